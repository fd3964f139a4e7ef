"""A thread that does one thing after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

_Task = tuple[Future[None], Callable[[], None]]


class Worker:
    """Does what it is given, in that order, until it is closed.

    Not an executor of the standard library: from the moment when the interpreter begins to end those take nothing more,
    and a save in the background is to be finished then.
    """

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, act: Callable[[], None]) -> Future[None]:
        """Do this when all before it is done; the future has its error."""
        future: Future[None] = Future()
        self._tasks.put((future, act))
        return future

    def close(self) -> None:
        """Wait for what was given."""
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, act = task
            try:
                act()
            except BaseException as error:  # noqa: BLE001  raised where the result is asked for
                future.set_exception(error)
            else:
                future.set_result(None)
