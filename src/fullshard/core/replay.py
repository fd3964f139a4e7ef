"""Answers events that the Scheduler has answered before, in the same situation, without deciding again.

[Note: how a situation is recognized]
The Scheduler is pure: its answer follows from the settings, from what it remembers and from the event. A settled
training step brings the events of the step before, so its answers are known; they only have to be found. To compare
all that the Scheduler remembers takes a walk over all units. That is done where a forward of the root begins, if this
beginning was not reached from the same place before, and where settings have changed; in between a situation is known
by the events since. So the answers are a tree under each beginning: a node an event, and from each node a branch for
every event that has followed.

While known events come the Scheduler stays behind. Only the states and depths of units, which others read, are kept up
to date. When an event comes that no branch leads to, the Scheduler is put back to where its memory was saved last,
hears the events since again, and decides. So a step that takes another way costs its decisions twice, and nothing else
changes.
"""

from __future__ import annotations

from fullshard.core.events import Command, Event, EventKind
from fullshard.core.lifecycle import State
from fullshard.core.policy import SchedulePolicy, UnitPolicy
from fullshard.core.schedule import Memory, Scheduler

# A step has about four events a unit, and there are a few kinds of steps. What exceeds this makes all be forgotten.
MAX_NODES_PER_UNIT = 64
_SPARE_NODES = 1024

# What settings and the Scheduler's memory were where a tree begins.
_Beginning = tuple[tuple[int, ...], tuple[UnitPolicy, ...], SchedulePolicy, Memory]


class _Node:
    """A situation: the one `before`, and then `event`.

    Attributes:
        commands: The answer to the event.
        moves: (unit, state, depth) of the units that it changed.
        memory: What the Scheduler remembers there, if that was saved, as it is at every beginning.
        after: Where events that have followed led.
        beginning: Where a forward of the root led from here.
    """

    __slots__ = ("after", "before", "beginning", "commands", "event", "memory", "moves")

    def __init__(self, before: _Node | None = None, event: Event | None = None, memory: Memory | None = None) -> None:
        self.before = before
        self.event = event
        self.memory = memory
        self.commands: tuple[Command, ...] = ()
        self.moves: tuple[tuple[int, State, int], ...] = ()
        self.after: dict[Event, _Node] = {}
        self.beginning: _Node | None = None


class Replay:
    """A Scheduler to its callers, with the same answers; see the note above.

    Args:
        scheduler: Decides; nothing else may drive it.

    Attributes:
        states: Of each unit, never another list.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.states = scheduler.states
        self._depths = scheduler.depths
        self._beginnings: dict[_Beginning, _Node] = {}
        self._nodes = 0
        self._limit = MAX_NODES_PER_UNIT * len(scheduler.states) + _SPARE_NODES
        self._at: _Node | None = None  # None: known to the Scheduler only
        self._behind = False  # the Scheduler has not heard the latest events

    def on(self, event: Event) -> tuple[Command, ...]:
        """See `Scheduler.on`."""
        here = self._at or self._begin()
        if event.kind is EventKind.PRE_FORWARD and event.unit == 0 and not self._depths[0]:
            if here.beginning is None:
                here.beginning = self._begin()
            self._at = here = here.beginning
        node = here.after.get(event)
        if node is None:
            return self._decide(event)
        self._at = node
        self._behind = True
        for unit, state, depth in node.moves:
            self.states[unit] = state
            self._depths[unit] = depth
        return node.commands

    def _decide(self, event: Event) -> tuple[Command, ...]:
        if self._nodes >= self._limit:
            self._forget()
        here = self._at or self._begin()
        self._catch_up()
        self._at = None  # what an event that fails has done is not known
        node = _Node(here, event)
        node.commands = self._scheduler.on(event)
        moved = sorted({event.unit, *self._scheduler.moved} - {-1})
        node.moves = tuple((unit, self.states[unit], self._depths[unit]) for unit in moved)
        here.after[event] = self._at = node
        self._nodes += 1
        return node.commands

    def _begin(self) -> _Node:
        """The beginning that is like the situation of now."""
        self._catch_up()
        scheduler, memory = self._scheduler, self._scheduler.save()
        if self._at is not None:
            self._at.memory = memory
        key = (scheduler.full_bytes, tuple(scheduler.policies), scheduler.policy, memory)
        found = self._beginnings.get(key)
        if found is None:
            self._nodes += len(self.states)  # its size is that of so many nodes
            self._beginnings[key] = found = _Node(memory=memory)
        self._at = found
        return found

    def _catch_up(self) -> None:
        """Let the Scheduler hear what it has missed."""
        if not self._behind:
            return
        missed: list[Event] = []
        node = self._at
        while node is not None and node.memory is None:
            assert node.event is not None
            missed.append(node.event)
            node = node.before
        assert node is not None
        assert node.memory is not None
        self._scheduler.load(node.memory)
        for event in reversed(missed):
            self._scheduler.on(event)
        self._behind = False

    def _forget(self) -> None:
        self._catch_up()
        self._at = None
        self._beginnings.clear()
        self._nodes = 0

    # Settings

    def set_unit_policy(self, unit: int, policy: UnitPolicy) -> None:
        """Change the settings of one unit from the next event on."""
        if policy != self._scheduler.policies[unit]:
            self._leave_tree()
            self._scheduler.policies[unit] = policy

    def set_policy(self, policy: SchedulePolicy) -> None:
        """Change the settings of the engine from the next event on."""
        self._leave_tree()
        self._scheduler.policy = policy

    def resize(self, full_bytes: tuple[int, ...]) -> None:
        """Units have full buffers of these sizes from now on."""
        self._leave_tree()
        self._scheduler.resize(full_bytes)

    def _leave_tree(self) -> None:
        """The situation of now goes on under other settings."""
        self._catch_up()
        if self._at is not None:
            self._at.memory = self._at.memory or self._scheduler.save()
        self._at = None

    # What others read

    @property
    def policy(self) -> SchedulePolicy:
        """Settings of the engine."""
        return self._scheduler.policy

    def at_rest(self) -> bool:
        """See `Scheduler.at_rest`."""
        self._catch_up()
        return self._scheduler.at_rest()

    def runs(self, unit: int) -> bool:
        """See `Scheduler.runs`."""
        return self._depths[unit] > 0

    def in_use(self) -> list[int]:
        """See `Scheduler.in_use`."""
        return self._scheduler.in_use()

    def any_in_use(self) -> bool:
        """Whether the forward of a unit is running."""
        return any(self._depths)
