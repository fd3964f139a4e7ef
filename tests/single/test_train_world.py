"""Joining the ranks: the time limits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from fullshard.errors import PeerTimeoutError
from fullshard.train.config import Config, RuntimeConfig
from fullshard.train.rendezvous import fresh_name
from fullshard.train.world import Place, joined


def test_waiting_for_files_has_a_limit_of_its_own() -> None:
    runtime = RuntimeConfig(device="cpu", threads=1, timeout_seconds=7.0, prepare_timeout_seconds=300.0)
    threads = torch.get_num_threads()
    with joined(Config(runtime=runtime), Place()) as world:
        assert world.control is not None
        options = world.control._get_backend(torch.device("cpu")).options
        assert options._timeout == timedelta(seconds=300)
        assert world.on_first(lambda: "done") == "done"
    torch.set_num_threads(threads)


def test_restarted_ranks_never_meet_under_the_name_of_dead_ones() -> None:
    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        names = []
        for _ in range(3):  # all are restarted, with what is left of those before in the store
            found = {future.result() for future in [pool.submit(fresh_name, store, rank, 3, 20.0) for rank in range(3)]}
            assert len(found) == 1
            names += found
    assert len(set(names)) == 3


def test_a_rank_that_does_not_come_to_the_rendezvous_is_named() -> None:
    with pytest.raises(PeerTimeoutError, match=r"rank\(s\) \[1, 2\] did not come to the rendezvous within 0 s"):
        fresh_name(HashStore(), 0, 3, 0.0)
    with pytest.raises(PeerTimeoutError, match=r"rank\(s\) \[0\] did not come"):
        fresh_name(HashStore(), 1, 3, 0.0)
