"""The Scheduler: events of hooks in, commands for the runtime out; the same events, the same commands on every rank.

[Note: what is guaranteed]
1. A unit that enters forward or backward is gathered and waited for before the event returns.
2. Full buffers that no computation uses and no policy keeps are prefetches, and their bytes stay within the budget.
3. At most `reduces_in_flight` units have gradients on the wire; at the end of backward none has.
4. ABORT brings every unit to SHARDED from any state; the next step needs no special call.
5. A prefetch follows the order that was recorded in the last forward. It is a hint: when the model takes another way,
   units are gathered on demand and wrong prefetches are dropped; only speed is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any

from fullshard.core.budget import one_unit_bytes, units_to_keep
from fullshard.core.events import Command, Event, EventKind, Memory
from fullshard.core.lifecycle import TABLE, Op, State, Step
from fullshard.core.order import LOOKAHEAD, ForwardOrder
from fullshard.core.policy import AfterForward, SchedulePolicy, UnitPolicy
from fullshard.core.reductions import Reductions
from fullshard.core.updates import Updates
from fullshard.errors import MisuseError

__all__ = ["Command", "Event", "EventKind", "Memory", "Scheduler"]

# Forwards whose backward never comes (evaluation with gradients enabled) must not let the record grow without bound.
MAX_RECORD_PER_UNIT = 64


class Scheduler:
    """Decides for all units of one engine. Unit 0 is the root.

    Args:
        full_bytes: Bytes of each unit's full buffers, in the order of the module tree.
        policies: Settings of each unit; the caller may replace entries between events.
        policy: Settings of the engine.

    Attributes:
        states: Of each unit.
        depths: Of each unit: how many of its forwards are running.
        moved: Units whose state or depth the latest event may have changed, beside its own.
    """

    def __init__(self, full_bytes: Sequence[int], policies: list[UnitPolicy], policy: SchedulePolicy) -> None:
        if len(full_bytes) != len(policies):
            raise ValueError(f"{len(full_bytes)} units but {len(policies)} policies")
        self.resize(full_bytes)
        self.policies = policies
        self.policy = policy
        self.states = [State.SHARDED] * len(full_bytes)
        self.depths = [0] * len(full_bytes)
        self.moved: set[int] = set()
        self._order = ForwardOrder(list(range(len(full_bytes))))
        # Units that the budget of `reshard_after_forward="auto"` has room for, since the root's last forward began.
        self._kept: frozenset[int] = frozenset()
        # Units that left forward with a backward to come, in that order; backward takes them from the end.
        self._to_backward: list[int] = []
        # Units that the user unsharded ahead of use: no prefetch decision may drop them.
        self._pinned: set[int] = set()
        self._reductions = Reductions(self._emit)
        self._updates = Updates(self.states, self.depths, self._to_backward, self._reductions.pending)
        self._out: list[Command] = []
        self._handlers: dict[EventKind, Callable[[Event], None]] = {
            EventKind.PRE_FORWARD: self._pre_forward,
            EventKind.POST_FORWARD: self._post_forward,
            EventKind.PRE_BACKWARD: self._pre_backward,
            EventKind.POST_BACKWARD: self._post_backward,
            EventKind.END_BACKWARD: self._end_backward,
            EventKind.FORWARD_FAILED: self._forward_failed,
            EventKind.UNSHARD: self._unshard,
            EventKind.SETTLE: lambda event: self._move(event.unit, Step.SETTLE),
            EventKind.RESHARD: self._reshard,
            EventKind.CHANGED: self._changed,
            EventKind.NEXT_STEP: self._next_step,
            EventKind.ABORT: self._abort,
        }

    def resize(self, full_bytes: Sequence[int]) -> None:
        """Units have full buffers of these sizes from now on."""
        self.full_bytes = tuple(full_bytes)
        self._one_unit_bytes = one_unit_bytes(self.full_bytes)

    def on(self, event: Event) -> tuple[Command, ...]:
        """Take one event and return the commands that answer it, in the order in which they are to be executed."""
        self._out = []
        self.moved.clear()
        self._handlers[event.kind](event)
        return tuple(self._updates.add(self._out, event, self.policies, self.policy.replicated))

    def save(self) -> Memory:
        """What is remembered now. The next answers follow from it and the settings."""
        order = self._order
        lists: tuple[Sequence[Any], ...] = (
            *(self.states, self.depths, order.expected, order.recorded, self._to_backward, self._reductions.pending),
        )
        sets = (frozenset(self._pinned), self._kept, self._updates.memory)
        return (*(tuple(each) for each in lists), order.position, *sets)

    def load(self, memory: Memory) -> None:
        """Remember what was remembered when it was saved."""
        states, depths, expected, recorded, to_backward, reducing, position, *sets = memory
        self.states[:], self.depths[:] = states, depths
        self._order = ForwardOrder(list(expected), position, list(recorded))
        self._to_backward[:], self._reductions.pending[:] = to_backward, reducing
        self._pinned, (self._kept, self._updates.memory) = set(sets[0]), sets[1:]

    def at_rest(self) -> bool:
        """Whether every unit is sharded and nothing is in flight."""
        return not self._reductions.pending and all(state is State.SHARDED for state in self.states)

    def runs(self, unit: int) -> bool:
        """Whether the forward of `unit` is running."""
        return self.depths[unit] > 0

    def in_use(self) -> list[int]:
        """Units whose forward is running."""
        return [unit for unit, depth in enumerate(self.depths) if depth]

    def prefetched_bytes(self) -> int:
        """Bytes of full buffers that were gathered ahead of use."""
        if State.PREFETCHED not in self.states:
            return 0
        return sum(
            self.full_bytes[unit]
            for unit, state in enumerate(self.states)
            if state is State.PREFETCHED and unit not in self._pinned
        )

    # Events of forward

    def _pre_forward(self, event: Event) -> None:
        unit = event.unit
        self.depths[unit] += 1
        if self.states[unit] is State.BACKWARD or event.inside_backward:
            self._move(unit, Step.ENTER_FORWARD)
            return
        if unit == 0 and self.depths[0] == 1:
            self._order.begin()
            self._choose_kept()
        self._order.enter(unit, MAX_RECORD_PER_UNIT * len(self.states))
        self._move(unit, Step.ENTER_FORWARD)
        explicit = self.policies[unit].forward_prefetch
        wanted = self._within_budget(unit, self._order.upcoming()) if explicit is None else explicit
        self._prefetch(Step.PREFETCH, wanted)

    def _post_forward(self, event: Event) -> None:
        unit = event.unit
        if not self.depths[unit]:
            return  # an ABORT came while it ran
        self.depths[unit] -= 1
        if self.depths[unit]:
            return
        # What is recomputed stays full until its backward, and its first forward is on the list already.
        if event.will_backward and not event.inside_backward:
            self._to_backward.append(unit)
            del self._to_backward[: -MAX_RECORD_PER_UNIT * len(self.states)]
        step = self._exit(event)
        if step is Step.EXIT_HOLD and event.inside_backward:
            # Of a segment that is recomputed as a whole only the last unit is next; the others are gathered again.
            self._release_held()
        self._move(unit, step)
        if unit == 0 and not event.inside_backward:
            self._end_of_root_forward(event)

    def _exit(self, event: Event) -> Step:
        """How a unit leaves forward."""
        after = self._after_forward(event.unit, event.will_backward)
        if after is AfterForward.KEEP:
            return Step.EXIT_KEEP
        if event.more or (event.inside_backward and event.will_backward):
            # Its next use follows at once: another module of the unit, or the backward of what was recomputed.
            return Step.EXIT_HOLD
        if not (event.will_backward and self.policies[event.unit].unshard_in_backward):
            return Step.EXIT_FREE
        if self._order.at_end() and self._stash_fits(event.unit):
            return Step.EXIT_STASH
        return Step.EXIT_SHRINK if after is AfterForward.SHRINK else Step.EXIT_FREE

    def _after_forward(self, unit: int, will_backward: bool) -> AfterForward:
        after = self.policies[unit].after_forward
        if after not in (AfterForward.AUTO, AfterForward.FIT):
            return after
        # Without a backward to come, what is kept would only hold memory and go stale when parameters change.
        keep = unit == 0 or (after is AfterForward.FIT and unit in self._kept)
        return AfterForward.KEEP if keep and will_backward else AfterForward.FREE

    def _choose_kept(self) -> None:
        """Which units with `reshard_after_forward="auto"` stay full from this forward to its backward."""
        policies, order = self.policies, self._order.expected
        may = [u for u, policy in enumerate(policies) if u and policy.after_forward is AfterForward.FIT]
        if not may:
            self._kept = frozenset()
            return
        # What an earlier forward has kept for a backward that is still to come stays, and counts.
        stay = [u for u in may if u in self._kept and self.states[u] is State.KEPT]
        latest_first = [u for u in dict.fromkeys(reversed(order)) if u in may and policies[u].unshard_in_backward]
        last = order[-1] if self._fits(0, order[-1]) else None
        self._kept = units_to_keep(stay, latest_first, self.full_bytes, self.policy.keep_bytes or 0, last)

    def _stash_fits(self, unit: int) -> bool:
        """The last unit of forward is the first of backward: keeping its buffer is a prefetch that costs nothing."""
        # Units around this one leave forward later, so backward needs them before it.
        around = (u for u in self.in_use() if self._after_forward(u, will_backward=True) is not AfterForward.KEEP)
        ahead = self.prefetched_bytes() + sum(self.full_bytes[u] for u in around)
        return self._fits(ahead, unit)

    def _release_held(self) -> None:
        for unit, state in enumerate(self.states):
            if state is State.HELD:
                self._move(unit, Step.RESHARD)

    def _end_of_root_forward(self, event: Event) -> None:
        self._release_held()
        # This drops prefetches that forward did not use, and gathers what backward needs first. The root itself comes
        # first of all: if its buffer was kept it counts, but to gather it again at once would overlap with nothing.
        ahead = self._backward_order() if event.will_backward else []
        wanted = self._within_budget(-1 if self.states[0] is State.PREFETCHED else 0, ahead)
        self._prefetch(Step.PREFETCH_BACKWARD, wanted)

    # Events of backward

    def _pre_backward(self, event: Event) -> None:
        unit = event.unit
        first = self.states[unit] is not State.BACKWARD
        if self.policies[unit].unshard_in_backward:
            self._move(unit, Step.ENTER_BACKWARD)
        if not first or self.depths[unit]:
            return
        for i in range(len(self._to_backward) - 1, -1, -1):
            if self._to_backward[i] == unit:
                del self._to_backward[i]
                break
        else:
            i = len(self._to_backward)
        explicit = self.policies[unit].backward_prefetch
        wanted = self._within_budget(unit, self._backward_order(i)) if explicit is None else explicit
        self._prefetch(Step.PREFETCH_BACKWARD, wanted)

    def _backward_order(self, stop: int | None = None) -> list[int]:
        """Units whose backward is expected next and needs their parameters."""
        ahead = [u for u in reversed(self._to_backward[:stop]) if self.policies[u].unshard_in_backward]
        return ahead[:LOOKAHEAD]

    def _post_backward(self, event: Event) -> None:
        unit = event.unit
        self._move(unit, Step.LEAVE_KEEP if self.policies[unit].keep_after_backward else Step.LEAVE_FREE)
        if not event.reducible:
            return
        if not self.policies[unit].sync_gradients:
            self._emit(Op.HOLD, unit)
            return
        self._reductions.begin(unit, self.policy.reduces_in_flight, self._sums_replicas)

    def _sums_replicas(self, unit: int) -> bool:
        return self.policy.replicated and self.policies[unit].sync_replicas

    def _end_backward(self, event: Event) -> None:
        left = [u for u, state in enumerate(self.states) if state is State.BACKWARD]
        for unit in sorted(set(left) | set(event.units), reverse=True):
            self._post_backward(Event(EventKind.POST_BACKWARD, unit, reducible=unit in event.units))
        for unit, state in enumerate(self.states):
            # Left over: held or kept for a backward that did not need it (frozen, unused).
            kept = state is State.KEPT and not self.policies[unit].keep_after_backward
            if kept or state in (State.HELD, State.SECONDARY):
                self._move(unit, Step.RESHARD)
        self._drop_prefetched()
        if event.last:
            self._reductions.drain(self._sums_replicas)

    # Events of the user and of failures

    def _forward_failed(self, event: Event) -> None:
        """A forward raised: an inner unit lets go of its buffers, the outermost one aborts the step."""
        unit = event.unit
        if not self.depths[unit]:
            return
        self.depths[unit] -= 1
        if self.states[unit] is State.BACKWARD or event.inside_backward:
            # Activation checkpointing ends a recomputation early by raising; a real failure ends the backward itself.
            if not self.depths[unit]:
                self._move(unit, Step.EXIT_HOLD)
            return
        if not self.in_use():
            self._abort(event)
        elif not self.depths[unit]:
            self._move(unit, Step.ABORT)

    def _unshard(self, event: Event) -> None:
        self._pinned.add(event.unit)
        self._move(event.unit, Step.UNSHARD)

    def _reshard(self, event: Event) -> None:
        if self.states[event.unit].in_use:
            raise MisuseError(
                f"unit {event.unit} cannot be resharded: its {self.states[event.unit].value} is running and needs the "
                "full parameters; call this after the forward or backward has returned"
            )
        self._move(event.unit, Step.RESHARD)

    def _changed(self, event: Event) -> None:
        """The optimizer or a load wrote the shards: what was gathered before is stale, graphs from before are done."""
        self._to_backward.clear()
        for unit, state in enumerate(self.states):
            # The base of an adapter that is kept full is gathered once, not once a step. What was gathered for the next
            # step is not gathered again because others were written later.
            keeps = state is State.PREFETCHED or (state is State.KEPT and self.policies[unit].keep_after_backward)
            if not state.in_use and not (keeps and unit in event.units):
                self._move(unit, Step.RESHARD)

    def _next_step(self, event: Event) -> None:
        """Begin the next step with units that will not change any more, while an optimizer still updates others.

        They are as many as may be full when a forward begins: the root, and what is gathered ahead beside it. Where the
        user gave a number of bytes, the root counts.
        """
        explicit = self.policies[0].forward_prefetch
        order = self._order.first() if explicit is None else (0, *explicit)
        head = list(takewhile(lambda unit: unit in event.units, order))
        wanted = self._within_budget(-1, head)
        if self.policy.prefetch_bytes is None and 0 in wanted:
            wanted = (0, *self._within_budget(0, head))
        for unit in wanted:
            if self.states[unit] in (State.SHARDED, State.SECONDARY):
                self._move(unit, Step.PREFETCH)

    def _abort(self, event: Event) -> None:
        if event.inside_backward:
            self._reductions.discard()
        else:
            # Of an earlier backward, complete and not waited for: its gradients are good.
            self._reductions.drain(self._sums_replicas)
        for unit in range(len(self.states)):
            self._move(unit, Step.ABORT)
            self.depths[unit] = 0
        self._to_backward.clear()
        self._order.recorded = []
        self._order.position = 0

    # Shared

    def _prefetch(self, step: Step, wanted: tuple[int, ...]) -> None:
        """Gather units that are needed next, and drop prefetches that are not among them."""
        self._drop_prefetched(wanted)
        for unit in wanted:
            if self.states[unit] in (State.SHARDED, State.SECONDARY):
                self._move(unit, step)
        # All that peers need from this rank is on its way before this rank waits for them.
        self._out.sort(key=lambda command: command.op is Op.WAIT_GATHER)

    def _within_budget(self, current: int, ahead: Iterable[int]) -> tuple[int, ...]:
        """The first units of `ahead` that need a buffer and together fit the budget."""
        wanted: list[int] = []
        used = 0
        for unit in ahead:
            if unit == current or unit in wanted or self._needs_no_prefetch(unit):
                continue
            if not self._fits(used, unit):
                break
            used += self.full_bytes[unit]
            wanted.append(unit)
        return tuple(wanted)

    def _fits(self, ahead_bytes: int, unit: int) -> bool:
        """Whether `unit` may be gathered ahead of use beside other units of `ahead_bytes`.

        Without the user's number it is one unit of any size, or as many as are together no larger than the largest.
        """
        total, budget = ahead_bytes + self.full_bytes[unit], self.policy.prefetch_bytes
        return total <= budget if budget is not None else not ahead_bytes or total <= self._one_unit_bytes

    def _needs_no_prefetch(self, unit: int) -> bool:
        full = self.states[unit] in (State.KEPT, State.HELD, State.FORWARD, State.BACKWARD)
        return full or unit in self._pinned or not self.full_bytes[unit]

    def _drop_prefetched(self, wanted: tuple[int, ...] = ()) -> None:
        if State.PREFETCHED not in self.states:
            return  # the usual case, without a walk over all units
        for unit, state in enumerate(self.states):
            if state is State.PREFETCHED and unit not in wanted and unit not in self._pinned:
                self._move(unit, Step.RESHARD)

    def _move(self, unit: int, step: Step) -> None:
        """The only place where a state changes, and only along the table."""
        entry = TABLE.get((self.states[unit], step))
        if entry is None:
            raise AssertionError(f"unit {unit} in state {self.states[unit].value!r} cannot {step.value!r}")
        self.states[unit], ops = entry
        self.moved.add(unit)
        if self.states[unit] is not State.PREFETCHED:
            self._pinned.discard(unit)
        for op in ops:
            self._emit(op, unit)

    def _emit(self, op: Op, unit: int) -> None:
        self._out.append(Command(op, unit))
