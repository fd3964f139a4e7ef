"""Faults that users of other engines met, and that no other chapter of the tests covers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from reference import assert_at_rest, full
from stack import batch, engine_of, make_stack
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from cluster import Cluster
from fullshard import clip_grad_norm_, fully_shard
from fullshard.core.lifecycle import Op

# Devices


def check_gloo_beside_an_accelerator(rank: int) -> None:
    with (
        mock.patch("torch.accelerator.is_available", return_value=True),
        mock.patch("torch.accelerator.current_accelerator", return_value=torch.device("cuda")),
    ):
        layer = fully_shard(nn.Linear(4, 4))
    assert layer.weight.device.type == "cpu"
    layer(torch.ones(1, 4)).sum().backward()


def test_a_gloo_group_keeps_the_model_on_the_cpu(cluster: Cluster) -> None:
    """B14: the machine has an accelerator, the group does not serve it."""
    cluster.run(check_gloo_beside_an_accelerator)


class Reductions(TorchDispatchMode):
    """Elements of every tensor that an all-reduce is given."""

    def __init__(self) -> None:
        super().__init__()
        self.numels: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allreduce" in func.name():
            self.numels += [tensor.numel() for tensor in args[0]]
        return func(*args, **(kwargs or {}))


def check_only_a_number_is_reduced_to_clip(rank: int) -> None:
    model = make_stack()
    model(batch(rank, 0)).sum().backward()
    with Reductions() as seen:
        clip_grad_norm_(model, 0.1)
    assert seen.numels == [1]


def test_clipping_moves_one_number_between_ranks(cluster: Cluster) -> None:
    """B58: norms are made where gradients are; what has to be reduced on another device is one number."""
    cluster.run(check_only_a_number_is_reduced_to_clip)


# Accumulation


def check_patterns_of_accumulation(rank: int, replicas: int) -> None:
    world = dist.get_world_size()
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=names) if replicas > 1 else None
    model = make_stack(mesh=mesh)
    reference = [torch.zeros(parameter.shape) for parameter in model.parameters()]
    for number in range(3):
        model.zero_grad()
        model(batch(rank, number)).sum().backward()
        for total, parameter in zip(reference, model.parameters(), strict=True):
            total.add_(full(parameter.grad))
    ways = ("all", "shard axis", "none") if replicas > 1 else ("all", "none")
    for pattern in itertools.product(ways, ways, ("all",)):
        model.zero_grad()
        for number, way in enumerate(pattern):
            model.set_requires_gradient_sync(way != "none")
            model.set_requires_all_reduce(way == "all")
            model.set_is_last_backward(number == 2)
            model(batch(rank, number)).sum().backward()
        for want, (name, parameter) in zip(reference, model.named_parameters(), strict=True):
            torch.testing.assert_close(full(parameter.grad), want, msg=f"{name} after {pattern}: {{}}".format)


@pytest.mark.parametrize(("world_size", "replicas"), [(2, 1), (4, 2)])
def test_every_pattern_of_accumulation_gives_the_sum_of_all_microbatches(
    cluster: Cluster, world_size: int, replicas: int
) -> None:
    """B70: no microbatch is lost, whichever of them communicated."""
    cluster.run(check_patterns_of_accumulation, replicas, world_size=world_size)


# Parameters and units that are used seldom, or hold little


class Pair(nn.Module):
    """Two networks of which each step trains one, and a scale without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
        if which == "neither":
            return x * 1
        out: torch.Tensor = getattr(self, which)(x) * self.scale
        return out


def check_alternating(rank: int, sequence: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    reference, ours = Pair(), Pair()
    ours.load_state_dict(reference.state_dict())
    fully_shard(ours.generator)
    fully_shard(ours.critic)
    fully_shard(ours)
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in (reference, ours)]
    for step, which in enumerate(sequence):
        for optimizer in optimizers:
            optimizer.zero_grad()
        inputs = [batch(each, step, width=4).requires_grad_() for each in range(dist.get_world_size())]
        torch.stack([reference(x, which).square().sum() for x in inputs]).mean().backward()
        x = batch(rank, step, width=4).requires_grad_()
        ours(x, which).square().sum().backward()
        torch.testing.assert_close(x.grad, inputs[rank].grad * dist.get_world_size())
        for optimizer in optimizers:
            optimizer.step()
        assert_at_rest(ours)
        for (name, got), want in zip(ours.named_parameters(), reference.parameters(), strict=True):
            assert (got.grad is None) == (want.grad is None), f"gradient of {name} after {which!r}"
            torch.testing.assert_close(full(got.detach()), want.detach(), msg=f"{name} after {which!r}: {{}}".format)


@pytest.mark.parametrize(
    "sequence",
    [
        pytest.param(("generator", "critic", "generator", "critic"), id="alternating"),
        pytest.param(("neither", "critic", "neither", "generator"), id="not_used"),
    ],
)
def test_networks_that_train_in_turn(cluster: Cluster, sequence: tuple[str, ...]) -> None:
    """B29; B23: a step that uses no parameter leaves every unit sharded and every gradient None; B07: 0-d."""
    cluster.run(check_alternating, sequence)


# Adapters


class Adapter(nn.Module):
    """A frozen base and a small trainable change of it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapted: torch.Tensor = self.base(x) + self.up(self.down(x))
        return adapted


@contextmanager
def gathers_of(model: nn.Module) -> Iterator[list[str]]:
    """Names of the units that are gathered inside."""
    engine = engine_of(model)
    before, names = len(engine.log), []
    yield names
    names += [engine.units[c.unit].name for c in list(engine.log)[before:] if c.op is Op.GATHER]


def check_frozen_base_stays(rank: int) -> None:
    model = nn.Sequential(Adapter(), Adapter())
    for block in model:
        fully_shard(block.base, reshard_after_forward=False).set_reshard_after_backward(False)
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        output: torch.Tensor = model(batch(rank, 0))
        output.sum().backward()
        optimizer.step()
        return output

    first = step()
    with gathers_of(model) as names:
        step()
        step()
    assert names, "the adapters are gathered"
    assert not [name for name in names if name.endswith("base")]
    with torch.no_grad():
        for block in model:
            block.base.weight.zero_()  # by hand: what is kept is stale now
            block.base.bias.zero_()
            block.up.weight.zero_()
    with gathers_of(model) as names:
        after = step()
    assert {name for name in names if name.endswith("base")} == {"0.base", "1.base"}
    assert first.abs().sum() > 0
    assert not after.any()


def test_a_frozen_base_that_is_kept_is_gathered_once(cluster: Cluster) -> None:
    """B126: only what the optimizer wrote is gathered again in the next step."""
    cluster.run(check_frozen_base_stays)
