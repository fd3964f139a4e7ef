"""Boxes of tensors in the files of a checkpoint, against torch's own chunks and against brute force."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.core.ckpt.boxes import Box, Division


@st.composite
def divisions(draw: st.DrawFn) -> tuple[tuple[int, ...], Division]:
    """A shape, and a division that fits it."""
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    axes = draw(st.permutations(range(len(mesh))))[: draw(st.integers(0, len(mesh)))]
    splits = tuple((draw(st.integers(0, len(shape) - 1)), axis) for axis in axes)
    ranks = tuple(draw(st.permutations(range(prod(mesh) + 2)))[: prod(mesh)])
    return shape, Division(mesh, ranks, splits)


def cells(box: Box) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for offset, size in zip(box.offsets, box.sizes, strict=True):
        found = [(*cell, index) for cell in found for index in range(offset, offset + size)]
    return set(found)


@settings(deadline=None)
@given(divisions())
def test_every_element_is_in_exactly_one_file(case: tuple[tuple[int, ...], Division]) -> None:
    shape, division = case
    boxes = [division.box(shape, rank) for rank in range(max(division.ranks) + 2)]
    found = [cell for box in boxes if box is not None for cell in cells(box)]
    assert sorted(found) == sorted(cells(Box.whole(shape)))


@settings(deadline=None)
@given(divisions(), st.data())
def test_overlapping_pieces_are_those_that_brute_force_finds(
    case: tuple[tuple[int, ...], Division], data: st.DataObject
) -> None:
    shape, division = case
    offsets = tuple(data.draw(st.integers(0, size)) for size in shape)
    sizes = tuple(data.draw(st.integers(0, size - a)) for size, a in zip(shape, offsets, strict=True))
    wanted = Box(offsets, sizes)
    pieces = {rank: division.box(shape, rank) for rank in division.ranks}
    expected = {rank: box for rank, box in pieces.items() if box is not None and box.overlap(wanted) is not None}
    found = division.overlapping(shape, wanted)
    assert dict(found) == expected
    assert len(found) == len(expected)


def test_chunks_are_those_of_torch() -> None:
    division = Division((4,), (0, 1, 2, 3), ((0, 0),))
    boxes = [division.box((5, 2), rank) for rank in range(4)]
    assert boxes == [Box((0, 0), (2, 2)), Box((2, 0), (2, 2)), Box((4, 0), (1, 2)), None]


def test_an_axis_that_splits_nothing_has_one_holder() -> None:
    division = Division((2, 2), (0, 1, 2, 3), ((0, 1),))
    assert [division.box((4,), rank) is None for rank in range(4)] == [False, False, True, True]
    assert Division.whole_on(3).box((), 3) == Box((), ())


def test_splits_of_one_dim_divide_what_is_left() -> None:
    """Data parallel over tensor parallel: the second split cuts the chunk of the first."""
    division = Division((2, 2), (0, 1, 2, 3), ((0, 1), (0, 0)))
    found = {rank: box.offsets[0] for rank in range(4) if (box := division.box((8,), rank)) is not None}
    assert found == {0: 0, 2: 2, 1: 4, 3: 6}


@pytest.mark.parametrize(
    ("mesh", "ranks", "splits"),
    [
        ((2,), (0,), ()),
        ((2,), (0, 0), ()),
        ((), (), ()),
        ((0,), (), ()),
        ((1,), (-1,), ()),
        ((2,), (0, 1), ((0, 1),)),
        ((2,), (0, 1), ((0, 0), (1, 0))),
        ((2,), (0, 1), ((-1, 0),)),
    ],
)
def test_impossible_divisions_are_refused(
    mesh: tuple[int, ...], ranks: tuple[int, ...], splits: tuple[tuple[int, int], ...]
) -> None:
    with pytest.raises(ValueError, match=r"mesh|splits"):
        Division(mesh, ranks, splits)
