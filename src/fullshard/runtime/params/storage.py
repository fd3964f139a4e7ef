"""The two buffers of one unit and dtype as tensors: the flat shard, and the full buffer that comes and goes.

[Note: one storage object, many blocks of memory]
Autograd saves views of full parameters; a saved view holds the *storage object*. So each buffer has one storage object
for life. To free it, its memory is taken away (`BufferPool.drain`); to gather again, memory is put back (`fill`).
Writes go through tensors that share the storage but not the version counter of the parameters, so that refilling does
not look to autograd like a forbidden in-place change.

[Note: one full buffer for all ranks of a host]
With a transport through shared memory the memory under a full buffer is a block that every rank of the host sees, and
each rank writes its own rows into it, small parameters like large ones: that is the whole gather. So full parameters
are not to be written to by a model, even less than elsewhere: other ranks compute with them.

[Note: one copy on a shard axis of size 1]
There the flat shard holds whole parameters, in the order of the full buffer. If they are computed with in the dtype in
which they are stored, the full parameters are views of the flat shard: gathers copy nothing, and nothing is freed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fullshard.core.layout import FlatLayout, Region, plan_layout
from fullshard.core.spec import ParamSpec, World
from fullshard.errors import MisuseError
from fullshard.runtime.collectives import Block, Call, GatherItem, Shared
from fullshard.runtime.device import BufferPool, swap_memory
from fullshard.runtime.params.dress import Dress
from fullshard.runtime.params.gathers import GatherPlan, InPlace, local_range, rows_of, shape_of_rows
from fullshard.runtime.params.place import Place


class FullMemory:
    """The storage of a full buffer, and the memory that comes and goes under it.

    Args:
        storage: Without memory, or for good with that of the flat shard.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        self._block: tuple[Shared, Block, int] | None = None  # that is under the storage, and what of it is used
        self._full: Sequence[torch.Tensor] = ()
        self._versions: list[int] = []

    def watch(self, full: Sequence[torch.Tensor]) -> None:
        """Notice writes to the full parameters from now on."""
        self._full = full
        self._versions = [parameter._version for parameter in full]

    def fill(self, nbytes: int, pool: BufferPool, shared: Shared | None, call: Call) -> Block | None:
        """Put memory under the storage: a block, which is returned, or if there is none memory of this rank alone."""
        block = shared.take(nbytes, call) if shared is not None and nbytes else None
        if shared is None or block is None:
            pool.fill(self.storage, nbytes)
            return None
        assert self._block is None, "the full buffer holds memory already"
        swap_memory(self.storage, block.storage)
        self.watch(self._full)
        pool.count(nbytes)
        self._block = (shared, block, nbytes)
        return block

    def drain(self, pool: BufferPool, specs: Sequence[ParamSpec]) -> None:
        """Take the memory away.

        Args:
            pool: Memory of this rank alone.
            specs: The full parameters.

        Raises:
            MisuseError: One was written to while all ranks of the host computed with it. The memory is gone anyway.
        """
        if self._block is None:
            pool.drain(self.storage)
            return
        (shared, block, nbytes), self._block = self._block, None
        swap_memory(self.storage, block.storage)
        pool.count(-nbytes)
        shared.blocks.give_back(block)
        pairs = zip(specs, self._full, self._versions, strict=True)
        written = [spec.name for spec, parameter, before in pairs if parameter._version != before]
        if written:
            raise MisuseError(
                f"full parameters {written} were written to while they were gathered. They are in memory that the "
                "ranks of this host share, so other ranks compute with what was written. Write to sharded parameters "
                "between steps; or, if the model does so itself (nn.Embedding with max_norm, for one), use "
                "transport='direct', which gives every rank a copy of its own that is dropped after use"
            )


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
        self._memory = FullMemory(torch.UntypedStorage(0, device="cpu"))
        self._places: list[torch.Tensor] = []
        self._primary: GatherPlan | None = None
        self._secondary: GatherPlan | None = None
        self._gathering: GatherPlan | InPlace | None = None

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
        return not self._is_alias and self._memory.storage.nbytes() > 0

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
            self._memory = FullMemory(self.shard.untyped_storage())
            with torch.inference_mode(False), torch.no_grad():
                self.full = [self._build_full(region) for region in ordered]
            return
        storage = torch.UntypedStorage(0, device=self.shard.device)
        self._memory = FullMemory(storage)
        with torch.inference_mode(False), torch.no_grad():
            pool.fill(storage, self.full_bytes)
            whole = torch.empty(0, dtype=compute_dtype, device=self.shard.device)
            whole.set_(storage, 0, (self.layout.full_numel,), (1,))
            self._places = [
                whole.narrow(0, region.full_offset, region.chunk_numel * self.layout.size) for region in ordered
            ]
            self.full = [self._build_full(region) for region in ordered]
            self._primary = GatherPlan(self.layout, self.world.rank, self.shard, self._places, self.specs)
            pool.drain(storage)
        self._memory.watch(self.full)

    def _build_full(self, region: Region) -> torch.nn.Parameter:
        spec = self.specs[region.index]
        flat = torch.empty(0, dtype=self._dtype, device=self.shard.device)
        # `set_` on a new tensor, not a view of the places: this one must have a version counter of its own.
        flat.set_(self._memory.storage, region.full_offset, (spec.numel,), (1,))
        return self.dresses[region.index].full(flat.view(spec.shape))

    def begin_gather(
        self, pool: BufferPool, shared: Shared | None, call: Call, secondary: bool = False
    ) -> tuple[list[GatherItem], Block | None]:
        """Put memory under the full buffer and this rank's rows into it.

        Args:
            pool: Memory of this rank alone.
            shared: Memory that ranks have in common, if the transport has any.
            call: The command.
            secondary: From the secondary shard.

        Returns:
            What has to be exchanged, and the block that it lies in, if any.
        """
        if self._is_alias:
            return [], None
        plan = self._secondary if secondary else self._primary
        assert plan is not None
        if shared is not None and shared.column is not None and plan.is_scattered:
            shared = None  # other hosts get these rows by messages, from every rank to every other
        # None of these tensors requires gradients, so what is done to them here and in `end` is not recorded.
        block = self._memory.fill(self.full_bytes, pool, shared, call)
        self._gathering = plan if block is None else plan.in_place
        return self._gathering.begin(pool), block

    def sent_as_is(self) -> bool:
        """Whether the gather under way carries this rank's rows as they are now."""
        if self._gathering is None:
            return self._is_alias
        with torch.no_grad():
            return self._gathering.sent_as_is()

    def end_gather(self) -> None:
        """The exchange is complete: the full parameters become valid."""
        if self._gathering is not None:
            self._gathering.end()
            self._gathering = None

    def release(self, pool: BufferPool) -> None:
        """Take the memory from under the full buffer and drop the secondary shard."""
        for plan in (self._primary, self._secondary):
            if plan is not None:
                plan.drop()
        self._gathering = self._secondary = None
        if self.is_full:
            self._memory.drain(pool, self.specs)

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
