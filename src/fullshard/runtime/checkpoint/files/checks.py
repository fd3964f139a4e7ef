"""Checksums of what is in a file, block by block, so that any part of it can be verified when it is read.

XXH3 (64 bits) notices damage, at the speed of memory. It does not notice intent: who can change a file can change its
checksums, so a checkpoint from someone else is as trustworthy as they are. What it cannot do is run code.
"""

from __future__ import annotations

import sys
from array import array

import xxhash

BLOCK_BYTES = 256 * 1024
TABLE = ".checksums"  # name of the entry, the last one of a file; real tensors never begin with a dot
CHECKSUM_BYTES = 8


def checksum(data: memoryview | bytes) -> int:
    """XXH3, 64 bits."""
    return xxhash.xxh3_64_intdigest(data)


def seal_of(header: bytes, table: bytes) -> str:
    """What the manifest says of a file: it seals the checksums, and those seal the data."""
    seal = xxhash.xxh3_64(header)
    seal.update(table)
    return seal.hexdigest()


def block_count(nbytes: int) -> int:
    """Blocks of an entry; each entry begins a new one."""
    return -(-nbytes // BLOCK_BYTES)


class Checks:
    """Makes the table of a file while its bytes go by, in any portions."""

    def __init__(self) -> None:
        self._sums = array("Q")
        self._block: xxhash.xxh3_64 | None = None
        self._left = BLOCK_BYTES

    def add(self, data: memoryview) -> None:
        """Bytes of the current entry."""
        start = 0
        while start < len(data):
            part = data[start : start + self._left]
            if len(part) == BLOCK_BYTES:
                self._sums.append(checksum(part))
            else:
                self._block = self._block or xxhash.xxh3_64()
                self._block.update(part)
                self._left -= len(part)
                if not self._left:
                    self.end_entry()
            start += len(part)

    def end_entry(self) -> None:
        """What follows is another block."""
        if self._block is not None:
            self._sums.append(self._block.intdigest())
        self._block, self._left = None, BLOCK_BYTES

    def table(self) -> bytes:
        """The checksums so far, little endian."""
        return _little_endian(self._sums).tobytes()


def read_table(table: bytes) -> array[int]:
    """The checksums in the bytes of a table."""
    return _little_endian(array("Q", table))


def _little_endian(sums: array[int]) -> array[int]:
    if sys.byteorder == "big":
        sums = sums[:]
        sums.byteswap()
    return sums
