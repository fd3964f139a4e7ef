"""Exchanges that are made once, while a model is built: small objects, and whole tensors from the first rank."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist

from fullshard.runtime.collectives.base import Call, time_limit, translate

_Value = TypeVar("_Value")


def exchange(value: _Value, group: dist.ProcessGroup) -> list[_Value]:
    """Every rank's `value`, a small picklable object, in the order of the group."""
    if group.size() == 1:
        return [value]
    gathered: list[_Value] = [value] * group.size()
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def broadcast_from_first(tensor: torch.Tensor, group: dist.ProcessGroup, label: str) -> None:
    """Replace a contiguous tensor on the group's device by the first rank's, and wait for it.

    Args:
        tensor: The same shape and dtype on every rank.
        group: Its first rank is the source.
        label: Name of the tensor, for messages.

    Raises:
        CommunicationError: A rank did not take part within the time limit.
    """
    if group.size() == 1:
        return
    limit = time_limit(group._get_backend(tensor.device))
    work = dist.broadcast(tensor, group_src=0, group=group, async_op=True)
    try:
        work.wait(limit)
    except RuntimeError as error:
        where = f"rank {dist.get_rank()} waited for ranks {dist.get_process_group_ranks(group)} (tensor {label!r})"
        raise translate(error, Call("broadcast", "(while building)", 0), where, limit.total_seconds()) from error
