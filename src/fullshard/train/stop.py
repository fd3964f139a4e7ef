"""Requests to stop: SIGTERM (the scheduler wants the machine), SIGINT (Ctrl-C), or the launcher is gone.

Before the first step there is nothing to save: a signal ends the rank at once, by an exception. From then on a request
is only noted; the loop finishes its step, the ranks agree, and a checkpoint is saved. Who does not want to wait for
that presses Ctrl-C again.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class EarlyStopError(KeyboardInterrupt):
    """A signal before the first step. No `Exception`, like its base: nothing on the way may take it for a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} before training started; nothing was saved.")
        self.exit_code = 128 + number


@dataclass
class StopRequest:
    """The strongest signal received so far; 0 is none."""

    received: int = 0
    parent: int = field(default_factory=os.getppid)
    launched: bool = False  # started by `fullshard train`, so an orphan must not go on alone
    training: bool = False  # steps are being done: there is something to save

    def begin(self) -> None:
        """The first step is next: from here on signals are noted."""
        self.training = True

    def note(self, number: int) -> None:
        """Remember a request."""
        self.received = max(self.received, number)

    def handle(self, number: int, _frame: FrameType | None = None) -> None:
        """Signal handler."""
        if number == signal.SIGINT or not self.training:
            # A second one ends the process at once, even inside a collective, where no Python handler runs. After a
            # second Ctrl-C torch's launcher sends SIGTERM to its ranks, so that one must count as well. A SIGTERM that
            # follows a SIGTERM does not: schedulers signal every process, and the launcher passes its own one on.
            for each in SIGNALS:
                signal.signal(each, signal.SIG_DFL)
        if not self.training:
            raise EarlyStopError(number)
        self.note(number)

    def pending(self) -> int:
        """The signal number to act on, or 0."""
        if self.launched and os.getppid() != self.parent:
            self.note(signal.SIGTERM)
        return self.received


@contextmanager
def listening(launched: bool) -> Iterator[StopRequest]:
    """Handle SIGTERM and SIGINT instead of dying, for the length of a `with` block."""
    request = StopRequest(launched=launched)
    before = {number: signal.signal(number, request.handle) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
