"""What `step_time.py` prints: a table with bars, and the reaches that were set, met or missed.

python benchmarks/report.py benchmarks/results/step_time-a-*.json    # the same in Markdown, for the documentation
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from engines import ENGINES
from fullshard.tools.bench.bars import bar

MIB = 1024**2


@dataclass(frozen=True)
class Reach:
    """A ratio that was set as a goal before anything was measured."""

    workloads: str
    engines: tuple[str, ...]
    what: str
    at_most: float


_ANY = ("fullshard-direct", "fullshard-shm")
REACHES = (
    Reach("a b", ("fullshard-direct",), "time_over_fsdp2", 0.55),
    Reach("a b", ("fullshard-shm",), "time_over_fsdp2", 0.40),
    Reach("a b", ("fullshard-direct",), "time_over_ddp", 1.15),
    Reach("a b", ("fullshard-shm",), "time_over_ddp", 0.85),
    Reach("b", ("fullshard-shm",), "time_over_compute", 1.25),
    Reach("c", _ANY, "time_over_fsdp2", 0.40),
    Reach("i1", ("fullshard-direct",), "time_over_bound", 1.15),
    Reach("a b c d e h", _ANY, "peak_over_ideal", 1.05),
    Reach("a b c d e h", _ANY, "peak_over_fsdp2", 1.00),
)


def print_workload(result: dict[str, Any]) -> None:
    """The table of one workload, as wide as it needs where nobody looks at a terminal."""
    console = Console(width=None if sys.stdout.isatty() else 180)
    found, missing = _split(result["engines"])
    console.print(_table(result, found))
    if "ideal" in result:
        ideal, activations = (result["ideal"][key] / MIB for key in ("peak_bytes", "activation_bytes"))
        console.print(f"ideal peak {ideal:.1f} MiB, of which activations (measured) {activations:.1f} MiB")
    for engine, reason in missing.items():
        console.print(f"without {engine}: {reason}", markup=False)
    agree = result["losses_agree"]
    console.print("losses agree" if agree else "LOSSES DIFFER: the engines do not train the same model")
    for line in _reach_lines(result, found):
        console.print(line, markup=False)


def markdown(result: dict[str, Any]) -> str:
    """The same table without bars."""
    found, missing = _split(result["engines"])
    rows = {engine: _cells(result, engine, values, 1.0) for engine, values in found.items()}
    shown = [name for name in next(iter(rows.values()), {}) if name and any(cells[name] for cells in rows.values())]
    lines = [["engine", *map(str.strip, shown)], ["---"] * (len(shown) + 1)]
    for engine, cells in rows.items():
        title = f"**{ENGINES[engine].title}**" if engine.startswith("fullshard") else ENGINES[engine].title
        lines.append([title, *(cells[name] for name in shown)])
    workload = result["workload"]
    text = [f"**({workload['name']})** {workload['title']}; {workload['world_size']} ranks", ""]
    text += [f"| {' | '.join(line)} |" for line in lines]
    text += [f"Not measured: {ENGINES[engine].title} ({reason})." for engine, reason in missing.items()]
    return "\n".join([*text, *(f"- {line}" for line in _reach_lines(result, found)), ""])


def ratios(result: dict[str, Any], engine: str) -> dict[str, float]:
    """Every ratio of one engine that there is."""
    found, _ = _split(result["engines"])
    values = found[engine]
    ratio = {key: values[key]["median"] for key in values if key.startswith("time_over_") and key != "time_over_bound"}
    ratio |= {key: values[key] for key in ("time_over_bound", "overlap") if key in values}
    if "memory" in values:
        peak = values["memory"]["peak_bytes"]
        if "ideal" in result:
            ratio["peak_over_ideal"] = peak / result["ideal"]["peak_bytes"]
        if "fsdp2" in found:
            ratio["peak_over_fsdp2"] = peak / found["fsdp2"]["memory"]["peak_bytes"]
    return ratio


def _split(engines: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    found = {engine: values for engine, values in engines.items() if "missing" not in values}
    return found, {engine: values["missing"] for engine, values in engines.items() if "missing" in values}


def _table(result: dict[str, Any], found: dict[str, Any]) -> Table:
    workload = result["workload"]
    table = Table(title=f"({workload['name']}) {workload['title']}; {workload['world_size']} ranks", box=None)
    table.add_column("engine")
    longest = max((values["seconds"]["median"] for values in found.values()), default=1.0)
    rows = {engine: _cells(result, engine, values, longest) for engine, values in found.items()}
    # Columns that no engine fills are left out.
    shown = [name for name in next(iter(rows.values()), {}) if any(cells[name] for cells in rows.values())]
    for name in shown:
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for engine, cells in rows.items():
        style = "bold" if engine.startswith("fullshard") else None
        table.add_row(ENGINES[engine].title, *(cells[name] for name in shown), style=style)
    return table


def _cells(result: dict[str, Any], engine: str, values: dict[str, Any], longest: float) -> dict[str, str]:
    """One line of the table, by the headings of its columns."""
    seconds, memory, ratio = values["seconds"], values.get("memory"), ratios(result, engine)
    over_fsdp2 = values.get("time_over_fsdp2")
    return {
        "": bar(seconds["median"] / longest, 24),
        "step s": f"{seconds['median']:.3f}",
        "middle half": f"{seconds['low']:.3f}-{seconds['high']:.3f}",
        "/ FSDP2": _two(ratio, "time_over_fsdp2"),
        "its middle half": f"{over_fsdp2['low']:.2f}-{over_fsdp2['high']:.2f}" if over_fsdp2 else "",
        "/ DDP": _two(ratio, "time_over_ddp"),
        "/ compute": _two(ratio, "time_over_compute"),
        "/ bound": _two(ratio, "time_over_bound"),
        "overlap": f"{ratio['overlap']:.0%}" if "overlap" in ratio else "",
        "peak MiB": f"{memory['peak_bytes'] / MIB:.1f}" if memory else "",
        "/ ideal": _two(ratio, "peak_over_ideal"),
        "/ FSDP2 ": _two(ratio, "peak_over_fsdp2"),
        "RSS MiB": f"{values['resident_peak_bytes'] / MIB:.0f}",
        "wire MiB": f"{values['wire_bytes_per_step'] / MIB:.1f}",
    }


def main() -> None:
    """Print every workload of the files on the command line."""
    for name in sys.argv[1:]:
        document = json.loads(Path(name).read_text())
        for key, result in document.items():
            if isinstance(result, dict) and "engines" in result:
                print(f"<!-- {Path(name).name}: {document['rounds']} rounds of {document['steps']} steps, {key} -->")
                print(markdown(result))


def _two(ratio: dict[str, float], name: str) -> str:
    return f"{ratio[name]:.2f}" if name in ratio else ""


def _reach_lines(result: dict[str, Any], found: dict[str, Any]) -> Sequence[str]:
    lines = []
    for reach in REACHES:
        if result["workload"]["name"] not in reach.workloads.split():
            continue
        for engine in reach.engines:
            value = ratios(result, engine).get(reach.what) if engine in found else None
            verdict = "not measured" if value is None else "met" if value <= reach.at_most else "MISSED"
            shown = "" if value is None else f"{value:.3f}, "
            lines.append(f"reach: {engine} {reach.what} at most {reach.at_most:.2f}: {shown}{verdict}")
    return lines


if __name__ == "__main__":
    main()
