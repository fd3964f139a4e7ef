"""What people do beside a sharded model: zero_grad between microbatches, other seeds, wrapped weights, adapters."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference import full
from stack import batch, make_stack
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parametrizations

from cluster import Cluster
from fullshard import fully_shard
from fullshard.errors import RanksDisagreeError


def mesh_of(replicas: int) -> Any:
    world = dist.get_world_size()
    return init_device_mesh("cpu", (replicas, world // replicas) if replicas > 1 else (world,))


# zero_grad


def check_zero_grad(rank: int, replicas: int, method: str) -> None:
    """A microbatch that is dropped by zero_grad leaves nothing behind."""
    gradients = []
    for dropped in (False, True):
        model = make_stack(mesh=mesh_of(replicas))
        if dropped:
            getattr(model, method)(False)
            model(batch(rank, 5)).sum().backward()
            model.zero_grad()
            getattr(model, method)(True)
        for step in range(2):
            model(batch(rank, step)).sum().backward()
        gradients.append([full(parameter.grad) for parameter in model.parameters()])
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    model.zero_grad(set_to_none=False)
    assert all(not full(parameter.grad).any() for parameter in model.parameters())
    model.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("replicas", "method"),
    [(1, "set_requires_gradient_sync"), (2, "set_requires_gradient_sync"), (2, "set_requires_all_reduce")],
)
def test_zero_grad_drops_gradients_that_are_held(cluster: Cluster, replicas: int, method: str) -> None:
    cluster.run(check_zero_grad, replicas, method, world_size=2 * replicas)


# Other values on other ranks


class WithScalar(nn.Module):
    """A 0-d parameter, which every rank holds whole."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.randn(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def run_with_seed(rank: int, replicas: int) -> None:
    torch.manual_seed(rank)
    model = WithScalar() if replicas == 1 else nn.Linear(5, 3)
    fully_shard(model, mesh=mesh_of(replicas))
    model(torch.ones(2, 4 if replicas == 1 else 5))


@pytest.mark.parametrize(("world_size", "replicas", "name"), [(2, 1, "scale"), (2, 2, "weight"), (4, 2, "weight")])
def test_replicas_that_start_from_other_values_are_an_error(
    cluster: Cluster, world_size: int, replicas: int, name: str
) -> None:
    """B74: what several ranks hold whole must be the same on them."""
    match = rf"parameter '{name}' of unit '\(root\)'.*values with checksum.*seed"
    cluster.run(run_with_seed, replicas, world_size=world_size, expect=RanksDisagreeError, match=match)


def check_loaded(rank: int) -> None:
    """Values that are loaded after sharding count, not those that the model was built with."""
    torch.manual_seed(rank)
    model = fully_shard(nn.Linear(5, 3), mesh=mesh_of(2))
    model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
    model(torch.ones(2, 5)).sum().backward()


def test_values_loaded_after_sharding_count(cluster: Cluster) -> None:
    cluster.run(check_loaded, world_size=4)


# Wrapped weights and adapters


class Adapted(nn.Module):
    """A frozen low-precision layer with a trainable low-rank addition."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x.to(self.base.weight.dtype)).to(x.dtype) + self.up(self.down(x))


class Decomposed(nn.Module):
    """DoRA: a trainable magnitude a row of a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 7)
        self.linear.weight.requires_grad_(False)
        self.magnitude = nn.Parameter(self.linear.weight.detach().norm(dim=1, keepdim=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.linear.weight
        direction = weight / weight.norm(dim=1, keepdim=True)
        return nn.functional.linear(x, self.magnitude * direction, self.linear.bias)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lora": lambda: nn.Sequential(Adapted(nn.Linear(5, 7).bfloat16()), nn.Tanh(), Adapted(nn.Linear(7, 3).bfloat16())),
    "dora": lambda: nn.Sequential(Decomposed(), nn.Tanh(), nn.Linear(7, 3)),
    "weight_norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 7)), nn.Tanh(), nn.Linear(7, 3)),
    "spectral": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(5, 7)), nn.Tanh(), nn.Linear(7, 3)),
}


def check_model(rank: int, name: str) -> None:
    torch.manual_seed(0)
    reference = MODELS[name]()
    ours = deepcopy(reference)
    for layer in (ours[0], ours[2], ours):
        fully_shard(layer)
    pair = [torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1) for model in (reference, ours)]
    x = torch.linspace(-1, 1, 20).view(4, 5)
    for step in range(4):
        for model, optimizer in zip((reference, ours), pair, strict=True):
            if step == 2:  # flags may change between steps
                model[2].requires_grad_(False)
                model[0].requires_grad_(False)
                for parameter in optimizer.param_groups[0]["params"][:2]:
                    parameter.requires_grad_(True)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        for (key, got), want in zip(ours.named_parameters(), reference.parameters(), strict=True):
            assert (got.grad is None) == (want.grad is None), key
            torch.testing.assert_close(full(got.detach()), want.detach(), msg=(f"{step} {key}\n{{}}").format)


@pytest.mark.parametrize("name", list(MODELS))
def test_adapters_and_parametrizations_equal_unsharded(cluster: Cluster, name: str) -> None:
    """B80, and adapters by hand; flags that change between steps."""
    cluster.run(check_model, name)


def check_cast(rank: int) -> None:
    """`half`, `double` and `to` after sharding, between steps."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    ours = deepcopy(reference)
    fully_shard(ours[0])
    fully_shard(ours)
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.float32):
        for model in (reference, ours):
            model.to(dtype)
            model.zero_grad()
            model(torch.ones(2, 5, dtype=dtype)).sum().backward()
        for got, want in zip(ours.parameters(), reference.parameters(), strict=True):
            assert got.dtype is got.grad.dtype is dtype
            torch.testing.assert_close(full(got.detach()), want.detach(), rtol=0, atol=0)
            torch.testing.assert_close(full(got.grad), want.grad)


def test_dtype_changes_after_sharding(cluster: Cluster) -> None:
    cluster.run(check_cast)


def check_warned(rank: int) -> None:
    def build(seed: int, how: str) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        fully_shard(model[0])
        fully_shard(model)
        if how == "load":
            model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
        elif how == "assign":
            model.load_state_dict({name: value * 1 for name, value in model.state_dict().items()}, assign=True)
        elif how == "init":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(1.0)
        return model

    x = torch.ones(2, 5)
    match = r"ranks \[0, 1\] built parameters \[.1.weight., .1.bias., .0.weight., .0.bias.\] with different values"
    with pytest.warns(UserWarning, match=match):
        build(rank, "")(x)
    for seed, how in ((7, ""), (rank, "load"), (rank, "assign"), (rank, "init")):
        build(seed, how)(x)  # warnings are errors here


def test_models_built_from_other_seeds_are_named(cluster: Cluster) -> None:
    """B74: a warning, since rows that were never meant to count may be loaded later by ways that nobody sees."""
    cluster.run(check_warned)


def check_replicated_around(rank: int) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 7), nn.Linear(7, 3)).double()

    reference, model = build(), build()
    fully_shard(model[1])
    replicate(model)
    for step in range(2):
        model(batch(rank, step).double()).sum().backward()
        torch.stack([reference(batch(r, step).double()).sum() for r in range(2)]).mean().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(ours.grad), theirs.grad)


def test_replicate_leaves_sharded_parts_alone(cluster: Cluster) -> None:
    cluster.run(check_replicated_around)
