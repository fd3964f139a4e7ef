"""Shared by the benchmarks: groups of rank processes, the machine's description, statistics, tables, result files."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

RESULTS_FOLDER = Path(__file__).parent / "results"
REPLY_TIMEOUT_SECONDS = 600.0
GROUP_TIMEOUT_SECONDS = 300.0

Handler = Callable[[str], Any]
"""What a rank does with a command: name in, reply out."""


class RankGroup:
    """Processes of one engine, one a rank, that sleep on a pipe until they are sent a command."""

    def __init__(self, world_size: int, make_handler: Callable[..., Handler], *args: Any) -> None:
        """Start the processes; `make_handler(rank, *args)` runs in each, once its process group is up."""
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.mkdtemp(prefix="fullshard-bench-")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            place = _Place(rank, world_size, f"{self._folder}/store")
            process = context.Process(target=_rank_main, args=(theirs, place, make_handler, args), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._receive()

    def send(self, command: str) -> list[Any]:
        """Send every rank the command and return the replies by rank."""
        for pipe in self._pipes:
            pipe.send(command)
        return self._receive()

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()  # the ranks read the end of the pipe and leave
        for process in self._processes:
            process.join(timeout=30)
            if process.is_alive():
                process.kill()
                process.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _receive(self) -> list[Any]:
        replies = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(REPLY_TIMEOUT_SECONDS):
                raise RuntimeError(f"rank {rank} gave no reply within {REPLY_TIMEOUT_SECONDS} seconds")
            try:
                ok, reply = pipe.recv()
            except EOFError as error:
                raise RuntimeError(f"rank {rank} died") from error
            if not ok:
                raise RuntimeError(f"rank {rank} failed:\n{reply}")
            replies.append(reply)
        return replies


@dataclass(frozen=True)
class _Place:
    rank: int
    world_size: int
    store_path: str


def _rank_main(pipe: Connection, place: _Place, make_handler: Callable[..., Handler], args: tuple[Any, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the ranks are on one host
    torch.set_num_threads(1)  # one core a rank
    with contextlib.suppress(EOFError, BrokenPipeError):
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(place.store_path, place.world_size),
                rank=place.rank,
                world_size=place.world_size,
                timeout=timedelta(seconds=GROUP_TIMEOUT_SECONDS),
            )
            handler = make_handler(place.rank, *args)
            pipe.send((True, None))
            while True:
                pipe.send((True, handler(pipe.recv())))
        except (EOFError, BrokenPipeError):
            raise
        except Exception:  # noqa: BLE001 - whatever it is, the parent prints it
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


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
