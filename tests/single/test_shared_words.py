"""Counters in shared memory, between two places of one process and with a process that ends."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from datetime import timedelta

import pytest

from fullshard.errors import PeerLostError, PeerTimeoutError
from fullshard.runtime.collectives.base import Call
from fullshard.runtime.collectives.shm.blocks import rounded
from fullshard.runtime.collectives.shm.hosts import AREA_BYTES, Neighbours
from fullshard.runtime.collectives.shm.words import LEFT, WRITTEN, Words

CALL = Call("gather", "layer", 7)


def words(memory: mmap.mmap, place: int, peer: int, seconds: float = 0.2) -> Words:
    processes = (os.getpid(), peer) if place == 0 else (peer, os.getpid())
    neighbours = Neighbours(((0, 1),), 0, place, processes, memory)
    return Words(neighbours, [4, 5], timedelta(seconds=seconds))


@pytest.fixture
def memory() -> mmap.mmap:
    return mmap.mmap(-1, 2 * AREA_BYTES)


def test_a_wait_ends_when_the_counter_has_come(memory: mmap.mmap) -> None:
    first, second = words(memory, 0, os.getpid(), 30.0), words(memory, 1, os.getpid(), 30.0)
    second.set(3, WRITTEN, 1)
    first.wait([1], 3, WRITTEN, 1, CALL)
    waiting = threading.Thread(target=first.wait, args=([1], 3, WRITTEN, 2, CALL))
    waiting.start()
    second.set(3, WRITTEN, 2)
    waiting.join(timeout=20)
    assert not waiting.is_alive()
    assert first.get(1, 3, LEFT) == 0  # counters do not touch each other
    assert first.get(0, 3, WRITTEN) == 0


def test_a_wait_is_bounded_and_names_the_ranks(memory: mmap.mmap) -> None:
    with pytest.raises(PeerTimeoutError, match=r"gather of unit 'layer': rank 4 waited for rank\(s\) \[5\].*0.2 s"):
        words(memory, 0, os.getpid()).wait([1], 0, WRITTEN, 1, CALL)


def test_a_process_that_ended_is_noticed_long_before_the_limit(memory: mmap.mmap) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as peer:
        ours = words(memory, 0, peer.pid, 300.0)
        peer.kill()
        peer.wait()
        with pytest.raises(PeerLostError, match="that process has ended"):
            ours.wait([1], 0, WRITTEN, 1, CALL)


def test_where_processes_cannot_be_watched_the_time_limit_remains(
    memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_process: int) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(PeerTimeoutError):
        words(memory, 0, os.getpid()).wait([1], 0, WRITTEN, 1, CALL)


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 12_849_152, 1 << 30])
def test_sizes_are_rounded_by_an_eighth_at_most_or_to_pages(nbytes: int) -> None:
    assert nbytes <= rounded(nbytes) <= max(nbytes * 9 / 8, nbytes + mmap.PAGESIZE)
    assert rounded(nbytes) % mmap.PAGESIZE == 0
