"""The two buffers of one unit and dtype as tensors: the flat shard, and the full buffer that comes and goes.

[Note: one storage object, many blocks of memory]
Autograd saves views of full parameters; a saved view holds the *storage object*. So each buffer has one storage object
for life. To free it, its memory is taken away (`BufferPool.drain`); to gather again, memory is put back (`fill`).
Writes go through tensors that share the storage but not the version counter of the parameters, so that refilling does
not look to autograd like a forbidden in-place change.

[Note: one copy on a shard axis of size 1]
There the flat shard holds whole parameters, in the order of the full buffer. If they are computed with in the dtype in
which they are stored, the full parameters are views of the flat shard: gathers copy nothing, and nothing is freed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fullshard.core.layout import FlatLayout, Region, chunk_rows, plan_layout
from fullshard.core.spec import ParamSpec, World
from fullshard.runtime.collectives import GatherItem
from fullshard.runtime.device import BufferPool
from fullshard.runtime.params.dress import Dress
from fullshard.runtime.params.place import Place


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
        self._rank = rank
        self._dtype = places[0].dtype
        self._own_chunks: list[torch.Tensor] = []  # this rank's rows of large parameters, in the full buffer
        self._own_shards: list[torch.Tensor] = []  # the same rows, in the flat shard
        self._items: list[GatherItem] = []
        self._packed: list[Region] = []
        self._unpacked: list[torch.Tensor] = []  # those in the full buffer, [size, chunk_numel] each
        self._scattered: list[_Scattered] = []
        self._bucket: torch.Tensor | None = None  # [size, packed_numel], alive during a gather
        for region in layout.regions:
            spec = specs[region.index]
            place = places[region.index].narrow(0, 0, region.chunk_numel * layout.size)
            if spec.shard_dim:
                self._scattered.append(_Scattered(region, spec, place.narrow(0, 0, spec.numel)))
            elif region.packed:
                self._packed.append(region)
                self._unpacked.append(place.view(layout.size, region.chunk_numel))
            else:
                own = local_range(source, region, layout.size, rank)
                self._own_shards.append(own)
                self._own_chunks.append(place.narrow(0, rank * region.chunk_numel, own.numel()))
                self._items.append(GatherItem(spec.name, place, region.chunk_numel, spec.numel))

    def begin(self) -> list[GatherItem]:
        """Put this rank's rows into the full buffer, which holds memory; returns what has to be exchanged."""
        if self._own_chunks:
            # The only bulk pass, over 1/N of the parameters; where dtypes differ it is the cast.
            torch._foreach_copy_(self._own_chunks, self._own_shards)
        size, items = self.layout.size, self._items
        for each in self._scattered:
            if not each.region.packed:
                own = local_range(self.source, each.region, size, self._rank)
                items = [*items, each.begin(own, self._rank, size)]
        packed = self.layout.packed_numel
        if not packed:
            return items
        self._bucket = self.source.new_empty(size, packed, dtype=self._dtype)
        self._bucket[self._rank].copy_(self.source[:packed])
        return [*items, GatherItem("small parameters", self._bucket.view(-1), packed, size * packed)]

    def end(self) -> None:
        """The exchange is complete: put the small parameters, and rows that lie in many places, into their places."""
        bucket = self._bucket
        if bucket is not None and self._packed:
            sources = [bucket.narrow(1, region.shard_offset, region.chunk_numel) for region in self._packed]
            torch._foreach_copy_(self._unpacked, sources)
        for each in self._scattered:
            each.end(bucket)
        self._bucket = None

    def drop(self) -> None:
        """The exchange was given up."""
        self._bucket = None
        for each in self._scattered:
            each.drop()


class FlatBuffers:
    """Flat shard and full buffer for parameters of one dtype.

    Attributes:
        specs: The parameters.
        dresses: How each looks outside of the buffers.
        dressed: Numbers of those whose gradients are no plain tensors.
        layout: Where they lie.
        place: The ranks that hold the shards.
        shard: Flat shard, shape [layout.shard_numel], in the stored dtype.
        full: Full parameters in the order of `specs`: leaf tensors that view the full buffer. Empty until `build`.
    """

    def __init__(
        self,
        specs: Sequence[ParamSpec],
        layout: FlatLayout,
        place: Place,
        shard: torch.Tensor,
        dresses: Sequence[Dress],
    ) -> None:
        self.specs = tuple(specs)
        self.dresses = tuple(dresses)
        self.dressed = frozenset(i for i, dress in enumerate(dresses) if not dress.is_plain)
        self.layout = layout
        self.place = place
        self.shard = shard
        self.full: list[torch.nn.Parameter] = []
        self._local_views = {region.index: self._local_view(region) for region in layout.regions}
        self._dtype = shard.dtype
        self._is_alias = False  # the full parameters view the flat shard
        self._storage = torch.UntypedStorage(0, device="cpu")
        self._places: list[torch.Tensor] = []
        self._primary: GatherPlan | None = None
        self._secondary: GatherPlan | None = None
        self._gathering: GatherPlan | None = None

    @property
    def world(self) -> World:
        """This rank among those that hold the shards."""
        return self.place.world

    def _local_view(self, region: Region) -> tuple[torch.Size, tuple[int, ...]]:
        """Shape and stride of this rank's rows of a parameter in a flat shard."""
        start, stop = region.rank_rows(self.world.size, self.world.rank)
        rows = torch.empty(shape_of_rows(self.specs[region.index], stop - start), device="meta")
        return rows.shape, rows.stride()

    def local(self, region: Region, flat: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's rows of a parameter in its own shape, from the flat shard (or `flat`, which has its offsets)."""
        shape, stride = self._local_views[region.index]
        return (self.shard if flat is None else flat).as_strided(shape, stride, region.shard_offset)

    def own_local(self, region: Region) -> torch.Tensor:
        """The same rows of the flat shard, as a tensor with a storage of its own on the same memory.

        A DTensor takes its storage offset from its local tensor, and one whose offset is not 0 can be neither pickled
        nor deep-copied. Files get the rows of the parameter, not the flat shard.
        """
        local = self.local(region)
        return local if local.is_meta or type(local) is not torch.Tensor else torch.utils.dlpack.from_dlpack(local)

    @property
    def full_bytes(self) -> int:
        """Bytes of the full buffer; none if it is the flat shard."""
        return 0 if self._is_alias else self.layout.full_numel * self._dtype.itemsize

    @property
    def is_full(self) -> bool:
        """Whether the full buffer holds memory of its own."""
        return not self._is_alias and self._storage.nbytes() > 0

    def build(self, pool: BufferPool, compute_dtype: torch.dtype) -> None:
        """Make the full parameters and every view that a gather needs, once; the buffer stays empty.

        Another engine that takes the unit over finds them made: graphs of the first one hold this storage.

        Not under inference mode: its tensors could not take part in autograd later.
        """
        if self.full:
            return
        self._dtype = compute_dtype
        ordered = sorted(self.layout.regions, key=lambda region: region.index)
        self._is_alias = self.world.size == 1 and compute_dtype == self.shard.dtype
        if self._is_alias:
            self._storage = self.shard.untyped_storage()
            with torch.inference_mode(False), torch.no_grad():
                self.full = [self._build_full(region) for region in ordered]
            return
        self._storage = torch.UntypedStorage(0, device=self.shard.device)
        with torch.inference_mode(False), torch.no_grad():
            pool.fill(self._storage, self.full_bytes)
            whole = torch.empty(0, dtype=compute_dtype, device=self.shard.device)
            whole.set_(self._storage, 0, (self.layout.full_numel,), (1,))
            self._places = [
                whole.narrow(0, region.full_offset, region.chunk_numel * self.layout.size) for region in ordered
            ]
            self.full = [self._build_full(region) for region in ordered]
            self._primary = GatherPlan(self.layout, self.world.rank, self.shard, self._places, self.specs)
            pool.drain(self._storage)

    def _build_full(self, region: Region) -> torch.nn.Parameter:
        spec = self.specs[region.index]
        flat = torch.empty(0, dtype=self._dtype, device=self.shard.device)
        # `set_` on a new tensor, not a view of the places: this one must have a version counter of its own.
        flat.set_(self._storage, region.full_offset, (spec.numel,), (1,))
        return self.dresses[region.index].full(flat.view(spec.shape))

    def begin_gather(self, pool: BufferPool, secondary: bool = False) -> list[GatherItem]:
        """Put memory under the full buffer and this rank's rows into it; returns what has to be exchanged."""
        if self._is_alias:
            return []
        self._gathering = self._secondary if secondary else self._primary
        assert self._gathering is not None
        pool.fill(self._storage, self.full_bytes)
        with torch.no_grad():
            return self._gathering.begin()

    def end_gather(self) -> None:
        """The exchange is complete: the full parameters become valid."""
        if self._gathering is not None:
            with torch.no_grad():
                self._gathering.end()
            self._gathering = None

    def release(self, pool: BufferPool) -> None:
        """Take the memory from under the full buffer and drop the secondary shard."""
        if self._gathering is not None:
            self._gathering.drop()
            self._gathering = None
        self._secondary = None
        if self.is_full:
            pool.drain(self._storage)

    def shrink(self, pool: BufferPool, size: int, rank: int) -> None:
        """Keep this rank's rows over a smaller group of `size` ranks in place of the full buffer."""
        layout = plan_layout(self.specs, size)
        with torch.inference_mode(False), torch.no_grad():
            source = self._places[0].new_empty(layout.shard_numel)
            for region in layout.regions:
                start, stop = region.rank_rows(size, rank)
                spec = self.specs[region.index]
                rows = rows_of(self._places[region.index][: spec.numel].view(spec.shape), spec, start, stop)
                local_range(source, region, size, rank).view(rows.shape).copy_(rows)
            # Before the memory goes: views of an empty storage cannot be made.
            plan = GatherPlan(layout, rank, source, self._places, self.specs)
            self.release(pool)
            self._secondary = plan
