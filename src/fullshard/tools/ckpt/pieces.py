"""From a tensor of any source to bytes in order, in any portions, through one buffer."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch

from fullshard.core.ckpt.boxes import Box
from fullshard.runtime.checkpoint.files.memory import dtype_name
from fullshard.runtime.checkpoint.files.writing import Piece
from fullshard.tools.ckpt.sources import Readable

BUFFER_BYTES = 8 << 20


class Stream:
    """Makes pieces whose bytes are read when they are written. All of them share one buffer."""

    def __init__(self) -> None:
        self.buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8)

    def piece(self, name: str, tensor: Readable, box: Box | None = None, dtype: torch.dtype | None = None) -> Piece:
        """A part of a tensor as a piece.

        Args:
            name: What the piece is called.
            tensor: Where it comes from.
            box: Which part; None: all of it.
            dtype: As which it is written; None: as it is stored.
        """
        part = box or Box.whole(tensor.shape)
        written = dtype or tensor.dtype

        def fill(offset: int, out: torch.Tensor) -> None:
            target = out.view(written)
            start, done = offset // written.itemsize, 0
            for run in flat_boxes(part.sizes, start, start + target.numel()):
                offsets = tuple(a + b for a, b in zip(part.offsets, run.offsets, strict=True))
                rows = target[done : done + run.numel].view(run.sizes)
                tensor.read(Box(offsets, run.sizes), rows, self.buffer)
                done += run.numel

        return Piece(name, dtype_name(written), part.sizes, fill)


def flat_boxes(sizes: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Boxes that hold, one after the other, the elements [start, stop) of a row-major tensor of these sizes."""
    yield from _descend((), sizes, start, stop)


def _descend(above: tuple[int, ...], sizes: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The same below the index `above` of the first dimensions."""
    if start >= stop:
        return
    ones = (1,) * len(above)
    if not sizes:
        yield Box(above, ones)
        return
    inner = prod(sizes[1:])
    first, head = divmod(start, inner)
    if head:
        end = min(stop, (first + 1) * inner)
        yield from _descend((*above, first), sizes[1:], head, end - first * inner)
        start, first = end, first + 1
    rows = max(stop - start, 0) // inner
    if rows:
        yield Box((*above, first, *(0 for _ in sizes[1:])), (*ones, rows, *sizes[1:]))
    yield from _descend((*above, first + rows), sizes[1:], 0, stop - start - rows * inner)
