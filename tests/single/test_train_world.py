"""Joining the ranks: the time limits."""

from __future__ import annotations

from datetime import timedelta

import torch

from fullshard.train.config import Config, RuntimeConfig
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
