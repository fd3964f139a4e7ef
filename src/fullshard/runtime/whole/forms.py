"""The forms that values of a state dict can have, and the way from one to the other for a single tensor."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fullshard.runtime.dtensors import local_of, part_of_full, sharded_like
from fullshard.runtime.module import HANDLE
from fullshard.runtime.whole.tensors import Gatherer


class Kind(Enum):
    """What stands for a sharded tensor."""

    FULL = "whole tensors"
    SHARDED = "DTensors"


@dataclass(frozen=True, slots=True)
class Form:
    """How values of a state dict are written.

    Attributes:
        kind: What stands for a sharded tensor.
        offload_to_cpu: Values are on the CPU.
        rank0_only: Only the first rank of the mesh keeps values. The others take part in gathers all the same.
    """

    kind: Kind = Kind.FULL
    offload_to_cpu: bool = False
    rank0_only: bool = False

    def write(self, tensor: torch.Tensor, name: str, gatherer: Gatherer) -> torch.Tensor:
        """`tensor` in this form, without gradient. FULL communicates, and gives a fresh tensor."""
        if not isinstance(tensor, DTensor):
            plain = tensor.detach() if tensor.requires_grad else tensor
            return plain.cpu() if self.offload_to_cpu else plain
        if self.kind is Kind.FULL:
            whole = gatherer.full(tensor, name)
            return whole.cpu() if self.offload_to_cpu else whole
        local = local_of(tensor).detach()
        local = local.cpu() if self.offload_to_cpu else local
        return sharded_like(tensor, local, local.new_empty(0))

    def read(self, value: torch.Tensor, like: DTensor, fresh: bool = False) -> torch.Tensor:
        """`value`, which was written in any form, as a `DTensor` like `like`. Does not communicate.

        It may be a view of `value`, and then keeps all of it alive, unless it is to be `fresh`.

        A value of another shape than `like` is returned as it is; who loads it says what does not fit.
        """
        if isinstance(value, ShardedTensor):
            return of_chunks(value, like)
        if isinstance(value, DTensor):
            return value
        if value.shape != like.shape:
            return value
        local = part_of_full(like, value)
        own = local_of(like).device
        device = like.device_mesh.device_type if own.type == "meta" else own
        return sharded_like(like, local.to(device, copy=fresh), local.new_empty(0, device=device))

    def take(self, value: torch.Tensor, has: Any, parameter: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - for others
        """`value` as it is, of the state of `parameter`, which `has` another one now; a copy, nobody else's."""
        return value.clone()


def of_chunks(value: ShardedTensor, like: DTensor) -> torch.Tensor:
    """`value` as a `DTensor` like `like`, without communication.

    torch's `load_sharded_optimizer_state_dict` returns state in this older type, with rows divided over all ranks.

    Raises:
        ValueError: This rank has other rows of it than of `like`.
    """
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    shards = value.local_shards()
    whole = value.metadata().size
    mine = [(tuple(shard.metadata.shard_sizes), tuple(shard.metadata.shard_offsets)) for shard in shards]
    expected = [] if 0 in shape else [(tuple(shape), tuple(offset))]
    if whole != like.shape or mine != expected:
        raise ValueError(
            f"a ShardedTensor of shape {tuple(whole)} has rows (sizes, offsets) {mine} on this rank, but the parameter "
            f"has shape {tuple(like.shape)} and rows {expected}. Save, and load into FSDP.optim_state_dict(model, "
            "optim), with torch.distributed.checkpoint: it finds rows wherever they are"
        )
    local = (
        shards[0].tensor if shards else local_of(like).new_empty(shape, dtype=value.metadata().tensor_properties.dtype)
    )
    return sharded_like(like, local, local.new_empty(0))


def keeps_values(model: nn.Module, form: Form) -> bool:
    """Whether this rank's state dicts of `model` have values: always, or on the first rank of its mesh."""
    if not form.rank0_only:
        return True
    for module in model.modules():
        handle = module.__dict__.get(HANDLE)
        if handle is not None:
            return not any(handle.unit.place.mesh.get_coordinate())
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
