"""What `unshard(async_op=True)` gives the user to wait for."""

from __future__ import annotations

from fullshard.core.schedule import Event, EventKind
from fullshard.runtime.engine import Engine
from fullshard.runtime.unit import Unit


class UnshardHandle:
    """What `unshard(async_op=True)` returns."""

    def wait(self) -> None:
        """Wait for the full parameters and register them. Forward waits by itself; a second call does nothing."""


class Unsharding(UnshardHandle):
    """One that waits."""

    def __init__(self, engine: Engine, unit: Unit) -> None:
        self._started: tuple[Engine, Unit] | None = (engine, unit)

    def wait(self) -> None:
        """See `UnshardHandle.wait`."""
        if self._started is not None:
            (engine, unit), self._started = self._started, None
            engine.on(Event(EventKind.SETTLE, unit.index))
