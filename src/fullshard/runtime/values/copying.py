"""Copies of sharded modules: independent units on the same ranks, and methods that follow their module."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fullshard.errors import MisuseError
from fullshard.runtime.dtensors import local_of, sharded_like
from fullshard.runtime.registry import REGISTRY
from fullshard.runtime.unit import Unit


class ModuleMethod:
    """A function that stands for a method of one module, like a bound method, with two differences.

    It does not keep the module, so that it can lie in the module's dict without a cycle; and in a copy of the module it
    is a method of that copy.

    Args:
        module: The first argument of every call.
        function: Called with the module and the arguments.
        original: Function whose name, signature and docstring to show.
    """

    def __init__(self, module: nn.Module, function: Callable[..., Any], original: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)
        self._module = weakref.ref(module)
        self._function = function
        self._original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method of the module."""
        return self._function(self._target(), *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleMethod:
        return ModuleMethod(copy.deepcopy(self._target(), memo), self._function, self._original)

    def _target(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise ReferenceError(f"the module whose method {self._original.__name__!r} this is no longer exists")
        return module


def deepcopy_module(module: nn.Module, units: Sequence[Unit], memo: dict[int, Any]) -> nn.Module:
    """A deep copy of a sharded module.

    Args:
        module: The module.
        units: Units of it and of the modules in it.
        memo: Of `copy.deepcopy`.
    """
    for unit in units:
        if unit.engine is None:
            unit.reflatten()
        else:
            unit.engine.recover()
            if not unit.engine.in_backward and not unit.engine.scheduler.in_use():
                unit.engine.adopt_changes()
        copy_parameters(unit, memo)
    made: nn.Module = object.__new__(type(module))
    memo[id(module)] = made
    for value in module.__dict__.values():
        if isinstance(value, dist.ProcessGroup | DeviceMesh):
            memo[id(value)] = value  # who the ranks are does not change with a copy
    state: Any = module.__getstate__()
    made.__setstate__(copy.deepcopy(state, memo))
    for unit in units:
        memo[id(unit)].wishes.prefetch = _copied_prefetch(unit, memo)
    for name, buffer in module._buffers.items():
        copied = made._buffers[name]
        if buffer is not None and copied is not None and REGISTRY.unfilled.get(buffer, -1) == buffer._version:
            REGISTRY.unfilled[copied] = copied._version
    return made


def _copied_prefetch(unit: Unit, memo: dict[int, Any]) -> dict[str, list[Unit]]:
    """What the copy of `unit` shall prefetch; units outside of what is copied are of no use to it."""
    copied = {field: [memo[id(u)] for u in wanted if id(u) in memo] for field, wanted in unit.wishes.prefetch.items()}
    return {field: wanted for field, wanted in copied.items() if wanted}


def copy_parameters(unit: Unit, memo: dict[int, Any]) -> None:
    """Enter a copy of every sharded parameter of `unit` into `memo`; also for the full ones, which may be shown now."""
    for member in unit.members:
        registered: list[torch.Tensor | None] = [slot.registry[slot.name] for slot in member.slots]
        for parameter in [member.sharded, *registered]:
            if isinstance(parameter, DTensor) and id(parameter) not in memo:
                memo[id(parameter)] = _copy_parameter(parameter, memo)
    for flow in unit.flows:
        for sharded, full in zip(flow.sharded, flow.buffers.full, strict=False):
            memo[id(full)] = memo[id(sharded)]


def _copy_parameter(parameter: torch.Tensor, memo: dict[int, Any]) -> nn.Parameter:
    with torch.inference_mode(False), torch.no_grad():
        made = nn.Parameter(_copy_dtensor(parameter), requires_grad=parameter.requires_grad)
        if parameter.grad is not None:
            gradient = parameter.grad
            made.grad = _copy_dtensor(gradient) if isinstance(gradient, DTensor) else gradient.clone()
    # What the user wrote on the parameter (a learning-rate scale, a name) stays with it.
    made.__dict__.update(copy.deepcopy(parameter.__dict__, memo))
    return made


def _copy_dtensor(tensor: torch.Tensor) -> torch.Tensor:
    return sharded_like(tensor, local_of(tensor).clone())


def cannot_be_pickled(module: nn.Module) -> MisuseError:
    """The error for a sharded module that shall be pickled."""
    return MisuseError(
        f"a sharded module ({type(module).__name__}) cannot be pickled, nor saved whole by torch.save: its shards "
        "belong to the process groups of this run. Save its state_dict(): by torch.distributed.checkpoint.save, "
        "which writes every rank's part, or on one rank after value.full_tensor() of each value on all ranks"
    )
