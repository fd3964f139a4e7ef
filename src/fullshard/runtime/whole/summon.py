"""Full parameters outside of a step: to look at, to edit, or to compute with what is not in their module's forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from fullshard.core.schedule import Event, EventKind
from fullshard.errors import MisuseError
from fullshard.runtime.dtensors import local_of, part_of_full, sharded_like
from fullshard.runtime.failures.postmortem import explained
from fullshard.runtime.module import HANDLE
from fullshard.runtime.params.registered import Shown
from fullshard.runtime.params.shards import Member
from fullshard.runtime.registry import REGISTRY
from fullshard.runtime.unit import Unit
from fullshard.runtime.whole.forms import Form, Kind, keeps_values
from fullshard.runtime.whole.tensors import Gatherer

_Result = TypeVar("_Result")


@contextmanager
def full_parameters(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Show full parameters in the sharded modules below `module`, between steps.

    They are fresh plain parameters in the dtype that is stored (not the dtype computed in). All ranks must enter;
    leaving needs no communication, so what one rank's block raises stays on that rank. Whatever the block raises, the
    modules get their sharded parameters back, with the edits that were made until then if `writeback` is set.

    Memory: every full parameter of the units concerned (twice that with gradients) on each rank that sees them, on the
    CPU if `offload_to_cpu` is set; the other ranks hold one full parameter at a time while entering.

    Forwards inside compute with the full parameters and do not communicate; a backward through them raises.

    Args:
        module: Any module; what is sharded in it or below it counts.
        recurse: False takes only the unit of `module` itself.
        writeback: At the end each rank writes its own rows into its shard. False drops all edits.
        rank0_only: Only the first rank of the mesh sees full parameters; the others keep their shards.
        offload_to_cpu: Full parameters are on the CPU.
        with_grads: Full parameters have full gradients, which are written back, too.

    Raises:
        NotImplementedError: `writeback` and `rank0_only` are both set.
        MisuseError: A forward or backward is running.
        ValueError: At the end, if a parameter was replaced by a tensor of another shape; nothing is written then.
    """
    if writeback and rank0_only:
        raise NotImplementedError(
            "writeback=True with rank0_only=True is not supported: the other ranks see nothing to write back. Pass "
            "writeback=False, or edit on every rank"
        )
    if writeback:
        REGISTRY.about_to_write()
    form = Form(Kind.FULL, offload_to_cpu, rank0_only)
    units = _units(module, recurse)
    for unit in units:
        _bring_to_rest(unit)
    with explained(module.parameters()):
        lent = _gather(units, form, keeps_values(module, form), with_grads)
    if not lent:
        yield
        return
    for unit, parameters in zip(units, lent, strict=True):
        unit.registration.lend(parameters)
    try:
        yield
    finally:
        held = [unit.registration.take_back(parameters) for unit, parameters in zip(units, lent, strict=True)]
        for unit, parameters in zip(units, lent, strict=True):
            REGISTRY.note_lent(unit, parameters)
        if writeback:
            _write_back(units, held, with_grads)


def _units(module: nn.Module, recurse: bool) -> list[Unit]:
    """Units of the sharded modules, without those that an outer context has summoned."""
    modules = module.modules() if recurse else [module]
    units = {id(handle.unit): handle.unit for each in modules if (handle := each.__dict__.get(HANDLE)) is not None}
    return [unit for unit in units.values() if unit.registration.shown is not Shown.SUMMONED]


def _bring_to_rest(unit: Unit) -> None:
    engine = unit.engine
    if engine is None:
        unit.reflatten()
        return
    engine.recover()
    if engine.in_backward or engine.scheduler.in_use():
        raise MisuseError(
            f"full parameters of unit {unit.name or '(root)'!r} cannot be shown while a forward or backward runs: "
            "enter the context between steps"
        )
    # As before a forward: what the user put in place of parameters is what they are.
    touched = unit.was_touched
    if touched:
        unit.adopt()
    engine.on(Event(EventKind.RESHARD, unit.index))
    if touched:
        unit.rebuild()


def _gather(units: list[Unit], form: Form, keep: bool, with_grads: bool) -> list[list[nn.Parameter]]:
    """Full parameters of each unit; none at all where this rank keeps nothing."""
    gatherer = Gatherer("full parameters")
    lent: list[list[nn.Parameter]] = []
    for unit in units:
        parameters = []
        for member in unit.members:
            name = f"{unit.name}.{member.spec.name}".lstrip(".")
            made = _parameter(member.sharded, form.write(member.sharded, name, gatherer))
            if with_grads and member.sharded.grad is not None:
                made.grad = form.write(member.sharded.grad, name, gatherer)
            if keep:
                parameters.append(made)
            del made  # before the next one is gathered
        lent.append(parameters)
    return lent if keep else []


def _parameter(sharded: nn.Parameter, full: torch.Tensor) -> nn.Parameter:
    """The full parameter, with what the user wrote on the sharded one."""
    parameter = nn.Parameter(full, requires_grad=sharded.requires_grad)
    parameter.__dict__.update(sharded.__dict__)
    return parameter


def _write_back(units: list[Unit], held: list[list[torch.Tensor | None]], with_grads: bool) -> None:
    pairs = [
        (member, _checked(value, member))
        for unit, values in zip(units, held, strict=True)
        for member, value in zip(unit.members, values, strict=True)
    ]
    with torch.no_grad():
        for member, value in pairs:
            local_of(member.sharded).copy_(part_of_full(member.sharded, value))
            if with_grads:
                _write_back_gradient(member.sharded, value.grad)
    for unit in units:
        if unit.engine is not None:
            unit.engine.written.add(unit.index)


def _checked(value: torch.Tensor | None, member: Member) -> torch.Tensor:
    if value is None or value.shape != member.sharded.shape:
        found = "None" if value is None else f"shape {tuple(value.shape)}"
        raise ValueError(
            f"parameter {member.spec.name!r} of shape {tuple(member.sharded.shape)} was replaced by {found} inside the "
            "context, so nothing can be written back; keep its shape, or pass writeback=False"
        )
    return value


def _write_back_gradient(sharded: nn.Parameter, gradient: torch.Tensor | None) -> None:
    if gradient is None:
        sharded.grad = None
    elif sharded.grad is None:
        rows = part_of_full(sharded, gradient).to(local_of(sharded).device, copy=True)
        sharded.grad = sharded_like(sharded, rows.contiguous())
    else:
        local_of(sharded.grad).copy_(part_of_full(sharded, gradient))


def use_parameters(module: nn.Module, function: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
    """Call `function(*args, **kwargs)` while the unit of `module` is full, as in its forward, with autograd.

    For parameters that are used outside of their module's forward, such as a head's weight in a fused loss:

        >>> def loss_of(hidden, labels):
        ...     return cross_entropy(hidden @ head.weight.T, labels)
        >>> loss = use_parameters(head, loss_of, hidden, labels)

    Gradients are reduced into the shards as those of the forward are. Every rank must call it. It costs one gather, and
    one more in backward if the unit has been freed in between; a head that is a unit of its own costs least.

    Args:
        module: A sharded module, or one below it; its unit is gathered, not the units below it.
        function: Its tensors are cast as the unit's mixed-precision policy casts inputs and outputs of a forward.
            Tensors that come from other modules should be its arguments, not taken from around it: a backward that
            reaches them is how the end of the unit's backward is noticed.
        *args: Passed on.
        **kwargs: Passed on.

    Returns:
        What `function` returns: a tensor, or tensors in a tuple, list, dict or dataclass.

    Raises:
        ValueError: `module` has no sharded parameters, or those of several units.
        MisuseError: `module` is not itself sharded, and the model has not run yet.
    """
    unit = _unit_that_owns(module)
    reference = REGISTRY.hooks.get(unit)
    hooks = None if reference is None else reference()
    assert hooks is not None, "the unit has lost its hooks"
    if unit.engine is None and HANDLE not in module.__dict__:
        raise MisuseError(
            f"the parameters of this {type(module).__name__} belong to a unit of a larger module that has not run yet: "
            "pass the module that was given to fully_shard, or run the model's forward first"
        )
    return hooks.use(module, function, args, kwargs)  # type: ignore[no-any-return]


def _unit_that_owns(module: nn.Module) -> Unit:
    handle = module.__dict__.get(HANDLE)
    if handle is not None:
        unit: Unit = handle.unit
        return unit
    # By the places of parameters, not by the parameters: while a forward runs, full ones are registered there.
    places = {id(part._parameters) for part in module.modules()}
    units = [
        unit
        for unit in list(REGISTRY.hooks)
        if any(id(slot.registry) in places for member in unit.members for slot in member.slots)
    ]
    if len(units) != 1:
        what = f"those of {len(units)} units" if units else "no sharded ones"
        raise ValueError(
            f"use_parameters needs a module with the parameters of one unit, this {type(module).__name__} has {what}; "
            "pass a module that was given to fully_shard"
        )
    return units[0]
