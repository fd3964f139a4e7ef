"""One unit: executes one command at a time for the parameters that are communicated together."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fullshard.core.policy import UnitPolicy
from fullshard.core.scaling import divide_factors
from fullshard.runtime.collectives import Call, Pending, command_tag, start_gather
from fullshard.runtime.params.describe import Found
from fullshard.runtime.params.gradients import GradientFlow
from fullshard.runtime.params.place import Links, Place, Resources
from fullshard.runtime.params.registered import Registration, Shown
from fullshard.runtime.params.shards import Member, adopt_registered, reflatten, shard_parameters
from fullshard.runtime.params.wishes import Wishes
from fullshard.runtime.policy import MixedPrecisionPolicy
from fullshard.runtime.registry import REGISTRY

if TYPE_CHECKING:
    from fullshard.runtime.engine import Engine

# Numbers of the collectives of one unit and dtype, in the low bits of a tag. An all-reduce takes two; `whole/`
# has the next.
_GATHER, _REDUCE, _ALL_REDUCE = 0, 1, 2


class _Calls:
    """Names of the collectives of one unit and dtype, in messages and on the wire."""

    __slots__ = ("all_reduce", "gather", "reduce")

    def __init__(self, unit: str, number: int) -> None:
        def call(op: str, code: int) -> Call:
            return Call(op, unit or "(root)", command_tag(f"{unit}/{number}", code))

        self.gather = call("gather", _GATHER)
        self.reduce = call("reduce", _REDUCE)
        self.all_reduce = call("all-reduce", _ALL_REDUCE)


class Unit:
    """Parameters that are gathered, freed and reduced together.

    Args:
        found: The parameters, with their values (or on the meta device).
        place: Ranks and device.
        precision: Dtypes.
        policy: Settings that the schedule depends on.

    Attributes:
        name: Qualified name in the engine's root; "" until the engine starts.
        index: Number in the engine; -1 until the engine starts.
        registration: Which parameters the unit's modules hold.
        wishes: What the user set beside the policies.
    """

    def __init__(
        self, found: Sequence[Found], place: Place, precision: MixedPrecisionPolicy, policy: UnitPolicy
    ) -> None:
        self.name = ""
        self.index = -1
        self.place = place
        self.precision = precision
        self.policy = policy
        self._engine: weakref.ref[Engine] | None = None
        self.wishes = Wishes()
        # Identities of the unit's modules: a reference to the modules would be a cycle.
        self.module_ids: set[int] = set()
        self.members, self.flows = shard_parameters(found, precision)
        self.registration = Registration(self.members)
        self._resources: Resources | None = None
        self.gathering: list[Pending] = []
        self._reducing: list[Pending] = []
        # One a flow: names of its collectives.
        self._calls: list[_Calls] = []
        self.registration.show_sharded()

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        """An independent unit on the same ranks, at rest and without an engine; its modules are copies, too.

        `memo` must know the copy of every parameter, full or sharded, see `copying.copy_parameters`.
        """
        made = copy.copy(self)
        memo[id(self)] = made
        made.name, made.index, made._resources, made._engine = "", -1, None, None
        made._calls, made.gathering, made._reducing, made.module_ids = [], [], [], set()
        made.members = [member.copy(memo) for member in self.members]
        made.flows = reflatten(made.members, self.precision)
        for old, new in zip(self.flows, made.flows, strict=True):
            new.copy_held(old)
        # Without indices in an engine, and without optimizers of the original.
        made.policy = replace(self.policy, forward_prefetch=None, backward_prefetch=None, update_in_backward=False)
        made.wishes = replace(self.wishes, prefetch={}, schedule=dict(self.wishes.schedule), updaters=[])
        made.registration = Registration(made.members)
        made.registration.show_sharded()
        REGISTRY.note_copied(made, self)
        return made

    def start(self, name: str, index: int, resources: Resources) -> None:
        """The engine starts: build full parameters. The unit is sharded and at rest."""
        self.name, self.index = name, index
        self.relink(resources)
        full = {}
        for flow in self.flows:
            flow.buffers.build(resources.pool, self.precision.compute_dtype(flow.buffers.shard.dtype))
            for sharded, parameter in zip(flow.sharded, flow.buffers.full, strict=True):
                if not flow.buffers.dresses[0].extends:
                    # Attributes that users write on a parameter are found on both, whenever they were written.
                    parameter.__dict__ = sharded.__dict__
                full[id(sharded)] = parameter
        self.registration.renew(full)
        self._calls = [_Calls(name, number) for number in range(len(self.flows))]

    @property
    def engine(self) -> Engine | None:
        """The engine that runs the unit. It is the hooks that keep it: unit and engine would be a cycle."""
        return None if self._engine is None else self._engine()

    @engine.setter
    def engine(self, engine: Engine | None) -> None:
        self._engine = None if engine is None else weakref.ref(engine)

    def release(self, name: str) -> Member:
        """Let another unit take over a parameter; before any engine has started."""
        member = next(member for member in self.members if member.spec.name == name)
        self.members.remove(member)
        self.registration.renew({})
        REGISTRY.note_released(self)
        self.flows = reflatten(self.members, self.precision)
        return member

    def reflatten(self) -> None:
        """Take over what the user put in place of sharded parameters or of their local tensors; nothing uses the unit.

        Raises:
            ValueError: A parameter was replaced by something that is not this rank's part of it.
        """
        if self.registration.shown is Shown.SUMMONED:
            return  # the modules hold the user's full parameters; nothing can be told from them
        if self.adopt() or not all(flow.is_intact() for flow in self.flows):
            if self.engine is not None:
                self.engine.bring_to_rest(self)  # not before: that registers the sharded parameters again
            self.rebuild()

    def adopt(self) -> bool:
        """Make parameters that the user registered in place of sharded ones the sharded ones. Were there any?"""
        replaced = adopt_registered(self.members)
        if replaced:
            REGISTRY.note_replaced(self, replaced)
            self.registration.renew({})
        return bool(replaced)

    def rebuild(self) -> None:
        """Make flat shards, and full buffers, of what the sharded parameters hold now; the unit is at rest."""
        self.flows = reflatten(self.members, self.precision)
        self.registration.show_sharded()
        if any(flow.buffers.shard.is_meta for flow in self.flows):
            self._resources, self._engine = None, None  # the next forward finds no engine, and says what is missing
        if self._resources is not None:
            self.start(self.name, self.index, self._resources)
            if self.engine is not None:
                self.engine.sizes_changed()

    @property
    def was_touched(self) -> bool:
        """Whether the user put other parameters, or other local tensors, in place of sharded ones."""
        return self.registration.was_touched or not all(flow.is_intact() for flow in self.flows)

    @property
    def links(self) -> Links:
        """Transports between the ranks of `place`; only after `start`."""
        return self.resources.links[self.place]

    def relink(self, resources: Resources) -> None:
        """Use other transports from now on. What is in flight ends on those that it was started on."""
        self._resources = resources
        for flow in self.flows:
            flow.links = resources.links[flow.place]

    @property
    def resources(self) -> Resources:
        """Memory and transports; only after `start`."""
        assert self._resources is not None, "the unit has no engine yet"
        return self._resources

    @property
    def full_bytes(self) -> int:
        """Bytes of full buffers when gathered."""
        return sum(flow.buffers.full_bytes for flow in self.flows)

    @property
    def is_stale(self) -> bool:
        """Whether shards were written in place since they were gathered (by hand; optimizers report themselves)."""
        return any(flow.is_stale() for flow in self.flows)

    @property
    def in_flight(self) -> list[Pending]:
        """What was started and is not ended, gathers first."""
        return self.gathering + self._reducing

    @property
    def trainable(self) -> bool:
        """Whether any parameter requires gradients now."""
        return True in [flow.is_trainable for flow in self.flows]

    @property
    def has_gradients_to_reduce(self) -> bool:
        """Whether full gradients wait to be reduced, or zeros in place of gradients that this backward did not make."""
        if self.policy.reduce_unused and not all(flow.began for flow in self.flows):
            return True
        return any(flow.has_full() for flow in self.flows)

    # Commands, one method each

    def gather(self) -> None:
        """Start to fill the full buffers from all ranks' shards."""
        self._gather(secondary=False)

    def gather_secondary(self) -> None:
        """The same from the secondary shards of the smaller group."""
        self._gather(secondary=True)

    def _gather(self, *, secondary: bool) -> None:
        for flow, calls in zip(self.flows, self._calls, strict=True):
            flow.note_gathered()
            transport = flow.links.secondary if secondary else flow.links.shard
            assert transport is not None
            items, block = flow.buffers.begin_gather(self.resources.pool, transport.shared, calls.gather, secondary)
            self.gathering.append(start_gather(transport, items, calls.gather, block))

    def wait_gather(self) -> None:
        """Make the full parameters valid and register them in the modules."""
        for pending, flow in zip(self.gathering, self.flows, strict=False):
            pending.wait()
            flow.buffers.end_gather()
        self.register_full()

    def register_full(self) -> None:
        """Register full parameters, which require gradients where the sharded ones do."""
        for flow in self.flows:
            flow.take_flags()
        self.registration.show_full()

    def show(self, full: bool) -> None:
        """Register full or sharded parameters, if it is the other kind that is registered."""
        if full and self.registration.shown is Shown.SHARDED:
            self.register_full()
        elif not full and self.registration.shown is Shown.FULL:
            self.registration.show_sharded()

    def stash(self) -> None:
        """Register sharded parameters but keep the full buffers, for the next gather to find."""
        self.registration.show_sharded()

    def shrink(self) -> None:
        """Keep rows for a smaller group in place of the full buffers."""
        self._finish_gather()
        for flow in self.flows:
            transport = flow.links.secondary
            assert transport is not None
            flow.buffers.shrink(self.resources.pool, transport.size, transport.rank)
        self.registration.show_sharded()

    def free(self) -> None:
        """Register sharded parameters and give the full buffers back, after what is in flight has ended."""
        self.registration.show_sharded()
        with ExitStack() as cleaning:  # whatever one of them says, all of them are done
            for flow in self.flows:
                cleaning.callback(flow.buffers.release, self.resources.pool)
            self._finish_gather()

    def hold(self) -> None:
        """Keep full gradients for a later reduce."""
        for flow in self.flows:
            flow.hold()

    def reduce(self) -> None:
        """Start to sum the gradients over the shard axis."""
        for flow, calls in zip(self.flows, self._calls, strict=True):
            items = flow.begin(self._divide_factors(flow))
            if items:
                self._reducing.append(flow.links.reduce.reduce(items, calls.reduce))

    def wait_reduce(self) -> None:
        """The sums over the shard axis are made; without replicas they become the gradients."""
        self._wait_reducing()
        for flow in self.flows:
            flow.end()
            if flow.links.replicate is None:
                self._bind(flow)

    def all_reduce(self) -> None:
        """Start to sum the reduced gradients over replicas."""
        for flow, calls in zip(self.flows, self._calls, strict=True):
            partial, transport = flow.partial(), flow.links.replicate
            if partial is not None and transport is not None:
                self._reducing.append(transport.all_reduce(partial, calls.all_reduce))

    def wait_all_reduce(self) -> None:
        """The sums over replicas are made and become the gradients."""
        self._wait_reducing()
        for flow in self.flows:
            self._bind(flow)

    def discard(self) -> None:
        """Let reductions in flight end, and forget their results and all full gradients."""
        try:
            for pending in self._reducing:
                pending.finish()
        finally:
            self._reducing.clear()
            self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget full and partial gradients."""
        for flow in self.flows:
            flow.drop()

    def begin_backward(self) -> None:
        """See `GradientFlow.begin_backward`."""
        for flow in self.flows:
            flow.begin_backward()

    def undo_backward(self) -> bool:
        """See `GradientFlow.undo_backward`."""
        lost = [flow.undo_backward() for flow in self.flows]
        return any(lost)

    def clear_gradients(self) -> None:
        """Remove the gradients of the sharded parameters."""
        for flow in self.flows:
            flow.clear()

    # Parts of commands

    def _wait_reducing(self) -> None:
        try:
            for pending in self._reducing:
                pending.wait()
                pending.finish()
        finally:
            self._reducing.clear()

    def _finish_gather(self) -> None:
        try:
            for pending in self.gathering:
                pending.finish()
        finally:
            self.gathering.clear()

    def _bind(self, flow: GradientFlow) -> None:
        flow.bind(self.wishes.after_reduce, self.policy.reduce_unused)

    def _divide_factors(self, flow: GradientFlow) -> tuple[float, float]:
        small = torch.float16 in [each.sum_dtype for each in self.flows]
        return divide_factors(flow.place.world.data_parallel_size, small, self.policy.divide_factor)
