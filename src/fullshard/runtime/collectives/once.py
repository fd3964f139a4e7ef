"""Exchanges that are no command of a unit: small objects, flags, and whole tensors from the first rank."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_object_coll_device

from fullshard.runtime.collectives.base import Call, wait_for_ranks

_Value = TypeVar("_Value")


def exchange(value: _Value, group: dist.ProcessGroup, what: str = "exchange") -> list[_Value]:
    """Every rank's `value`, a small picklable object, in the order of the group.

    Unlike torch's function for this it does not wait for the half hour that groups of a mesh are given.

    Args:
        value: This rank's.
        group: The ranks.
        what: What it is for, for messages.

    Raises:
        CommunicationError: A rank did not take part within the time limit.
    """
    if group.size() == 1:
        return [value]
    data, device = packed(value), _get_object_coll_device(group)
    sizes = _gather(torch.tensor([data.numel()], device=device), group, what).tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: data.numel()].copy_(data)
    rows = _gather(padded, group, what).view(len(sizes), -1).cpu()
    return [unpacked(row[:size]) for row, size in zip(rows, sizes, strict=True)]


def packed(value: object) -> torch.Tensor:
    """A picklable object as bytes, uint8. Ranks of a job trust each other; nothing else is ever read so."""
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def unpacked(data: torch.Tensor) -> Any:
    """The reverse."""
    return pickle.loads(data.numpy().tobytes())


def is_same(value: object, group: dist.ProcessGroup, what: str) -> bool:
    """Whether what `value` shows as is the same on every rank; every rank gets the same answer. One small collective.

    Raises:
        CommunicationError: A rank did not take part within the time limit.
    """
    digest = hashlib.blake2b(repr(value).encode(), digest_size=16).digest()
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(_get_object_coll_device(group))
    rows = _gather(own, group, what).view(group.size(), -1)
    return bool((rows == rows[0]).all())


def exchange_flags(flags: Sequence[bool], group: dist.ProcessGroup, what: str) -> list[list[bool]]:
    """Every rank's flags, as many on each, in the order of the group. One collective, where `exchange` takes two.

    Raises:
        CommunicationError: A rank did not take part within the time limit.
    """
    if group.size() == 1:
        return [list(flags)]
    own = torch.tensor(flags, dtype=torch.uint8, device=_get_object_coll_device(group))
    rows: list[list[bool]] = _gather(own, group, what).view(group.size(), -1).bool().tolist()
    return rows


def _gather(tensor: torch.Tensor, group: dist.ProcessGroup, what: str) -> torch.Tensor:
    """A 1-D tensor of every rank, one after the other."""
    whole = tensor.new_empty(group.size() * tensor.numel())
    work = dist.all_gather_single(whole, tensor, group, async_op=True)
    wait_for_ranks(work, group, tensor.device, Call(what, "(while building)", 0))
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
    wait_for_ranks(work, group, tensor.device, Call("broadcast", "(while building)", 0), f"tensor {label!r}")
