"""Portions that lie beside each other in a file are read at once, and the next ones while those are used.

The disk is slow at many small reads, and idle while nobody asks for anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, suppress
from functools import partial
from typing import Generic, TypeVar

import torch

from fullshard.errors import CheckpointError
from fullshard.runtime.checkpoint.files.memory import torch_dtype
from fullshard.runtime.checkpoint.files.reading import STRETCH_BYTES, Buffer, Portion, TensorFile
from fullshard.runtime.checkpoint.files.worker import Worker

_T = TypeVar("_T")

_AHEAD = 1  # stretches that are fetched while one is used: one thread cannot keep up with more
_GAP_BYTES = 64 << 10  # reading so much that nobody wants takes less time than to read twice


class Stretch(Generic[_T]):
    """Bytes of a file that are fetched at once, by any thread.

    Args:
        file: The file.
        portion: The first portion in it.
        note: What its user wants to know of it.

    Attributes:
        portions: Portions in it, with their notes.
    """

    __slots__ = ("_begin", "_buffer", "_end", "_file", "_place", "portions")

    def __init__(self, file: TensorFile, portion: Portion, note: _T) -> None:
        self.portions = [(portion, note)]
        self._file = file
        self._begin, self._end = portion.begin, portion.end
        self._buffer: Buffer | None = None
        self._place: int | None = None  # where in the buffer the bytes begin, if they could be read

    def takes(self, portion: Portion, note: _T) -> bool:
        """Add a portion that begins no earlier than those before, if it is near enough."""
        end = max(self._end, portion.end)
        if portion.begin > self._end + _GAP_BYTES or end > self._begin + STRETCH_BYTES:
            return False
        self._end = end
        self.portions.append((portion, note))
        return True

    def fetch(self, buffer: Buffer) -> None:
        """Read the bytes into a buffer, which is theirs as long as they are used. `data` raises what went wrong."""
        self._buffer, self._place = buffer, None
        with suppress(CheckpointError):
            self._place = self._file.fetch(self._begin, self._end, buffer)

    def data(self, portion: Portion) -> torch.Tensor:
        """The elements of a portion, verified: one-dimensional, in the dtype of its tensor, in the buffer.

        Raises:
            CheckpointDamagedError: They are not those that were written.
            CheckpointError: They could not be read.
        """
        assert self._buffer is not None
        if self._place is None:  # of all that is in a stretch, what cannot be read may be something else
            first = self._file.fetch(portion.begin, portion.end, self._buffer)
        else:
            first = self._place + portion.begin - self._begin
        self._file.verify(portion, self._buffer.view[first : first + portion.end - portion.begin])
        start = first + portion.start - portion.begin
        data = self._buffer.tensor[start : start + portion.stop - portion.start]
        dtype = torch_dtype(self._file.spans[portion.name].dtype)
        # Other programs need not care where elements of several bytes begin.
        return (data.clone() if data.storage_offset() % dtype.itemsize else data).view(dtype)


def stretches(file: TensorFile, portions: Iterable[tuple[Portion, _T]]) -> Iterator[Stretch[_T]]:
    """Portions of a file, put together in the order in which they lie there."""
    stretch: Stretch[_T] | None = None
    for portion, note in sorted(portions, key=lambda each: each[0].begin):
        if stretch is None:
            stretch = Stretch(file, portion, note)
        elif not stretch.takes(portion, note):
            yield stretch
            stretch = Stretch(file, portion, note)
    if stretch is not None:
        yield stretch


class ReadAhead:
    """Buffers, of which a thread fills the next ones while one is in use."""

    def __init__(self) -> None:
        self._buffers: list[Buffer] = []

    def run(self, wanted: Iterable[Stretch[_T]]) -> Generator[Stretch[_T]]:
        """The stretches, in their order, each fetched. What one holds is gone when the next is asked for.

        Close the generator before the files.
        """
        coming: deque[tuple[Callable[[], None], Stretch[_T]]] = deque()
        buffers, self._buffers = self._buffers, []  # nobody else gets them before the thread has let go of them
        with closing(_Fetcher(buffers)) as fetcher:
            for stretch in wanted:
                coming.append((fetcher.begin(stretch), stretch))
                if len(coming) > _AHEAD:
                    yield _arrived(*coming.popleft())
            while coming:
                yield _arrived(*coming.popleft())
        self._buffers = buffers


class _Fetcher:
    """Fetches into buffers in turn. Makes them, and a thread, when it needs them."""

    def __init__(self, buffers: list[Buffer]) -> None:
        self._buffers = buffers
        self._number = 0
        self._worker: Worker | None = None

    def begin(self, stretch: Stretch[_T]) -> Callable[[], None]:
        """Begin to fetch; returns what is to be called before it is used."""
        place = self._number % (_AHEAD + 1)
        if place == len(self._buffers):
            self._buffers.append(Buffer())
        fetch = partial(stretch.fetch, self._buffers[place])
        self._number += 1
        if self._number == 1:  # the caller can do this one, and has it sooner if it is the only one
            return fetch
        self._worker = self._worker or Worker("fullshard-read")
        return self._worker.submit(fetch).result

    def close(self) -> None:
        """Wait for what is being fetched."""
        if self._worker is not None:
            self._worker.close()


def _arrived(wait: Callable[[], None], stretch: Stretch[_T]) -> Stretch[_T]:
    wait()
    return stretch
