"""Between two steps: the first units of the next one are gathered while the optimizer still updates others.

[Note: ranks begin alike]
What a rank gathers ahead here depends on what its optimizers report, and what it has gathered may be stale: users write
parameters by hand after a step (to clamp them, say), through views that nobody watches, on one rank only. But a gather
takes all ranks, each of them once, with the rows that it has in the end. So before anything else of the next step is
gathered, ranks tell each other, in one small message, which units they have begun to gather and which of those they
still stand by. Those that not all ranks have begun, or stand by, are dropped everywhere, and gathered again in their
turn; a rank that has not begun such a unit takes part in its gather first, so that no message stays behind. Whether
rows are still the same is decided by comparing them, bit by bit, with what was sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from fullshard.core.lifecycle import Op, State
from fullshard.core.schedule import Event, EventKind
from fullshard.runtime.collectives import Direct, Shared, exchange_flags
from fullshard.runtime.params.storage import FlatBuffers

if TYPE_CHECKING:
    from fullshard.runtime.engine import Engine
    from fullshard.runtime.unit import Unit

# A unit that was gathered for nothing so often is written once more after the optimizer in every step: leave it.
_MOST_WASTED = 3


class Boundary:
    """What one engine does between two steps, if the user wants the next one to begin early.

    Args:
        units: Of the engine.

    Attributes:
        wanted: The user asked for it, on every rank.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.wanted = units[0].wishes.across_steps
        self._group = units[0].place.shard_group
        # Ranks of the root's group agree, and rows of subclasses that shard themselves are not ours to compare. Where a
        # backend matches collectives by their order, nothing may begin that another rank has not begun.
        ranks = dist.get_process_group_ranks(self._group)
        self._able = [
            all(
                isinstance(flow.buffers, FlatBuffers)
                and isinstance(flow.links.shard, Direct | Shared)
                and dist.get_process_group_ranks(flow.place.shard_group) == ranks
                for flow in unit.flows
            )
            for unit in units
        ]
        self._open = False  # a backward has ended, and no forward has begun since
        self._reports = [0] * len(units)  # how often optimizers have written each unit since then
        self._expected: list[int] | None = None  # how often they did so the time before
        self._begun: set[int] = set()  # what was begun since ranks last agreed
        self._first: set[int] = set()  # what was begun the time before
        self._wasted = [0] * len(units)

    def backward_ended(self) -> None:
        """Gradients are reduced: an optimizer may step."""
        self._open = self.wanted

    def written(self, engine: Engine, units: list[int]) -> None:
        """An optimizer has written these units; begin the next step with units that are not written any more."""
        if not (self.wanted and self._open):
            return
        for unit in units:
            self._reports[unit] += 1
        if self._expected is None or engine.in_backward or engine.scheduler.in_use():
            return
        if self._first and self._first.isdisjoint(units):
            return  # an event is not worth it
        engine.forget_written()
        final = tuple(unit for unit in range(len(self._able)) if self._is_final(engine, unit))
        commands = engine.on(Event(EventKind.NEXT_STEP, units=final))
        self._begun.update(command.unit for command in commands if command.op is Op.GATHER)

    def _is_final(self, engine: Engine, unit: int) -> bool:
        assert self._expected is not None
        if unit in self._begun:  # if it was dropped meanwhile: other ranks take part in its gather once, not twice
            return engine.scheduler.states[unit] is State.PREFETCHED
        due = self._reports[unit] >= self._expected[unit]
        return due and self._able[unit] and self._wasted[unit] < _MOST_WASTED

    def agree(self, engine: Engine) -> None:
        """Before the first gather after a step: take part in what others have begun, drop what is stale on any rank.

        Raises:
            CommunicationError: A rank does not begin a step within the time limit.
        """
        if not self._open:
            return
        self._open = False
        if any(self._reports):
            self._expected = self._reports
        units = range(len(self._able))
        self._reports = [0] * len(units)
        begun, self._first, self._begun = self._begun, self._begun, set()
        flags = [*(unit in begun for unit in units), *(unit in begun and self._is_good(engine, unit) for unit in units)]
        rows = exchange_flags(flags, self._group, "agreement on what was gathered between steps")
        for unit in units:
            if any(row[unit] for row in rows) and not all(row[len(units) + unit] for row in rows):
                self._wasted[unit] += 1
                if unit not in begun:
                    engine.on(Event(EventKind.RESHARD, unit))
                    engine.on(Event(EventKind.UNSHARD, unit))
                engine.on(Event(EventKind.RESHARD, unit))

    @staticmethod
    def _is_good(engine: Engine, unit: int) -> bool:
        return (
            engine.scheduler.states[unit] is State.PREFETCHED
            and unit not in engine.written
            and not engine.units[unit].is_stale
            and all(flow.buffers.sent_as_is() for flow in engine.units[unit].flows)  # type: ignore[union-attr]
        )
