"""Small objects between ranks, beside the training: of any size, and connections that one rank alone asks for."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from cluster import Cluster
from fullshard.runtime.collectives import Call, messages_of
from fullshard.runtime.collectives.messages import _INSIDE_BYTES

LIMIT = timedelta(seconds=20)


def check_sizes(rank: int) -> None:
    messages = messages_of((0, 1), Call("test", "", 0), LIMIT)
    assert messages_of((0, 1), Call("test", "", 0), LIMIT) is messages
    around = range(_INSIDE_BYTES - 60, _INSIDE_BYTES + 8)  # a string of so many characters, and what pickling adds
    for size in (0, 1, *around, 5 * _INSIDE_BYTES):
        mine = [str(rank) * size, "x"][:: 1 if rank else -1]  # also where only one rank has more than fits
        values = messages.exchange((mine, size if rank else None), Call("test", "", 0), LIMIT)
        assert values == [(["x", "0" * size], None), (["1" * size, "x"], size)]
    large = messages.exchange("y" * 100_000 if rank else "", Call("test", "", 0), LIMIT)
    assert large == ["", "y" * 100_000]
    dist.barrier()


def test_messages_of_any_size_arrive(cluster: Cluster) -> None:
    cluster.run(check_sizes, world_size=2)
