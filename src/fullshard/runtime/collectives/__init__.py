"""Transports, picked by what connects the ranks. The only folder that calls collectives."""

from __future__ import annotations

import json

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
    time_limit,
    translate,
)
from fullshard.runtime.collectives.direct import Direct
from fullshard.runtime.collectives.native import Native
from fullshard.runtime.collectives.once import broadcast_from_first, exchange
from fullshard.runtime.device import BufferPool, Streams

__all__ = [
    "Call",
    "Direct",
    "GatherItem",
    "Pending",
    "ReduceItem",
    "Transport",
    "broadcast_from_first",
    "check_agreement",
    "command_tag",
    "exchange",
    "make_transport",
    "sum_scalars",
    "translate",
]

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
    if name == "auto":
        name = "direct" if backend == "gloo" else "torch"
    return Direct(group, device, pool) if name == "direct" else Native(group, device, streams)


def check_agreement(description: list[str], group: dist.ProcessGroup) -> None:
    """Compare a description of the model, one line an item, over the ranks of `group`.

    Raises:
        RanksDisagreeError: On every rank, with the first line that differs and the ranks that differ in it.
    """
    if group.size() == 1:
        return
    gathered: list[str] = [""] * group.size()
    dist.all_gather_object(gathered, json.dumps(description), group=group)
    ranks = dist.get_process_group_ranks(group)
    reference = json.loads(gathered[0])
    for rank, text in zip(ranks, gathered, strict=True):
        found = first_difference(reference, json.loads(text))
        if found is not None:
            _, theirs, mine = found
            raise RanksDisagreeError(
                f"ranks {ranks[0]} and {rank} do not train the same model. Rank {ranks[0]} has: {theirs}. Rank {rank} "
                f"has: {mine}. Build the model from the same code, configuration and seed on every rank, and shard it "
                "in the same order."
            )


def sum_scalars(values: torch.Tensor, group: dist.ProcessGroup, largest: bool = False) -> None:
    """Replace a small tensor by its sum (or maximum) over `group`, and wait for it."""
    if group.size() > 1:
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        limit = time_limit(group._get_backend(values.device))
        work = dist.all_reduce(values, op=op, group=group, async_op=True)
        try:
            work.wait(limit)
        except RuntimeError as error:
            where = f"rank {dist.get_rank()} waited for ranks {dist.get_process_group_ranks(group)}"
            call = Call("sum of norms", "(all)", 0)
            raise translate(error, call, where, limit.total_seconds()) from error
