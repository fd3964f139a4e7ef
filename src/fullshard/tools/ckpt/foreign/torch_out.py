"""Writes what `torch.load` reads, without having the tensors in memory.

An archive is a pickle that describes tensors, and the bytes of their storages. The pickle is made of stand-ins that
name a storage instead of having one; the bytes follow as they are read from the source.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from fullshard.runtime.checkpoint.files.memory import torch_dtype
from fullshard.runtime.checkpoint.files.writing import Piece
from fullshard.tools.ckpt.foreign.torch_files import STORAGES
from fullshard.tools.ckpt.outputs import Output

_ROOT = "archive/"
_ALIGNMENT = 64  # of storages, as torch has it: files can then be mapped
_LOCAL_HEADER, _ZIP64_EXTRA = 30, 20
_CLASSES = {dtype: getattr(torch, name) for name, dtype in STORAGES.items()}


@dataclass(frozen=True)
class _Storage:
    """Stands for the storage with the bytes of a piece."""

    key: str
    piece: Piece

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self.piece.dtype)

    def identity(self) -> tuple[Any, ...]:
        """What torch finds in the pickle in its place."""
        typed = _CLASSES.get(self.dtype)
        numel = self.piece.nbytes // (self.dtype.itemsize if typed else 1)
        return ("storage", typed or torch.UntypedStorage, self.key, "cpu", numel)


@dataclass(frozen=True)
class _Tensor:
    """Stands for a contiguous tensor over a storage."""

    storage: _Storage

    def __reduce__(self) -> tuple[Any, ...]:
        shape = self.storage.piece.shape
        strides = tuple(torch.empty(shape, device="meta").stride())
        rest: tuple[Any, ...] = (self.storage, 0, shape, strides, False, OrderedDict())
        if self.storage.dtype in _CLASSES:
            return torch._utils._rebuild_tensor_v2, rest
        return torch._utils._rebuild_tensor_v3, (*rest, self.storage.dtype)


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.identity() if isinstance(value, _Storage) else None


def write_torch_file(path: Path, tensors: Mapping[str, Piece], aliases: Mapping[str, str]) -> None:
    """One file with a state dict, for `torch.load(path, weights_only=True)`; tied tensors are one in memory again."""
    made = {name: _Tensor(_Storage(str(key), piece)) for key, (name, piece) in enumerate(tensors.items())}
    state: OrderedDict[str, Any] = OrderedDict(made)
    state.update({alias: made[name] for alias, name in aliases.items()})
    with Output(path) as output:
        _write_archive(output, state, [tensor.storage for tensor in made.values()])


def append_tensor(output: Output, piece: Piece) -> int:
    """Append an archive that holds one tensor; returns its bytes."""
    storage = _Storage("0", piece)
    return _write_archive(output, _Tensor(storage), [storage])


def append_value(output: Output, value: Any) -> int:
    """Append an archive that holds a value; returns its bytes."""
    made = io.BytesIO()
    torch.save(value, made)
    output.write(made.getbuffer())
    return len(made.getbuffer())


def _write_archive(output: Output, value: Any, storages: list[_Storage]) -> int:
    described = io.BytesIO()
    _Pickler(described, protocol=2).dump(value)
    view = _Appended(output.file)
    with zipfile.ZipFile(view, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        with _entry(archive, view, "data.pkl") as entry:
            entry.write(described.getbuffer())
        with _entry(archive, view, "byteorder") as entry:
            entry.write(b"little")
        for storage in storages:
            with _entry(archive, view, f"data/{storage.key}") as entry:
                for portion in output.portions(storage.piece):
                    entry.write(portion)
        with _entry(archive, view, "version") as entry:
            entry.write(b"3\n")
    return view.tell()


@contextmanager
def _entry(archive: zipfile.ZipFile, view: _Appended, name: str) -> Iterator[IO[bytes]]:
    """A new entry, whose data begin at a multiple of the alignment."""
    info = zipfile.ZipInfo(_ROOT + name)
    begin = view.tell() + _LOCAL_HEADER + len(info.filename) + _ZIP64_EXTRA + 4
    padding = -begin % _ALIGNMENT
    info.extra = b"FB" + padding.to_bytes(2, "little") + bytes(padding)
    with archive.open(info, "w", force_zip64=True) as entry:
        yield entry


class _Appended(io.RawIOBase):
    """What is appended to a file, as a file of its own: offsets in an archive are from where it begins."""

    def __init__(self, file: io.FileIO) -> None:
        self._file, self._base = file, file.tell()

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell() - self._base

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert whence == io.SEEK_SET, "the library only goes back to what it has written"
        return self._file.seek(self._base + offset) - self._base

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        count = len(left)
        while left:
            left = left[self._file.write(left) :]
        return count
