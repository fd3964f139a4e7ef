"""What rank 0 shows while training: a live panel on a terminal, plain lines otherwise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

GIB = 2**30


@dataclass(frozen=True)
class StepReport:
    """The numbers of one optimizer step, the same on every rank."""

    step: int  # steps done, from 1
    steps: int
    loss: float  # nats per token, mean over all ranks
    max_loss: float  # of the rank with the highest
    grad_norm: float
    lr: float
    seconds: float
    data_seconds: float
    tokens: int  # of all ranks in this step
    tokens_seen: int
    memory: tuple[int, ...]  # bytes per rank
    peak_memory: tuple[int, ...]
    seconds_left: float

    def metrics(self) -> Mapping[str, Any]:
        """A line of metrics.jsonl, with the names torchtitan uses; throughput is per rank, as there."""
        return {
            "step": self.step,
            "loss_metrics/global_avg_loss": self.loss,
            "loss_metrics/global_max_loss": self.max_loss,
            "bits_per_byte": bits_per_byte(self.loss),
            "grad_norm": self.grad_norm,
            "lr": self.lr,
            "n_tokens_seen": self.tokens_seen,
            "throughput(tps)": self.tokens / len(self.memory) / self.seconds,
            "throughput/all_ranks(tps)": self.tokens / self.seconds,
            "time_metrics/end_to_end(s)": self.seconds,
            "time_metrics/data_loading(s)": self.data_seconds,
            "time_metrics/data_loading(%)": 100 * self.data_seconds / self.seconds,
            "memory/now(GiB)": [round(value / GIB, 4) for value in self.memory],
            "memory/max_active(GiB)": max(self.peak_memory) / GIB,
        }


def bits_per_byte(loss: float) -> float:
    """Tokens are bytes, so nats per token / ln 2."""
    return loss / math.log(2)


def format_bytes(count: float) -> str:
    """`523 MiB`, `1.50 GiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.2f} {unit}" if count < 10 * size else f"{count / size:.0f} {unit}"
    return f"{count:.0f} B"


def format_seconds(seconds: float) -> str:
    """`1:05`, `2:00:09`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class ProgressView(Protocol):
    """What the loop tells the screen."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def step(self, report: StepReport) -> None:
        """One optimizer step is done."""

    def note(self, text: str) -> None:
        """Something worth a line of its own."""


class _Quiet:
    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to close."""

    def step(self, report: StepReport) -> None:
        """Shows nothing."""

    def note(self, text: str) -> None:
        """Shows nothing."""


class SilentProgress(_Quiet):
    """The view of every rank but the first."""


class PlainProgress(_Quiet):
    """One line each `interval` steps, for log files."""

    def __init__(self, console: Console, interval: int) -> None:
        self._console = console
        self._interval = interval

    def step(self, report: StepReport) -> None:
        """Print a line if it is due."""
        if report.step % self._interval == 0 or report.step in (1, report.steps):
            self.note(_line(report))

    def note(self, text: str) -> None:
        """Print a line."""
        self._console.print(escape(text), soft_wrap=True, highlight=False)


class LiveProgress(_Quiet):
    """A panel that is redrawn in place; notes scroll above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=8, transient=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def step(self, report: StepReport) -> None:
        """Redraw."""
        bar = Table.grid(padding=(0, 2))
        done = f"[bold]step {report.step}[/]/{report.steps}"
        bar.add_row(
            done,
            ProgressBar(total=report.steps, completed=report.step, width=40),
            f"{format_seconds(report.seconds_left)} left",
        )
        numbers = Table.grid(padding=(0, 2))
        numbers.add_row(
            f"loss [bold cyan]{report.loss:.4f}[/]",
            f"bits/byte [bold cyan]{bits_per_byte(report.loss):.3f}[/]",
            f"{report.tokens / report.seconds:,.0f} tokens/s",
        )
        numbers.add_row(
            f"lr {report.lr:.2e}",
            f"grad norm {report.grad_norm:.2f}",
            f"memory/rank {', '.join(map(format_bytes, report.memory[:8]))}",
        )
        self._live.update(Group(bar, numbers))

    def note(self, text: str) -> None:
        """Print above the panel."""
        self._console.print(escape(text), highlight=False)


def make_progress(console: Console, plain: bool, interval: int) -> ProgressView:
    """The view that suits the output: live only on a terminal that wants it."""
    if plain or not console.is_terminal:
        return PlainProgress(console, interval)
    return LiveProgress(console)


def _line(report: StepReport) -> str:
    return (
        f"step {report.step:>5}/{report.steps}  loss {report.loss:.4f}  bits/byte {bits_per_byte(report.loss):.3f}  "
        f"{report.tokens / report.seconds:,.0f} tokens/s  memory/rank {format_bytes(max(report.memory))}  "
        f"lr {report.lr:.2e}  grad norm {report.grad_norm:.2f}  {format_seconds(report.seconds_left)} left"
    )
