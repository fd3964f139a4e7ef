"""Tensors that lie in files of other programs, and how any part of them is read through a small buffer."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import torch

from fullshard.core.ckpt.boxes import Box
from fullshard.errors import CheckpointDamagedError, CheckpointError
from fullshard.runtime.checkpoint.files.reading import open_regular, read_exactly

_OPEN_FILES = 64


class Elements(Protocol):
    """Numbers in a row, somewhere."""

    @property
    def dtype(self) -> torch.dtype:
        """Their dtype."""

    @property
    def numel(self) -> int:
        """How many there are."""

    def read(self, start: int, out: torch.Tensor) -> None:
        """Fill `out`, contiguous [any] of `dtype`, with the elements from `start` on."""


class Folder:
    """The files of a folder, opened when needed; nothing outside of it, and no links.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: OrderedDict[str, tuple[int, int]] = OrderedDict()  # name -> (descriptor, bytes)

    def close(self) -> None:
        """Close the files."""
        while self._open:
            os.close(self._open.popitem()[1][0])

    def size(self, name: str) -> int:
        """Bytes of a file."""
        return self._file(name)[1]

    def read(self, name: str, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes of a file from `offset` on.

        Raises:
            CheckpointDamagedError: It has fewer.
        """
        file, nbytes = self._file(name)
        if offset < 0 or offset + len(view) > nbytes:
            raise CheckpointDamagedError(
                f"{self.path / name} has {nbytes} bytes, but bytes {offset} to {offset + len(view)} are needed: "
                f"it was cut short"
            )
        read_exactly(file, view, offset, self.path / name)

    def bytes(self, name: str, offset: int, count: int) -> bytes:
        """Bytes of a file."""
        data = bytearray(count)
        self.read(name, offset, memoryview(data))
        return bytes(data)

    def _file(self, name: str) -> tuple[int, int]:
        found = self._open.pop(name, None)
        if found is None:
            plain_name(name, str(self.path))
            while len(self._open) >= _OPEN_FILES:
                os.close(self._open.popitem(last=False)[1][0])
            found = open_regular(self.path / name)
        self._open[name] = found
        return found


def plain_name(name: str, source: str) -> str:
    """A name of a file that lies in the folder itself.

    Raises:
        CheckpointError: It would lead elsewhere.
    """
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise CheckpointError(f"{source} names a file {name[:200]!r}, which would not be in its own folder: refused")
    return name


@dataclass(frozen=True, slots=True)
class InFile:
    """Elements that lie in a file as they do in memory."""

    folder: Folder
    name: str
    offset: int  # bytes
    dtype: torch.dtype
    numel: int

    def read(self, start: int, out: torch.Tensor) -> None:
        """See `Elements`."""
        view = memoryview(out.view(torch.uint8).numpy().data)
        self.folder.read(self.name, self.offset + start * self.dtype.itemsize, view)


@dataclass(frozen=True, slots=True)
class InMemory:
    """Elements of a tensor [any] that had to be read as a whole."""

    tensor: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor."""
        return self.tensor.dtype

    @property
    def numel(self) -> int:
        """Of the tensor."""
        return self.tensor.numel()

    def read(self, start: int, out: torch.Tensor) -> None:
        """See `Elements`."""
        out.copy_(self.tensor[start : start + out.numel()])


@dataclass(frozen=True, slots=True)
class Part:
    """Some of other elements."""

    elements: Elements
    start: int
    numel: int


class Joined:
    """Parts of one dtype, one after the other."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = [part for part in parts if part.numel]
        self._ends = list(accumulate(part.numel for part in self._parts))
        self.dtype: torch.dtype = parts[0].elements.dtype
        self.numel: int = self._ends[-1] if self._ends else 0

    def read(self, start: int, out: torch.Tensor) -> None:
        """See `Elements`."""
        done = 0
        number = bisect_right(self._ends, start)
        while done < out.numel():
            part = self._parts[number]
            inside = start + done - (self._ends[number] - part.numel)
            count = min(part.numel - inside, out.numel() - done)
            part.elements.read(part.start + inside, out[done : done + count])
            done += count
            number += 1


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor over elements.

    Attributes:
        elements: Where the numbers are.
        shape: Of the tensor.
        strides: In elements.
        offset: Its first element.
    """

    elements: Elements
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @classmethod
    def contiguous(cls, elements: Elements, shape: Sequence[int], offset: int = 0) -> StoredTensor:
        """A tensor whose elements lie in order."""
        strides = list(accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1))[::-1] if shape else []
        return cls(elements, tuple(shape), tuple(strides), offset)

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""
        return self.elements.dtype

    def checked(self, source: str) -> StoredTensor:
        """This tensor, if all of it lies in its elements and no two of its elements are one.

        Raises:
            CheckpointDamagedError: It does not.
        """
        values = (*self.shape, *self.strides, self.offset)
        fits = len(self.shape) == len(self.strides) and all(type(value) is int and value >= 0 for value in values)
        if fits and 0 not in self.shape:
            last = self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
            fits = last < self.elements.numel
            # In order of their strides, each dimension steps over all that is inside of it.
            reach = 1
            for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
                fits = fits and (size == 1 or stride >= reach)
                reach += (size - 1) * stride
        if not fits:
            raise CheckpointDamagedError(
                f"{source} describes a tensor of shape {list(self.shape)[:8]} that its {self.elements.numel} stored "
                f"elements do not hold"
            )
        return self

    def read(self, box: Box, out: torch.Tensor, buffer: torch.Tensor) -> None:
        """Copy part of the tensor.

        Args:
            box: Which part.
            out: Tensor of shape `box.sizes` and of any dtype.
            buffer: Scratch, uint8 [any]; what is read at once fits into it.
        """
        if not box.numel:
            return
        reach = [(size - 1) * stride for size, stride in zip(box.sizes, self.strides, strict=True)]
        span = 1 + sum(reach)
        if span * self.dtype.itemsize > buffer.numel():
            dim = max(range(len(reach)), key=reach.__getitem__)
            half, size = box.sizes[dim] // 2, box.sizes[dim]
            self.read(box.narrowed(dim, 0, half), out.narrow(dim, 0, half), buffer)
            self.read(box.narrowed(dim, half, size), out.narrow(dim, half, size - half), buffer)
            return
        first = self.offset + sum(start * stride for start, stride in zip(box.offsets, self.strides, strict=True))
        data = buffer[: span * self.dtype.itemsize].view(self.dtype)
        self.elements.read(first, data)
        out.copy_(data.as_strided(box.sizes, self.strides))
