"""Requests to stop: SIGTERM (the scheduler wants the machine), SIGINT (Ctrl-C), or the launcher is gone. And to save.

Until the ranks have met, SIGTERM and SIGINT do what they do to any process: there is nothing to lose, and the waits are
torch's own, in which no handler of Python runs. Then, before the first step, there is nothing to save: a signal ends
the rank at once, by an exception. From the first step on a request is only noted; the loop finishes its step, the ranks
agree, and a checkpoint is saved. Who does not want to wait for that presses Ctrl-C again. SIGUSR1 asks for a checkpoint
and for nothing else: schedulers send it some time before they take the machine away. It is never the end of a rank,
however early it comes.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAVE_SIGNAL = signal.SIGUSR1


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
    wants_save: bool = False

    def listen(self) -> None:
        """The ranks have met: from here on SIGTERM and SIGINT are handled."""
        for number in SIGNALS:
            signal.signal(number, self.handle)

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

    def handle_save(self, _number: int, _frame: FrameType | None = None) -> None:
        """Signal handler of `SAVE_SIGNAL`."""
        self.wants_save = True

    def take_save(self) -> bool:
        """Whether a checkpoint was asked for since the last call."""
        wanted, self.wants_save = self.wants_save, False
        return wanted

    def pending(self) -> int:
        """The signal number to act on, or 0."""
        if self.launched and os.getppid() != self.parent:
            self.note(signal.SIGTERM)
        return self.received


@contextmanager
def listening(launched: bool) -> Iterator[StopRequest]:
    """Handle SIGUSR1, and from `StopRequest.listen` on SIGTERM and SIGINT, for the length of a `with` block."""
    request = StopRequest(launched=launched)
    before = {number: signal.getsignal(number) for number in (*SIGNALS, SAVE_SIGNAL)}
    signal.signal(SAVE_SIGNAL, request.handle_save)
    # Our launcher blocks it for its ranks, so that one that comes while they start waits until here.
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, [SAVE_SIGNAL])
    try:
        yield request
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def passing_on(send: Callable[[int], None]) -> Iterator[None]:
    """In a launcher: `SAVE_SIGNAL` is no end of this process, but goes to `send`, for the length of a `with` block.

    A thread waits for it, because the launcher's own loop may be anywhere. Processes that are started meanwhile begin
    with the signal blocked.
    """
    before = signal.signal(SAVE_SIGNAL, lambda number, _frame: send(number))  # in case a thread of a library gets it
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [SAVE_SIGNAL])
    done = threading.Event()
    waiter = threading.Thread(target=_pass_on, args=(send, done), daemon=True)
    waiter.start()
    try:
        yield
    finally:
        done.set()
        signal.pthread_kill(waiter.ident or 0, SAVE_SIGNAL)
        waiter.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(SAVE_SIGNAL, before)


def _pass_on(send: Callable[[int], None], done: threading.Event) -> None:
    while True:
        number = signal.sigwait([SAVE_SIGNAL])
        if done.is_set():
            return
        send(number)
