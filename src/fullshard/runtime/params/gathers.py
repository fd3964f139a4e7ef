"""What a gather of a full buffer needs, made once: views of where rows come from and of where they go."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from fullshard.core.layout import FlatLayout, Region, chunk_rows
from fullshard.core.spec import ParamSpec
from fullshard.runtime.collectives import GatherItem
from fullshard.runtime.device import BufferPool


def rows_of(tensor: torch.Tensor, spec: ParamSpec, start: int, stop: int) -> torch.Tensor:
    """Rows [start, stop) of a parameter or gradient along its sharded dim, a view with the dims in their own order."""
    return tensor if spec.replicated else tensor.narrow(spec.shard_dim, start, stop - start)


def shape_of_rows(spec: ParamSpec, rows: int) -> list[int]:
    """Shape of `rows` rows of a parameter."""
    return [rows if dim == spec.shard_dim else size for dim, size in enumerate(spec.shape)]


def in_rank_order(tensor: torch.Tensor, spec: ParamSpec, size: int) -> torch.Tensor:
    """A parameter or gradient, 1-D: the rows of rank 0, then those of rank 1, each contiguous.

    That is how it lies in memory anyway if it is sharded on dim 0; on another dim it is copied.
    """
    if spec.shard_dim == 0:
        return tensor.contiguous().view(-1)
    pieces = tensor.split(max(1, chunk_rows(spec.rows, size)), spec.shard_dim)
    return torch.cat([piece.reshape(-1) for piece in pieces])


def local_range(flat: torch.Tensor, region: Region, size: int, rank: int) -> torch.Tensor:
    """The rows of `rank` of one parameter, 1-D, in a flat shard."""
    return flat.narrow(0, region.shard_offset, region.rank_numel(size, rank))


def same_bits(sent: torch.Tensor, rows: torch.Tensor) -> bool:
    """Whether `sent` is what `rows`, of any dtype, would be sent as. A NaN equals itself."""
    now = rows if rows.dtype == sent.dtype else rows.to(sent.dtype)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(sent.element_size())
    return torch.equal(sent, now) if bits is None else torch.equal(sent.view(bits), now.view(bits))


class _Scattered:
    """A parameter sharded on a dim other than 0: the rows of a rank lie in many places of the full parameter.

    They arrive beside the full buffer, as one block a rank, and are copied into their places. So the full parameter and
    this rank's part of it are both contiguous, and `weight.view(-1)` works as it did before sharding.

    Args:
        region: Its place.
        spec: Shape and dim.
        whole: The full parameter, 1-D, as a view of the full buffer.
    """

    def __init__(self, region: Region, spec: ParamSpec, whole: torch.Tensor) -> None:
        self.region = region
        self.name = spec.name
        self._rows = whole.view(spec.shape).split(max(1, region.chunk), spec.shard_dim)
        self._staging: torch.Tensor | None = None  # [size * chunk_numel], alive during a gather of a large parameter

    def begin(self, own: torch.Tensor, rank: int, size: int) -> GatherItem:
        """Memory for the blocks, with this rank's in it."""
        chunk = self.region.chunk_numel
        self._staging = self._rows[0].new_empty(size * chunk)
        self._staging.narrow(0, rank * chunk, own.numel()).copy_(own)
        return GatherItem(self.name, self._staging, chunk, self.region.rows * self.region.row_numel)

    def sent(self, own: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What was put among the blocks as this rank's, and its rows."""
        assert self._staging is not None
        return self._staging.narrow(0, rank * self.region.chunk_numel, own.numel()), own

    def end(self, bucket: torch.Tensor | None) -> None:
        """All blocks are here, or in `bucket` if they were packed, shape [size, packed_numel]."""
        start, chunk = self.region.shard_offset, self.region.chunk_numel
        for rank, rows in enumerate(self._rows):
            if self._staging is not None:
                block = self._staging.narrow(0, rank * chunk, rows.numel())
            else:
                assert bucket is not None
                block = bucket[rank].narrow(0, start, rows.numel())
            rows.copy_(block.view(rows.shape))
        self._staging = None

    def drop(self) -> None:
        """The gather was given up."""
        self._staging = None


class _Bucket:
    """Small parameters on their way, shape [size, packed_numel]: one message. It begins with memory, to make views of.

    Its memory comes with a gather and goes with the full buffer: until then this rank's rows may still be on the wire.

    Args:
        layout: Whose chunks the ranks of the gathering group hold.
        rank: This rank in that group.
        source: Flat shard with that layout.
        dtype: Of the full buffer.
    """

    def __init__(self, layout: FlatLayout, rank: int, source: torch.Tensor, dtype: torch.dtype) -> None:
        size, numel = layout.size, layout.packed_numel
        self._storage = torch.UntypedStorage(size * numel * dtype.itemsize, device=source.device)
        self._nbytes = self._storage.nbytes()
        self._pool: BufferPool | None = None
        self.rows = torch.empty(0, dtype=dtype, device=source.device)
        self.rows.set_(self._storage, 0, (size, numel), (numel, 1))
        self.own = self.rows[rank]
        self.own_shard = source.narrow(0, 0, numel)
        self.item = GatherItem("small parameters", self.rows.view(-1), numel, size * numel)

    def fill(self, pool: BufferPool) -> None:
        """Put memory of `pool` under it."""
        self._pool = pool
        pool.fill(self._storage, self._nbytes)

    def drain(self) -> None:
        """Take the memory away, if there is any."""
        if self._pool is None:
            self._storage.resize_(0)
        elif self._storage.nbytes():
            self._pool.drain(self._storage)


class InPlace:
    """What a gather into a block needs, made once: every rank writes its rows where all ranks of its host read them.

    Args:
        plan: The same gather into memory of this rank alone.
    """

    def __init__(self, plan: GatherPlan) -> None:
        self._targets: list[torch.Tensor] = []
        self._rows: list[torch.Tensor] = []
        self._items: list[GatherItem] = []
        layout, rank = plan.layout, plan.rank
        for region in layout.regions:
            spec, place = plan.specs[region.index], plan.places[region.index]
            rows = local_range(plan.source, region, layout.size, rank)
            if spec.shard_dim:
                start, stop = region.rank_rows(layout.size, rank)
                target = rows_of(place.narrow(0, 0, spec.numel).view(spec.shape), spec, start, stop)
                rows = rows.view(target.shape)
            else:
                target = place.narrow(0, rank * region.chunk_numel, rows.numel())
            self._targets.append(target)
            self._rows.append(rows)
            self._items.append(GatherItem(spec.name, place, region.chunk_numel, spec.numel))

    def begin(self, _pool: BufferPool) -> list[GatherItem]:
        """Write this rank's rows: the only pass over bulk data, over 1/N of it; where dtypes differ it is the cast."""
        torch._foreach_copy_(self._targets, self._rows)
        return self._items

    def sent_as_is(self) -> bool:
        """See `GatherPlan.sent_as_is`."""
        return all(same_bits(sent, rows) for sent, rows in zip(self._targets, self._rows, strict=True))

    def end(self) -> None:
        """Every rank has written its rows where they belong."""

    def drop(self) -> None:
        """The gather was given up."""


class GatherPlan:
    """Everything one gather of a full buffer needs, made once: views of where rows come from and where they go.

    Args:
        layout: Whose chunks the ranks of the gathering group hold.
        rank: This rank in that group.
        source: Flat shard with that layout.
        places: Per parameter its padded range of the full buffer, 1-D.
        specs: The parameters.
    """

    def __init__(
        self,
        layout: FlatLayout,
        rank: int,
        source: torch.Tensor,
        places: list[torch.Tensor],
        specs: Sequence[ParamSpec],
    ) -> None:
        self.layout = layout
        self.source = source
        self.rank = rank
        self.places = places
        self.specs = specs
        self._dtype = places[0].dtype
        self._own_chunks: list[torch.Tensor] = []  # this rank's rows of large parameters, in the full buffer
        self._own_shards: list[torch.Tensor] = []  # the same rows, in the flat shard
        self._items: list[GatherItem] = []
        self._bucket = _Bucket(layout, rank, source, self._dtype) if layout.packed_numel else None
        self._packed: list[torch.Tensor] = []  # small parameters in the bucket, [size, chunk_numel] each
        self._unpacked: list[torch.Tensor] = []  # the same in the full buffer
        self._scattered: list[_Scattered] = []
        for region in layout.regions:
            spec = specs[region.index]
            place = places[region.index].narrow(0, 0, region.chunk_numel * layout.size)
            if spec.shard_dim:
                self._scattered.append(_Scattered(region, spec, place.narrow(0, 0, spec.numel)))
            elif region.packed:
                if self._bucket is not None:  # there are elements at all
                    self._packed.append(self._bucket.rows.narrow(1, region.shard_offset, region.chunk_numel))
                    self._unpacked.append(place.view(layout.size, region.chunk_numel))
            else:
                own = local_range(source, region, layout.size, rank)
                self._own_shards.append(own)
                self._own_chunks.append(place.narrow(0, rank * region.chunk_numel, own.numel()))
                self._items.append(GatherItem(spec.name, place, region.chunk_numel, spec.numel))
        if self._bucket is not None:
            self._own_chunks.append(self._bucket.own)
            self._own_shards.append(self._bucket.own_shard)
            self._items.append(self._bucket.item)
            self._bucket.drain()

    @property
    def is_scattered(self) -> bool:
        """Whether rows of a rank lie in many places, so that no message can carry them from there."""
        return bool(self._scattered)

    @functools.cached_property
    def in_place(self) -> InPlace:
        """The same gather into a block. Asked for while the full buffer holds memory: an empty one has no views."""
        return InPlace(self)

    def begin(self, pool: BufferPool) -> list[GatherItem]:
        """Put this rank's rows into the full buffer, which holds memory; returns what has to be exchanged."""
        if self._bucket is not None:
            self._bucket.fill(pool)
        if self._own_chunks:
            # The only bulk pass, over 1/N of the parameters; where dtypes differ it is the cast.
            torch._foreach_copy_(self._own_chunks, self._own_shards)
        staged = [each for each in self._scattered if not each.region.packed]
        if not staged:
            return self._items
        size = self.layout.size
        own = [local_range(self.source, each.region, size, self.rank) for each in staged]
        return [each.begin(rows, self.rank, size) for each, rows in zip(staged, own, strict=True)] + self._items

    def sent_as_is(self) -> bool:
        """Whether this rank's rows still are, bit by bit, what it put into the exchange that is under way."""
        pairs = list(zip(self._own_chunks, self._own_shards, strict=True))
        size, rank = self.layout.size, self.rank
        alone = [each for each in self._scattered if not each.region.packed]
        pairs += [each.sent(local_range(self.source, each.region, size, rank), rank) for each in alone]
        return all(same_bits(sent, rows) for sent, rows in pairs)

    def end(self) -> None:
        """The exchange is complete: put the small parameters, and rows that lie in many places, into their places."""
        if self._packed:
            torch._foreach_copy_(self._unpacked, self._packed)
        for each in self._scattered:
            each.end(None if self._bucket is None else self._bucket.rows)
        if self._bucket is not None and self.layout.size == 1:
            self._bucket.drain()  # nothing of it is on the wire

    def drop(self) -> None:
        """What was exchanged is used no more, or was given up."""
        if self._bucket is not None:
            self._bucket.drain()
        for each in self._scattered:
            each.drop()
