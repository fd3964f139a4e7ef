"""Reads ranges of bytes of one safetensors file, and verifies them on the way."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

import torch

from fullshard.core.ckpt.manifest import DTYPE_BYTES, FileEntry, ManifestError
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
from fullshard.runtime.checkpoint.files.header import PAGE_BYTES, Span, header_bytes, parse
from fullshard.runtime.checkpoint.files.memory import Pages

# The most bytes of an entry that are asked for at once. With the blocks that they begin and end in they fit the buffer.
PORTION_BYTES = 8 << 20
_BUFFER_BYTES = PORTION_BYTES + 2 * BLOCK_BYTES + 2 * PAGE_BYTES
_DIRECT_BYTES = 256 << 10  # smaller reads are better served by the system, which reads ahead
_DIRECT = getattr(os, "O_DIRECT", 0)  # not on macOS


class Buffer(Pages):
    """What files are read through; one for all of them."""

    def __init__(self) -> None:
        super().__init__(_BUFFER_BYTES)


class TensorFile:
    """An open safetensors file.

    Args:
        path: Regular file; a symbolic link is refused.
        expected: What the manifest says of it; None for a file from elsewhere, which has no checksums.
        buffer: What is read goes through it.
        verify: Compare with the checksums what is read.
        direct: Read tensors past the cache of the system, where the file system can.

    Attributes:
        spans: Tensors in the file, by name, in its order.

    Raises:
        CheckpointDamagedError: The file is missing, or is not what the manifest says.
    """

    def __init__(
        self, path: Path, expected: FileEntry | None, buffer: Buffer, verify: bool = True, direct: bool = False
    ) -> None:
        self.path = path
        self._buffer = buffer
        self._file, nbytes = open_regular(path)
        if not direct:
            _announce(self._file)
        try:
            _check_size(nbytes, expected)
            header = self._bytes(0, header_bytes(self._bytes(0, min(8, nbytes)), nbytes))
            self.spans = parse(header, nbytes)
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

    def portion(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Bytes [start, stop) of a tensor, at most `PORTION_BYTES`: uint8, in the buffer, until the next call.

        Raises:
            CheckpointDamagedError: They cannot be read, or are not those that were written.
        """
        span = self.spans[name]
        first, last = start // BLOCK_BYTES, block_count(stop)
        begin = first * BLOCK_BYTES if self._sums is not None else start
        end = min(last * BLOCK_BYTES, span.nbytes) if self._sums is not None else stop
        place = self._fetch(span, begin, end)
        if self._sums is not None:
            self._verify(name, self._buffer.view[place : place + end - begin], first)
        return self._buffer.tensor[place + start - begin : place + stop - begin]

    def _fetch(self, span: Span, begin: int, end: int) -> int:
        """Read bytes [begin, end) of an entry into the buffer; returns where in it they begin."""
        start, count = span.start + begin, end - begin
        # Elements must lie in memory as their dtype asks for, which a file from elsewhere need not care about.
        if self._direct is not None and count >= _DIRECT_BYTES and span.start % DTYPE_BYTES[span.dtype] == 0:
            place = start % PAGE_BYTES
            pages = self._buffer.view[: -(-(place + count) // PAGE_BYTES) * PAGE_BYTES]
            with suppress(OSError):  # this file system asks for more than whole pages, or the disk fails: again below
                if os.preadv(self._direct, [pages], start - place) >= place + count:
                    return place
        self._read(self._buffer.view[:count], start)
        return 0

    def _verify(self, name: str, data: memoryview, first: int) -> None:
        assert self._sums is not None
        number = self._first_sum[name] + first
        for start in range(0, len(data), BLOCK_BYTES):
            if checksum(data[start : start + BLOCK_BYTES]) != self._sums[number]:
                at = (first * BLOCK_BYTES) + start
                raise CheckpointDamagedError(
                    f"{self.path}: tensor {name!r} is damaged: bytes {at} to "
                    f"{min(at + BLOCK_BYTES, self.spans[name].nbytes)} of its piece are not those that were written"
                )
            number += 1

    def _bytes(self, start: int, count: int) -> bytes:
        """Bytes outside of tensors."""
        data = bytearray(count)
        self._read(memoryview(data), start)
        return bytes(data)

    def _read(self, view: memoryview, start: int) -> None:
        read_exactly(self._file, view, start, self.path)


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
