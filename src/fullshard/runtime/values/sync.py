"""Values from the first rank: every rank starts from the same parameters and buffers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import nn

from fullshard.core.grouping import first_difference
from fullshard.errors import RanksDisagreeError, UninitializedError
from fullshard.runtime.collectives import broadcast_from_first, exchange
from fullshard.runtime.registry import REGISTRY


def broadcast_module_states(
    module: nn.Module,
    groups: Sequence[dist.ProcessGroup],
    device: torch.device,
    skip: Collection[int] = frozenset(),
) -> None:
    """Give every rank the first rank's values of parameters and buffers that are not sharded, one tensor at a time.

    Args:
        module: Walked with all its submodules. Its tensors hold memory, on ranks other than the first with any values.
        groups: Broadcast over the first, then over the next: (replicate, shard) brings the values of a mesh's first
            rank to all of it.
        device: Tensors elsewhere travel through a copy on this device, the one that the groups communicate on.
        skip: Identities of tensors to leave alone.

    Raises:
        RanksDisagreeError: Ranks have other tensors, shapes or dtypes. On every rank.
        UninitializedError: The first rank has tensors without values. On every rank.
    """
    tensors = {
        name: tensor.detach()
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
        if id(tensor) not in skip and REGISTRY.owner(tensor) is None
    }
    for group in groups:
        _check_same(tensors, group)
        for name, tensor in tensors.items():
            _broadcast(tensor, group, device, name)


def raise_alike(error: ValueError | UninitializedError | None, groups: Sequence[dist.ProcessGroup]) -> None:
    """Raise what was found on any rank on every rank. All ranks must call it.

    Args:
        error: What this rank found.
        groups: The axes of the mesh; what one rank found travels along one after the other.
    """
    found = None if error is None else (type(error).__name__, str(error))
    for group in groups:
        found = next((each for each in exchange(found, group) if each is not None), None)
    if error is not None:
        raise error
    if found is not None:
        raise (UninitializedError if found[0] == UninitializedError.__name__ else ValueError)(found[1])


def _check_same(tensors: dict[str, torch.Tensor], group: dist.ProcessGroup) -> None:
    lines = [f"{name!r}, shape {tuple(tensor.shape)}, {tensor.dtype}" for name, tensor in tensors.items()]
    empty = [name for name, tensor in tensors.items() if tensor.is_meta]
    reports = exchange((lines, empty), group)
    ranks = dist.get_process_group_ranks(group)
    for rank, (theirs, _) in zip(ranks, reports, strict=True):
        found = first_difference(reports[0][0], theirs)
        if found is not None:
            raise RanksDisagreeError(
                f"ranks {ranks[0]} and {rank} cannot get the same values, because they have different parameters or "
                f"buffers. Rank {ranks[0]} has: {found[1]}. Rank {rank} has: {found[2]}. Build the model from the same "
                "code and configuration on every rank"
            )
    for rank, (_, names) in zip(ranks, reports, strict=True):
        if names:
            raise UninitializedError(
                f"on rank {rank}, {names[:5]} are on the meta device while values are to be broadcast from rank "
                f"{ranks[0]}; give them memory first (param_init_fn), and values on rank {ranks[0]}"
            )


def _broadcast(tensor: torch.Tensor, group: dist.ProcessGroup, device: torch.device, name: str) -> None:
    with torch.no_grad():
        if tensor.device == device and tensor.is_contiguous():
            broadcast_from_first(tensor, group, name)
            return
        staged = tensor.to(device=device, copy=True, memory_format=torch.contiguous_format)
        broadcast_from_first(staged, group, name)
        tensor.copy_(staged)
