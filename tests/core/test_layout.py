"""Layout: where each row of each parameter lives."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from core.support import Core, holds, holds_for, real_core

ALIGN_BYTES = 16  # written out: a layout that changed its own constant would otherwise agree with itself


@dataclass(frozen=True)
class Param:
    """A parameter of a case."""

    shape: tuple[int, ...]
    shard_dim: int
    trainable: bool


@dataclass(frozen=True)
class LayoutCase:
    """Parameters of one dtype over some ranks."""

    params: tuple[Param, ...]
    size: int
    itemsize_bytes: int
    pack_below_bytes: int

    @property
    def trainable(self) -> list[bool]:
        return [param.trainable for param in self.params]

    def plan(self, core: Core, size: int | None = None) -> Any:
        return core.layout.plan_layout(self.specs(core), size or self.size, self.pack_below_bytes)

    def specs(self, core: Core) -> list[Any]:
        return [
            core.spec.ParamSpec(f"p{i}", p.shape, "any", self.itemsize_bytes, p.trainable, p.shard_dim)
            for i, p in enumerate(self.params)
        ]


@st.composite
def params(draw: st.DrawFn) -> Param:
    """0-d to 3-d, with empty dims and dims around the world sizes, sharded on any dim."""
    sizes = st.one_of(st.integers(0, 12), st.sampled_from([16, 31, 64, 1000]))
    shape = tuple(draw(st.lists(sizes, max_size=3)))
    shard_dim = draw(st.integers(0, max(0, len(shape) - 1)))
    return Param(shape, shard_dim, draw(st.booleans()))


def layout_cases() -> st.SearchStrategy[LayoutCase]:
    """World sizes 1 to 9 and a large one; packing of nothing, of some parameters, of nearly all."""
    return st.builds(
        LayoutCase,
        st.lists(params(), min_size=1, max_size=6).map(tuple),
        st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 9, 1024]),
        st.sampled_from([1, 2, 4, 8]),
        st.sampled_from([0, 64, 1024, 32 * 1024]),
    )


def chunk_sizes(rows: int, size: int) -> list[int]:
    """Rows of each rank, by torch itself."""
    sizes = [len(chunk) for chunk in torch.empty(rows).chunk(size)]
    return sizes + [0] * (size - len(sizes))


def ranks_of(size: int) -> list[int]:
    """All ranks, or of a large world those where something can happen."""
    return list(range(size)) if size < 10 else [0, 1, 2, 11, 12, 15, 16, 30, 31, 63, 64, 999, 1000, size - 1]


@holds_for(layout_cases())
def test_rows_are_those_of_torch_chunk(core: Core, case: LayoutCase) -> None:
    layout = case.plan(core)
    for region in layout.regions:
        shape = case.params[region.index].shape
        if region.replicated:
            continue
        sizes = chunk_sizes(shape[case.params[region.index].shard_dim], case.size)
        for rank in ranks_of(case.size):
            start, stop = region.rank_rows(case.size, rank)
            assert stop - start == sizes[rank]
            assert start == sum(sizes[:rank])
            assert region.rank_numel(case.size, rank) == sizes[rank] * region.row_numel


@holds_for(layout_cases())
def test_ranges_tile_every_parameter(core: Core, case: LayoutCase) -> None:
    """Every row of every parameter is in the range of exactly one rank; a replicated one is whole on every rank."""
    layout = case.plan(core)
    assert sorted(region.index for region in layout.regions) == list(range(len(case.params)))
    for region in layout.regions:
        param = case.params[region.index]
        assert region.replicated == (param.shape == ())
        assert region.rows * region.row_numel == prod(param.shape)
        ranges = [region.rank_rows(case.size, rank) for rank in range(case.size)]
        if region.replicated:
            assert set(ranges) == {(0, 1)}
            continue
        end = 0
        for start, stop in ranges:
            assert start == end
            assert stop >= start
            end = stop
        assert end == param.shape[param.shard_dim]


@holds_for(layout_cases())
def test_regions_overlap_in_no_buffer(core: Core, case: LayoutCase) -> None:
    """In the flat shard and in the full buffer, each region has room for its chunks and touches no other."""
    layout = case.plan(core)
    shard_end = full_end = 0
    for region in sorted(layout.regions, key=lambda region: region.shard_offset):
        assert region.shard_offset >= shard_end
        shard_end = region.shard_offset + region.chunk_numel
        for rank in ranks_of(case.size):
            assert region.rank_numel(case.size, rank) <= region.chunk_numel
    assert shard_end <= layout.shard_numel
    for region in sorted(layout.regions, key=lambda region: region.full_offset):
        assert region.full_offset >= full_end
        full_end = region.full_offset + region.chunk_numel * case.size
        assert region.rows * region.row_numel <= region.chunk_numel * case.size
    assert full_end <= layout.full_numel
    assert layout.shard_bytes == layout.shard_numel * case.itemsize_bytes
    assert layout.full_bytes == layout.full_numel * case.itemsize_bytes


@holds_for(layout_cases())
def test_each_rank_writes_its_rows_at_its_chunk_of_the_full_buffer(core: Core, case: LayoutCase) -> None:
    """A gather puts chunk r at chunk r's place, without looking at rows: both must be the same elements."""
    for region in case.plan(core).regions:
        if region.replicated:
            continue
        for rank in ranks_of(case.size):
            start, stop = region.rank_rows(case.size, rank)
            if stop > start:
                assert start * region.row_numel == rank * region.chunk_numel


@holds_for(layout_cases())
def test_every_shard_is_aligned(core: Core, case: LayoutCase) -> None:
    """Parameters in both buffers, and of large ones also each rank's rows, start on a 16-byte boundary."""
    layout = case.plan(core)
    for region in layout.regions:
        assert region.shard_offset * case.itemsize_bytes % ALIGN_BYTES == 0
        assert region.full_offset * case.itemsize_bytes % ALIGN_BYTES == 0
        if not region.packed:
            assert region.chunk_numel * case.itemsize_bytes % ALIGN_BYTES == 0
    assert layout.shard_bytes % ALIGN_BYTES == 0
    assert layout.full_bytes % ALIGN_BYTES == 0
    assert layout.packed_numel * case.itemsize_bytes % ALIGN_BYTES == 0


@holds_for(layout_cases())
def test_padding_is_bounded(core: Core, case: LayoutCase) -> None:
    """Padding is less than one row a rank and one alignment a parameter (a buffer and parameter).

    For R rows over N ranks a chunk has c = ceil(R / N) rows, so N * c <= R + N - 1; rounding up to 16 bytes adds less
    than 16 bytes. Summed over the parameters:

        full buffer          <= sum of (R + N - 1) * row + 15 bytes
        N times flat shard   <= sum of (R + N - 1) * row + 15 bytes a rank
    """
    full = shards = 0
    for param in case.params:
        rows = param.shape[param.shard_dim] if param.shape else 1
        row_bytes = case.itemsize_bytes * prod(n for dim, n in enumerate(param.shape) if dim != param.shard_dim)
        chunks = (rows + case.size - 1) * row_bytes
        full += chunks + ALIGN_BYTES - 1
        shards += chunks + case.size * (ALIGN_BYTES - 1)
    layout = case.plan(core)
    assert layout.full_bytes <= full
    assert layout.shard_bytes * case.size <= shards


@holds_for(layout_cases())
def test_packed_regions_are_a_prefix(core: Core, case: LayoutCase) -> None:
    """One message moves [0, packed_numel) of the flat shard: all small parameters and nothing of the large ones."""
    layout = case.plan(core)
    for region in layout.regions:
        end = region.shard_offset + region.chunk_numel
        assert end <= layout.packed_numel if region.packed else region.shard_offset >= layout.packed_numel
        # What does not fill whole 16-byte units, and what every rank holds, can only travel packed.
        chunk_bytes = region.chunk_numel * case.itemsize_bytes
        small = region.replicated or chunk_bytes < case.pack_below_bytes or chunk_bytes % ALIGN_BYTES != 0
        assert region.packed == small
    assert layout.packed_numel == 0 or any(region.packed for region in layout.regions)


@holds_for(layout_cases())
def test_trainable_regions_stand_before_frozen_ones(core: Core, case: LayoutCase) -> None:
    """Among the packed ones and among the large ones; parameters that are alike keep the order of the module."""
    layout = case.plan(core)
    keys = [(not r.packed, not case.params[r.index].trainable, r.index) for r in layout.regions]
    assert keys == sorted(keys)
    offsets = [region.shard_offset for region in layout.regions]
    assert offsets == sorted(offsets)


@holds_for(layout_cases())
def test_gradients_are_a_prefix_of_the_flat_shard(core: Core, case: LayoutCase) -> None:
    """[0, gradient_numel) holds every trainable region and ends with one; also for flags changed after planning."""
    layout = case.plan(core)
    for trainable in (case.trainable, [not flag for flag in case.trainable], [True] * len(case.params)):
        numel = layout.gradient_numel(trainable)
        ends = [r.shard_offset + r.chunk_numel for r in layout.regions if trainable[r.index]]
        assert numel <= layout.shard_numel
        assert numel * case.itemsize_bytes % ALIGN_BYTES == 0
        assert max(ends, default=0) <= numel < max(ends, default=0) + ALIGN_BYTES
        if not ends:
            assert numel == 0


@holds_for(layout_cases())
def test_gaps_are_what_gradients_leave(core: Core, case: LayoutCase) -> None:
    """On every rank each element of the flat gradient shard is in one trainable parameter or in one gap, never both."""
    layout = case.plan(core)
    for trainable in (case.trainable, [not flag for flag in case.trainable]):
        total = layout.gradient_numel(trainable)
        for rank in ranks_of(case.size):
            pieces = [
                (r.shard_offset, r.shard_offset + r.rank_numel(case.size, rank))
                for r in layout.regions
                if trainable[r.index] and r.rank_numel(case.size, rank)
            ]
            gaps = list(layout.gaps(rank, trainable))
            assert all(stop > start for start, stop in gaps)
            end = 0
            for start, stop in sorted(pieces + gaps):
                assert start == end
                end = stop
            assert end == total


@holds_for(layout_cases())
def test_a_smaller_group_fits_the_same_full_buffer(core: Core, case: LayoutCase) -> None:
    """`reshard_after_forward=int` gathers chunks of a smaller group into the places of the whole one."""
    layout = case.plan(core)
    places = {region.index: region.chunk_numel * case.size for region in layout.regions}
    for size in (n for n in range(1, min(case.size, 9)) if case.size % n == 0):
        for region in case.plan(core, size).regions:
            assert region.chunk_numel * size <= places[region.index]


@holds
def test_special_parameters(core: Core) -> None:
    """A 0-d parameter, one element, no rows, fewer rows than ranks: by hand."""
    shapes = ((), (1,), (0, 4), (3, 2))
    case = LayoutCase(tuple(Param(shape, 0, True) for shape in shapes), 4, 4, 32 * 1024)
    layout = case.plan(core)
    scalar, one, empty, short = layout.regions
    assert [scalar.rank_numel(4, rank) for rank in range(4)] == [1, 1, 1, 1]
    assert [one.rank_numel(4, rank) for rank in range(4)] == [1, 0, 0, 0]
    assert [empty.rank_numel(4, rank) for rank in range(4)] == [0, 0, 0, 0]
    assert [short.rank_rows(4, rank) for rank in range(4)] == [(0, 1), (1, 2), (2, 3), (3, 3)]
    assert [region.shard_offset for region in layout.regions] == [0, 4, 8, 8]
    assert (layout.shard_numel, layout.full_numel, layout.packed_numel) == (12, 16, 12)
    assert list(layout.gaps(3, [True] * 4)) == [(1, 4), (4, 8), (8, 12)]


@holds
def test_work_grows_with_the_number_of_parameters_only(core: Core) -> None:
    """Counted in calls of functions, which is the same on every machine: twice the parameters, twice the calls."""

    def calls(count: int) -> int:
        made = 0

        def note(frame: object, event: str, argument: object) -> None:
            nonlocal made
            made += event in ("call", "c_call")

        specs = [core.spec.ParamSpec("p", (8, 8), "float32", 4, trainable=i % 2 == 0) for i in range(count)]
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            core.layout.plan_layout(specs, 4)
        finally:
            sys.setprofile(before)
        return made

    assert calls(400) <= 2.1 * calls(200)


def test_a_hundred_thousand_parameters_can_be_planned() -> None:
    core = real_core()
    count = 100_000
    layout = core.layout.plan_layout([core.spec.ParamSpec("p", (7, 3), "bfloat16", 2)] * count, 8)
    assert layout.shard_numel == count * 8  # one row of 3 elements, padded to 16 bytes


def test_one_layout_holds_one_dtype() -> None:
    core = real_core()
    specs = [core.spec.ParamSpec("a", (4,), "float32", 4), core.spec.ParamSpec("b", (4,), "bfloat16", 2)]
    with pytest.raises(ValueError, match=r"a flat layout holds one dtype, got itemsizes \[2, 4\]"):
        core.layout.plan_layout(specs, 2)
