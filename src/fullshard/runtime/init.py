"""Initialization of sharded parameters, one module at a time, with the same numbers as without sharding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fullshard.runtime.copying import ModuleMethod
from fullshard.runtime.dtensors import local_of
from fullshard.runtime.registry import REGISTRY
from fullshard.runtime.storage import rows_of
from fullshard.runtime.unit import Unit


@contextmanager
def full_parameters_of(module: nn.Module) -> Iterator[None]:
    """Inside, the sharded parameters that `module` itself holds are full, plain parameters; after it, rows are kept.

    Only this rank's rows are valid inside until they are written, which is what an initialization does. Written the
    same way on every rank (same random state), the shards become those of the unsharded parameter. At most one module's
    parameters are whole at a time, and nothing is communicated.
    """
    sharded = {
        name: parameter
        for name, parameter in module._parameters.items()
        if parameter is not None and REGISTRY.owner(parameter) is not None and not parameter.is_meta
    }
    full = {name: _full_with_own_rows(parameter) for name, parameter in sharded.items()}
    module._parameters.update(full)
    try:
        yield
        for name, parameter in sharded.items():
            _keep_own_rows(parameter, module._parameters[name])
    finally:
        module._parameters.update(sharded)


def _place_of(parameter: nn.Parameter) -> tuple[Unit, Any, Any]:
    """Unit, flow and region of a sharded parameter."""
    unit = REGISTRY.owner(parameter)
    assert unit is not None
    for flow in unit.flows:
        for region in flow.buffers.layout.regions:
            if flow.sharded[region.index] is parameter:
                return unit, flow, region
    raise AssertionError("the unit does not hold the parameter that it owns")


def _rows(parameter: nn.Parameter, full: torch.Tensor) -> torch.Tensor:
    """This rank's rows in a tensor of the global shape, a view."""
    _, flow, region = _place_of(parameter)
    spec, world = flow.buffers.specs[region.index], flow.buffers.world
    full = flow.buffers.dresses[region.index].part_of(full)
    return rows_of(full, spec, *region.rank_rows(world.size, world.rank))


def _own(parameter: nn.Parameter) -> torch.Tensor:
    """The flat shard's rows of a parameter, in the shape of `_rows`."""
    _, flow, region = _place_of(parameter)
    local: torch.Tensor = flow.buffers.local(region)
    return local


def _full_with_own_rows(parameter: nn.Parameter) -> nn.Parameter:
    with torch.no_grad():
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        _rows(parameter, full).copy_(_own(parameter))
    return nn.Parameter(full, requires_grad=parameter.requires_grad)


def _keep_own_rows(parameter: nn.Parameter, full: torch.Tensor | None) -> None:
    if full is None or tuple(full.shape) != tuple(parameter.shape):
        raise ValueError(
            f"the initialization replaced a parameter of shape {tuple(parameter.shape)} by "
            f"{None if full is None else tuple(full.shape)}; it may only write values"
        )
    with torch.no_grad():
        _own(parameter).copy_(_rows(parameter, full.detach()))


def wrap_reset_parameters(module: nn.Module) -> None:
    """Let the next `module.reset_parameters()` see full parameters, once; for modules sharded on the meta device."""
    original = getattr(module, "reset_parameters", None)
    if original is None:
        return

    def reset_parameters(target: Any, *args: Any, **kwargs: Any) -> Any:
        del target.__dict__["reset_parameters"]
        with full_parameters_of(target):
            return type(target).reset_parameters(target, *args, **kwargs)

    module.__dict__["reset_parameters"] = ModuleMethod(module, reset_parameters, original)


def materialize(
    model: nn.Module, device: torch.device | str | None = None, init_fn: Callable[[nn.Module], None] | None = None
) -> None:
    """Give a model that was sharded on the meta device memory for its shards, and initialize them.

    Every rank must have the same random state; the values are then those that the unsharded model gets from the same
    calls in the same order. Memory needed beside the shards: the parameters of one module at a time.

    Args:
        model: Module with sharded parameters on the meta device.
        device: Device of the shards; default is that of their mesh.
        init_fn: Called with every submodule, in the order of `model.modules()`; default calls the module's own
            `reset_parameters` where it has one. It must write the parameters and buffers that the module itself holds.

    Raises:
        ValueError: A module holds parameters or buffers and `init_fn` is not given and it has no `reset_parameters`.
    """
    if device is None:
        units = (REGISTRY.owner(parameter) for parameter in model.parameters())
        device = next((unit.place.device for unit in units if unit is not None), torch.device("cpu"))
    if init_fn is None:
        _check_can_reset(model)
    model.to_empty(device=device)
    for module in model.modules():
        module.__dict__.pop("reset_parameters", None)
        if init_fn is None and not hasattr(module, "reset_parameters"):
            continue
        with full_parameters_of(module):
            (init_fn or _reset)(module)


def _reset(module: nn.Module) -> None:
    module.reset_parameters()  # type: ignore[operator]


def _check_can_reset(model: nn.Module) -> None:
    cannot = [
        name or "(root)"
        for name, module in model.named_modules()
        if (module._parameters or module._buffers) and not hasattr(module, "reset_parameters")
    ]
    if cannot:
        raise ValueError(
            f"modules {cannot} hold parameters or buffers but have no reset_parameters method; "
            "pass init_fn to say how to initialize them"
        )


def note_unfilled(buffers: dict[str, torch.Tensor], names: list[str]) -> None:
    """Buffers of these names were on the meta device: remember those that have memory now, but no values."""
    for name in names:
        if not buffers[name].is_meta:
            REGISTRY.unfilled[buffers[name]] = buffers[name]._version


def mark_unfilled(parameters: list[nn.Parameter]) -> None:
    """Parameters that were on the meta device and have memory now: NaN tells them from initialized ones."""
    with torch.no_grad():
        for parameter in parameters:
            local = local_of(parameter)
            if not local.is_meta and local.is_floating_point():
                local.fill_(torch.nan)
                REGISTRY.marked.add(id(parameter))
