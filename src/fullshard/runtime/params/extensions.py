"""Parameters that say themselves what is gathered: tensor subclasses with `fsdp_pre_all_gather`.

A quantized or 8-bit tensor has its own inner tensors. It shards itself (through the operators that it supports), and at
every gather it gives the tensors to send, and makes the full parameter of what came from all ranks. The memory of what
came lives as long as the full buffer of plain parameters does: it comes with a gather, goes with a free, and returns
under the same storages, which autograd may have saved (see the note in `storage.py`).

[Note: the protocol]
`fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)` -> (tensors to gather, metadata); older ones
take the mesh only. `fsdp_post_all_gather(outputs, metadata, param_dtype, *, out=None)` -> (full tensor, inner tensors
whose memory may go with the full buffer) at first, and afterwards, with `out` the full parameter made then, nothing: it
must refill what that one consists of. Where rows do not divide evenly the outputs have the rows that pad the last
ranks' at first, and with `out` no more rows than `out`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from fullshard.core.layout import FlatLayout, Region, chunk_rows, plan_layout
from fullshard.core.spec import ParamSpec, World
from fullshard.runtime.collectives import Block, Call, GatherItem, Shared
from fullshard.runtime.device import BufferPool
from fullshard.runtime.dtensors import contiguous_stride, local_of
from fullshard.runtime.params.describe import Slot, module_of
from fullshard.runtime.params.dress import Dress
from fullshard.runtime.params.gathers import shape_of_rows
from fullshard.runtime.params.place import Place
from fullshard.runtime.params.storage import FlatBuffers
from fullshard.runtime.policy import MixedPrecisionPolicy


def shard_of(value: torch.Tensor, spec: ParamSpec, world: World) -> torch.Tensor:
    """This rank's rows of a subclass, by the operators that torch's own engine needs, too: chunk, new_zeros, copy_."""
    chunk = chunk_rows(spec.rows, world.size)
    pieces = value.detach().chunk(world.size, spec.shard_dim)
    padded = value.new_zeros(shape_of_rows(spec, chunk))
    if world.rank >= len(pieces):
        return padded.narrow(spec.shard_dim, 0, 0)
    rows = pieces[world.rank].size(spec.shard_dim)
    padded.narrow(spec.shard_dim, 0, rows).copy_(pieces[world.rank])
    return padded.narrow(spec.shard_dim, 0, rows)


@dataclass(slots=True)
class _Output:
    """One gathered tensor: its memory comes and goes under one storage object.

    Attributes:
        storage: The memory of all ranks' inputs, one after the other.
        shape: Of one rank's input.
        dtype: Of it.
        size: Ranks.
    """

    storage: torch.UntypedStorage
    shape: torch.Size
    dtype: torch.dtype
    size: int

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one rank's input."""
        return self.shape.numel() * self.dtype.itemsize

    def tensor(self, rows_at_most: int | None = None) -> torch.Tensor:
        """All ranks' inputs along dim 0; for the user, with a version counter of its own."""
        rows = (self.shape[0] * self.size, *self.shape[1:]) if self.shape else (self.size,)
        if rows_at_most is not None:
            rows = (min(rows[0], rows_at_most), *rows[1:])
        made = torch.empty(0, dtype=self.dtype, device=self.storage.device)
        return made.set_(self.storage, 0, rows, contiguous_stride(rows))

    def bytes(self) -> torch.Tensor:
        """The same as bytes, 1-D, for the transport: any dtype travels bit by bit."""
        made = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return made.set_(self.storage, 0, (self.chunk_bytes * self.size,), (1,))


@dataclass(slots=True)
class _Extension:
    """One parameter: what it gave to the gather under way, and what its full tensor consists of."""

    spec: ParamSpec
    dress: Dress
    sharded: nn.Parameter
    slot: Slot
    takes_mesh_only: bool  # its fsdp_pre_all_gather is an older one
    outputs: list[_Output] = field(default_factory=list)
    metadata: Any = None
    inner: list[tuple[torch.UntypedStorage, int]] = field(default_factory=list)  # other memory of it, bytes
    full: nn.Parameter | None = None


class ExtensionBuffers:
    """What `FlatBuffers` is for plain parameters, for parameters with the protocol.

    Args:
        specs: The parameters.
        place: The ranks that hold the shards.
        dresses: How each looks outside of the buffers.
        parameters: The sharded parameters, whose local tensors are subclasses, and a place where each is registered.
        precision: For the protocol.

    Attributes:
        layout: Where gradients lie: they are plain tensors in the dtype that the subclass shows.
        shard: Without elements, in that dtype and on the device of the shards.
        full: Full parameters in the order of `specs`. Empty until `build`.
    """

    def __init__(
        self,
        specs: Sequence[ParamSpec],
        place: Place,
        dresses: Sequence[Dress],
        parameters: Sequence[tuple[nn.Parameter, Slot]],
        precision: MixedPrecisionPolicy,
    ) -> None:
        self.specs = tuple(specs)
        self.dresses = tuple(dresses)
        self.dressed = frozenset(i for i, dress in enumerate(dresses) if not dress.is_plain)
        self.place = place
        self.layout: FlatLayout = plan_layout(specs, place.world.size)
        first = local_of(parameters[0][0])
        self.shard = torch.empty(0, dtype=first.dtype, device=first.device)
        self.full: list[nn.Parameter] = []
        self._precision = precision
        self._dtype = first.dtype
        self._parts = [
            _Extension(spec, dress, sharded, slot, _takes_mesh_only(local_of(sharded)))
            for spec, dress, (sharded, slot) in zip(specs, dresses, parameters, strict=True)
        ]
        self._mesh = place.shard_mesh
        self._is_full = False
        self._gathering = False

    @property
    def world(self) -> World:
        """This rank among those that hold the shards."""
        return self.place.world

    @property
    def full_bytes(self) -> int:
        """Bytes of everything that comes and goes with a gather."""
        outputs = sum(output.chunk_bytes * output.size for part in self._parts for output in part.outputs)
        return outputs + sum(nbytes for part in self._parts for _, nbytes in part.inner)

    @property
    def is_full(self) -> bool:
        """Whether gathered tensors hold memory."""
        return self._is_full

    def local(self, region: Region, flat: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's rows of a parameter: the subclass itself, or a plain part of `flat`, a flat gradient shard."""
        if flat is None:
            return local_of(self._parts[region.index].sharded)
        start, stop = region.rank_rows(self.world.size, self.world.rank)
        shape = shape_of_rows(self.specs[region.index], stop - start)
        return flat.narrow(0, region.shard_offset, prod(shape)).view(shape)

    def build(self, pool: BufferPool, compute_dtype: torch.dtype) -> None:
        """Make the full parameters; no memory is kept.

        What they are made of is known to the subclass only, so it is asked once with this rank's rows in the place of
        all ranks': valid tensors, if not the right values.
        """
        if self.full:
            return
        self._dtype = compute_dtype
        with torch.inference_mode(False), torch.no_grad():
            for part in self._parts:
                inputs = self._inputs(part)
                part.outputs = [self._output(value) for value in inputs]
                self._fill(part, inputs, pool, everywhere=True)
                part.full = self._first_full(part)
                self.full.append(part.full)
        self._is_full = True
        self.release(pool)

    def begin_gather(
        self, pool: BufferPool, _shared: Shared | None, _call: Call, secondary: bool = False
    ) -> tuple[list[GatherItem], Block | None]:
        """Ask every parameter what to send; returns what has to be exchanged. It is in no block."""
        assert not secondary, "a parameter with a protocol has no secondary shard"
        items = []
        with torch.no_grad():
            for part in self._parts:
                inputs = self._inputs(part)
                found, known = [(v.shape, v.dtype) for v in inputs], [(o.shape, o.dtype) for o in part.outputs]
                if found != known:
                    raise ValueError(
                        f"fsdp_pre_all_gather of parameter {part.spec.name!r} returned tensors of other shapes or "
                        f"dtypes than at first: {found}, expected {known}"
                    )
                self._fill(part, inputs, pool)
                for output in part.outputs:
                    numel = output.chunk_bytes * output.size
                    items.append(GatherItem(part.spec.name, output.bytes(), output.chunk_bytes, numel))
        self._is_full = self._gathering = True
        return items, None

    def end_gather(self) -> None:
        """The exchange is complete: let every parameter refill its full tensor."""
        if not self._gathering:
            return
        self._gathering = False
        with torch.no_grad():
            for part in self._parts:
                for storage, nbytes in part.inner:
                    storage.resize_(nbytes)
                assert part.full is not None
                # Refilled behind autograd's back, like the full buffer of plain parameters.
                with _unsafe_preserve_version_counter(part.full):
                    self._post(part, out=part.full)
                part.metadata = None

    def release(self, pool: BufferPool) -> None:
        """Take the memory away."""
        self._gathering = False
        if not self._is_full:
            return
        self._is_full = False
        for part in self._parts:
            part.metadata = None
            for output in part.outputs:
                pool.drain(output.storage)
            for storage, _ in part.inner:
                storage.resize_(0)

    def shrink(self, _pool: BufferPool, _size: int, _rank: int) -> None:
        """Not possible; refused when the parameters are found."""
        raise AssertionError("a parameter with a protocol has no secondary shard")

    # The protocol

    def _inputs(self, part: _Extension) -> list[torch.Tensor]:
        local: Any = local_of(part.sharded)
        arguments: list[Any] = [self._mesh]
        if not part.takes_mesh_only:
            size = torch.Size(part.spec.shape)
            arguments += [size, contiguous_stride(size), module_of(part.slot), self._precision]
        inputs, part.metadata = local.fsdp_pre_all_gather(*arguments)
        padded = torch.Size(shape_of_rows(part.spec, chunk_rows(part.spec.rows, self.world.size)))
        if local.shape != padded and any(value.shape != padded for value in inputs):
            raise ValueError(
                f"parameter {part.spec.name!r} of shape {part.spec.shape} does not divide evenly over "
                f"{self.world.size} ranks: fsdp_pre_all_gather must return tensors padded to {tuple(padded)}, got "
                f"{[tuple(value.shape) for value in inputs]}"
            )
        return list(inputs)

    def _output(self, value: torch.Tensor) -> _Output:
        return _Output(torch.UntypedStorage(0, device=value.device), value.shape, value.dtype, self.world.size)

    def _fill(
        self, part: _Extension, inputs: list[torch.Tensor], pool: BufferPool, *, everywhere: bool = False
    ) -> None:
        """Put memory under the outputs, and this rank's inputs into it."""
        for output, value in zip(part.outputs, inputs, strict=True):
            pool.fill(output.storage, output.chunk_bytes * output.size)
            rows = output.bytes().view(output.size, output.chunk_bytes)
            own = value.contiguous().view(-1).view(torch.uint8)
            (rows if everywhere else rows[self.world.rank]).copy_(own)

    def _first_full(self, part: _Extension) -> nn.Parameter:
        full, inner = self._post(part)
        own = {output.storage.data_ptr() for output in part.outputs}
        storages = {each.data_ptr(): each for tensor in inner if (each := tensor.untyped_storage()).nbytes()}
        part.inner = [(each, each.nbytes()) for start, each in storages.items() if start not in own]
        size = torch.Size(part.spec.shape)
        if full.shape != size:  # without the rows that pad the last rank's
            full = full.as_strided(size, contiguous_stride(size), 0)
        return part.dress.full(full)

    def _post(self, part: _Extension, out: nn.Parameter | None = None) -> Any:
        local: Any = local_of(part.sharded)
        if out is None:
            outputs = tuple(output.tensor() for output in part.outputs)
            return local.fsdp_post_all_gather(outputs, part.metadata, self._dtype)
        # `out` has been cut to the parameter's rows, so that `out.copy_(outputs[0])` needs outputs cut alike.
        rows = part.spec.rows if self._is_padded(part.spec) else None
        outputs = tuple(output.tensor(rows) for output in part.outputs)
        return local.fsdp_post_all_gather(outputs, part.metadata, self._dtype, out=out)

    def _is_padded(self, spec: ParamSpec) -> bool:
        """Whether the outputs end with rows that are not the parameter's."""
        return spec.shard_dim == 0 and spec.rows % self.world.size != 0


def _takes_mesh_only(local: Any) -> bool:
    return len(inspect.signature(local.fsdp_pre_all_gather).parameters) == 1


Buffers = FlatBuffers | ExtensionBuffers
