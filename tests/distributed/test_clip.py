"""Clipping: torch's functions and ours, the same numbers, for every kind of parameter."""

from __future__ import annotations

from copy import deepcopy
from math import inf
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference import full
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cluster import Cluster
from fullshard import clip_grad_norm_, fully_shard


class Model(nn.Module):
    """Uneven, one-row and 0-d parameters, one that gets no gradient, one that is frozen with a gradient left."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.last = nn.Linear(7, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x))) * self.scale + self.frozen.sum()


def with_gradients(replicas: int, **options: Any) -> tuple[nn.Module, nn.Module]:
    """The same model unsharded and sharded, with the same gradients."""
    torch.manual_seed(0)
    reference = Model().double()
    ours = deepcopy(reference)
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (replicas, world // replicas) if replicas > 1 else (world,))
    ignored = {p for name, p in ours.named_parameters() if name in options.get("ignored", ())}
    fully_shard(ours.first, mesh=mesh, ignored_params=ignored)
    other = init_device_mesh("cpu", (world,))  # another mesh than the block's
    fully_shard(ours, mesh=other, ignored_params=ignored, average_ignored_grads=False)
    for model in (reference, ours):
        model(torch.linspace(-2, 2, 10, dtype=torch.float64).view(2, 5)).square().sum().backward()
        model.frozen.requires_grad_(False)
    return reference, ours


def assert_same(ours: nn.Module, reference: nn.Module) -> None:
    for (name, got), want in zip(ours.named_parameters(), reference.parameters(), strict=True):
        assert (got.grad is None) == (want.grad is None), name
        if got.grad is not None:
            torch.testing.assert_close(full(got.grad), want.grad, msg=(name + "\n{}").format)


def check_functions(rank: int, replicas: int) -> None:
    utils = torch.nn.utils
    for norm_type in (1.0, 2.0, 3.0, inf):
        reference, ours = with_gradients(replicas)
        want = utils.clip_grad_norm_(reference.parameters(), 0.1, norm_type)
        if replicas == 1 and norm_type != inf:  # torch's own function adds up one mesh only, and no empty maximum
            torchs = deepcopy(ours)
            torch.testing.assert_close(full(utils.clip_grad_norm_(torchs.parameters(), 0.1, norm_type)), want)
            assert_same(torchs, reference)
        again = deepcopy(ours)
        torch.testing.assert_close(clip_grad_norm_(ours, 0.1, norm_type), want)
        torch.testing.assert_close(clip_grad_norm_(list(again.parameters()), 0.1, norm_type, foreach=True), want)
        assert_same(ours, reference)
        assert_same(again, reference)
    reference, ours = with_gradients(1)
    for model in (reference, ours):
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norm = utils.get_total_norm(gradients)
        utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)
    assert_same(ours, reference)
    for model in (reference, ours):
        utils.clip_grad_value_(model.parameters(), 0.01)
    assert_same(ours, reference)


@pytest.mark.parametrize(("world_size", "replicas"), [(3, 1), (4, 2)])
def test_norm_and_clipped_gradients_equal_torchs(cluster: Cluster, world_size: int, replicas: int) -> None:
    """B56: frozen, unused, 0-d and one-row parameters, on one mesh and on two."""
    cluster.run(check_functions, replicas, world_size=world_size)


def check_parts(rank: int) -> None:
    """A part of a unit, one parameter, none at all; sharded and ignored ones together."""
    reference, ours = with_gradients(1)
    for model in (reference, ours):
        clip = clip_grad_norm_ if model is ours else torch.nn.utils.clip_grad_norm_
        model.norms = [clip(model.last.parameters(), 0.1), clip(model.scale, 0.1), clip([], 0.1)]  # type: ignore[operator]
    for got, want in zip(ours.norms, reference.norms, strict=True):
        torch.testing.assert_close(got, want, check_dtype=False)
    assert_same(ours, reference)
    torch.testing.assert_close(
        clip_grad_norm_(ours.last, 1.0), torch.tensor(0.1, dtype=torch.float64), rtol=1e-4, atol=0
    )
    reference, ours = with_gradients(1, ignored=("first.bias", "last.weight"))
    want = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    torch.testing.assert_close(clip_grad_norm_(ours.parameters(), 0.1), want)
    assert_same(ours, reference)
    want = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
    torch.testing.assert_close(clip_grad_norm_(reference, 0.05), want.clamp(max=0.05), rtol=1e-4, atol=0)  # no shards


def test_clipping_some_parameters_and_ignored_ones(cluster: Cluster) -> None:
    """B59, and norms of less than a unit."""
    cluster.run(check_parts)
