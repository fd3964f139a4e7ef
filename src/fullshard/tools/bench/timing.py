"""Time that all ranks agree on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from fullshard.runtime.collectives import exchange

_LEAST, _MOST = 3, 200
_BATCHES = 5

_Value = TypeVar("_Value")


class Ranks:
    """The ranks that measure together.

    Args:
        group: All of them.
        device: Where tensors are.
        seconds: For one measured value, about.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, seconds: float) -> None:
        self.group = group
        self.device = device
        self._seconds = seconds

    @property
    def size(self) -> int:
        """How many."""
        return self.group.size()

    def of_first(self, value: _Value) -> _Value:
        """The first rank's value."""
        return exchange(value, self.group, "what was measured")[0]

    def slowest(self, seconds: float) -> float:
        """The most of all ranks; also brings them to one point in time."""
        return max(exchange(seconds, self.group, "what was measured"))

    def time(self, action: Callable[[], object]) -> float:
        """Seconds of one call of `action`, which all ranks make together: the median of some batches of calls."""
        self._run(action, 1)  # memory, threads, connections
        once = self._run(action, 1)
        # The same on all ranks, because `once` is: an action may communicate.
        count = max(1, min(_MOST, round(self._seconds / _BATCHES / max(once, 1e-9))))
        batches = _BATCHES if once * _BATCHES <= self._seconds else _LEAST
        return statistics.median(self._run(action, count) for _ in range(batches))

    def _run(self, action: Callable[[], object], count: int) -> float:
        self.slowest(0.0)
        started = time.perf_counter()
        for _ in range(count):
            action()
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return self.slowest(time.perf_counter() - started) / count
