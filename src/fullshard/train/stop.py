"""Requests to stop: SIGTERM (the scheduler wants the machine), SIGINT (Ctrl-C), or the launcher is gone.

A request is only noted; the loop finishes its step, the ranks agree, and a checkpoint is saved.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType


@dataclass
class StopRequest:
    """The strongest signal received so far; 0 is none."""

    received: int = 0
    parent: int = field(default_factory=os.getppid)
    launched: bool = False  # started by `fullshard train`, so an orphan must not go on alone

    def note(self, number: int, _frame: FrameType | None = None) -> None:
        """Signal handler."""
        self.received = max(self.received, number)

    def pending(self) -> int:
        """The signal number to act on, or 0."""
        if self.launched and os.getppid() != self.parent:
            self.note(signal.SIGTERM)
        return self.received


@contextmanager
def listening(launched: bool) -> Iterator[StopRequest]:
    """Note SIGTERM and SIGINT instead of dying, for the length of a `with` block."""
    request = StopRequest(launched=launched)
    before = {number: signal.signal(number, request.note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
