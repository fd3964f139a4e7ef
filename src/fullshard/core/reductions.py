"""Gradients on the wire: which units have some, and what the next wait for each is."""

from __future__ import annotations

from collections.abc import Callable

from fullshard.core.events import Command
from fullshard.core.lifecycle import Op

# Whether the gradients of a unit are summed over replicas as well.
SumsReplicas = Callable[[int], bool]


class Reductions:
    """The reductions that were started and not waited for.

    Args:
        emit: Takes the commands.

    Attributes:
        pending: Units, oldest first, each with the op that its next wait is.
    """

    def __init__(self, emit: Callable[[Op, int], None]) -> None:
        self._emit = emit
        self.pending: list[Command] = []

    def begin(self, unit: int, allowed: int, sums_replicas: SumsReplicas) -> None:
        """Reduce `unit`; with it at most `allowed` units have full gradients on the wire."""
        if any(pending.unit == unit for pending in self.pending):
            self.drain(sums_replicas)
        for pending in self.pending[: max(0, len(self.pending) - (allowed - 1))]:
            self._advance(pending, sums_replicas)
        self._emit(Op.REDUCE, unit)
        self.pending.append(Command(Op.WAIT_REDUCE, unit))

    def drain(self, sums_replicas: SumsReplicas) -> None:
        """Wait for everything."""
        while self.pending:
            self._advance(self.pending[0], sums_replicas)

    def discard(self) -> None:
        """Give everything up."""
        for pending in self.pending:
            self._emit(Op.DISCARD, pending.unit)
        self.pending.clear()

    def _advance(self, pending: Command, sums_replicas: SumsReplicas) -> None:
        """Complete one stage of a reduction: the sum over the shard axis, then that over replicas if there are any."""
        at = self.pending.index(pending)
        self._emit(pending.op, pending.unit)
        if pending.op is Op.WAIT_REDUCE and sums_replicas(pending.unit):
            self._emit(Op.ALL_REDUCE, pending.unit)
            self.pending[at] = Command(Op.WAIT_ALL_REDUCE, pending.unit)
        else:
            del self.pending[at]
