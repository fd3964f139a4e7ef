"""Initialization of sharded parameters, one module at a time, with the same numbers as without sharding."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.runtime.dtensors import local_of, part_of_full, sharded_by_rows
from fullshard.runtime.registry import REGISTRY
from fullshard.runtime.values.copying import ModuleMethod


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


def _full_with_own_rows(parameter: nn.Parameter) -> nn.Parameter:
    with torch.no_grad():
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        part_of_full(parameter, full).copy_(local_of(parameter))
    return nn.Parameter(full, requires_grad=parameter.requires_grad)


def _keep_own_rows(parameter: nn.Parameter, full: torch.Tensor | None) -> None:
    if full is None or tuple(full.shape) != tuple(parameter.shape):
        raise ValueError(
            f"the initialization replaced a parameter of shape {tuple(parameter.shape)} by "
            f"{None if full is None else tuple(full.shape)}; it may only write values"
        )
    with torch.no_grad():
        local_of(parameter).copy_(part_of_full(parameter, full.detach()))


# Methods by which models initialize themselves, whose random numbers shall be those of the unsharded model.
INIT_METHODS = ("init_weights", "init_states", "init_parameters", "initialize_weights", "reset_parameters")

_DRAWS_INTO = {"uniform_", "normal_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_"}
_DRAWS_LIKE = {"rand_like", "randn_like", "randint_like"}


class _DrawAsUnsharded(TorchDispatchMode):
    """Draws for a sharded tensor what the full one would get, and keeps this rank's part.

    Every rank draws everything: at most one full tensor is alive, and nothing is sent. By itself a `DTensor` draws for
    its local part only; on CPU ranks with the same random state then get the same rows.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, target = func.overloadpacket.__name__, args[0] if args else None
        if not isinstance(target, DTensor) or target.is_meta or name not in _DRAWS_INTO | _DRAWS_LIKE:
            return func(*args, **(kwargs or {}))
        local = local_of(target)
        full = func(torch.empty(target.shape, dtype=target.dtype, device=local.device), *args[1:], **(kwargs or {}))
        if name in _DRAWS_LIKE:
            return sharded_by_rows(target, full)
        local.copy_(part_of_full(target, full))
        return target


def init_methods(original: Any) -> dict[str, Callable[..., Any]]:
    """What a sharded class has in place of methods of the class `original`, to give values to its parameters.

    Those named in `INIT_METHODS`, and `apply`, draw the random numbers of the unsharded model. After `to_empty` the
    model holds no values, wherever it was before.
    """

    def to_empty(self: nn.Module, *, device: Any, recurse: bool = True) -> nn.Module:
        original.to_empty(self, device=device, recurse=recurse)
        _note_emptied(self, recurse)
        return self

    draws = {name: _drawing(getattr(original, name)) for name in (*INIT_METHODS, "apply") if hasattr(original, name)}
    return {**draws, "to_empty": functools.wraps(original.to_empty)(to_empty)}


def _drawing(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def drawing(*args: Any, **kwargs: Any) -> Any:
        with _DrawAsUnsharded():  # type: ignore[no-untyped-call]
            return method(*args, **kwargs)

    return drawing


def _note_emptied(model: nn.Module, recurse: bool) -> None:
    units = {parameter: unit for parameter in model.parameters(recurse) if (unit := REGISTRY.owner(parameter))}
    note_materialized(model, [name for name, _ in model.named_buffers(recurse=recurse)], list(units))
    for unit in set(units.values()):
        if unit.engine is not None:
            unit.engine.unproven = True


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


def note_materialized(model: nn.Module, buffers: list[str], parameters: list[nn.Parameter]) -> None:
    """These buffers (by name) and parameters of `model` have got memory, but no values."""
    _note_unfilled(dict(model.named_buffers()), buffers)
    _mark_unfilled(parameters)


def _note_unfilled(buffers: dict[str, torch.Tensor], names: list[str]) -> None:
    """Buffers of these names were on the meta device: remember those that have memory now, but no values."""
    for name in names:
        if not buffers[name].is_meta:
            REGISTRY.unfilled[buffers[name]] = buffers[name]._version


def _mark_unfilled(parameters: list[nn.Parameter]) -> None:
    """Parameters that were on the meta device and have memory now: NaN tells them from initialized ones."""
    with torch.no_grad():
        for parameter in parameters:
            local = local_of(parameter)
            # A subclass need not know NaN, or how to be filled.
            if type(local) is torch.Tensor and not local.is_meta and local.is_floating_point():
                local.fill_(torch.nan)
                REGISTRY.marked.add(id(parameter))
