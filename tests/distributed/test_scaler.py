"""Loss scaling: all ranks know of an overflow before any of them steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference import full
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from cluster import Cluster
from fullshard import ShardedGradScaler, fully_shard
from fullshard.runtime.dtensors import local_of
from fullshard.sharded_grad_scaler import ShardedGradScaler as OfTorchsModule


class Model(nn.Module):
    """The first parameter is 0-d, so every rank holds it; an inf in another one is on one rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.linear = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def make_model(replicas: int, ignored: bool = False) -> Any:
    torch.manual_seed(0)
    model = Model()
    world = dist.get_world_size()
    mesh = (
        init_device_mesh("cpu", (world,)) if replicas == 1 else init_device_mesh("cpu", (replicas, world // replicas))
    )
    options: dict[str, Any] = {"ignored_params": {model.linear.bias}, "average_ignored_grads": False} if ignored else {}
    return fully_shard(model, mesh=mesh, **options)


def values(model: nn.Module) -> list[torch.Tensor]:
    return [full(parameter.detach()).clone() for parameter in model.parameters()]


def backward(model: nn.Module, scaler: torch.amp.GradScaler, rank: int) -> None:
    x = torch.ones(2, 4) + rank
    scaler.scale(model(x).square().mean()).backward()


def check_overflow(rank: int, replicas: int, options: dict[str, Any], where: str) -> None:
    model = make_model(replicas, ignored=where == "ignored")
    kind, options = (torch.optim.SGD, options) if "momentum" in options else (torch.optim.AdamW, options)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    scaler = ShardedGradScaler("cpu", init_scale=1024.0, growth_interval=2)
    before = values(model)
    backward(model, scaler, rank)
    if rank == 0:
        gradient = model.linear.bias.grad if where == "ignored" else local_of(model.linear.weight.grad)
        gradient[0] = float("inf") if where != "nan" else float("nan")
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0  # on every rank
    for now, then in zip(values(model), before, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model, scaler, rank)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 1024.0  # two good steps, so it grew
    assert all(not torch.equal(now, then) for now, then in zip(values(model), before, strict=True))
    assert not any(value.isnan().any() for value in values(model))


@pytest.mark.parametrize(
    ("world_size", "replicas", "options", "where"),
    [
        (2, 1, {"momentum": 0.9}, "shard"),
        (3, 1, {"foreach": True}, "nan"),
        (4, 2, {"momentum": 0.9}, "shard"),
        (2, 1, {"foreach": False}, "ignored"),
        (2, 1, {"fused": True}, "shard"),
    ],
)
def test_ranks_skip_a_step_together(
    cluster: Cluster, world_size: int, replicas: int, options: dict[str, Any], where: str
) -> None:
    """B61: an inf that one rank holds; all skip, the scale halves on all, nothing moves, the next step trains."""
    cluster.run(check_overflow, replicas, options, where, world_size=world_size)


def check_clipping(rank: int, ours: bool) -> None:
    """Unscaled by hand, then clipped: the same as without a scaler."""
    trained = []
    for scaler in (ShardedGradScaler("cpu", init_scale=256.0), ShardedGradScaler("cpu", enabled=False)):
        model = make_model(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            backward(model, scaler, rank)
            scaler.unscale_(optimizer)
            norm = fullshard.clip_grad_norm_(model, 0.1)
            assert float(norm) > 0.1
            scaler.step(optimizer)
            scaler.update()
        trained.append(values(model))
    for one, other in zip(*trained, strict=True):
        torch.testing.assert_close(one, other)


def test_unscaled_gradients_can_be_clipped(cluster: Cluster) -> None:
    cluster.run(check_clipping, True)


def check_half(rank: int) -> None:
    """A model that is stored in float16 has float16 gradients."""
    torch.manual_seed(0)
    model = nn.Linear(4, 5).half()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    scaler = ShardedGradScaler("cpu", init_scale=8.0)
    before = values(model)
    scaler.scale(model(torch.ones(2, 4, dtype=torch.float16)).float().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(values(model)[1], before[1] - 0.25)
    twin = ShardedGradScaler("cpu")
    twin.load_state_dict(scaler.state_dict())
    assert twin.get_scale() == scaler.get_scale() == 8.0
    assert OfTorchsModule is ShardedGradScaler


def test_gradients_in_half_precision_and_state(cluster: Cluster) -> None:
    cluster.run(check_half)


def check_alone(rank: int) -> None:
    """Without sharding or a process group it is torch's scaler."""
    weight = nn.Parameter(torch.ones(3))
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD([weight, *table.parameters()], lr=1.0)
    scaler = ShardedGradScaler("cpu", init_scale=2.0, backoff_factor=0.25)
    scaler.scale(weight.sum() + table(torch.tensor([1, 1])).sum()).backward()
    scaler.unscale_(optimizer)
    torch.testing.assert_close(weight.grad, torch.ones(3))
    torch.testing.assert_close(table.weight.grad.to_dense()[1], torch.full((2,), 2.0))
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(weight.detach(), torch.zeros(3))
    weight.grad[0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 0.5


def test_without_a_process_group(cluster: Cluster) -> None:
    cluster.run(check_alone, init_group=False, world_size=1)


def check_torchs(rank: int) -> None:
    """What torch's own scaler does with sharded gradients, as docs/composition.md says."""
    for first_is_0d in (False, True):
        model = make_model(1)
        parameters = list(model.parameters())
        optimizer = torch.optim.SGD(parameters if first_is_0d else parameters[::-1], lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        backward(model, scaler, rank)
        if rank == 0:
            local_of(model.linear.weight.grad)[0] = float("inf")
        scaler.unscale_(optimizer)
        found = sum(float(value) for value in scaler._found_inf_per_device(optimizer).values())
        assert (found > 0) == (rank == 0 or not first_is_0d)


def test_torchs_scaler_misses_an_overflow_if_the_first_gradient_is_replicated(cluster: Cluster) -> None:
    cluster.run(check_torchs)
