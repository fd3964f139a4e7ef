"""Where each row of each parameter lives: pure arithmetic on integers.

A unit has, per dtype, two buffers. Both are described by one `FlatLayout`:

    flat shard   this rank's rows of every parameter, each parameter at a 16-byte aligned offset
    full buffer  every parameter whole and contiguous; in it the rows of each rank are a contiguous range

Rows follow `torch.chunk`: with ceil(rows / world) rows a rank, the last ranks hold fewer rows or none. Offsets are
the same on every rank, so both buffers are padded to that even size; what lies in the padding is never read.

Small parameters (norms, biases) are *packed*: they stand first in the flat shard, side by side, so that one message
moves them all. Large ones are moved each by its own message, straight to and from its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fullshard.core.spec import ParamSpec

# A boundary that vector loads and every transport like.
ALIGN_BYTES = 16
# Below this many bytes a rank, a message of its own costs more than the copy into a shared one.
PACK_BELOW_BYTES = 32 * 1024


def chunk_rows(rows: int, size: int) -> int:
    """Rows of a full chunk when `rows` are divided over `size` ranks as `torch.chunk` does."""
    return -(-rows // size)


def row_range(rows: int, size: int, rank: int) -> tuple[int, int]:
    """First row of `rank` and the row after its last one; an empty range for ranks past the end."""
    chunk = chunk_rows(rows, size)
    return min(rank * chunk, rows), min((rank + 1) * chunk, rows)


@dataclass(frozen=True, slots=True)
class Region:
    """The place of one parameter in both buffers of its unit. Offsets and sizes are in elements.

    Attributes:
        index: Position of the parameter in the unit's list of specs.
        rows: Rows of the parameter (1 if it is replicated).
        row_numel: Elements in a row.
        chunk: Rows of a full chunk, ceil(rows / world size).
        shard_offset: Where this rank's rows begin in the flat shard.
        full_offset: Where the parameter begins in the full buffer.
        packed: Moved in the common message of small parameters.
        replicated: Held whole by every rank.
    """

    index: int
    rows: int
    row_numel: int
    chunk: int
    shard_offset: int
    full_offset: int
    packed: bool
    replicated: bool

    @property
    def chunk_numel(self) -> int:
        """Elements of a full chunk: the space the region takes in the flat shard, without alignment."""
        return self.chunk * self.row_numel

    def rank_rows(self, size: int, rank: int) -> tuple[int, int]:
        """Rows [start, stop) that `rank` holds."""
        return (0, self.rows) if self.replicated else row_range(self.rows, size, rank)

    def rank_numel(self, size: int, rank: int) -> int:
        """Elements that `rank` holds."""
        start, stop = self.rank_rows(size, rank)
        return (stop - start) * self.row_numel


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """The buffers of one unit and dtype over `size` ranks. Regions stand in the order of the flat shard."""

    size: int
    itemsize_bytes: int
    regions: tuple[Region, ...]
    packed_numel: int
    shard_numel: int
    full_numel: int

    @property
    def full_bytes(self) -> int:
        """Bytes of the full buffer in the stored dtype."""
        return self.full_numel * self.itemsize_bytes

    @property
    def shard_bytes(self) -> int:
        """Bytes of the flat shard."""
        return self.shard_numel * self.itemsize_bytes

    def gradient_numel(self, trainable: Sequence[bool]) -> int:
        """Elements of the flat gradient shard: the flat shard up to its last trainable region.

        Gradients keep the offsets of their parameters. Trainable regions stand first, so frozen ones cost nothing.
        """
        ends = [r.shard_offset + self.aligned(r.chunk_numel) for r in self.regions if trainable[r.index]]
        return max(ends, default=0)

    def gaps(self, rank: int, trainable: Sequence[bool]) -> Iterator[tuple[int, int]]:
        """Ranges [start, stop) of `rank`'s flat gradient shard that hold no gradient and so must be zeroed."""
        end = 0
        for region in self.regions:
            if not trainable[region.index]:
                continue
            if region.shard_offset > end:
                yield end, region.shard_offset
            end = region.shard_offset + region.rank_numel(self.size, rank)
        total = self.gradient_numel(trainable)
        if total > end:
            yield end, total

    def aligned(self, numel: int) -> int:
        """`numel` rounded up to a multiple of `ALIGN_BYTES`."""
        return align(numel, self.itemsize_bytes)


def align(numel: int, itemsize_bytes: int) -> int:
    """Round a number of elements up so that the next element starts on an `ALIGN_BYTES` boundary."""
    step = max(1, ALIGN_BYTES // itemsize_bytes)
    return -(-numel // step) * step


def plan_layout(specs: Sequence[ParamSpec], size: int, pack_below_bytes: int = PACK_BELOW_BYTES) -> FlatLayout:
    """Lay out parameters of one dtype over `size` ranks.

    Args:
        specs: The parameters; all have the same dtype.
        size: Ranks along the shard axis.
        pack_below_bytes: Parameters with a smaller chunk are packed.

    Returns:
        The layout; `Region.index` counts in `specs`.
    """
    itemsizes = {spec.itemsize_bytes for spec in specs}
    if len(itemsizes) != 1:
        raise ValueError(f"a flat layout holds one dtype, got itemsizes {sorted(itemsizes)}")
    itemsize = itemsizes.pop()

    def packed(spec: ParamSpec) -> bool:
        chunk_bytes = chunk_rows(spec.rows, size) * spec.row_numel * itemsize
        # Other parameters cannot be padded inside without moving rows between ranks, so unaligned chunks are packed.
        return spec.replicated or chunk_bytes < pack_below_bytes or chunk_bytes % ALIGN_BYTES != 0

    is_packed = [packed(spec) for spec in specs]
    order = sorted(range(len(specs)), key=lambda i: (not is_packed[i], not specs[i].trainable, i))
    regions: list[Region] = []
    shard_offset = full_offset = packed_numel = 0
    for i in order:
        spec = specs[i]
        chunk = 1 if spec.replicated else chunk_rows(spec.rows, size)
        row_numel = spec.row_numel
        chunk_numel = chunk * row_numel
        regions.append(Region(i, spec.rows, row_numel, chunk, shard_offset, full_offset, is_packed[i], spec.replicated))
        shard_offset += align(chunk_numel, itemsize)
        full_offset += align(chunk_numel * size, itemsize)
        if is_packed[i]:
            packed_numel = shard_offset
    return FlatLayout(size, itemsize, tuple(regions), packed_numel, shard_offset, full_offset)
