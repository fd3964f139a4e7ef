"""Saving and loading a training job, against torch.distributed.checkpoint, `torch.save`, and what the disk can do.

    python benchmarks/checkpoint.py
    python benchmarks/checkpoint.py --report benchmarks/results/checkpoint-*.json    # the tables in Markdown

The job is a Llama with AdamW, in float32, on two ranks: sharded by torch's `fully_shard` for torch's contenders, by
fullshard's for ours; the same bytes. Round after round each contender in turn saves and loads while the others sleep on
a pipe; the order turns by one place each round, and ratios are taken within a round, then their median. What a
contender saved the last time is removed before, and the disk has settled. A save counts until its bytes are on the disk
(all contenders call fsync), a load from a cold page cache. A time is that of the slowest rank. After each load the
values are compared with those that were saved.

The limit of the disk: every rank writes as many bytes as its part of the state has from memory to one file, in pieces
of 16 MiB, and waits for the disk (fsync); through the page cache and past it (O_DIRECT). The faster one counts.

Stall: how long the call of an asynchronous save takes, and the optimizer waits for a copy that is still being taken:
what training waits for at least. Lost: that, and by how much the steps until the save is done take longer than others.

Reshard: what two ranks saved is loaded by four, and what these save by three.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _common import RESULTS_FOLDER, Spread, machine_info, save_result, table
from paper_ranks import plan_on_paper
from ranks import RankGroup
from savers import BYTES_A_PARAMETER, workload_of
from workloads import sizes

GIB = 1024**3
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")


@dataclass(frozen=True)
class Contender:
    """Who is measured.

    Attributes:
        title: Its name in tables.
        ranks: Whose processes: "disk", or an engine's.
        verbs: What it does in its turn, of save, load, async.
    """

    title: str
    ranks: str
    verbs: tuple[str, ...]


CONTENDERS: dict[str, Contender] = {
    "disk-buffered": Contender("disk, through the page cache", "disk", ("save", "load")),
    "disk-direct": Contender("disk, O_DIRECT", "disk", ("save", "load")),
    "torch-save": Contender("torch.save of the full state", "fsdp2", ("save", "load")),
    "dcp": Contender("torch.distributed.checkpoint", "fsdp2", ("save", "load", "async")),
    "dcp-threads": Contender("the same, 2 threads a rank", "fsdp2", ("save", "load")),
    "dcp-process": Contender("the same, saving in a process", "fsdp2", ("async",)),
    "fullshard": Contender("fullshard.checkpoint", "fullshard", ("save", "load", "async")),
    "fullshard-overlap": Contender("the same, overlapped_save", "fullshard", ("async",)),
}
OURS, OVERLAP, DISKS = "fullshard", "fullshard-overlap", ("disk-buffered", "disk-direct")
RESHARDED = ("dcp", OURS)
RESHARD_WORLDS = (4, 3)


@dataclass(frozen=True)
class Goal:
    """A ratio, `what` of ours over `other`'s `over`, and what was set for it before anything was measured."""

    what: str
    other: str
    over: str
    at_most: float | None
    ours: str = OURS


GOALS = (
    Goal("save", "dcp", "save", 0.5),
    Goal("save", "disk", "save", 1.3),
    Goal("load", "dcp", "load", 0.5),
    Goal("load", "disk", "load", None),
    Goal("stall", OURS, "save", 0.05),
    Goal("stall", OURS, "save", 0.05, OVERLAP),
)
PLANNING_GOAL_SECONDS = 2.0

Times = dict[str, dict[str, list[Any]]]
"""By contender and what was measured, the value of each round."""


# -- measuring ---------------------------------------------------------------------------------------------------------


class Runner:
    """Sends contenders what they do.

    Args:
        nbytes: Of the state.
        folder: Where they save.
    """

    def __init__(self, nbytes: int, folder: Path) -> None:
        self._nbytes = nbytes
        self._folder = folder
        self._saved: dict[Path, int] = {}  # fingerprint by path
        self.cold = "dropped before each load"
        self.found: Times = {}

    @contextmanager
    def ranks(self, names: Sequence[str], world_size: int) -> Iterator[dict[str, RankGroup]]:
        """Processes for these contenders, by `Contender.ranks`."""
        with ExitStack() as stack:
            groups = {}
            for kind in dict.fromkeys(CONTENDERS[name].ranks for name in names):
                handler, options = "savers:make_trainer", {"engine": kind, "nbytes": self._nbytes}
                if kind == "disk":
                    options = {"nbytes": state_bytes(self._nbytes, world_size) // world_size}
                    handler = "savers:make_disk"
                groups[kind] = RankGroup(world_size, handler, options)
                stack.callback(groups[kind].close)
            yield groups

    def take_turn(self, group: RankGroup, name: str, verbs: Sequence[str]) -> dict[str, Any]:
        """One contender saves, loads, saves in the background; returns what it took, of the slowest rank."""
        taken: dict[str, Any] = {}
        for verb in verbs:
            path = self._folder / name
            if verb != "load":
                shutil.rmtree(path, ignore_errors=True)
            self._settle(path)
            taken |= self.run(group, name, verb, path)
        return taken

    def run(self, group: RankGroup, name: str, verb: str, path: Path) -> dict[str, Any]:
        """One verb, now."""
        ranks = group.send({"saver": name, "verb": verb, "path": str(path)})
        slowest = {key: max(rank[key] for rank in ranks) for key in ranks[0] if key != "fingerprint"}
        if "fingerprint" in ranks[0]:
            print_of = sum(rank["fingerprint"] for rank in ranks) % 2**48
            if verb == "load" and print_of != self._saved[path]:
                raise RuntimeError(f"{name} loaded other values than were saved")
            self._saved[path] = print_of
        if verb == "async":
            self._saved.pop(path, None)  # it has gone on training since
            return {"stall": slowest["stall_seconds"], "lost": slowest["lost_seconds"], "async": slowest}
        return {verb: slowest["seconds"]}

    def add(self, name: str, taken: dict[str, Any]) -> None:
        """Note what a turn took."""
        for what, value in taken.items():
            self.found.setdefault(name, {}).setdefault(what, []).append(value)

    def _settle(self, path: Path) -> None:
        """Nothing of other contenders is on its way to the disk, and nothing is in the page cache."""
        os.sync()
        try:
            _DROP_CACHES.write_text("3")
        except OSError:  # not root
            self.cold = "each file asked out of it (posix_fadvise) before each load: not root"
            for file in (file for file in path.rglob("*") if file.is_file()):
                descriptor = os.open(file, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)


def state_bytes(nbytes: int, world_size: int) -> int:
    """Bytes of the state of the job that comes nearest to `nbytes`."""
    return BYTES_A_PARAMETER * sizes(workload_of(nbytes, world_size)).all


def measure(runner: Runner, names: Sequence[str], rounds: int, async_rounds: int) -> None:
    """Turns of two ranks; one round before that is not counted."""
    with runner.ranks(names, 2) as groups:
        for number in range(-1, rounds):
            turn = number % len(names)
            for name in [*names[turn:], *names[:turn]]:
                verbs = CONTENDERS[name].verbs
                if number >= async_rounds:
                    verbs = tuple(verb for verb in verbs if verb != "async")
                taken = runner.take_turn(groups[CONTENDERS[name].ranks], name, verbs)
                if number >= 0:
                    runner.add(name, taken)
            print(f"  round {number + 1} of {rounds} done" if number >= 0 else "  warm", flush=True)
        for name in set(RESHARDED) & set(names):  # for the next who load it
            runner.take_turn(groups[CONTENDERS[name].ranks], name, ("save",))


def measure_reshard(runner: Runner, names: Sequence[str], rounds: int) -> None:
    """What was saved last is loaded by other numbers of ranks, each of which saves it for the next."""
    for world_size in RESHARD_WORLDS:
        with runner.ranks(names, world_size) as groups:
            for number in range(rounds):
                for name in names[:: -1 if number % 2 else 1]:
                    taken = runner.take_turn(groups[CONTENDERS[name].ranks], name, ("load",))
                    runner.add(name, {f"load_at_{world_size}": taken["load"]})
            for name in names:
                runner.take_turn(groups[CONTENDERS[name].ranks], name, ("save",))
        print(f"  loaded by {world_size}", flush=True)


# -- what comes of it --------------------------------------------------------------------------------------------------


def add_disk(found: Times) -> None:
    """The limit: in each round the faster way."""
    if all(name in found for name in DISKS):
        found["disk"] = {
            verb: [min(pair) for pair in zip(*(found[name][verb] for name in DISKS), strict=True)]
            for verb in ("save", "load")
        }


def ratios(found: Times) -> dict[str, dict[str, float]]:
    """By "our what / other's over" the spread of the ratios within rounds, for each goal that was measured."""
    made = {}
    for goal in GOALS:
        mine, theirs = found.get(goal.ours, {}).get(goal.what), found.get(goal.other, {}).get(goal.over)
        if mine and theirs:
            pairs = zip(mine, theirs, strict=False)  # saves in the background have fewer rounds
            made[_ratio_name(goal)] = asdict(Spread.of([a / b for a, b in pairs]))
    return made


def _ratio_name(goal: Goal) -> str:
    ours = "" if goal.ours == OURS else f"{goal.ours} "
    return f"{ours}{goal.what} / {goal.other} {goal.over}"


def goal_lines(result: dict[str, Any]) -> list[str]:
    """What was aimed at, and what came."""
    lines = []
    for goal in GOALS:
        ratio = result["ratios"].get(_ratio_name(goal))
        aim = "" if goal.at_most is None else f", goal at most {goal.at_most}"
        shown = "not measured"
        if ratio:
            shown = f"{ratio['median']:.3f} ({ratio['low']:.3f}-{ratio['high']:.3f})"
            if goal.at_most is not None:
                shown += ", met" if ratio["median"] <= goal.at_most else ", MISSED"
        lines.append(f"{_ratio_name(goal)}{aim}: {shown}")
    if planning := result.get("planning"):
        seconds = planning["seconds"]["all"]["median"]
        verdict = "met" if seconds <= PLANNING_GOAL_SECONDS else "MISSED"
        what = f"{planning['tensors']} tensors at {planning['world_size']} ranks"
        lines.append(f"planning {what}, goal at most {PLANNING_GOAL_SECONDS} s: {seconds:.2f}, {verdict}")
    return lines


_COLUMNS = {
    "save s": "save",
    "load s": "load",
    "async stall ms": "stall",
    "async lost s": "lost",
    "load at 4 s": "load_at_4",
    "load at 3 s": "load_at_3",
}


def cells(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Heading and lines of the table; columns and contenders that were not measured are left out."""
    found, nbytes = result["found"], result["bytes"]
    shown = {title: what for title, what in _COLUMNS.items() if any(values.get(what) for values in found.values())}
    rows = []
    for name, contender in CONTENDERS.items():
        if name not in found:
            continue
        row = [contender.title]
        for title, what in shown.items():
            values = found[name].get(what)
            scale = 1000 if title.endswith("ms") else 1
            row.append(f"{Spread.of(values).median * scale:.{0 if scale > 1 else 3}f}" if values else "")
        for verb in ("save", "load"):
            values = found[name].get(verb)
            row.append(f"{nbytes / GIB / Spread.of(values).median:.2f}" if values else "")
        rows.append(row)
    return ["", *shown, "save GiB/s", "load GiB/s"], rows


def planning_lines(result: dict[str, Any]) -> list[str]:
    """Seconds of each part of planning."""
    parts = result["planning"]["seconds"] if "planning" in result else {}
    return [f"planning, {what}: {spread['median']:.3f} s" for what, spread in parts.items()]


def markdown(result: dict[str, Any]) -> str:
    """The table and the goals, for the documentation."""
    header, rows = cells(result)
    rows = [[f"**{row[0]}**" if row[0] == CONTENDERS[OURS].title else row[0], *row[1:]] for row in rows]
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    machine = result["machine"]
    job = f"{result['bytes'] / GIB:.2f} GiB ({result['title']}) on 2 ranks, medians of {result['rounds']} rounds"
    text = [
        f"{job}; {machine['cores']} cores ({machine['cpu']}), torch {machine['torch']};",
        f"page cache {result['page_cache']}.",
        "",
        *(f"| {' | '.join(line)} |" for line in lines),
        "",
        *(f"- {line}" for line in [*goal_lines(result), *planning_lines(result)]),
    ]
    return "\n".join(text)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=float, default=0.75 * GIB, help="of the state, roughly")
    parser.add_argument("--rounds", type=int, default=5, help="how often each contender has its turn")
    parser.add_argument("--async-rounds", type=int, default=3, help="how often it also saves in the background")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="comma-separated; default: %(default)s")
    parser.add_argument("--skip-reshard", action="store_true", help="leave loading by other numbers of ranks out")
    parser.add_argument("--skip-planning", action="store_true", help="leave planning out")
    parser.add_argument("--tensors", type=int, default=100_000, help="of the planning")
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure; default: this one")
    parser.add_argument("--out", type=Path, default=RESULTS_FOLDER, help="folder for the JSON file")
    parser.add_argument("--report", type=Path, nargs="*", help="print these results in Markdown, measure nothing")
    arguments = parser.parse_args()
    arguments.contenders = arguments.contenders.split(",") if arguments.contenders else []
    if unknown := [name for name in arguments.contenders if name not in CONTENDERS]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(CONTENDERS)}")
    return arguments


def main() -> None:
    """Measure, print, save."""
    arguments = parse_arguments()
    if arguments.report is not None:
        for path in arguments.report:
            print(f"<!-- {path.name} -->\n{markdown(json.loads(path.read_text()))}\n")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of every `finally`: ranks and files go
    nbytes, names = int(arguments.bytes), arguments.contenders
    result: dict[str, Any] = {
        "machine": machine_info(),
        "title": workload_of(nbytes, 2).title,
        "bytes": state_bytes(nbytes, 2),
        "rounds": arguments.rounds,
    }
    print(result["machine"])
    with tempfile.TemporaryDirectory(prefix="fullshard-bench-", dir=arguments.folder) as folder:
        runner = Runner(nbytes, Path(folder).resolve())
        if names:
            measure(runner, names, arguments.rounds, arguments.async_rounds)
        if not arguments.skip_reshard and (resharded := [name for name in RESHARDED if name in names]):
            measure_reshard(runner, resharded, arguments.rounds)
    add_disk(runner.found)
    result |= {"page_cache": runner.cold, "found": runner.found, "ratios": ratios(runner.found)}
    if not arguments.skip_planning:
        result["planning"] = plan_on_paper(arguments.tensors, arguments.rounds)
    if names:
        print(table(*cells(result)))
    print("\n".join([*goal_lines(result), *planning_lines(result)]))
    print(f"saved {save_result('checkpoint', result, arguments.out)}")


if __name__ == "__main__":
    main()
