"""What an engine costs in Python: host time a block of many tiny blocks, in a world whose messages cost nothing.

The process group is torch's fake one: collectives return at once, so what is left beside the computation of a 16 x 16
layer is hooks, scheduling and bookkeeping. All of it happens in one thread, and that thread's processor time is
measured, so that other work on the machine disturbs less. Each engine runs in a process of its own, in turns. Ratios
are those of what comes on top of the plain model, per round. The fake group's own collectives are measured beside: they
cost the host something for every rank, in a world of 1024 ranks more than all else, and the same in every engine.

    python benchmarks/host_time.py --rounds 5 --world-size 8
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

BLOCKS = 32
WIDTH = 16
WARM_UP_STEPS = 5
ENGINES = ("plain", "fsdp2", "fullshard")
MESSAGES = "messages"  # in the place of an engine: the collectives of one block alone


def shard_function(engine: str) -> Callable[..., Any] | None:
    """`fully_shard` of an engine; None for the plain model."""
    if engine == "fsdp2":
        from torch.distributed.fsdp import fully_shard as of_torch

        return of_torch
    if engine == "fullshard":
        from fullshard import fully_shard

        return fully_shard
    return None


def make_model(blocks: int) -> nn.Sequential:
    """Blocks under a root."""
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(blocks)])


def shard(model: nn.Sequential, engine: str, world_size: int) -> None:
    """Make every block, and the root, a unit of its own."""
    fully_shard = shard_function(engine)
    if fully_shard is not None:
        mesh = init_device_mesh("cpu", (world_size,))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)


def join_fake_world(world_size: int) -> None:
    """Make this process rank 0 of a world in which messages cost nothing."""
    # Its module is private to torch's own tests and imports much; only the child processes need it.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())


def measure_messages(steps: int, world_size: int) -> dict[str, list[float]]:
    """Milliseconds of the fake collectives of a block: a gather in forward, a gather and a reduction in backward."""
    numel = (WIDTH * WIDTH + WIDTH) // min(WIDTH, world_size)
    own, whole = torch.zeros(numel), torch.zeros(numel * world_size)
    found: dict[str, list[float]] = {"forward": [], "backward": []}
    for _ in range(WARM_UP_STEPS + steps):
        moments = [time.thread_time()]
        for _ in range(BLOCKS):
            dist.all_gather_single(whole, own, async_op=True).wait()
        moments.append(time.thread_time())
        for _ in range(BLOCKS):
            dist.reduce_scatter_single(own, whole, async_op=True).wait()
        moments.append(time.thread_time())
        gather, reduce = (1e3 / BLOCKS * (moments[i + 1] - moments[i]) for i in (0, 1))
        found["forward"].append(gather)
        found["backward"].append(gather + reduce)
    return found


def measure(engine: str, steps: int, world_size: int) -> dict[str, list[float]]:
    """Milliseconds a block of each step's forward and backward."""
    join_fake_world(world_size)
    if engine == MESSAGES:
        return measure_messages(steps, world_size)
    model, inputs = make_model(BLOCKS), torch.randn(2, WIDTH)
    shard(model, engine, world_size)
    found: dict[str, list[float]] = {"forward": [], "backward": []}
    for step in range(WARM_UP_STEPS + steps):
        started = time.thread_time()
        output = model(inputs)
        between = time.thread_time()
        output.sum().backward()
        ended = time.thread_time()
        model.zero_grad()
        if step >= WARM_UP_STEPS:
            found["forward"].append((between - started) * 1e3 / BLOCKS)
            found["backward"].append((ended - between) * 1e3 / BLOCKS)
    dist.destroy_process_group()
    return found


def run_rounds(engines: list[str], rounds: int, steps: int, world_size: int) -> dict[str, dict[str, list[float]]]:
    """Every engine in turn, a new process each time, so that no engine has the warmer machine."""
    found: dict[str, dict[str, list[float]]] = {engine: {"forward": [], "backward": []} for engine in engines}
    for number in range(rounds):
        turn = number % len(engines)
        for engine in engines[turn:] + engines[:turn]:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                milliseconds = pool.apply(measure, (engine, steps, world_size))
            for stage, values in milliseconds.items():
                found[engine][stage].append(statistics.median(values))
        print(f"  round {number + 1} of {rounds} done", flush=True)
    return found


def ratios(found: dict[str, dict[str, list[float]]], without: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Time of fullshard / that of FSDP2, both less that of `without`: spread over rounds, by stage."""
    if not {"fsdp2", "fullshard", *without} <= set(found):
        return {}

    def extra(engine: str, stage: str) -> list[float]:
        others = zip(*(found[each][stage] for each in without), strict=True)
        return [value - sum(less) for value, less in zip(found[engine][stage], others, strict=True)]

    return {
        stage: asdict(Spread.of([a / b for a, b in zip(extra("fullshard", stage), extra("fsdp2", stage), strict=True)]))
        for stage in ("forward", "backward")
    }


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default=",".join((*ENGINES, MESSAGES)), help="comma-separated")
    parser.add_argument("--rounds", type=int, default=5, help="how often each engine has its turn")
    parser.add_argument("--steps", type=int, default=30, help="measured steps a turn")
    parser.add_argument("--world-size", type=int, default=8, help="ranks of the fake process group")
    parser.add_argument("--out", type=Path, default=RESULTS_FOLDER, help="folder for the JSON file")
    arguments = parser.parse_args()
    found = run_rounds(arguments.engines.split(","), arguments.rounds, arguments.steps, arguments.world_size)
    spreads = {
        engine: {k: asdict(Spread.of(values)) for k, values in stages.items()} for engine, stages in found.items()
    }
    result = {
        "machine": machine_info(),
        "blocks": BLOCKS,
        "world_size": arguments.world_size,
        "steps": arguments.steps,
        "rounds": arguments.rounds,
        "round_milliseconds_per_block": found,
        "milliseconds_per_block": spreads,
        "above_plain_of_fsdp2": ratios(found, ("plain",)),
        "above_plain_and_messages_of_fsdp2": ratios(found, ("plain", MESSAGES)),
    }
    rows = [
        [engine, *(f"{stages[k]['median']:.3f}" for k in ("forward", "backward"))] for engine, stages in spreads.items()
    ]
    print(result["machine"])
    print(table(["engine", "forward ms/block", "backward ms/block"], rows))
    for what in ("above_plain_of_fsdp2", "above_plain_and_messages_of_fsdp2"):
        for stage, spread in result[what].items():
            middle = f"middle half {spread['low']:.2f}-{spread['high']:.2f}"
            print(f"{stage}, {what.replace('_', ' ')}: {spread['median']:.2f}, {middle}")
    print(f"saved {save_result('host_time', result, arguments.out)}")


if __name__ == "__main__":
    main()
