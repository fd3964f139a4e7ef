"""Step time, tensor memory and bytes on the wire of fullshard against torch's engines and the plain model, in one run.

    python benchmarks/step_time.py --workload a,b

Time: every engine has its own rank processes, all alive from the start. Round after round each engine in turn runs a
few steps while the others sleep on a pipe; the order turns by one place each round. So a busy or throttled machine hits
all engines alike, no engine disturbs another's allocator, and ratios are taken within a round, then their median.

Wire: bytes each rank received per step, counted by the kernel on that process's own sockets, in the same steps.

Memory: "peak" and "rest" are tensor bytes of the fullest rank during and between steps, measured afterwards in fresh
processes because logging slows; see probes.tensor_memory. "RSS" is the most physical memory a rank had in the timed
steps; Python and torch themselves are about 250 MiB of it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

import probes
from _common import RESULTS_FOLDER, Handler, RankGroup, Spread, machine_info, save_result, table
from engines import ENGINES, WORKLOADS, Training, Workload, missing_reason, world_size_of

MIB = 1024**2
WARM_UP_STEPS = 2  # the first makes the optimizer's state, the second sees the engine's recorded order
MEMORY_STEPS = 2
COMPARED_WITH = ("fsdp2", "ddp")


# -- in the ranks ------------------------------------------------------------------------------------------------------


def make_timing_handler(rank: int, engine: str, workload: Workload, steps: int) -> Handler:
    """A rank that runs a block of steps when asked."""
    training = Training(engine, workload, rank)
    for _ in range(WARM_UP_STEPS):
        training.step()

    def run_block(_command: str) -> dict[str, Any]:
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


def make_memory_handler(rank: int, engine: str, workload: Workload) -> Handler:
    """A rank that measures its memory when asked, once."""

    def prepare() -> Training:
        training = Training(engine, workload, rank)
        for _ in range(WARM_UP_STEPS):
            training.step()
        return training

    def measured(training: Training) -> None:
        for _ in range(MEMORY_STEPS):
            training.step()

    return lambda _command: asdict(probes.tensor_memory(prepare, measured))


# -- in the parent -----------------------------------------------------------------------------------------------------


def measure_time(workload: Workload, engines: list[str], rounds: int, steps: int) -> dict[str, dict[str, Any]]:
    """Seconds per step of each round, wire bytes per step and rank, and the last loss, by engine."""
    groups: dict[str, RankGroup] = {}
    found: dict[str, dict[str, Any]] = {engine: {"round_seconds": [], "step_seconds": []} for engine in engines}
    try:
        for engine in engines:
            groups[engine] = RankGroup(world_size_of(engine, workload), make_timing_handler, engine, workload, steps)
        for number in range(rounds):
            turn = number % len(engines)
            for engine in engines[turn:] + engines[:turn]:
                ranks = groups[engine].send("block")
                # A step is over when its slowest rank is done.
                seconds = [max(step) for step in zip(*(rank["seconds"] for rank in ranks), strict=True)]
                found[engine]["step_seconds"] += seconds
                found[engine]["round_seconds"].append(statistics.median(seconds))
                found[engine]["wire_bytes_per_step"] = max(rank["wire_bytes"] for rank in ranks)
                found[engine]["resident_peak_bytes"] = max(rank["resident_bytes"] for rank in ranks)
                found[engine]["mean_loss"] = statistics.fmean(rank["loss"] for rank in ranks)
            print(f"  round {number + 1} of {rounds} done", flush=True)
    finally:
        for group in groups.values():
            group.close()
    return found


def measure_memory(workload: Workload, engine: str) -> dict[str, int]:
    """The largest of each number of probes.TensorMemory over the ranks, in bytes."""
    group = RankGroup(world_size_of(engine, workload), make_memory_handler, engine, workload)
    try:
        ranks = group.send("measure")
    finally:
        group.close()
    return {key: max(rank[key] for rank in ranks) for key in ranks[0]}


def add_statistics(found: dict[str, dict[str, Any]]) -> None:
    """Add spreads and the ratios within rounds to what `measure_time` found."""
    for values in found.values():
        values["seconds"] = asdict(Spread.of(values["step_seconds"]))
        for other in COMPARED_WITH:
            if other in found:
                pairs = zip(values["round_seconds"], found[other]["round_seconds"], strict=True)
                values[f"time_over_{other}"] = asdict(Spread.of([mine / theirs for mine, theirs in pairs]))


def render(workload: Workload, found: dict[str, dict[str, Any]]) -> str:
    """The table of one workload."""
    reference_bytes = found.get("fsdp2", {}).get("memory", {}).get("peak_bytes")
    rows = [{"engine": engine, **_cells(values, reference_bytes)} for engine, values in found.items()]
    title = f"workload {workload.name}: {workload}"
    return title + "\n" + table(list(rows[0]), [list(row.values()) for row in rows])


def _cells(values: dict[str, Any], reference_bytes: int | None) -> dict[str, str]:
    """One line of the table; `reference_bytes` is the memory peak of fsdp2."""
    seconds, memory = values["seconds"], values.get("memory")
    over_fsdp2, over_ddp = values.get("time_over_fsdp2"), values.get("time_over_ddp")
    return {
        "step s": f"{seconds['median']:.3f}",
        "middle half": f"{seconds['low']:.3f}-{seconds['high']:.3f}",
        "/ fsdp2": f"{over_fsdp2['median']:.2f}" if over_fsdp2 else "-",
        "its middle half": f"{over_fsdp2['low']:.2f}-{over_fsdp2['high']:.2f}" if over_fsdp2 else "-",
        "/ ddp": f"{over_ddp['median']:.2f}" if over_ddp else "-",
        "peak MiB": f"{memory['peak_bytes'] / MIB:.1f}" if memory else "-",
        "peak / fsdp2": f"{memory['peak_bytes'] / reference_bytes:.2f}" if memory and reference_bytes else "-",
        "rest MiB": f"{memory['between_steps_bytes'] / MIB:.1f}" if memory else "-",
        "RSS MiB": f"{values['resident_peak_bytes'] / MIB:.0f}",
        "wire MiB": f"{values['wire_bytes_per_step'] / MIB:.1f}",
    }


def losses_agree(found: dict[str, dict[str, Any]]) -> bool:
    """Whether the engines trained the same model: same weights, same data, the same loss after the same steps."""
    losses = [values["mean_loss"] for engine, values in found.items() if engine != "plain"]
    return max(losses, default=0.0) - min(losses, default=0.0) <= 1e-3 * max(losses, default=0.0)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="a", help=f"comma-separated, of {','.join(WORKLOADS)}")
    parser.add_argument("--engines", default=",".join(ENGINES), help="comma-separated")
    parser.add_argument("--rounds", type=int, default=7, help="how often each engine has its turn")
    parser.add_argument("--steps", type=int, default=5, help="measured steps a turn")
    parser.add_argument("--skip-memory", action="store_true", help="leave the memory pass out")
    parser.add_argument("--out", type=Path, default=RESULTS_FOLDER, help="folder for the JSON file")
    return parser.parse_args()


def main() -> None:
    """Measure, print, save."""
    arguments = parse_arguments()
    engines = []
    for engine in arguments.engines.split(","):
        if reason := missing_reason(engine):
            print(f"skipping {engine}: {reason}")
        else:
            engines.append(engine)
    result: dict[str, Any] = {"machine": machine_info(), "rounds": arguments.rounds, "steps": arguments.steps}
    print(result["machine"])
    for name in arguments.workload.split(","):
        workload = WORKLOADS[name]
        print(f"workload {name}: {', '.join(engines)}", flush=True)
        found = measure_time(workload, engines, arguments.rounds, arguments.steps)
        add_statistics(found)
        if not arguments.skip_memory:
            for engine in engines:
                found[engine]["memory"] = measure_memory(workload, engine)
        result[name] = {"workload": asdict(workload), "engines": found, "losses_agree": losses_agree(found)}
        print(render(workload, found))
        print(
            "losses agree" if losses_agree(found) else "LOSSES DIFFER: the engines do not train the same model",
            flush=True,
        )
    print(f"saved {save_result('step_time', result, arguments.out)}")


if __name__ == "__main__":
    main()
