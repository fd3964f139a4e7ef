"""What many units and many ranks cost: sharding a deep model, its first step, and planning where parameters lie.

Models are 1000 blocks of one 16 x 16 linear layer in a world of 1024 ranks, under torch's fake process group, whose
messages cost nothing. Each engine runs in a process of its own, in turns. Layouts are planned for 100 000 parameters,
once as one unit and once as units of 100.

    python benchmarks/scale.py --rounds 3
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from dataclasses import asdict
from pathlib import Path

import torch

from _common import RESULTS_FOLDER, Spread, machine_info, save_result, table
from fullshard.core.layout import plan_layout
from fullshard.core.spec import ParamSpec
from host_time import WIDTH, join_fake_world, make_model, shard

ENGINES = ("fsdp2", "fullshard")
STAGES = ("fully_shard", "first forward", "first backward", "second forward", "second backward")
PARAMETERS = 100_000
UNIT_PARAMETERS = 100


def measure(engine: str, units: int, world_size: int) -> dict[str, float]:
    """Seconds of the thread's processor time for each stage."""
    join_fake_world(world_size)
    inputs = torch.randn(2, WIDTH)
    warm_up = make_model(2)  # imports, and what is made once a process
    shard(warm_up, engine, world_size)
    warm_up(inputs).sum().backward()
    model = make_model(units)
    moments = [time.thread_time()]
    shard(model, engine, world_size)
    moments.append(time.thread_time())
    for _ in range(2):
        output = model(inputs)
        moments.append(time.thread_time())
        output.sum().backward()
        moments.append(time.thread_time())
    return {stage: after - before for stage, before, after in zip(STAGES, moments[:-1], moments[1:], strict=True)}


def plan_many(world_size: int) -> dict[str, float]:
    """Seconds to plan layouts of `PARAMETERS` parameters."""
    specs = [ParamSpec(f"layers.{i}.weight", (64, 64), "float32", 4, trainable=i % 50 != 0) for i in range(PARAMETERS)]
    found = {}
    for what, size in (("one unit", PARAMETERS), (f"units of {UNIT_PARAMETERS}", UNIT_PARAMETERS)):
        started = time.thread_time()
        for begin in range(0, PARAMETERS, size):
            unit = specs[begin : begin + size]
            layout = plan_layout(unit, world_size)
            trainable = [spec.trainable for spec in unit]
            layout.gradient_numel(trainable)
            list(layout.gaps(0, trainable))
        found[what] = time.thread_time() - started
    return found


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=1000, help="blocks of the model")
    parser.add_argument("--world-size", type=int, default=1024, help="ranks of the fake process group")
    parser.add_argument("--rounds", type=int, default=3, help="how often each engine has its turn")
    parser.add_argument("--out", type=Path, default=RESULTS_FOLDER, help="folder for the JSON file")
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {engine: [] for engine in ENGINES}
    planned: list[dict[str, float]] = []
    for number in range(arguments.rounds):
        for engine in ENGINES[:: -1 if number % 2 else 1]:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                found[engine].append(pool.apply(measure, (engine, arguments.units, arguments.world_size)))
        planned.append(plan_many(arguments.world_size))
        print(f"  round {number + 1} of {arguments.rounds} done", flush=True)
    seconds = {
        engine: {stage: asdict(Spread.of([turn[stage] for turn in turns])) for stage in STAGES}
        for engine, turns in found.items()
    }
    planning = {what: asdict(Spread.of([turn[what] for turn in planned])) for what in planned[0]}
    result = {
        "machine": machine_info(),
        "units": arguments.units,
        "world_size": arguments.world_size,
        "rounds": arguments.rounds,
        "seconds": seconds,
        "planned_parameters": PARAMETERS,
        "planning_seconds": planning,
    }
    rows = [[engine, *(f"{stages[stage]['median']:.3f}" for stage in STAGES)] for engine, stages in seconds.items()]
    ratio = [seconds["fullshard"][stage]["median"] / seconds["fsdp2"][stage]["median"] for stage in STAGES]
    print(result["machine"])
    print(table(["seconds", *STAGES], [*rows, ["fullshard / FSDP2", *(f"{value:.2f}" for value in ratio)]]))
    for what, spread in planning.items():
        print(f"planning {PARAMETERS} parameters in {what}: {spread['median']:.3f} s")
    print(f"saved {save_result('scale', result, arguments.out)}")


if __name__ == "__main__":
    main()
