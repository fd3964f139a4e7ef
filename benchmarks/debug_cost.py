"""What debug mode costs: the first step and later ones, with and without a comparison before every command.

Each measurement has processes of its own, because a first step can be measured only once in a process.

    python benchmarks/debug_cost.py --workload a --rounds 7
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from _common import RESULTS_FOLDER, Spread, machine_info, save_result, table
from engines import Training
from ranks import RankGroup
from tasks import Handler
from workloads import WORKLOADS, Workload

STEADY_STEPS = 5


def make_handler(rank: int, workload: str, debug: bool) -> Handler:
    """A rank that trains a few steps when asked, and tells the seconds of each."""
    os.environ["FULLSHARD_DEBUG"] = "1" if debug else "0"
    training = Training("fullshard", WORKLOADS[workload], rank)

    def run(_command: str) -> list[float]:
        seconds = []
        for _ in range(1 + STEADY_STEPS):
            dist.barrier()
            started = time.perf_counter()
            training.step()
            seconds.append(time.perf_counter() - started)
        return seconds

    return run


def measure(workload: Workload, debug: bool) -> dict[str, float]:
    """Seconds of the first step, and the median of later ones, of the slowest rank."""
    group = RankGroup(workload.world_size, "debug_cost:make_handler", {"workload": workload.name, "debug": debug})
    try:
        steps = [max(step) for step in zip(*group.send("run"), strict=True)]
    finally:
        group.close()
    return {"first": steps[0], "steady": statistics.median(steps[1:])}


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="a", choices=sorted(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=7, help="how often each of the two has its turn")
    parser.add_argument("--out", type=Path, default=RESULTS_FOLDER, help="folder for the JSON file")
    arguments = parser.parse_args()
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for number in range(arguments.rounds):
        for debug in (False, True) if number % 2 else (True, False):
            found[debug].append(measure(WORKLOADS[arguments.workload], debug))
    result: dict[str, Any] = {"machine": machine_info(), "workload": asdict(WORKLOADS[arguments.workload])}
    rows = []
    for which in ("first", "steady"):
        plain, debugged = ([step[which] for step in found[debug]] for debug in (False, True))
        ratio = Spread.of([mine / theirs for mine, theirs in zip(debugged, plain, strict=True)])
        result[which] = {"plain_seconds": plain, "debug_seconds": debugged, "ratio": asdict(ratio)}
        spread = f"{ratio.low:.3f}-{ratio.high:.3f}"
        medians = [f"{statistics.median(values):.3f}" for values in (plain, debugged)]
        rows.append([which, *medians, f"{ratio.median:.3f}", spread])
    print(result["machine"])
    print(table(["step", "plain s", "debug s", "ratio", "middle half"], rows))
    print(f"saved {save_result('debug_cost', result, arguments.out)}")


if __name__ == "__main__":
    main()
