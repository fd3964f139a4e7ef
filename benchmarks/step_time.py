"""Step time, tensor memory and bytes on the wire of fullshard, of its peers, and of plain computing, in one run.

    python benchmarks/step_time.py                        # workload a, every engine
    python benchmarks/step_time.py --workload a,b,c,d,e,h --rounds 5 --steps 3
    sudo python benchmarks/step_time.py --workload i1,i4  # two hosts: network namespaces, which need root
    python benchmarks/step_time.py --list

Engines: torch's FSDP2, FSDP1 and DDP; DeepSpeed's ZeRO-1, -2 and -3 and Megatron-FSDP in a virtual environment that
the script makes (`peers.py`); fullshard over each of its transports ("fullshard" alone picks by itself); "plain", one
process with the whole model; "compute", as many plain processes as ranks, which compute at once and update 1/N each but
never wait for one another: a step whose communication is free. One that cannot run is named, with the reason.

Time: every engine has its own rank processes. Round after round each engine in turn runs a few steps while the others
sleep on a pipe; the order turns by one place each round. So a busy or throttled machine hits all engines alike, no
engine disturbs another's allocator, and ratios are taken within a round, then their median. Where the engines do not
fit into memory side by side, the last ones of the list have new processes for each turn.

Wire: bytes each rank received per step, counted by the kernel on that process's own sockets, in the same steps.

Memory: "peak" is tensor bytes of the fullest rank during steps, measured afterwards in new processes because logging
slows; see `probes.tensor_memory`. Memory that ranks share is not in torch's log: each rank's part of it, as the kernel
counts it, is added. "ideal" is the formula of `workloads.ideal_peak_bytes`. "RSS" is the most physical memory that a
rank had in the timed steps; Python and torch themselves are about 250 MiB of it.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

import hosts
import peers
from _common import RESULTS_FOLDER, Spread, machine_info, save_result
from engines import ENGINES, world_size_of
from ranks import RankError, RankGroup, Where
from report import print_workload
from workloads import WORKLOADS, Workload, ideal_peak_bytes, sizes

COMPARED_WITH = ("fsdp2", "ddp", "compute")
PROCESS_BYTES = 350 * 1024**2  # Python, torch and Gloo
MEMORY_PART = 0.75  # of the free memory, for engines side by side

Found = dict[str, Any]
"""What was measured of one engine, or {"missing": why}."""


class Runner:
    """Measures one workload over some engines.

    Args:
        workload: What is trained.
        engines: Names.
        steps: Measured steps a turn.
        places: Hosts of the ranks.
    """

    def __init__(self, workload: Workload, engines: Sequence[str], steps: int, places: Sequence[Where]) -> None:
        self.workload = workload
        self.found: dict[str, Found] = {engine: {} for engine in engines}
        self._steps = steps
        self._places = places
        self._stack = ExitStack()
        self._groups: dict[str, RankGroup] = {}
        self._kept = self._fitting()

    @property
    def running(self) -> list[str]:
        """Engines that are not known to be missing."""
        return [engine for engine, values in self.found.items() if "missing" not in values]

    def measure_time(self, rounds: int) -> None:
        """Seconds per step of each round, wire bytes per step and rank, and the last loss."""
        if restarted := [engine for engine in self.found if engine not in self._kept]:
            print(f"  not enough memory to keep them: new processes each turn for {', '.join(restarted)}", flush=True)
        with self._stack:
            for number in range(rounds):
                engines = list(self.found)
                turn = number % len(engines)
                for engine in engines[turn:] + engines[:turn]:
                    self._take_turn(engine)
                print(f"  round {number + 1} of {rounds} done", flush=True)
        for values in self.found.values():
            self._add_statistics(values)

    def measure_memory(self) -> None:
        """The largest of each number of `probes.TensorMemory` over the ranks, in bytes."""
        for engine in self.running:
            with self._group(engine, "tasks:make_memory", {}) as group:
                ranks = group.send("steps")
            memory = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
            memory["peak_bytes"] = max(rank["peak_bytes"] + rank["shared_bytes"] for rank in ranks)
            self.found[engine]["memory"] = memory

    def ideal_bytes(self) -> dict[str, int]:
        """`workloads.ideal_peak_bytes`, and the activations in it."""
        with self._group("plain", "tasks:make_memory", {}) as group:
            (memory,) = group.send("forward")
        activation_bytes = memory["peak_bytes"] - memory["between_steps_bytes"]
        peak_bytes = ideal_peak_bytes(self.workload, activation_bytes)
        return {"peak_bytes": peak_bytes, "activation_bytes": activation_bytes}

    def losses_agree(self) -> bool:
        """Whether the engines trained the same model: same weights and data, the same loss after the same steps."""
        losses = [self.found[engine]["mean_loss"] for engine in self.running if not ENGINES[engine].alone]
        tolerance = 1e-3 if self.workload.compute_dtype == "float32" else 2e-2
        return max(losses, default=0.0) - min(losses, default=0.0) <= tolerance * max(losses, default=0.0)

    def _take_turn(self, engine: str) -> None:
        values = self.found[engine]
        if "missing" in values:
            return
        try:
            if engine in self._kept:
                if engine not in self._groups:
                    self._groups[engine] = self._stack.enter_context(self._timing_group(engine))
                ranks = self._groups[engine].send("block")
            else:
                with self._timing_group(engine) as group:
                    ranks = group.send("block")
        except (RankError, RuntimeError) as error:
            reason = error.reason if isinstance(error, RankError) else str(error)
            print(f"  without {engine}: {reason}", flush=True)
            values.clear()
            values["missing"] = reason
            return
        # A step is over when its slowest rank is done.
        seconds = [max(step) for step in zip(*(rank["seconds"] for rank in ranks), strict=True)]
        values.setdefault("step_seconds", []).extend(seconds)
        values.setdefault("round_seconds", []).append(statistics.median(seconds))
        values["wire_bytes_per_step"] = max(rank["wire_bytes"] for rank in ranks)
        values["resident_peak_bytes"] = max(rank["resident_bytes"] for rank in ranks)
        values["mean_loss"] = statistics.fmean(rank["loss"] for rank in ranks)

    def _timing_group(self, engine: str) -> Any:
        return self._group(engine, "tasks:make_timing", {"steps": self._steps})

    @contextmanager
    def _group(self, engine: str, handler: str, options: dict[str, Any]) -> Iterator[RankGroup]:
        options = {"engine": engine, "workload": self.workload.name, **options}
        python = peers.python() if ENGINES[engine].peer else sys.executable
        # Whoever sends nothing needs no second host.
        places = [Where()] if ENGINES[engine].alone else self._places
        group = RankGroup(world_size_of(engine, self.workload), handler, options, python, places)
        try:
            yield group
        finally:
            group.close()

    def _fitting(self) -> set[str]:
        """Engines whose processes live side by side, while one of the others has its turn."""
        room = MEMORY_PART * psutil.virtual_memory().available
        kept = list(self.found)
        while (
            kept and self._bytes(kept) + max((self._bytes([e]) for e in self.found if e not in kept), default=0) > room
        ):
            kept.pop()
        return set(kept)

    def _bytes(self, engines: Sequence[str]) -> int:
        """Memory of engines side by side, roughly: states as each holds them, and as much again for one block."""
        total, count = 0, sizes(self.workload)
        for engine in engines:
            ranks, whole = world_size_of(engine, self.workload), ENGINES[engine].whole
            states = count.all * (ranks * whole + max(0, 16 - whole))
            total += states + ranks * (16 * count.block + PROCESS_BYTES)
        return total

    def _add_statistics(self, values: Found) -> None:
        """Add spreads and the ratios within rounds."""
        if "missing" in values:
            return
        values["seconds"] = asdict(Spread.of(values["step_seconds"]))
        for other in COMPARED_WITH:
            if other in self.running:
                pairs = zip(values["round_seconds"], self.found[other]["round_seconds"], strict=True)
                values[f"time_over_{other}"] = asdict(Spread.of([mine / theirs for mine, theirs in pairs]))
        if self.workload.link_gbit and "compute" in self.running:
            self._add_overlap(values)

    def _add_overlap(self, values: Found) -> None:
        """The step against the longer of computing and sending, neither of which can be shortened."""
        step = values["seconds"]["median"]
        compute = self.found["compute"]["seconds"]["median"]
        link = values["wire_bytes_per_step"] * 8 / (self.workload.link_gbit * 1e9)
        if link:
            values["link_seconds"] = link
            values["time_over_bound"] = step / max(compute, link)
            values["overlap"] = (compute + link - step) / min(compute, link)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="a", help=f"comma-separated, of {','.join(WORKLOADS)}")
    parser.add_argument("--engines", help=f"comma-separated, of {','.join(ENGINES)}; default: those of the workload")
    parser.add_argument("--rounds", type=int, default=7, help="how often each engine has its turn")
    parser.add_argument("--steps", type=int, default=5, help="measured steps a turn")
    parser.add_argument("--skip-memory", action="store_true", help="leave the memory pass out")
    parser.add_argument("--out", type=Path, default=RESULTS_FOLDER, help="folder for the JSON file")
    parser.add_argument("--list", action="store_true", help="print workloads and engines, and stop")
    arguments = parser.parse_args()
    arguments.workload, arguments.engines = arguments.workload.split(","), (arguments.engines or "").split(",")
    for given, known in ((arguments.workload, WORKLOADS), (filter(None, arguments.engines), ENGINES)):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
    if any(WORKLOADS[name].link_gbit for name in arguments.workload) and (reason := hosts.missing_reason()):
        parser.error(f"a workload with two hosts {reason}")
    return arguments


def measure(workload: Workload, arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything about one workload; also prints it."""
    print(f"workload {workload.name}: {workload.title}", flush=True)
    with ExitStack() as stack:
        places: Sequence[Where] = [Where()]
        if workload.link_gbit:
            places = stack.enter_context(hosts.two_hosts(workload.link_gbit))
        engines = arguments.engines if any(arguments.engines) else workload.engines
        runner = Runner(workload, engines, arguments.steps, places)
        runner.measure_time(arguments.rounds)
        result: dict[str, Any] = {"workload": asdict(workload), "engines": runner.found}
        if not arguments.skip_memory:
            runner.measure_memory()
            result["ideal"] = runner.ideal_bytes()
    result["losses_agree"] = runner.losses_agree()
    print_workload(result)
    return result


def main() -> None:
    """Measure, print, save."""
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of every `finally`: ranks and hosts go
    if arguments.list:
        for name, title in [
            *((w.name, w.title) for w in WORKLOADS.values()),
            *((n, e.title) for n, e in ENGINES.items()),
        ]:
            print(f"{name:<18}{title}")
        return
    result: dict[str, Any] = {"machine": machine_info(), "rounds": arguments.rounds, "steps": arguments.steps}
    print(result["machine"])
    path: Path | None = None
    for name in arguments.workload:
        load_before = os.getloadavg()[0]  # of others: ours have not started
        result[name] = {**measure(WORKLOADS[name], arguments), "load_average_before": load_before}
        # Each time: a long run that is stopped keeps what it has.
        previous, path = path, save_result("step_time-" + "-".join(arguments.workload), result, arguments.out)
        if previous not in (None, path):
            previous.unlink()
    print(f"saved {path}")


if __name__ == "__main__":
    main()
