"""Optimizers that run inside of backward: after which command a unit may be updated.

A unit is updated as soon as its gradients are reduced, if this backward has no more use for it: another use in the
forward has another backward to come, which needs the parameters as they were and brings more gradients. Then the update
waits for the end of backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from fullshard.core.events import Command, Event, EventKind
from fullshard.core.lifecycle import Op, State
from fullshard.core.policy import UnitPolicy


class Updates:
    """Puts UPDATE into the answers to events. The arguments are the Scheduler's own lists.

    Args:
        states: Of each unit.
        depths: Of each unit: how many of its forwards are running.
        to_backward: Units that left forward with a backward to come.
        reducing: What completes the reductions that are under way.
    """

    def __init__(
        self,
        states: Sequence[State],
        depths: Sequence[int],
        to_backward: Sequence[int],
        reducing: Sequence[Command],
    ) -> None:
        self._states, self._depths, self._to_backward, self._reducing = states, depths, to_backward, reducing
        # Forwards of each unit whose backward is not over. Not those in `to_backward`: it lacks what ran without
        # gradients and is to be recomputed.
        self._uses = [0] * len(states)
        self._put_off: frozenset[int] = frozenset()

    @property
    def memory(self) -> tuple[tuple[int, ...], frozenset[int]]:
        """What is remembered between events."""
        return tuple(self._uses), self._put_off

    @memory.setter
    def memory(self, memory: tuple[tuple[int, ...], frozenset[int]]) -> None:
        self._uses[:], self._put_off = memory

    def add(
        self, commands: list[Command], event: Event, policies: Sequence[UnitPolicy], replicated: bool
    ) -> list[Command]:
        """The answer to an event, with updates among its `commands`; `replicated` as in `SchedulePolicy`."""
        if not any(policy.update_in_backward for policy in policies):
            return commands
        if event.kind in (EventKind.ABORT, EventKind.CHANGED):
            self._forget()
            return commands
        self._count(event)
        last = Op.WAIT_ALL_REDUCE if replicated else Op.WAIT_REDUCE  # after it the gradients of a unit are complete
        made: list[Command] = []
        for number, command in enumerate(commands):
            made.append(command)
            unit = command.unit
            if command.op is not last or not policies[unit].update_in_backward:
                continue
            if self._is_busy(unit) or Command(Op.REDUCE, unit) in commands[number:]:
                self._put_off |= {unit}
            elif unit not in self._put_off:
                made.append(Command(Op.UPDATE, unit))
        if event.kind is EventKind.END_BACKWARD and event.last:
            left = (unit for unit in sorted(self._put_off) if policies[unit].update_in_backward)
            made += [Command(Op.UPDATE, unit) for unit in left]
            self._put_off = frozenset()
        return made

    def _count(self, event: Event) -> None:
        unit = event.unit
        begins = event.kind is EventKind.PRE_FORWARD and unit == 0 and not event.inside_backward
        if begins and self._depths[0] == 1 and not self._to_backward:
            self._uses[:] = [0] * len(self._uses)  # what ran before, to evaluate, has no backward
        elif event.kind is EventKind.POST_FORWARD and not (event.more or event.inside_backward or self._depths[unit]):
            self._uses[unit] += 1
        elif event.kind is EventKind.POST_BACKWARD:
            self._uses[unit] = max(0, self._uses[unit] - 1)

    def _is_busy(self, unit: int) -> bool:
        """Whether this backward, or one to come, has more uses or gradients of the unit."""
        on_the_wire = any(pending.unit == unit for pending in self._reducing)
        return on_the_wire or self._uses[unit] > 0 or self._states[unit] is State.BACKWARD

    def _forget(self) -> None:
        self._uses[:] = [0] * len(self._uses)
        self._put_off = frozenset()
