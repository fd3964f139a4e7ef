"""The findings of `fullshard bench` as tables for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from fullshard.core.calibration import Calibration, LinkTime
from fullshard.tools.bench.bars import bar
from fullshard.tools.bench.run import Finding

_WIDTH = 24
_GIGA = 1e9
MIB = 1024**2


def print_finding(console: Console, finding: Finding) -> None:
    """Every table that there is something for."""
    calibration = finding.calibration
    machine = calibration.machine
    console.print(
        f"{machine.cpu}, {machine.cores} cores, device {machine.device}, torch {machine.torch}; "
        f"{calibration.ranks} ranks with {calibration.threads_per_rank} thread(s) each",
        soft_wrap=True,
    )
    tables = [_links(calibration), _speeds(calibration)]
    for table in [*tables, _steps(calibration)]:
        if table.row_count:
            console.print()
            console.print(table)
    for note in finding.notes:
        console.print(f"not measured: {note}", markup=False, soft_wrap=True)


def _links(calibration: Calibration) -> Table:
    """GB/s: the bytes that a rank has to receive, however the transport moves them, a second."""
    table = Table(title="link between the ranks", title_justify="left", box=None)
    for name in ("operation", "MiB", "transport", "", "GB/s", "ms"):
        table.add_column(name, justify="left" if name in ("operation", "transport", "") else "right", no_wrap=True)
    part = (calibration.ranks - 1) / calibration.ranks

    def rate(link: LinkTime) -> float:
        return link.full_bytes * part / link.seconds / _GIGA

    best = max(map(rate, calibration.links), default=1.0)
    ordered = sorted(calibration.links, key=lambda link: (link.operation, link.full_bytes))
    for link in ordered:
        cells = (link.operation, f"{link.full_bytes / MIB:g}", link.transport)
        table.add_row(*cells, bar(rate(link) / best, _WIDTH), f"{rate(link):.2f}", f"{link.seconds * 1e3:.2f}")
    return table


def _speeds(calibration: Calibration) -> Table:
    table = Table(title="one rank, all ranks at once", title_justify="left", box=None)
    for name in ("what", "size", "", "speed"):
        table.add_column(name, justify="right" if name in ("size", "speed") else "left", no_wrap=True)
    best = max((speed.flops for speed in calibration.matrices), default=1.0)
    for speed in calibration.matrices:
        size = f"{speed.size} x {speed.size}"
        table.add_row(
            f"matrices, {speed.dtype}", size, bar(speed.flops / best, _WIDTH), f"{speed.flops / _GIGA:.1f} GFLOP/s"
        )
    for copy in calibration.copies:
        table.add_row("copy", f"{copy.nbytes / MIB:g} MiB", "", f"{copy.bytes_per_second / _GIGA:.2f} GB/s")
    return table


def _steps(calibration: Calibration) -> Table:
    table = Table(title="a training step", title_justify="left", box=None)
    for name in ("engine", "model", "", "ms", "middle half"):
        table.add_column(name, justify="right" if name in ("ms", "middle half") else "left", no_wrap=True)
    longest = max((step.seconds for step in calibration.steps), default=1.0)
    for step in calibration.steps:
        half = f"{step.low * 1e3:.1f}-{step.high * 1e3:.1f}"
        table.add_row(step.engine, step.model, bar(step.seconds / longest, _WIDTH), f"{step.seconds * 1e3:.1f}", half)
    return table
