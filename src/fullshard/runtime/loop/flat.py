"""Optimizers on flat shards: one tensor for each unit and parameter group, seen by the user as one per parameter.

[Note: the class itself, on other tensors]
A flat optimizer is a subclass of the class that the user named. Its parameter groups and its state hold the sharded
parameters, so schedulers, scalers, state dicts and `isinstance` meet what they know. Only while its step runs do the
groups hold flat tensors in place of the parameters, and `state` their state: the update is the named class's own, with
the settings of the groups as they are at that moment. Kernels get plain tensors, never a `DTensor`.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.core.layout import Region
from fullshard.errors import MisuseError
from fullshard.runtime.dtensors import local_of
from fullshard.runtime.engine import Engine
from fullshard.runtime.loop.elementwise import is_known
from fullshard.runtime.loop.pieces import Part, Piece, StateByParameter, pieces_of
from fullshard.runtime.params.gradients import GradientFlow
from fullshard.runtime.params.registered import Shown
from fullshard.runtime.params.storage import FlatBuffers
from fullshard.runtime.registry import REGISTRY
from fullshard.runtime.unit import Unit

# Units are updated together until they hold this much: below it the calls cost more than the kernels. One after the
# other above it, so that the first units of the next forward are ready while others are still updated.
_TOGETHER_BYTES = 4 << 20
# Fused kernels on CPU compute in vectors of at most this many bytes, and what is left at the end of a tensor one by
# one, which rounds otherwise.
_VECTOR_BYTES = 64


@dataclass(slots=True, eq=False)
class Run:
    """Neighbours in a flat shard that are in one parameter group.

    Attributes:
        group: Number of the parameter group.
        shard: The flat shard.
        parts: The parameters.
        pieces: The same as tensors; one, unless their states differ.
    """

    group: int
    shard: torch.Tensor
    parts: list[Part]
    pieces: list[Piece] = field(default_factory=list)

    def ready(self, states: StateByParameter) -> list[Piece]:
        """Pieces that have gradients, which are taken. `states` are the optimizer's as the user has them now."""
        if not self.pieces or not all(piece.is_seen_in(states) for piece in self.pieces):
            self.pieces = pieces_of(self.parts, self.shard, states)
        ready, kept = [], []
        for piece in self.pieces:
            used = piece.used()
            whole = all(used) or not any(used)
            made = [piece] if whole else piece.split(used)
            kept += made
            if not whole:
                for each in made:
                    each.show(states)
            ready += [each for each in made if each.parts[0].parameter.grad is not None]
        self.pieces = kept
        for piece in ready:
            piece.take_gradient()
        return ready


@dataclass(slots=True, eq=False)
class Work:
    """What an optimizer has of one unit; `flows` are those that the runs were made for."""

    unit: Unit
    flows: list[GradientFlow]
    runs: list[Run]

    def is_current(self) -> bool:
        """Whether the flat shards still are what the parameters live in."""
        return self.unit.flows is self.flows and all(
            local_of(part.parameter) is part.local for run in self.runs for part in run.parts
        )


@dataclass(slots=True, eq=False)
class Plan:
    """How an optimizer's parameters lie in flat shards.

    Attributes:
        ids: Identities of the parameters, by group.
        works: By unit, in the order of forward where that is known.
        others: Per group the parameters that are in no flat shard: ignored ones, subclasses that shard themselves.
    """

    ids: list[list[int]]
    works: dict[Unit, Work]
    others: list[list[nn.Parameter]]

    def fits(self, groups: list[dict[str, Any]]) -> bool:
        """Whether it still is the plan for these groups."""
        ids = [list(map(id, group["params"])) for group in groups]
        return ids == self.ids and all(work.is_current() for work in self.works.values())


def make_plan(groups: list[dict[str, Any]], *, at_rest: bool = True) -> Plan:
    """The plan for an optimizer's parameter groups.

    Parameters that the user moved or replaced are made flat first, if the units are at rest.
    """
    group_of = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
    found = (REGISTRY.owner(p) for group in groups for p in group["params"])
    units = {id(unit): unit for unit in found if unit is not None}
    works: dict[Unit, Work] = {}
    placed: set[int] = set()
    for unit in sorted(units.values(), key=lambda unit: unit.index):  # a stable order; -1 before the first forward
        if at_rest and unit.registration.shown is Shown.SHARDED:
            unit.reflatten()
        runs = [run for flow in unit.flows for run in _runs(flow, group_of, groups)]
        placed.update(id(part.parameter) for run in runs for part in run.parts)
        works[unit] = Work(unit, unit.flows, runs)
    others = [[p for p in group["params"] if id(p) not in placed] for group in groups]
    for group, left in zip(groups, others, strict=True):
        _refuse_mixed(group, left)
    return Plan([list(map(id, group["params"])) for group in groups], works, others)


def _runs(flow: GradientFlow, group_of: dict[int, int], groups: list[dict[str, Any]]) -> Iterator[Run]:
    buffers = flow.buffers
    if not isinstance(buffers, FlatBuffers):
        return  # parameters that shard themselves have no flat shard
    run: Run | None = None
    for region in buffers.layout.regions:
        group = group_of.get(id(flow.sharded[region.index]))
        if run is not None and (
            run.group != group or _ends_within_a_vector(run.parts[-1], run.shard, groups[run.group])
        ):
            yield run
            run = None
        if group is not None:
            run = run or Run(group, buffers.shard, [])
            run.parts.append(_part(flow, region))
    if run is not None:
        yield run


def _part(flow: GradientFlow, region: Region) -> Part:
    world, parameter = flow.buffers.world, flow.sharded[region.index]
    stop = region.shard_offset + region.rank_numel(world.size, world.rank)
    name = flow.buffers.specs[region.index].name
    return Part(parameter, name, local_of(parameter), region.shard_offset, stop)


def _ends_within_a_vector(part: Part, shard: torch.Tensor, group: dict[str, Any]) -> bool:
    """Whether joining what follows would change how the last elements are rounded.

    Kernels of a CPU compute what fills no vector in another way: fused ones with other instructions, and all of them,
    in 16-bit types, rounding after each operation where vectors round once.
    """
    if shard.device.type != "cpu" or (shard.itemsize >= 4 and not group.get("fused")):
        return False
    return (part.stop - part.start) * shard.itemsize % _VECTOR_BYTES != 0


def _refuse_mixed(group: dict[str, Any], others: list[nn.Parameter]) -> None:
    sharded = [p for p in others if isinstance(p, DTensor)]
    if sharded and len(sharded) < len(group["params"]) and (group.get("fused") or group.get("foreach")):
        raise MisuseError(
            f"a parameter group mixes {len(sharded)} sharded parameters that lie in no flat shard (of a subclass that "
            "shards itself, or sharded by something else), such as one of shape "
            f"{tuple(sharded[0].shape)}, with others, which foreach and fused kernels cannot update together. Give "
            "them a group of their own"
        )


class FlatOptimizer(torch.optim.Optimizer):
    """What makes an optimizer class flat, see the module. `_kind` is the class that the user named."""

    _kind: type[torch.optim.Optimizer]
    _plan: Plan | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, as the named class does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        plan = self._current_plan()
        with torch.no_grad():
            self._update(plan.works.values(), plan.others)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any optimizer; kernels get plain tensors here, too."""
        if set_to_none:
            super().zero_grad()
            return
        with torch.no_grad():
            for gradient in (p.grad for group in self.param_groups for p in group["params"] if p.grad is not None):
                gradient.detach_()
                (local_of(gradient) if isinstance(gradient, DTensor) else gradient).zero_()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of `load_state_dict` too: pieces are made anew of the new state at the next step."""
        self._plan = None
        super().__setstate__(state)

    def __reduce__(self) -> tuple[Any, ...]:
        """For copies; one of an optimizer that runs in backward does not, until the user makes it so."""
        return _bare, (self._kind,), self.__getstate__()

    def _current_plan(self) -> Plan:
        plan = self._plan
        if plan is None or not plan.fits(self.param_groups):
            plan = self._plan = make_plan(self.param_groups)
        return plan

    def _update(self, works: Iterable[Work], others: list[list[nn.Parameter]]) -> None:
        """Update units that have gradients in their order, and parameters that are in no flat shard."""
        batch = _Batch([[*left] for left in others])
        at_once = not is_known(self._kind)  # what its step remembers beside the state must be changed once a step
        for work in works:
            ready = [(run.group, piece) for run in work.runs for piece in run.ready(self.state)]
            for group, piece in ready:
                batch.add(group, piece)
            if ready:  # a unit without gradients is left alone, and what is gathered of it stays good
                batch.units.append(work.unit)
            if batch.nbytes >= _TOGETHER_BYTES and not at_once:
                self._step_batch(batch)
                batch = _Batch([[] for _ in others])
        if any(batch.tensors):
            self._step_batch(batch)

    def _step_batch(self, batch: _Batch) -> None:
        groups, states = self.param_groups, self.state
        parameters = [group["params"] for group in groups]
        state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for piece in batch.pieces:
            state[piece.flat] = piece.state
        others = [p for tensors in batch.tensors for p in tensors if p in states]
        state.update({p: states[p] for p in others})
        try:
            self.state = state
            for group, tensors in zip(groups, batch.tensors, strict=True):
                group["params"] = tensors
            _own_step(self._kind)(self)
        finally:
            self.state = states
            for group, whole in zip(groups, parameters, strict=True):
                group["params"] = whole
            for piece in batch.pieces:
                piece.flat.grad = None  # or `zero_grad` would not free it
            batch.report()
        for piece in batch.pieces:
            state.pop(piece.flat)
            piece.show(states)
        states.update(state)  # of parameters that are in no flat shard


class _Batch:
    """Tensors that are updated in one call of the named class's step.

    Attributes:
        tensors: By group; at first those that are in no flat shard.
        pieces: The other ones.
        units: Units whose parameters are among them.
        nbytes: Bytes of the pieces.
    """

    def __init__(self, tensors: list[list[nn.Parameter]]) -> None:
        self.tensors = tensors
        self.pieces: list[Piece] = []
        self.units: list[Unit] = []
        self.nbytes = 0

    def add(self, group: int, piece: Piece) -> None:
        """Add a piece that has its gradient."""
        self.tensors[group].append(piece.flat)
        self.pieces.append(piece)
        self.nbytes += piece.flat.nbytes

    def report(self) -> None:
        """Tell the engines which units have been written."""
        written: dict[Engine, list[Unit]] = {}
        for unit in self.units:
            if unit.engine is not None:
                written.setdefault(unit.engine, []).append(unit)
        for engine, units in written.items():
            engine.note_written(*units)


def _own_step(kind: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], Any]:
    """The step of a class without what torch puts around it: hooks and profiling are around the flat step already."""
    step: Any = kind.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]


@functools.cache
def flat_class(kind: Any, base: Any = FlatOptimizer) -> Any:
    """The flat form of an optimizer class; `base` is `FlatOptimizer` or a subclass."""
    return type(f"Flat{kind.__name__}", (base, kind), {"_kind": kind, "__doc__": kind.__doc__})


def _bare(kind: type[torch.optim.Optimizer]) -> FlatOptimizer:
    """For copies: an optimizer that gets its state next."""
    cls: type[FlatOptimizer] = flat_class(kind)  # type: ignore[arg-type]
    return cls.__new__(cls)
