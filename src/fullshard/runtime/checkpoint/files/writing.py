"""Writes one safetensors file from tensors as they lie in memory, in few large writes.

Pieces are copied one after the other into one of two buffers while the other is written. Buffers are whole pages and
go to the disk directly where the file system can (`O_DIRECT`): a checkpoint is not read again soon, and filling the
cache of the system with it costs time and evicts what training needs.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import torch

from fullshard.core.ckpt.manifest import DTYPE_BYTES, FileEntry
from fullshard.errors import CheckpointError
from fullshard.runtime.checkpoint.files.checks import CHECKSUM_BYTES, TABLE, Checks, block_count, seal_of
from fullshard.runtime.checkpoint.files.header import PAGE_BYTES, lay_out
from fullshard.runtime.checkpoint.files.memory import Pages, as_bytes, dtype_name
from fullshard.runtime.checkpoint.files.worker import Worker

STAGING_BYTES = 8 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)  # not on macOS

Fill = Callable[[int, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Piece:
    """What is written under one name.

    Attributes:
        name: Name of the tensor.
        dtype: As safetensors writes it.
        shape: Of this piece.
        fill: `fill(offset, out)` writes bytes of the piece from `offset` on into `out`, uint8 [any].
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    fill: Fill

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


def piece_of(name: str, tensor: torch.Tensor) -> Piece:
    """A piece with the values that `tensor`, on any device, has when they are written."""
    flat = as_bytes(tensor.resolve_conj().resolve_neg().contiguous())

    def fill(offset: int, out: torch.Tensor) -> None:
        out.copy_(flat[offset : offset + out.numel()])

    return Piece(name, dtype_name(tensor.dtype), tuple(tensor.shape), fill)


def write_file(path: Path, pieces: Sequence[Piece]) -> FileEntry:
    """Write a new file, and wait until it is on the disk.

    Raises:
        CheckpointError: It cannot be written; says why. What was written stays, for the caller to remove.
    """
    table_bytes = sum(block_count(piece.nbytes) for piece in pieces) * CHECKSUM_BYTES
    described = [(piece.name, piece.dtype, piece.shape) for piece in pieces]
    header, spans = lay_out([*described, (TABLE, "U8", (table_bytes,))])
    by_name = {piece.name: piece for piece in pieces}
    try:
        with _Output(path) as output:
            output.add_bytes(header)
            checks = Checks()
            for name in list(spans)[:-1]:
                output.add(by_name[name], checks)
            table = checks.table()
            output.add_bytes(table)
            nbytes = output.finish()
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}.{advice_on(error)}") from error
    return FileEntry(path.name, nbytes, seal_of(header, table))


def advice_on(error: OSError) -> str:
    """What to do about it, as a sentence with a space before it; nothing if that is unknown."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return " Free space, keep fewer checkpoints, or save elsewhere; earlier checkpoints are untouched."
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return " Save to a folder that this rank may write to; all ranks must see the same folder."
    return ""


class _Output:
    """A file that grows from the front, written by a thread from two buffers in turn."""

    def __init__(self, path: Path) -> None:
        self._buffers = [Pages(STAGING_BYTES), Pages(STAGING_BYTES)]
        self._file = _open(path)
        self._writes: list[Future[None] | None] = [None, None]
        self._current = 0  # number of the buffer that is being filled
        self._filled = 0  # bytes in it
        self._begin = 0  # where it goes
        self._worker = Worker("fullshard-write")

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close()
        os.close(self._file)

    def add_bytes(self, data: bytes) -> None:
        """Append bytes."""
        source = memoryview(data)
        while source:
            buffer, room = self._room()
            part = source[:room]
            buffer.view[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            source = source[len(part) :]

    def add(self, piece: Piece, checks: Checks) -> None:
        """Append a piece."""
        offset, nbytes = 0, piece.nbytes
        while offset < nbytes:
            buffer, room = self._room()
            count = min(room, nbytes - offset)
            stop = self._filled + count
            piece.fill(offset, buffer.tensor[self._filled : stop])
            checks.add(buffer.view[self._filled : stop])
            self._filled = stop
            offset += count
        checks.end_entry()

    def finish(self) -> int:
        """Write what is left and wait for the disk; returns the size of the file."""
        nbytes = self._begin + self._filled
        padding = -self._filled % PAGE_BYTES
        self._buffers[self._current].view[self._filled : self._filled + padding] = bytes(padding)
        self._filled += padding
        self._flush()
        for write in self._writes:
            if write is not None:
                write.result()
        os.ftruncate(self._file, nbytes)
        os.fsync(self._file)
        return nbytes

    def _room(self) -> tuple[Pages, int]:
        if self._filled == STAGING_BYTES:
            self._flush()
        return self._buffers[self._current], STAGING_BYTES - self._filled

    def _flush(self) -> None:
        """Begin to write the current buffer, and go on with the other one as soon as that is on its way."""
        view = self._buffers[self._current].view[: self._filled]
        self._writes[self._current] = self._worker.submit(partial(_write, self._file, view, self._begin))
        self._begin += self._filled
        self._filled = 0
        self._current = 1 - self._current
        before = self._writes[self._current]
        if before is not None:
            before.result()


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags | _DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        path.unlink(missing_ok=True)  # some file systems make the file before they refuse
        return os.open(path, flags, 0o666)


def _write(file: int, data: memoryview, offset: int) -> None:
    while data:
        try:
            count = os.pwrite(file, data, offset)
        except OSError as error:
            flags = fcntl.fcntl(file, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & _DIRECT:
                raise
            fcntl.fcntl(file, fcntl.F_SETFL, flags & ~_DIRECT)  # this file system asks for more than whole pages
            continue
        data = data[count:]
        offset += count
