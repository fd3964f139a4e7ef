"""The order in which units run: recorded in one step, expected in the next."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

# How far ahead a prefetch looks: past this many units the order is a guess that is not worth the search.
LOOKAHEAD = 16


@dataclass
class ForwardOrder:
    """The order in which units enter forward: what is expected, how far this step has come, what it did."""

    expected: list[int]
    position: int = 0
    recorded: list[int] = field(default_factory=list)

    def begin(self) -> None:
        """A forward of the root begins: what the last one did is expected again."""
        if self.recorded:
            self.expected = self.recorded
        self.recorded = []
        self.position = 0

    def enter(self, unit: int, limit: int) -> None:
        """`unit` enters forward."""
        if len(self.recorded) < limit:
            self.recorded.append(unit)
        for start in (self.position, 0):
            with suppress(ValueError):
                self.position = self.expected.index(unit, start) + 1
                return

    def upcoming(self) -> list[int]:
        """Units expected next."""
        return self.expected[self.position : self.position + LOOKAHEAD]

    def first(self) -> list[int]:
        """Units that the next forward of the root is expected to begin with."""
        return (self.recorded or self.expected)[:LOOKAHEAD]

    def at_end(self) -> bool:
        """Whether no further unit is expected."""
        return self.position >= len(self.expected)
