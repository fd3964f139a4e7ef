"""Shared by the benchmarks: the machine's description, statistics, tables, result files."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch

RESULTS_FOLDER = Path(__file__).parent / "results"


def machine_info() -> dict[str, Any]:
    """What a reader must know to judge the numbers."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "unknown",
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average_1min": os.getloadavg()[0],
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@dataclass(frozen=True)
class Spread:
    """Median and range of the middle half of some measurements, all in the measurements' unit."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Quartiles of one or more values."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(statistics.median(values), low, high)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Text columns, the first one to the left, the others to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    rendered = [
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in pairs)
        for line in lines
        for pairs in [enumerate(zip(line, widths, strict=True))]
    ]
    return "\n".join([rendered[0], "-" * len(rendered[0]), *rendered[1:]])


def save_result(name: str, result: dict[str, Any], folder: Path) -> Path:
    """Write one JSON file named after the benchmark and the time in UTC."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    return path
