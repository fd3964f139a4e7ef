"""What the rank processes do for `step_time.py`; runs in the peers' environment, too."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

import probes
from engines import Training
from workloads import WORKLOADS

WARM_UP_STEPS = 2  # the first makes the optimizer's state, the second sees the engine's recorded order
MEMORY_STEPS = 2

Handler = Callable[[Any], Any]
"""What a rank does with a command."""


def _warm(engine: str, workload: str, rank: int) -> Training:
    training = Training(engine, WORKLOADS[workload], rank)
    for _ in range(WARM_UP_STEPS):
        training.step()
    return training


def make_timing(rank: int, engine: str, workload: str, steps: int) -> Handler:
    """A rank that runs a block of steps when asked."""
    training = _warm(engine, workload, rank)

    def run_block(_command: Any) -> dict[str, Any]:
        loss = training.step()  # wakes caches and threads up, not counted
        probes.reset_resident_peak()
        dist.barrier()
        before_bytes = probes.received_bytes()
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            loss = training.step()
            seconds.append(time.perf_counter() - start)
        wire_bytes = (probes.received_bytes() - before_bytes) / steps
        resident_bytes = probes.resident_peak_bytes()
        return {"seconds": seconds, "wire_bytes": wire_bytes, "resident_bytes": resident_bytes, "loss": loss}

    return run_block


def make_memory(rank: int, engine: str, workload: str) -> Handler:
    """A rank that measures its memory when asked, once; "forward" as the command: that of a forward alone."""

    def measured(training: Training) -> None:
        for _ in range(MEMORY_STEPS):
            training.step()

    def forward(training: Training) -> None:
        training.job.loss(*training.batch())

    def measure(command: Any) -> dict[str, int]:
        act = forward if command == "forward" else measured
        memory = asdict(probes.tensor_memory(lambda: _warm(engine, workload, rank), act))
        # After the steps, when every part of it that is ever used has been touched.
        return {**memory, "shared_bytes": probes.shared_memory_bytes()}

    return measure
