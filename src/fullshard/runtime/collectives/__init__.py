"""Transports, picked by what connects the ranks. The only folder that calls collectives."""

from __future__ import annotations

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
    translate,
    wait_for_ranks,
)
from fullshard.runtime.collectives.custom import AllGather, Custom, CustomAllReduce, ReduceScatter, check_comm
from fullshard.runtime.collectives.direct import Direct
from fullshard.runtime.collectives.native import Native
from fullshard.runtime.collectives.once import broadcast_from_first, exchange, exchange_flags
from fullshard.runtime.collectives.postbox import exchange_posts, post
from fullshard.runtime.device import BufferPool, Streams

__all__ = [
    "AllGather",
    "Call",
    "Custom",
    "CustomAllReduce",
    "Direct",
    "GatherItem",
    "Pending",
    "ReduceItem",
    "ReduceScatter",
    "Transport",
    "broadcast_from_first",
    "check_agreement",
    "check_comm",
    "command_tag",
    "exchange",
    "exchange_flags",
    "exchange_posts",
    "make_transport",
    "post",
    "separate_group",
    "sum_scalars",
    "translate",
]

_Remark = TypeVar("_Remark")

TRANSPORTS = ("auto", "direct", "torch")


def make_transport(
    name: str, group: dist.ProcessGroup, device: torch.device, pool: BufferPool, streams: Streams
) -> Transport:
    """The transport called `name` for `group`; "auto" is direct on Gloo and torch's collectives elsewhere."""
    backend = group._get_backend(device).name()
    if name == "direct" and backend != "gloo":
        raise ValueError(
            f"transport='direct' needs the Gloo backend, but the group's backend for {device.type} is {backend!r}: "
            "use transport='torch' (or 'auto')"
        )
    return Direct(group, device, pool) if _is_direct(name, backend) else Native(group, device, streams)


def _is_direct(name: str, backend: str) -> bool:
    return name == "direct" or (name == "auto" and backend == "gloo")


def separate_group(name: str, group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup | None:
    """A second group of the same ranks, so that gathers and reductions need not wait for each other.

    Returns:
        None where transport `name` lets them pass each other anyway: direct exchange, whose messages carry tags.
    """
    if _is_direct(name, group._get_backend(device).name()):
        return None
    # Local synchronization: ranks of other shard groups need not take part.
    ranks = dist.get_process_group_ranks(group)
    made: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)
    return made


def check_agreement(description: list[str], group: dist.ProcessGroup, remark: _Remark) -> list[_Remark]:
    """Compare a description of the model, one line an item, over the ranks of `group`.

    Returns:
        What every rank remarked, in the order of the group; it travels in the same exchange.

    Raises:
        CommunicationError: A rank has nothing to compare within the time limit.
        RanksDisagreeError: On every rank, with the first line that differs and the ranks that differ in it.
    """
    if group.size() == 1:
        return [remark]
    gathered = exchange((description, remark), group, "comparison of the model")
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
