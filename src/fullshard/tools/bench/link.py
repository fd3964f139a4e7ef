"""What it costs to gather and to reduce the parameters of a unit, by size and transport.

A gather is what `unshard` does: this rank writes its rows and the ranks exchange them. A reduce is the command of the
engine after backward: from a gradient of full size on every rank to this rank's rows of the sum.
"""

from __future__ import annotations

import torch
from torch import nn

from fullshard.core.calibration import LinkTime
from fullshard.runtime.api import fully_shard
from fullshard.runtime.collectives import TRANSPORTS, Call, ReduceItem, make_transport
from fullshard.runtime.device import BufferPool, make_streams
from fullshard.runtime.module import FSDPModule
from fullshard.tools.bench.timing import Ranks

_COLUMNS = 256
_ELEMENT_BYTES = 4


def measure_links(sizes: tuple[int, ...], ranks: Ranks) -> tuple[tuple[LinkTime, ...], tuple[str, ...]]:
    """Every transport that these ranks can use, and notes on the others."""
    if ranks.size == 1:
        return (), ("one rank: there is no link to measure",)
    found: list[LinkTime] = []
    notes: list[str] = []
    for transport in TRANSPORTS:
        if transport == "auto":  # one of the others
            continue
        try:
            found += _measure(transport, sizes, ranks)
        except ValueError as error:  # not between these ranks; all of them are told
            notes.append(str(error))
    return tuple(found), tuple(notes)


def _measure(transport: str, sizes: tuple[int, ...], ranks: Ranks) -> list[LinkTime]:
    found = []
    for nbytes in sizes:
        rows = max(ranks.size, nbytes // (_COLUMNS * _ELEMENT_BYTES))
        full_bytes = rows * _COLUMNS * _ELEMENT_BYTES
        for operation, seconds in (
            ("gather", _gather_seconds(transport, rows, ranks)),
            ("reduce", _reduce_seconds(transport, rows, ranks)),
        ):
            found.append(LinkTime(transport, operation, full_bytes, seconds))
    return found


def _gather_seconds(transport: str, rows: int, ranks: Ranks) -> float:
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(rows, _COLUMNS, device=ranks.device))
    fully_shard(module, transport=transport)
    assert isinstance(module, FSDPModule)

    def gather() -> None:
        module.unshard()
        module.reshard()

    return ranks.time(gather)


def _reduce_seconds(transport: str, rows: int, ranks: Ranks) -> float:
    group, device = ranks.group, ranks.device
    numel, chunk = rows * _COLUMNS, -(-rows // ranks.size) * _COLUMNS
    mine = range(numel)[group.rank() * chunk : (group.rank() + 1) * chunk]
    gradient = torch.ones(numel, device=device)
    item = ReduceItem("weight", gradient, chunk, torch.empty(len(mine), device=device))
    pool = BufferPool(device, 2 * numel * _ELEMENT_BYTES)
    moves = make_transport(transport, group, device, pool, make_streams(device))

    def reduce() -> None:
        pending = moves.reduce([item], Call("reduce", "(bench)", 0))
        pending.wait()
        pending.finish()

    return ranks.time(reduce)
