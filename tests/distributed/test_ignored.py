"""Gradients of parameters that are not sharded: averaged on request, else one warning that names them."""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference import full
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cluster import Cluster
from fullshard import FSDP, ShardingStrategy, fully_shard


class Model(nn.Module):
    """Two linear layers to shard, one to ignore, and one that only some ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.ignored = nn.Linear(7, 7)
        self.branch = nn.Linear(7, 7, bias=False)
        self.never = nn.Parameter(torch.ones(2))
        self.last = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor, branch: bool) -> torch.Tensor:
        x = torch.tanh(self.ignored(torch.tanh(self.first(x))))
        return self.last(self.branch(x) if branch else x)

    def not_sharded(self) -> set[nn.Parameter]:
        return {*self.ignored.parameters(), *self.branch.parameters(), self.never}


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(4, 5, dtype=torch.float64, generator=generator)
    return model(x, branch=rank == 1).square().mean()


def make(kind: str, replicas: int, average: bool | None) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    reference = Model().double()
    ours = deepcopy(reference)
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (replicas, world // replicas) if replicas > 1 else (world,))
    options: dict[str, Any] = {} if average is None else {"average_ignored_grads": average}
    if kind == "class":
        strategy = ShardingStrategy.HYBRID_SHARD if replicas > 1 else ShardingStrategy.FULL_SHARD
        return reference, FSDP(
            ours, device_mesh=mesh, sharding_strategy=strategy, ignored_states=ours.not_sharded(), **options
        )
    fully_shard(ours.first, mesh=mesh)
    return reference, fully_shard(ours, mesh=mesh, ignored_params=ours.not_sharded(), **options)


def check_average(rank: int, kind: str, replicas: int) -> None:
    reference, ours = make(kind, replicas, average=True)
    world = dist.get_world_size()
    pair = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (reference, ours)]
    for step in range(4):
        for model, optimizer in zip((reference, ours), pair, strict=True):
            if step != 2:  # two steps' gradients add up, with communication in between
                optimizer.zero_grad()
            if model is ours:
                model.set_requires_gradient_sync(step != 3)
                loss_of(model, rank, step).backward()
            else:
                torch.stack([loss_of(model, r, step) for r in range(world)]).mean().backward()
        if step == 3:  # without communication, and then with
            torch.stack([loss_of(reference, r, 9) for r in range(world)]).mean().backward()
            ours.set_requires_gradient_sync(True)
            loss_of(ours, rank, 9).backward()
        for (name, got), want in zip(ours.named_parameters(), reference.parameters(), strict=True):
            assert (got.grad is None) == (want.grad is None), name
            if got.grad is not None:
                torch.testing.assert_close(full(got.grad), want.grad, msg=(f"{step} {name}\n{{}}").format)
        for optimizer in pair:
            optimizer.step()
    for (name, got), want in zip(ours.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(got.detach()), want.detach(), msg=(name + "\n{}").format)


@pytest.mark.parametrize(
    ("kind", "world_size", "replicas"), [("function", 2, 1), ("function", 4, 2), ("class", 2, 1), ("class", 4, 2)]
)
def test_averaged_on_request(cluster: Cluster, kind: str, world_size: int, replicas: int) -> None:
    """B84: used on all, on one or on no rank; accumulated with and without communication; also with replicas."""
    cluster.run(check_average, kind, replicas, world_size=world_size)


def check_warning(rank: int) -> None:
    world = dist.get_world_size()
    expected = 1 if world > 1 else 0
    for kind in ("function", "class"):
        _, ours = make(kind, 1, average=None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(2):
                loss_of(ours, rank, step).backward()
        texts = [str(each.message) for each in caught if "not averaged" in str(each.message)]
        assert len(texts) == expected
        for text in texts:
            assert "['never', 'ignored.weight', 'ignored.bias', 'branch.weight'] are trainable" in text.replace(
                "_fsdp_wrapped_module.", ""
            )
            assert "average_ignored_grads=True" in text
    _, ours = make("function", 1, average=False)
    loss_of(ours, rank, 0).backward()  # warnings are errors here
    _, ours = make("function", 1, average=None)
    for parameter in ours.not_sharded():
        parameter.requires_grad_(False)
    loss_of(ours, rank, 0).backward()


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_warning_names_what_is_not_averaged(cluster: Cluster, world_size: int) -> None:
    """B84: only where there is something to average, and not where the user has said what is wanted."""
    cluster.run(check_warning, world_size=world_size)


class Times(nn.Module):
    """A sharded layer, and a low-precision weight whose gradient is what the caller says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor, gradient: float) -> torch.Tensor:
        return self.linear(x).sum() + (self.weight * gradient).sum()


def check_low_precision(rank: int) -> None:
    model = Times()
    fully_shard(model, ignored_params={model.weight}, average_ignored_grads=True)
    model(torch.ones(1, 4), 256.0 if rank == 0 else 1.0).backward()
    torch.testing.assert_close(model.weight.grad, torch.full((4,), 86.0, dtype=torch.bfloat16), rtol=0, atol=0)


def test_low_precision_gradients_are_summed_in_float32(cluster: Cluster) -> None:
    """256 + 1 + 1 is 256 in bfloat16."""
    cluster.run(check_low_precision, world_size=3)
