"""Reads ranges of bytes of one safetensors file, and verifies them on the way."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fullshard.core.ckpt.manifest import FileEntry, ManifestError
from fullshard.errors import CheckpointDamagedError, CheckpointError
from fullshard.runtime.checkpoint.files.checks import (
    BLOCK_BYTES,
    CHECKSUM_BYTES,
    TABLE,
    block_count,
    checksum,
    read_table,
    seal_of,
)
from fullshard.runtime.checkpoint.files.header import PAGE_BYTES, header_bytes, parse
from fullshard.runtime.checkpoint.files.memory import Pages

PORTION_BYTES = 8 << 20  # the most bytes of a tensor that are asked for at once
STRETCH_BYTES = PORTION_BYTES + 2 * BLOCK_BYTES  # the most that are read at once: the blocks that they begin and end in
_BUFFER_BYTES = STRETCH_BYTES + 2 * PAGE_BYTES
_DIRECT_BYTES = 256 << 10  # smaller reads are better served by the system, which reads ahead
_DIRECT = getattr(os, "O_DIRECT", 0)  # not on macOS


class Buffer(Pages):
    """What files are read through."""

    def __init__(self) -> None:
        super().__init__(_BUFFER_BYTES)


@dataclass(frozen=True, slots=True)
class Portion:
    """Part of a tensor, in bytes of the file.

    Attributes:
        name: Of the tensor.
        start: The first one that is wanted.
        stop: Their end.
        begin: The first one that must be read.
        end: Their end.
    """

    name: str
    start: int
    stop: int
    begin: int
    end: int


class TensorFile:
    """An open safetensors file.

    Args:
        path: Regular file; a symbolic link is refused.
        expected: What the manifest says of it; None for a file from elsewhere, which has no checksums.
        verify: Compare with the checksums what is read.
        direct: Read tensors past the cache of the system, where the file system can.

    Attributes:
        spans: Tensors in the file, by name, in its order.

    Raises:
        CheckpointDamagedError: The file is missing, or is not what the manifest says.
    """

    def __init__(self, path: Path, expected: FileEntry | None, verify: bool = True, direct: bool = False) -> None:
        self.path = path
        self._file, nbytes = open_regular(path)
        if not direct:
            _announce(self._file)
        try:
            _check_size(nbytes, expected)
            header = self._bytes(0, header_bytes(self._bytes(0, min(8, nbytes)), nbytes))
            self.spans = parse(header, nbytes)
            self._shift = len(header) % PAGE_BYTES  # none in our files: their data begin at a whole page
            self._sums, self._first_sum = self._checks(header, expected)
            self._sums = self._sums if verify else None
            self._direct = _open_direct(self._file) if direct else None
        except ManifestError as error:
            os.close(self._file)
            raise CheckpointDamagedError(f"{path} is damaged: {error}") from None
        except BaseException:
            os.close(self._file)
            raise

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
        if self._direct is not None:
            os.close(self._direct)

    def _checks(self, header: bytes, expected: FileEntry | None) -> tuple[memoryview | None, dict[str, int]]:
        """Checksums of all blocks, and for each entry the number of its first one."""
        if expected is None:
            return None, {}
        entry = self.spans.pop(TABLE, None)
        first: dict[str, int] = {}
        count = 0
        for name, span in self.spans.items():
            first[name] = count
            count += block_count(span.nbytes)
        if entry is None or entry.nbytes != count * CHECKSUM_BYTES:
            raise ManifestError(f"its entry {TABLE!r} does not have a checksum for each of its {count} blocks")
        table = self._bytes(entry.start, entry.nbytes)
        if seal_of(header, table) != expected.seal:
            raise ManifestError("its header or its checksums are not those that were written (the seal does not fit)")
        return memoryview(read_table(table)), first

    def portion(self, name: str, start: int, stop: int) -> Portion:
        """Bytes [start, stop) of a tensor, at most `PORTION_BYTES`."""
        span = self.spans[name]
        begin, end = start, stop
        if self._sums is not None:  # whole blocks: each has one checksum
            begin, end = start // BLOCK_BYTES * BLOCK_BYTES, min(block_count(stop) * BLOCK_BYTES, span.nbytes)
        return Portion(name, span.start + start, span.start + stop, span.start + begin, span.start + end)

    def fetch(self, begin: int, end: int, buffer: Buffer) -> int:
        """Read bytes [begin, end) of the file into a buffer; returns where in it they begin.

        Raises:
            CheckpointDamagedError: It ends before.
            CheckpointError: It cannot be read.
        """
        # In memory as from the first byte of all data on, where elements are aligned, if they are at all.
        place, count = (begin - self._shift) % PAGE_BYTES, end - begin
        if self._direct is not None and count >= _DIRECT_BYTES and not self._shift:
            pages = buffer.view[: -(-(place + count) // PAGE_BYTES) * PAGE_BYTES]
            with suppress(OSError):  # this file system asks for more than whole pages, or the disk fails: again below
                if os.preadv(self._direct, [pages], begin - place) >= place + count:
                    return place
        read_exactly(self._file, buffer.view[place : place + count], begin, self.path)
        return place

    def verify(self, portion: Portion, data: memoryview) -> None:
        """Compare what was read for a portion with its checksums, if it has some.

        Raises:
            CheckpointDamagedError: It is not what was written.
        """
        if self._sums is None:
            return
        span = self.spans[portion.name]
        first = portion.begin - span.start
        number = self._first_sum[portion.name] + first // BLOCK_BYTES
        for start in range(0, len(data), BLOCK_BYTES):
            if checksum(data[start : start + BLOCK_BYTES]) != self._sums[number]:
                at = first + start
                raise CheckpointDamagedError(
                    f"{self.path}: tensor {portion.name!r} is damaged: bytes {at} to "
                    f"{min(at + BLOCK_BYTES, span.nbytes)} of its piece are not those that were written"
                )
            number += 1

    def _bytes(self, start: int, count: int) -> bytes:
        """Bytes outside of tensors."""
        data = bytearray(count)
        read_exactly(self._file, memoryview(data), start, self.path)
        return bytes(data)


def read_exactly(file: int, view: memoryview, start: int, path: Path) -> None:
    """Fill `view` with the bytes of an open file from `start` on; `path` names it.

    Raises:
        CheckpointDamagedError: It ends before.
        CheckpointError: It cannot be read.
    """
    while view:
        try:
            count = os.preadv(file, [view], start)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        if count == 0:
            raise CheckpointDamagedError(f"{path} ended at byte {start} while it was read: it was cut short")
        view = view[count:]
        start += count


def _check_size(nbytes: int, expected: FileEntry | None) -> None:
    if expected is not None and nbytes != expected.nbytes:
        raise ManifestError(
            f"it has {nbytes} bytes, but the manifest says {expected.nbytes}; it was cut short or replaced"
        )


def _announce(file: int) -> None:
    """Say that the file is read from front to back, so that the disk works while what came is verified and copied."""
    if hasattr(os, "posix_fadvise"):  # not on macOS
        with suppress(OSError):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_SEQUENTIAL)


def _open_direct(file: int) -> int | None:
    """The same file past the cache of the system, or None."""
    try:  # by its descriptor: a path could lead elsewhere by now
        return os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC | _DIRECT) if _DIRECT else None
    except OSError:
        return None


def open_regular(path: Path) -> tuple[int, int]:
    """Open a file for reading, which is no link, pipe or device; returns (descriptor, bytes).

    Raises:
        CheckpointDamagedError: There is no such file.
        CheckpointError: It cannot be opened, or is no regular file.
    """
    try:
        # Not to wait for the other end of a pipe.
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise CheckpointDamagedError(f"{path} is missing") from None
    except OSError as error:
        link = " (it is a symbolic link, which is not followed)" if path.is_symlink() else ""
        raise CheckpointError(f"cannot open {path}: {error.strerror}{link}") from None
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        os.close(file)
        raise CheckpointError(f"{path} is not a regular file")
    return file, status.st_size
