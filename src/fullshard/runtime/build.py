"""Builds units from modules, and engines from units."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import nn

from fullshard.core.policy import AfterForward, UnitPolicy
from fullshard.errors import MisuseError, UninitializedError
from fullshard.runtime.collectives import check_agreement
from fullshard.runtime.dtensors import local_of
from fullshard.runtime.engine import Engine
from fullshard.runtime.failures.debug import wants_debug
from fullshard.runtime.failures.postmortem import explained_between
from fullshard.runtime.params.describe import Found, PlacementFn, find_parameters, module_names, own_part
from fullshard.runtime.params.ignored import IgnoredGradients, warn_of_own_gradients
from fullshard.runtime.params.origin import Origin, checksums, warn_of_other_origins
from fullshard.runtime.params.place import Place
from fullshard.runtime.params.shards import Member
from fullshard.runtime.policy import MixedPrecisionPolicy
from fullshard.runtime.registry import REGISTRY
from fullshard.runtime.unit import Unit
from fullshard.runtime.values.init import wrap_reset_parameters


def build_unit(
    modules: list[nn.Module],
    place: Place,
    precision: MixedPrecisionPolicy,
    policy: UnitPolicy,
    select: tuple[PlacementFn | None, set[nn.Parameter]],
) -> Unit:
    """Shard what the modules hold and no other unit has.

    Args:
        modules: The modules of the unit.
        place: Ranks and device.
        precision: Dtypes.
        policy: Settings of the unit.
        select: The user's `shard_placement_fn` and `ignored_params`.
    """
    placement_fn, ignored = select
    _refuse_torch_fsdp(modules)
    found = find_parameters(modules, ignored, placement_fn, place)
    _claim_tied(found, modules)
    _move_buffers(modules, place.device)
    _warn_of_hooks(found)
    unit = Unit(found, place, precision, policy)
    unit.module_ids = {id(module) for module in modules}
    REGISTRY.note_sharded(unit, [item.parameter for item in found])
    for item, member in zip(found, unit.members, strict=True):
        member.origin = Origin.of(own_part(item.parameter), member.sharded)
    _let_reset_see_full(modules, found)
    return unit


def _refuse_torch_fsdp(modules: list[nn.Module]) -> None:
    """What torch's FSDP has sharded looks like small parameters, or like tensor-parallel ones."""
    for root in modules:
        for name, module in root.named_modules():
            if any(base.__module__.startswith("torch.distributed.fsdp") for base in type(module).__mro__):
                raise MisuseError(
                    f"module {name or '(root)'!r} is sharded by torch.distributed.fsdp already; shard one model by one "
                    "of the two: change its import to fullshard"
                )


def _claim_tied(found: list[Found], modules: list[nn.Module]) -> None:
    """A parameter that an inner unit has taken, but that is registered outside of it too, moves to this unit.

    This unit is full whenever the inner one's modules run, so the parameter stays one parameter, trained by every use.
    """
    inside = {id(module) for root in modules for module in root.modules()}
    tied = [(item, taken) for item in found if (taken := REGISTRY.unit_that_replaced(item.parameter)) is not None]
    for item, (owner, name) in tied:  # all are checked before any is moved
        if owner.engine is not None or any(key not in inside for key in owner.module_ids):
            raise ValueError(
                f"parameter {item.spec.name!r} is tied to {name!r}, which another unit has sharded, so its rows "
                "would be trained by one of them only. Shard both modules as one unit: fully_shard([a, b]), or "
                "leave both to the fully_shard call of a module that contains them"
            )
    for item, (owner, name) in tied:
        item.slots[:0] = owner.release(name).slots


def _move_buffers(modules: list[nn.Module], device: torch.device) -> None:
    """Buffers are not sharded, but are needed where the parameters are."""
    for root in modules:
        for module in root.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta and buffer.device != device:
                    module._buffers[name] = buffer.to(device)


def _warn_of_hooks(found: list[Found]) -> None:
    """Hooks on parameters close over the parameters they were made for, so they do not move to the sharded ones."""
    names = [
        item.spec.name
        for item in found
        if item.parameter._backward_hooks or getattr(item.parameter, "_post_accumulate_grad_hooks", None)
    ]
    if names:
        warnings.warn(
            f"parameters {_some(names)} have hooks that were registered before sharding: they will not be called. "
            "Register them after it, on model.parameters()",
            stacklevel=4,
        )


def _let_reset_see_full(modules: list[nn.Module], found: list[Found]) -> None:
    meta = {id(slot.registry) for item in found if item.parameter.is_meta for slot in item.slots}
    for root in modules:
        for module in root.modules():
            if id(module._parameters) in meta:
                wrap_reset_parameters(module)


def find_engine(module: nn.Module, unit: Unit, attribute: str) -> Engine:
    """The engine that runs `unit`; if there is none, a new one whose root is `module`."""
    engine = unit.engine
    if engine is not None:
        if engine.unproven and unit.index == 0:
            _check_initialized(module, engine.units, set())
            engine.unproven = False
        return engine
    units, names = _units_in(module, attribute)
    _require_budget(units)
    for other in units:
        if other.engine is not None:
            _take_over(other)
        other.reflatten()
    handles = [handle for part in module.modules() if (handle := part.__dict__.get(attribute)) is not None]
    unfilled = _check_same_everywhere(units, names)
    _check_initialized(module, units, unfilled)
    engine = Engine(units, names)
    for each in reversed(units):  # what was set on the outermost module counts
        engine.set_schedule(**each.wishes.schedule)
    for each in units:
        each.engine = engine
    for handle in handles:
        handle.hooks.engine = engine
    _care_for_ignored(module, engine)
    return engine


def _require_budget(units: list[Unit]) -> None:
    """A budget cannot be read off free memory: that differs between ranks, and before a step nobody knows the peak."""
    fit = [unit for unit in units if unit.policy.after_forward is AfterForward.FIT]
    if fit and not any("keep_bytes" in unit.wishes.schedule for unit in units):
        raise MisuseError(
            f"reshard_after_forward='auto' (of {len(fit)} units) needs to know how many bytes of full parameters may "
            "stay from forward to backward: call model.set_keep_bytes(number) on every rank before the first forward. "
            f"All units together have {sum(unit.full_bytes for unit in units)} bytes as they are stored. (A part of "
            "the model that is run or unsharded before the model itself needs a number of its own.)"
        )


def _care_for_ignored(root: nn.Module, engine: Engine) -> None:
    """Average the gradients of parameters that no unit has, or say that they are not averaged."""
    unit = engine.units[0]
    ranks = unit.place.world.data_parallel_size
    if unit.wishes.average_ignored:
        links = unit.resources.links[unit.place]
        transports = [links.reduce] if links.replicate is None else [links.reduce, links.replicate]
        engine.ignored = IgnoredGradients(root, transports, ranks)
    elif unit.wishes.average_ignored is None:
        warn_of_own_gradients(root, ranks)


def _units_in(root: nn.Module, attribute: str) -> tuple[list[Unit], list[str]]:
    """Units of `root` and its submodules, each with the name of its first module, in the order of the tree."""
    labels = module_names(root)
    units: dict[int, tuple[Unit, str]] = {}
    for module in root.modules():
        handle = module.__dict__.get(attribute)
        if handle is not None:
            units.setdefault(id(handle.unit), (handle.unit, labels[id(module)]))
    return [unit for unit, _ in units.values()], [name for _, name in units.values()]


def _take_over(unit: Unit) -> None:
    """A module ran by itself before the model that contains it: its unit gets a new engine."""
    engine = unit.engine
    assert engine is not None
    engine.recover()
    if engine.scheduler.in_use() or engine.in_backward:
        raise MisuseError(
            f"module {unit.name or '(root)'!r} is running under its own root while the model that contains it starts; "
            "run the outermost sharded module first"
        )
    engine.abort()
    engine.retire(unit)
    unit.engine = None


def _check_initialized(root: nn.Module, units: list[Unit], elsewhere: set[int]) -> None:
    """Refuse parameters and buffers without values; `elsewhere` are identities of members that have none on a rank."""
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    members = [member for unit in units for member in unit.members]
    labels = {id(member): names.get(id(member.sharded), member.spec.name) for member in members}
    meta = [labels[id(member)] for member in members if member.sharded.is_meta]
    unfilled = [labels[id(member)] for member in members if id(member) in elsewhere or _is_unfilled(member)]
    buffers = [
        name
        for name, buffer in root.named_buffers()
        if buffer.is_meta or REGISTRY.unfilled.get(buffer, -1) == buffer._version
    ]
    if meta:
        raise UninitializedError(
            f"parameters {_some(meta)} are on the meta device; call fullshard.materialize(model), or "
            "model.to_empty(device=...) and then initialize or load them"
        )
    if unfilled or buffers:
        what = f"parameters {_some(unfilled)}" if unfilled else f"buffers {_some(buffers)}"
        raise UninitializedError(
            f"{what} were materialized (from the meta device, or by to_empty) and never given values; "
            "initialize them on every rank (a module's reset_parameters must set its buffers too), or load a state "
            "dict. Non-persistent buffers are in no state dict: compute them again"
        )


def _is_unfilled(member: Member) -> bool:
    """Whether every element here is the NaN that marks memory without values."""
    local = local_of(member.sharded)
    marked = id(member.sharded) in REGISTRY.marked
    return marked and local.numel() > 0 and not local.is_meta and bool(local.isnan().all())


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")


# What a rank knows about its members beside what must be equal: their origins, and names of those without values.
_Remark = tuple[dict[str, int | None], set[str]]


def _check_same_everywhere(units: list[Unit], names: list[str]) -> set[int]:
    """Ranks that will exchange rows must agree on what they exchange; otherwise they would hang, or mix rows up.

    One exchange a process group, whatever the number of units: a rank with more of them takes part as often as others.

    Returns:
        Identities of members without values on any rank: a rank that has no rows of a parameter cannot tell by itself.
    """
    lines: dict[tuple[int, ...], list[str]] = {}
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    known: dict[tuple[int, ...], _Remark] = {}
    for unit, name in zip(units, names, strict=True):
        # A unit without parameters takes part as well; parameters on other ranks than the rest are compared there.
        for place in dict.fromkeys((unit.place, *(flow.place for flow in unit.flows))):
            for group, same_values in ((place.shard_group, False), (place.replicate_group, True)):
                if group is not None:
                    key = tuple(dist.get_process_group_ranks(group))
                    groups.setdefault(key, group)
                    lines.setdefault(key, []).extend(_describe(unit, name or "(root)", place, same_values))
                    origins, unfilled = known.setdefault(key, ({}, set()))
                    members = {_full_name(name, m): m for m in unit.members if m.place == place}
                    origins.update(
                        (n, m.origin.checksum_if_untouched(m.sharded)) for n, m in members.items() if m.origin
                    )
                    unfilled.update(n for n, m in members.items() if _is_unfilled(m))
    remarks = {}
    for key, group in groups.items():
        with explained_between(key, "its first forward, comparison of the model"):
            remarks[key] = check_agreement(lines[key], group, known[key])
    for key, remark in remarks.items():
        warn_of_other_origins(list(key), [origins for origins, _ in remark])
    empty = {name for remark in remarks.values() for _, unfilled in remark for name in unfilled}
    return {
        id(m) for unit, name in zip(units, names, strict=True) for m in unit.members if _full_name(name, m) in empty
    }


def _full_name(unit: str, member: Member) -> str:
    return f"{unit}.{member.spec.name}".removeprefix(".")


def _describe(unit: Unit, name: str, place: Place, same_values: bool) -> list[str]:
    """What the ranks of a group must agree on about the parameters of `unit` that are at `place`, one line an item.

    Args:
        unit: The unit.
        name: Its name.
        place: Whose parameters.
        same_values: The group's ranks hold the same rows, so their values are compared as well.
    """
    policy = unit.policy
    members = [member for member in unit.members if member.place == place]
    settings = (
        f"{unit.precision}, transport {unit.place.transport!r}, after forward {policy.after_forward.value}, "
        f"sync {policy.sync_gradients} {policy.sync_replicas}, debug {wants_debug(unit)}, "
        f"schedule {dict(sorted(unit.wishes.schedule.items()))}{', across steps' * unit.wishes.across_steps}"
    )
    # Of a subclass that shards itself the bits are not known here.
    equal = [m for m in members if (same_values or m.spec.replicated) and not m.dress.extends]
    sums = dict(zip(map(id, equal), checksums([local_of(m.sharded) for m in equal]), strict=True))
    return [
        f"unit {name!r} with {len(members)} parameters, {settings}",
        *(_line(name, member, _is_unfilled(member), sums.get(id(member))) for member in members),
    ]


def _line(unit: str, member: Member, unfilled: bool, checksum: int | None) -> str:
    spec = member.spec
    state = "trainable" if member.sharded.requires_grad else "frozen"
    # Values are compared only where all ranks of the group have the same rows.
    values = "" if checksum is None else ", without values" if unfilled else f", values with checksum {checksum}"
    values = ", on the meta device" if member.sharded.is_meta else values
    where = f"parameter {spec.name!r} of unit {unit!r}, shape {spec.shape}"
    return f"{where}, {spec.dtype}, {state}, dim {spec.shard_dim}{values}"
