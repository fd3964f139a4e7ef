"""Whole tensors: gathers one from all ranks' shards. `dtensors.part_of_full` is the way back.

It is for what happens between steps (state dicts, export, editing weights): values keep the dtype they are stored in,
and every call makes a fresh tensor. What a step gathers goes through `storage.py` instead, into buffers that are kept.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from fullshard.core.layout import chunk_rows, row_range
from fullshard.runtime.collectives import Call, Direct, GatherItem, Transport, command_tag, make_messages, translate
from fullshard.runtime.device import BufferPool, make_streams
from fullshard.runtime.dtensors import local_of
from fullshard.runtime.failures.postmortem import explained

# Beside the commands of a unit, see `unit.py`: the low bits of the tag.
_WHOLE = 4


class Gatherer:
    """Gathers whole tensors, one at a time. Every rank of a tensor's mesh must ask for the same ones in the same order.

    Args:
        what: What the tensors are wanted for, for messages, such as "full state dict".
    """

    def __init__(self, what: str = "full tensor") -> None:
        self._what = what
        self._transports: dict[int, Transport] = {}

    def full(self, tensor: torch.Tensor, name: str = "") -> torch.Tensor:
        """The whole of `tensor`, in its dtype and on its device, as a fresh tensor without gradient.

        Memory: the result, and no more than one padded copy of it beside. A tensor that is no `DTensor` is copied.

        Args:
            tensor: A `DTensor` of any mesh, or a plain tensor.
            name: Its name, for messages, and so that ranks which ask for different tensors do not mix them up.

        Raises:
            PeerTimeoutError: Ranks of its mesh did not ask for it within the time limit; it names them.
        """
        if not isinstance(tensor, DTensor):
            return tensor.detach().clone()
        own = local = local_of(tensor).detach()
        if own.is_meta:
            return torch.empty(tensor.shape, dtype=own.dtype, device="meta")
        shapes = _shapes(tensor)
        if shapes is None:
            return self._by_torch(tensor, name)
        if own.device.type != tensor.device_mesh.device_type:
            local = local.to(tensor.device_mesh.device_type)  # offloaded: the mesh's backend may not serve the host
        for axis in reversed(range(len(shapes))):
            placement = tensor.placements[axis]
            if isinstance(placement, Shard):
                transport = self._transport(tensor.device_mesh.get_group(axis), local.device)
                local = self._gather(transport, local, shapes[axis], placement.dim, name)
        return local.clone() if local.data_ptr() == own.data_ptr() else local.to(own.device)

    def _by_torch(self, tensor: DTensor, name: str) -> torch.Tensor:
        """Placements that interleave rows or hold partial sums are left to torch."""
        try:
            whole: torch.Tensor = tensor.full_tensor()
        except RuntimeError as error:
            where = f"rank {dist.get_rank()} waited for ranks {tensor.device_mesh.mesh.tolist()} (tensor {name!r})"
            raise translate(error, Call(self._what, name, 0), where, 0.0) from error
        return whole.detach().clone()

    def _transport(self, group: dist.ProcessGroup, device: torch.device) -> Transport:
        if id(group) not in self._transports:
            streams = make_streams(device)
            self._transports[id(group)] = make_messages(group, device, BufferPool(device, 0), streams)
        return self._transports[id(group)]

    def _gather(
        self, transport: Transport, local: torch.Tensor, shape: torch.Size, dim: int, name: str
    ) -> torch.Tensor:
        """Undo the sharding of one dim over one mesh axis; `shape` is that of the result."""
        numel = shape.numel()
        if not numel:
            return local.new_empty(shape)
        chunk_numel = chunk_rows(shape[dim], transport.size) * (numel // shape[dim])
        # The transport that moves exact chunks needs no padding.
        padded_numel = numel if isinstance(transport, Direct) else chunk_numel * transport.size
        whole = local.new_empty(padded_numel)
        start = min(transport.rank * chunk_numel, numel)
        whole[start : start + local.numel()].copy_(local.movedim(dim, 0).reshape(-1))
        if transport.size > 1:
            call = Call(self._what, name.rpartition(".")[0] or "(root)", command_tag(name, _WHOLE))
            pending = transport.gather([GatherItem(name, whole, chunk_numel, numel)], call)
            pending.wait()
            pending.finish()
        exact = whole if padded_numel == numel else whole[:numel].clone()
        rows_first = [shape[dim], *(size for other, size in enumerate(shape) if other != dim)]
        return exact.view(rows_first).movedim(0, dim).contiguous()


def full_tensor(tensor: torch.Tensor, name: str = "") -> torch.Tensor:
    """The whole of one tensor; see `Gatherer.full`."""
    with explained([tensor]):
        return Gatherer().full(tensor, name)


def _shapes(tensor: DTensor) -> list[torch.Size] | None:
    """Shape before each axis of the mesh divides it further; None for placements other than `Shard` and `Replicate`."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None or any(type(p) is not Shard and not p.is_replicate() for p in tensor.placements):
        return None
    shape = list(tensor.shape)
    shapes = []
    for axis, placement in enumerate(tensor.placements):
        shapes.append(torch.Size(shape))
        if isinstance(placement, Shard):
            start, stop = row_range(shape[placement.dim], tensor.device_mesh.size(axis), coordinate[axis])
            shape[placement.dim] = stop - start
    return shapes
