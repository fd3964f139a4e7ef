"""Transports, picked by what connects the ranks. The only folder that calls collectives."""

from __future__ import annotations

import logging
from typing import TypeVar

import torch
import torch.distributed as dist

from fullshard.core.grouping import first_difference
from fullshard.errors import RanksDisagreeError
from fullshard.runtime.collectives.base import (
    Call,
    GatherItem,
    Pending,
    ReduceItem,
    Transport,
    command_tag,
    start_gather,
    translate,
    wait_for_ranks,
)
from fullshard.runtime.collectives.custom import AllGather, Custom, CustomAllReduce, ReduceScatter, check_comm
from fullshard.runtime.collectives.direct import Direct
from fullshard.runtime.collectives.messages import Messages, limit_of, messages_of
from fullshard.runtime.collectives.native import Native
from fullshard.runtime.collectives.once import broadcast_from_first, exchange, exchange_flags, is_same
from fullshard.runtime.collectives.postbox import exchange_posts, post
from fullshard.runtime.collectives.shm import Block, Neighbours, Shared, column_of, meet
from fullshard.runtime.device import BufferPool, Streams

__all__ = [
    "AllGather",
    "Block",
    "Call",
    "Custom",
    "CustomAllReduce",
    "Direct",
    "GatherItem",
    "Messages",
    "Pending",
    "ReduceItem",
    "ReduceScatter",
    "Shared",
    "Transport",
    "broadcast_from_first",
    "check_agreement",
    "check_comm",
    "command_tag",
    "exchange",
    "exchange_flags",
    "exchange_posts",
    "limit_of",
    "make_messages",
    "make_transport",
    "messages_of",
    "post",
    "separate_group",
    "start_gather",
    "sum_scalars",
    "translate",
]

_Remark = TypeVar("_Remark")

TRANSPORTS = ("auto", "shm", "direct", "torch")

_LOG = logging.getLogger("fullshard")


def make_transport(
    name: str, group: dist.ProcessGroup, device: torch.device, pool: BufferPool, streams: Streams
) -> Transport:
    """The transport called `name` for `group`. Every rank of the group calls it.

    "auto" is torch's collectives; but on Gloo, shared memory if ranks share a host, else direct exchange.
    """
    backend = group._get_backend(device).name()
    if name in ("shm", "direct") and backend != "gloo":
        raise ValueError(
            f"transport={name!r} needs the Gloo backend, but the group's backend for {device.type} is {backend!r}: "
            "use transport='torch' (or 'auto')"
        )
    if not _sends_messages(name, backend):
        return Native(group, device, streams)
    messages = Direct(group, device, pool)
    if name == "direct" or group.size() == 1 or device.type != "cpu":
        return messages
    return _make_shared(name, group, messages, pool)


def make_messages(
    group: dist.ProcessGroup, device: torch.device, pool: BufferPool, streams: Streams
) -> Direct | Native:
    """A transport for tensors that are not in blocks: direct exchange on Gloo, torch's collectives elsewhere."""
    is_gloo = group._get_backend(device).name() == "gloo"
    return Direct(group, device, pool) if is_gloo else Native(group, device, streams)


def _make_shared(name: str, group: dist.ProcessGroup, messages: Direct, pool: BufferPool) -> Transport:
    """Shared memory where ranks of the group share a host, else `messages`."""
    found = meet(group)
    if isinstance(found, Neighbours):
        column = None
        if len(found.hosts) > 1:
            ranks = [messages.global_ranks[rank] for rank in column_of(found, found.place)]
            # Local synchronization: ranks of other columns need not take part.
            between = dist.new_group(ranks, timeout=messages.limit, backend="gloo", use_local_synchronization=True)
            column = Direct(between, torch.device("cpu"), pool)
        return Shared(group, found, messages, column)
    if name == "shm":
        raise ValueError(
            f"transport='shm' is not possible for ranks {messages.global_ranks}: "
            f"{found or 'each of them is on a host of its own'}. Use transport='auto' or 'direct'"
        )
    if found:
        _LOG.warning("ranks %s exchange messages, not shared memory: %s", messages.global_ranks, found)
    return messages


def _sends_messages(name: str, backend: str) -> bool:
    return name in ("shm", "direct") or (name == "auto" and backend == "gloo")


def separate_group(name: str, group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup | None:
    """A second group of the same ranks, so that gathers and reductions need not wait for each other.

    Returns:
        None where transport `name` lets them pass each other anyway: shared memory, and messages, which carry tags.
    """
    if _sends_messages(name, group._get_backend(device).name()):
        return None
    # Local synchronization: ranks of other shard groups need not take part.
    ranks = dist.get_process_group_ranks(group)
    made: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)
    return made


def check_agreement(description: list[str], group: dist.ProcessGroup, remark: _Remark) -> list[_Remark]:
    """Compare a description of the model, one line an item, over the ranks of `group`.

    All of it, from every rank to every other, is more than the model itself where units and ranks are many. So it is
    exchanged only if it differs.

    Returns:
        What every rank remarked, in the order of the group; a single remark if all are the same.

    Raises:
        CommunicationError: A rank has nothing to compare within the time limit.
        RanksDisagreeError: On every rank, with the first line that differs and the ranks that differ in it.
    """
    if group.size() == 1:
        return [remark]
    what = "comparison of the model"
    if is_same((description, remark), group, what):
        return [remark]
    gathered = exchange((description, remark), group, what)
    ranks = dist.get_process_group_ranks(group)
    for rank, (theirs_all, _) in zip(ranks, gathered, strict=True):
        found = first_difference(gathered[0][0], theirs_all)
        if found is not None:
            _, theirs, mine = found
            raise RanksDisagreeError(
                f"ranks {ranks[0]} and {rank} do not train the same model. Rank {ranks[0]} has: {theirs}. Rank {rank} "
                f"has: {mine}. Build the model from the same code, configuration and seed on every rank, and shard it "
                "in the same order."
            )
    return [remark for _, remark in gathered]


def sum_scalars(values: torch.Tensor, group: dist.ProcessGroup, what: str, largest: bool = False) -> None:
    """Replace a small tensor by its sum (or maximum) over `group`, and wait for it; `what` it is, for messages."""
    if group.size() > 1:
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        work = dist.all_reduce(values, op=op, group=group, async_op=True)
        wait_for_ranks(work, group, values.device, Call(what, "(all)", 0))
