"""Exchanges that are no command of a unit: small objects, flags, and whole tensors from the first rank."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_object_coll_device

from fullshard.runtime.collectives.base import Call, own_limit, wait_for_ranks

_Value = TypeVar("_Value")

_BUILDING = "(while building)"


def exchange(
    value: _Value,
    group: dist.ProcessGroup,
    what: str = "exchange",
    unit: str = _BUILDING,
    limit: timedelta | None = None,
) -> list[_Value]:
    """Every rank's `value`, a small picklable object, in the order of the group.

    Unlike torch's function for this it does not wait for the half hour that groups of a mesh are given.

    Args:
        value: This rank's.
        group: The ranks.
        what: What it is for, for messages.
        unit: Of what, for messages.
        limit: Time limit, if it is not that of steps.

    Raises:
        CommunicationError: A rank did not take part within the time limit.
    """
    if group.size() == 1:
        return [value]
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    device = _get_object_coll_device(group)
    call = Call(what, unit, 0)
    sizes = _gather(torch.tensor([data.numel()], device=device), group, call, limit).tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: data.numel()].copy_(data)
    rows = _gather(padded, group, call, limit).view(len(sizes), -1).cpu().numpy()
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def is_same(value: object, group: dist.ProcessGroup, what: str) -> bool:
    """Whether what `value` shows as is the same on every rank; every rank gets the same answer. One small collective.

    Raises:
        CommunicationError: A rank did not take part within the time limit.
    """
    digest = hashlib.blake2b(repr(value).encode(), digest_size=16).digest()
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(_get_object_coll_device(group))
    rows = _gather(own, group, Call(what, _BUILDING, 0)).view(group.size(), -1)
    return bool((rows == rows[0]).all())


def exchange_flags(flags: Sequence[bool], group: dist.ProcessGroup, what: str) -> list[list[bool]]:
    """Every rank's flags, as many on each, in the order of the group. One collective, where `exchange` takes two.

    Raises:
        CommunicationError: A rank did not take part within the time limit.
    """
    if group.size() == 1:
        return [list(flags)]
    own = torch.tensor(flags, dtype=torch.uint8, device=_get_object_coll_device(group))
    rows: list[list[bool]] = _gather(own, group, Call(what, _BUILDING, 0)).view(group.size(), -1).bool().tolist()
    return rows


def separate_messages(group: dist.ProcessGroup) -> tuple[dist.ProcessGroup, timedelta]:
    """A Gloo group of the same ranks for messages beside the training, and its time limit, that of `group` itself.

    On any device Gloo waits without using it, and sees at once that a peer has died. All ranks call this.
    """
    limits = [own_limit(group._get_backend(device)) for device in group._device_types]
    limit = max((limit for limit in limits if limit is not None), default=timedelta(minutes=30))
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, timeout=limit, backend="gloo", use_local_synchronization=True), limit


def _gather(tensor: torch.Tensor, group: dist.ProcessGroup, call: Call, limit: timedelta | None = None) -> torch.Tensor:
    """A 1-D tensor of every rank, one after the other."""
    whole = tensor.new_empty(group.size() * tensor.numel())
    work = dist.all_gather_single(whole, tensor, group, async_op=True)
    wait_for_ranks(work, group, tensor.device, call, limit=limit)
    return whole


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
    work = dist.broadcast(tensor, group_src=0, group=group, async_op=True)
    wait_for_ranks(work, group, tensor.device, Call("broadcast", _BUILDING, 0), f"tensor {label!r}")
