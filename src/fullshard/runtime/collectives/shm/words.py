"""Counters in shared memory: each is written by one rank, and others wait for it."""

from __future__ import annotations

import ctypes
import os
import select
import time
from datetime import timedelta
from typing import Any

from fullshard.errors import CommunicationError, PeerLostError, PeerTimeoutError
from fullshard.runtime.collectives.base import EXPLAIN_LATE, Call
from fullshard.runtime.collectives.shm.hosts import AREA_BYTES, Neighbours

# What a rank says of each block: how often it has written its part, how often it has let go, and once, when the block
# is made: whether it has opened the memory, and (the rank that makes it) under which number. All are 0 at first. The
# tag says for which command it has written.
WRITTEN, LEFT, OPENED, NUMBER, TAG = range(5)
_WORDS_PER_SLOT = 8
SLOTS = AREA_BYTES // (4 * _WORDS_PER_SLOT)

_SYS_FUTEX = 202  # x86-64
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_EVERYBODY = 2**31 - 1
# A look takes a fraction of a microsecond. Twenty microseconds of looking cost less than to sleep and be woken; with
# more ranks than cores a rank that looks keeps the one from working that it waits for.
_LOOKS = 200
_NAP_SECONDS = 0.05
# In the place of the file descriptor of a process.
_ENDED, _UNKNOWN = -1, -2


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Words:
    """Counters of the ranks of one host.

    Args:
        neighbours: The ranks, and their memory.
        names: Rank numbers for messages, in the order of the neighbours.
        limit: How long to wait.
    """

    def __init__(self, neighbours: Neighbours, names: list[int], limit: timedelta) -> None:
        self.place = neighbours.place
        self.size = len(neighbours.ranks)
        self._names = names
        self._limit_seconds = limit.total_seconds()
        self._memory = neighbours.control
        self._words = memoryview(self._memory).cast("i")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._system: Any = ctypes.CDLL(None, use_errno=True).syscall
        self._nap = ctypes.pointer(_TimeSpec(0, int(_NAP_SECONDS * 1e9)))
        self._looks = _LOOKS if self.size <= len(os.sched_getaffinity(0)) else 1
        self._processes = [
            _UNKNOWN if place == self.place else _descriptor_of(process)
            for place, process in enumerate(neighbours.processes)
        ]

    def __del__(self) -> None:
        for descriptor in getattr(self, "_processes", ()):
            if descriptor >= 0:
                os.close(descriptor)

    def put(self, slot: int, word: int, value: int) -> None:
        """Write one of this rank's words that nobody waits for."""
        self._words[self._at(self.place, slot, word)] = value

    def set(self, slot: int, word: int, value: int) -> None:
        """Write one of this rank's counters and wake who waits for it."""
        at = self._at(self.place, slot, word)
        self._words[at] = value
        self._system(_SYS_FUTEX, ctypes.c_void_p(self._address + 4 * at), _FUTEX_WAKE, _EVERYBODY, None, None, 0)

    def get(self, place: int, slot: int, word: int) -> int:
        """A counter of the rank at `place`."""
        return self._words[self._at(place, slot, word)]

    def wait(self, places: list[int], slot: int, word: int, value: int, call: Call) -> None:
        """Wait until the counters of the ranks at `places` have reached `value`.

        Raises:
            PeerLostError: The process of one has ended before.
            PeerTimeoutError: That took longer than the time limit.
        """
        deadline = 0.0
        words = self._words
        for place in places:
            at = self._at(place, slot, word)
            for _ in range(self._looks):
                if words[at] >= value:
                    break
            else:
                deadline = deadline or time.monotonic() + self._limit_seconds  # one for all of them
                self._sleep(place, at, value, deadline, call)

    def _sleep(self, place: int, at: int, value: int, deadline: float, call: Call) -> None:
        address = ctypes.c_void_p(self._address + 4 * at)
        while (now := self._words[at]) < value:
            # Returns at once if the counter has changed since it was read, so no wake-up is missed.
            self._system(_SYS_FUTEX, address, _FUTEX_WAIT, now, self._nap, None, 0)
            if self._words[at] >= value:
                return
            if self._has_ended(place) and self._words[at] < value:
                raise PeerLostError(
                    f"{self._whom(place, call)}: that process has ended. Look at its error first.", [self._names[place]]
                )
            if time.monotonic() > deadline:
                raise PeerTimeoutError(
                    f"{self._whom(place, call)}: nothing arrived within {self._limit_seconds:g} s. {EXPLAIN_LATE}",
                    [self._names[place]],
                )

    def _whom(self, place: int, call: Call) -> str:
        names = self._names
        return f"{call.op} of unit {call.unit!r}: rank {names[self.place]} waited for rank(s) {[names[place]]}"

    def other_command(self, place: int, call: Call) -> CommunicationError:
        """What to raise if the rank at `place` wrote for another command than `call`."""
        names = self._names
        return CommunicationError(
            f"{call.op} of unit {call.unit!r}: rank {names[place]} is at another command than rank "
            f"{names[self.place]}. Ranks of one group must run their units in the same order; look for what depends on "
            "the rank (a forward that raised, a skipped or swapped module, another number of batches), or set "
            "FULLSHARD_DEBUG=1 to be told both commands"
        )

    def _has_ended(self, place: int) -> bool:
        descriptor = self._processes[place]
        if descriptor < 0:
            return descriptor == _ENDED
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        return bool(waiting.poll(0))

    def _at(self, place: int, slot: int, word: int) -> int:
        return (place * SLOTS + slot) * _WORDS_PER_SLOT + word


def _descriptor_of(process: int) -> int:
    """A file descriptor of another process, which tells when it ends; or why there is none."""
    try:
        return os.pidfd_open(process)
    except ProcessLookupError:
        return _ENDED
    except OSError:  # an old kernel, or a container that forbids it: the time limit remains
        return _UNKNOWN
