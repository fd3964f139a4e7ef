"""The REF check: sharded training against the same model, unsharded, on the mean of all ranks' losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard import FSDPModule, fully_shard
from models import Case, by_name, make_model, run_case


@dataclass(frozen=True)
class Setup:
    """How a case is trained; everything that a parametrized test varies."""

    dtype: torch.dtype = torch.float64
    steps: int = 3
    microbatches: int = 1
    sync: tuple[bool, ...] = ()
    """Per microbatch whether gradients are synchronized; default always."""
    replicas: int = 1
    reshard_after_forward: bool | int | str | None = None
    keep_bytes: int | None = None
    transport: str = "auto"
    shard_options: tuple[tuple[str, Any], ...] = ()
    at_rest: bool = True
    """Whether every unit is freed at the end of a step."""


def mesh_of(setup: Setup) -> DeviceMesh:
    world = dist.get_world_size()
    if setup.replicas == 1:
        return init_device_mesh("cpu", (world,))
    return init_device_mesh("cpu", (setup.replicas, world // setup.replicas), mesh_dim_names=("replicate", "shard"))


def shard_case(case: Case, model: nn.Module, setup: Setup) -> FSDPModule:
    options: dict[str, Any] = dict(setup.shard_options)
    options.update(mesh=mesh_of(setup), reshard_after_forward=setup.reshard_after_forward, transport=setup.transport)
    for unit in case.unit_modules(model):
        fully_shard(unit, **options)
    sharded: FSDPModule = fully_shard(model, **options)
    if setup.keep_bytes is not None:
        sharded.set_keep_bytes(setup.keep_bytes)
    return sharded


def full(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None:
        return None
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def reference_step(case: Case, model: nn.Module, setup: Setup, step: int) -> None:
    """Gradients of the mean of all ranks' losses, summed over microbatches."""
    world = dist.get_world_size()
    for microbatch in range(setup.microbatches):
        losses = [run_case(case, model, rank, step * setup.microbatches + microbatch) for rank in range(world)]
        torch.stack(losses).mean().backward()


def sharded_step(case: Case, model: FSDPModule, setup: Setup, step: int, rank: int) -> None:
    for microbatch in range(setup.microbatches):
        if setup.sync:
            model.set_requires_gradient_sync(setup.sync[microbatch])
        loss = run_case(case, model, rank, step * setup.microbatches + microbatch, dtype=setup.dtype)
        loss.backward()


def compare(ours: FSDPModule, reference: nn.Module, setup: Setup, what: str) -> None:
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6}[setup.dtype]
    expected = dict(reference.named_parameters())
    for name, parameter in ours.named_parameters():
        for kind, got, want in (
            ("value", full(parameter.detach()), expected[name].detach()),
            ("gradient", full(parameter.grad), expected[name].grad),
        ):
            label = f"{what}: {kind} of {name}"
            assert (got is None) == (want is None), f"{label}: got {got}, want {want}"
            if got is not None and want is not None:
                torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance, msg=(label + "\n{}").format)


def assert_at_rest(model: nn.Module) -> None:
    """The STATE check: every unit sharded, no full buffer, sharded parameters only."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            unit = module.__dict__["_fullshard"].unit
            assert not any(flow.buffers.is_full for flow in unit.flows), f"unit {unit.name!r} holds a full buffer"
            if unit.engine is not None:
                assert unit.engine.scheduler.at_rest(), unit.engine.scheduler.states
                assert unit.engine.pool.live_bytes == 0, unit.engine.pool.live_bytes
                shared = unit.links.shard.shared
                assert shared is None or shared.blocks.free_bytes == shared.blocks.nbytes
    for name, parameter in model.named_parameters():
        assert hasattr(parameter, "placements"), f"{name} is not sharded"


def check_reference(rank: int, name: str, setup: Setup, each_step: Callable[..., None] | None = None) -> None:
    """Train both for a few steps and compare gradients and values after each."""
    case = by_name(name)
    reference = make_model(case, setup.dtype)
    ours = shard_case(case, make_model(case, setup.dtype), setup)
    optimizers = [_optimizer(reference), _optimizer(ours)]
    for step in range(setup.steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        reference_step(case, reference, setup, step)
        sharded_step(case, ours, setup, step, rank)
        if each_step is not None:
            each_step(rank, ours, reference, setup)
        for optimizer in optimizers:
            optimizer.step()
        compare(ours, reference, setup, f"{name}, rank {rank}, step {step}")
        if setup.at_rest:
            assert_at_rest(ours)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
