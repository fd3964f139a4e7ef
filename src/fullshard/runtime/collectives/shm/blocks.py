"""Memory that all ranks of a host see, handed out to the same purpose on every one of them.

[Note: how ranks agree on blocks without a word]
All ranks execute the same commands in the same order, so they take and return blocks in the same order, too, and each
knows by itself which block comes next. Only two things must be waited for: a block is written for its k-th use when
every rank has returned it from use k - 1, and it is read when every rank has written its part of use k. Each rank
counts both for itself.

[Note: one block to spare]
The oldest of the free blocks is used again, and only if another one stays free; else a new one is made. So a rank that
is ahead of its neighbours by less than a unit waits for nobody, and how many blocks there are does not depend on who is
ahead. Sizes are rounded up, so that full buffers and gradients of like units share their blocks, and a block serves for
half its size, too. Once there are as many as like units would need, one is made only if no free one is large enough; so
units of many sizes need no more than about ten times the largest, whatever their number.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Hashable
from typing import Any

import torch

from fullshard.runtime.collectives.base import Call
from fullshard.runtime.collectives.shm.hosts import Neighbours, open_memory, reserve
from fullshard.runtime.collectives.shm.words import LEFT, NUMBER, OPENED, SLOTS, TAG, WRITTEN, Words

_LOG = logging.getLogger("fullshard")
_KEEP_FREE = 1
# Two full buffers and the gradients of a unit in use, and one to spare of both.
_PLENTY = 5
# What a counter says that starts at 0 and that others wait for: the maker of a block could not make it, or its file has
# this number plus 2; a rank could open it or not.
_REFUSED, _FIRST_NUMBER = 1, 2
_YES, _NO = 1, 2


class Block:
    """One piece of shared memory.

    Args:
        slot: Its number, the same on every rank.
        memory: The memory.
        words: Counters of all ranks.

    Attributes:
        slot: Its number.
        memory: The memory.
        views: Tensors on it that are needed in every use, by whatever tells them apart.
    """

    def __init__(self, slot: int, memory: mmap.mmap, words: Words) -> None:
        self.slot = slot
        self.memory = memory
        self.nbytes = len(memory)
        self.views: dict[Hashable, Any] = {}
        self._words = words
        self._peers = [place for place in range(words.size) if place != words.place]
        self._use = 0
        # With a storage of its own, which gives its memory to the storage of a full buffer while that is full.
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)

    @property
    def storage(self) -> torch.UntypedStorage:
        """The memory as a storage. Whoever takes the memory from under it must put it back."""
        return self._bytes.untyped_storage()

    def tensor(self, dtype: torch.dtype, offset_bytes: int, numel: int) -> torch.Tensor:
        """A 1-D tensor on a part of the memory."""
        if not numel:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.memory, dtype=dtype, offset=offset_bytes, count=numel)

    def begin(self, call: Call) -> None:
        """Wait until no rank needs what the last use has left in it."""
        self._words.wait(self._peers, self.slot, LEFT, self._use, call)
        self._use += 1

    def written(self, call: Call) -> None:
        """This rank has written its part."""
        self._words.put(self.slot, TAG, call.tag)
        self._words.set(self.slot, WRITTEN, self._use)

    def wait(self, call: Call) -> None:
        """Wait until every rank has written its part.

        Raises:
            CommunicationError: One has not, or for another command.
        """
        words = self._words
        words.wait(self._peers, self.slot, WRITTEN, self._use, call)
        for place in self._peers:
            # It cannot have gone on to the next use: this rank is still in this one.
            if words.get(place, self.slot, TAG) != call.tag:
                raise words.other_command(place, call)

    def is_written(self) -> bool:
        """Whether every rank has written its part; does not wait."""
        words = self._words
        return all(words.get(place, self.slot, WRITTEN) >= self._use for place in self._peers)

    def leave(self) -> None:
        """This rank needs it no more."""
        self._words.set(self.slot, LEFT, self._use)


class Blocks:
    """Hands out blocks.

    Args:
        neighbours: The ranks that see them.
        words: Their counters.

    Attributes:
        nbytes: Bytes of all blocks that were made; the ranks have them in common.
    """

    def __init__(self, neighbours: Neighbours, words: Words) -> None:
        self._processes = neighbours.processes
        self._words = words
        self._made = 0  # numbers given, also to blocks that could not be made
        self._free: list[Block] = []  # the one that was returned first comes first
        self._largest = 0  # bytes that were asked for at once
        self._exhausted = False  # there was no memory for a block: what there is must do
        self.nbytes = 0

    @property
    def free_bytes(self) -> int:
        """Bytes of the blocks that this rank does not use."""
        return sum(block.nbytes for block in self._free)

    def take(self, nbytes: int, call: Call) -> Block | None:
        """A block of `nbytes` to write into; None, on every rank, if there is no memory for one.

        Raises:
            CommunicationError: A rank did not come as far as that.
        """
        nbytes = rounded(nbytes)
        block = self._choose(nbytes)
        if block is not None:
            self._free.remove(block)
        elif not self._exhausted:
            block = self._make(nbytes, call)
        if block is not None:
            block.begin(call)
        return block

    def _choose(self, nbytes: int) -> Block | None:
        """The free block to use, the same on all ranks: they return blocks in the same order."""
        able = [block for block in self._free if block.nbytes >= nbytes]
        fitting = [block for block in able if block.nbytes <= 2 * nbytes]
        if len(fitting) > _KEEP_FREE:
            return fitting[0]
        self._largest = max(self._largest, nbytes)
        if self._exhausted or self.nbytes + nbytes > _PLENTY * self._largest:
            return min(able, key=lambda block: block.nbytes, default=None)  # of equals the one returned first
        return None

    def give_back(self, block: Block) -> None:
        """This rank does not need `block` any more."""
        block.leave()
        self._free.append(block)

    def _make(self, nbytes: int, call: Call) -> Block | None:
        """A new block. The ranks take turns to make the memory, and each says whether it could open it."""
        slot = self._made
        memory = None
        if slot < SLOTS:
            self._made += 1
            memory = self._open_everywhere(slot, nbytes, call)
        if memory is None:
            self._exhausted = True
            where = f"the {call.op} of unit {call.unit!r}"
            _LOG.warning("no shared memory of %d bytes for %s: from now on ranks exchange messages", nbytes, where)
            return None
        self.nbytes += nbytes
        return Block(slot, memory, self._words)

    def _open_everywhere(self, slot: int, nbytes: int, call: Call) -> mmap.mmap | None:
        """Memory that every rank has opened; None if there is none, or one of them may not."""
        words, maker = self._words, slot % self._words.size
        mine = -1
        try:
            if maker == words.place:
                mine = reserve("block", nbytes)
                words.set(slot, NUMBER, _REFUSED if mine < 0 else mine + _FIRST_NUMBER)
            words.wait([maker], slot, NUMBER, 1, call)
            number = words.get(maker, slot, NUMBER)
            memory = None
            if number != _REFUSED:
                memory = open_memory(self._processes[maker], number - _FIRST_NUMBER, nbytes)
            words.set(slot, OPENED, _NO if memory is None else _YES)
            everybody = list(range(words.size))
            words.wait(everybody, slot, OPENED, 1, call)
        finally:
            if mine >= 0:
                os.close(mine)
        return None if any(words.get(place, slot, OPENED) == _NO for place in everybody) else memory


def rounded(nbytes: int) -> int:
    """Up to an eighth more, and whole pages: few sizes, so that blocks fit more than one purpose."""
    step = max(mmap.PAGESIZE, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step
