"""Which part of a tensor lies in which rank's file: arithmetic on boxes.

A tensor is divided over a mesh of ranks by *splits*, one after the other. A split cuts one dimension of what is left
into as many chunks as its mesh axis is long, as `torch.chunk` does: all of ceil(rows / size) rows, the last ones
shorter or empty. So the box of each rank follows from a few numbers, and nobody needs a table with an entry for each
rank and tensor: a list of them for 100 000 tensors on 1024 ranks would be larger than many models.

What is loaded need not be what was saved: `Division.overlapping` tells, for any box, whose pieces it is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, TypeVar

from fullshard.core.layout import row_range

Shape = tuple[int, ...]

# Replicas share the writing of pieces from this size on; below it, one entry more in each file costs more.
SHARED_PIECE_BYTES = 64 << 10
_MOST_REMEMBERED = 4096  # answers of one kind

_Key = TypeVar("_Key", bound=tuple[Any, ...])
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Box:
    """Part of a tensor: rows [offset, offset + size) along each dimension.

    Attributes:
        offsets: First index along each dimension.
        sizes: Indices along each dimension. Empty for a 0-d tensor, whose box has one element.
    """

    offsets: Shape
    sizes: Shape

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return prod(self.sizes)

    def overlap(self, other: Box) -> Box | None:
        """The part that both have, or None if that is nothing."""
        starts, sizes = [], []
        for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            start = max(a, b)
            size = min(a + n, b + m) - start
            if size <= 0:
                return None
            starts.append(start)
            sizes.append(size)
        return Box(tuple(starts), tuple(sizes))

    def within(self, other: Box) -> tuple[slice, ...]:
        """Where this box is in `other`, which it is part of: an index for a tensor of the shape `other.sizes`."""
        return tuple(slice(a - b, a - b + n) for a, n, b in zip(self.offsets, self.sizes, other.offsets, strict=True))

    def narrowed(self, dim: int, start: int, stop: int) -> Box:
        """This box with only the rows [start, stop), counted from its own first, along `dim`."""
        offsets, sizes = list(self.offsets), list(self.sizes)
        offsets[dim] += start
        sizes[dim] = stop - start
        return Box(tuple(offsets), tuple(sizes))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(self.offsets, self.sizes, strict=True)) + "]"


@dataclass(frozen=True)
class Division:
    """How tensors are divided over ranks.

    On a mesh axis that no split names, only coordinate 0 holds anything: each element is in exactly one file.

    Attributes:
        mesh: Size of each mesh axis.
        ranks: The ranks of the mesh, the last axis fastest.
        splits: (dimension, mesh axis) in the order in which they apply.
    """

    mesh: Shape
    ranks: tuple[int, ...]
    splits: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if not self.mesh or min(self.mesh) < 1 or prod(self.mesh) != len(self.ranks):
            raise ValueError(f"a mesh of shape {list(self.mesh)} does not have {len(self.ranks)} ranks")
        if len(set(self.ranks)) != len(self.ranks) or min(self.ranks) < 0:
            raise ValueError("the ranks of a mesh must be different and not negative")
        axes = [axis for _, axis in self.splits]
        if len(set(axes)) != len(axes) or not all(0 <= axis < len(self.mesh) for axis in axes):
            raise ValueError(f"splits {list(self.splits)} do not name different axes of a mesh of {len(self.mesh)}")
        if any(dim < 0 for dim, _ in self.splits):
            raise ValueError(f"splits {list(self.splits)} name a negative dimension")

    @classmethod
    def whole_on(cls, rank: int) -> Division:
        """All of it in one rank's file."""
        return cls((1,), (rank,))

    @cached_property
    def _places(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.ranks)}

    @cached_property
    def _strides(self) -> Shape:
        return tuple(prod(self.mesh[axis + 1 :]) for axis in range(len(self.mesh)))

    @cached_property
    def _least_dims(self) -> int:
        return max((dim + 1 for dim, _ in self.splits), default=0)

    # A model has many tensors but few shapes, so answers are kept: for 100 000 tensors that is seconds.
    @cached_property
    def _boxes(self) -> dict[tuple[Shape, int], Box | None]:
        return {}

    @cached_property
    def _overlaps(self) -> dict[tuple[Shape, Box], tuple[tuple[int, Box], ...]]:
        return {}

    def coordinates(self, rank: int) -> Shape | None:
        """Place of a rank on each axis, or None if it is not in the mesh."""
        place = self._places.get(rank)
        if place is None:
            return None
        return tuple(place // stride % size for stride, size in zip(self._strides, self.mesh, strict=True))

    def box(self, shape: Sequence[int], rank: int) -> Box | None:
        """The part of a tensor of this shape in the file of `rank`; None if that is nothing."""
        return _remembered(self._boxes, (tuple(shape), rank), self._box)

    def _box(self, shape: Shape, rank: int) -> Box | None:
        coordinates = self.coordinates(rank)
        if coordinates is None:
            return None
        split = {axis for _, axis in self.splits}
        if any(coordinate and axis not in split for axis, coordinate in enumerate(coordinates)):
            return None
        box = Box.whole(shape)
        for dim, axis in self.splits:
            box = box.narrowed(dim, *row_range(box.sizes[dim], self.mesh[axis], coordinates[axis]))
        return box if box.numel else None

    def overlapping(self, shape: Sequence[int], box: Box) -> list[tuple[int, Box]]:
        """(rank, its whole piece) for every file with a part of `box`, without looking at the others."""
        found = _remembered(self._overlaps, (tuple(shape), box), self._overlapping)
        return list(found)

    def _overlapping(self, shape: Shape, box: Box) -> tuple[tuple[int, Box], ...]:
        return tuple(self._descend(Box.whole(shape), box, 0, 0)) if box.numel else ()

    def _descend(self, piece: Box, box: Box, number: int, place: int) -> Iterator[tuple[int, Box]]:
        if number == len(self.splits):
            if piece.overlap(box) is not None:
                yield self.ranks[place], piece
            return
        dim, axis = self.splits[number]
        size = self.mesh[axis]
        rows = piece.sizes[dim]
        chunk = -(-rows // size) or 1
        start = max(box.offsets[dim] - piece.offsets[dim], 0)
        stop = min(box.offsets[dim] + box.sizes[dim] - piece.offsets[dim], rows)
        for coordinate in range(start // chunk, min(-(-stop // chunk), size)):
            part = piece.narrowed(dim, *row_range(rows, size, coordinate))
            yield from self._descend(part, box, number + 1, place + coordinate * self._strides[axis])

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether tensors of this shape can be divided so."""
        return self._least_dims <= len(shape)


def shared_splits(
    shape: Shape, itemsize_bytes: int, mesh: Shape, splits: tuple[tuple[int, int], ...], replicated: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Further splits, by which replicas of a piece each write a part of it.

    Args:
        shape: Of the whole tensor.
        itemsize_bytes: Bytes of an element.
        mesh: Size of each mesh axis.
        splits: Those by which it is divided.
        replicated: Axes along which ranks hold the same.
    """
    largest = list(shape)
    for dim, axis in splits:
        largest[dim] = -(-largest[dim] // mesh[axis])
    made: list[tuple[int, int]] = []
    for axis in replicated if shape else ():
        if prod(largest) * itemsize_bytes >= SHARED_PIECE_BYTES and largest[0] > 1:
            made.append((0, axis))
            largest[0] = -(-largest[0] // mesh[axis])
    return tuple(made)


def _remembered(known: dict[_Key, _Answer], key: _Key, find: Callable[..., Any]) -> _Answer:
    """`find(*key)`, from `known` if it has been asked before. Threads may ask at once."""
    try:
        return known[key]
    except KeyError:
        answer: _Answer = find(*key)
    if len(known) >= _MOST_REMEMBERED:
        known.clear()
    known[key] = answer
    return answer
