"""What an engine costs in Python: host time a block of many tiny blocks, in a world whose messages cost nothing.

The process group is torch's fake one, of 8 ranks: collectives return at once, so what is left beside the computation of
a 16 x 16 layer is hooks, scheduling and bookkeeping. Each engine runs in a process of its own, in turns.

    python benchmarks/host_time.py --rounds 5
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from _common import RESULTS_FOLDER, Spread, machine_info, save_result, table

WORLD_SIZE = 8
BLOCKS = 32
WIDTH = 16
WARM_UP_STEPS = 5
ENGINES = ("plain", "fsdp2", "fullshard")


def shard_function(engine: str) -> Callable[..., Any] | None:
    """`fully_shard` of an engine; None for the plain model."""
    if engine == "fsdp2":
        from torch.distributed.fsdp import fully_shard as of_torch

        return of_torch
    if engine == "fullshard":
        from fullshard import fully_shard

        return fully_shard
    return None


def make_model(engine: str) -> nn.Module:
    """Blocks under a root, each a unit of its own."""
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)])
    fully_shard = shard_function(engine)
    if fully_shard is not None:
        mesh = init_device_mesh("cpu", (WORLD_SIZE,))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def measure(engine: str, steps: int) -> dict[str, list[float]]:
    """Milliseconds a block of each step's forward and backward."""
    # Its module is private to torch's own tests and imports much; only the child processes need it.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("fake", rank=0, world_size=WORLD_SIZE, store=FakeStore())
    model, inputs = make_model(engine), torch.randn(2, WIDTH)
    found: dict[str, list[float]] = {"forward": [], "backward": []}
    for step in range(WARM_UP_STEPS + steps):
        started = time.perf_counter()
        output = model(inputs)
        between = time.perf_counter()
        output.sum().backward()
        ended = time.perf_counter()
        model.zero_grad()
        if step >= WARM_UP_STEPS:
            found["forward"].append((between - started) * 1e3 / BLOCKS)
            found["backward"].append((ended - between) * 1e3 / BLOCKS)
    dist.destroy_process_group()
    return found


def run_rounds(engines: list[str], rounds: int, steps: int) -> dict[str, dict[str, list[float]]]:
    """Every engine in turn, a new process each time, so that no engine has the warmer machine."""
    found: dict[str, dict[str, list[float]]] = {engine: {"forward": [], "backward": []} for engine in engines}
    for number in range(rounds):
        turn = number % len(engines)
        for engine in engines[turn:] + engines[:turn]:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                milliseconds = pool.apply(measure, (engine, steps))
            for stage, values in milliseconds.items():
                found[engine][stage].append(statistics.median(values))
        print(f"  round {number + 1} of {rounds} done", flush=True)
    return found


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default=",".join(ENGINES), help="comma-separated")
    parser.add_argument("--rounds", type=int, default=5, help="how often each engine has its turn")
    parser.add_argument("--steps", type=int, default=30, help="measured steps a turn")
    parser.add_argument("--out", type=Path, default=RESULTS_FOLDER, help="folder for the JSON file")
    arguments = parser.parse_args()
    found = run_rounds(arguments.engines.split(","), arguments.rounds, arguments.steps)
    spreads = {
        engine: {k: asdict(Spread.of(values)) for k, values in stages.items()} for engine, stages in found.items()
    }
    result = {
        "machine": machine_info(),
        "blocks": BLOCKS,
        "world_size": WORLD_SIZE,
        "steps": arguments.steps,
        "rounds": arguments.rounds,
        "round_milliseconds_per_block": found,
        "milliseconds_per_block": spreads,
    }
    rows = [
        [engine, *(f"{stages[k]['median']:.3f}" for k in ("forward", "backward"))] for engine, stages in spreads.items()
    ]
    print(result["machine"])
    print(table(["engine", "forward ms/block", "backward ms/block"], rows))
    print(f"saved {save_result('host_time', result, arguments.out)}")


if __name__ == "__main__":
    main()
