"""The end of a run: one JSON document, and the same as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from fullshard.train.progress import bits_per_byte, format_bytes, format_seconds
from fullshard.train.trainer import Parts, Result


def make_summary(parts: Parts, result: Result, sample: bytes) -> dict[str, Any]:
    """Everything worth keeping about a finished (or stopped) run, ready for JSON."""
    own, ddp = result.bytes_per_rank
    validation = result.validation_loss
    speed = result.tokens / result.seconds if result.seconds else 0.0
    return {
        "ending": result.ending,
        "run_folder": str(parts.folder.path),
        "resumed": parts.folder.resumes,
        "ranks": parts.world.size,
        "device": str(parts.world.device.type),
        "precision": parts.config.train.precision,
        "parameters": sum(parameter.numel() for parameter in parts.model.parameters()),
        "step": result.step,
        "steps": parts.config.train.steps,
        "tokens": result.tokens,
        "seconds": result.seconds,
        "tokens_per_second": speed,
        "train_loss": _before_after(result.train_loss),
        "validation_loss": _before_after(validation),
        "validation_bits_per_byte": _before_after([None if x is None else bits_per_byte(x) for x in validation]),
        "bytes_per_rank": {
            "fullshard": own.as_dict(),
            "ddp": ddp.as_dict(),
            "ratio": own.total / ddp.total if ddp.total else None,
        },
        "peak_memory_per_rank": result.peak_memory,
        "profile": result.profile.summary().as_dict() if result.profile is not None else None,
        "sample": sample.decode("utf-8", errors="replace"),
    }


def print_summary(console: Console, summary: Mapping[str, Any]) -> None:
    """The tables and the sample."""
    console.print()
    console.print(_results(summary))
    if summary["bytes_per_rank"]["ratio"] is not None:
        console.print(_memory(summary))
    if summary["sample"]:
        # Text, not markup: the sample may hold anything, also square brackets and control characters.
        shown = "".join(char if char.isprintable() or char == "\n" else "·" for char in summary["sample"])
        console.print(Panel(Text(shown), title="sample", title_align="left", width=100))
    console.print(Text(f"run folder: {summary['run_folder']}"), soft_wrap=True)


def _before_after(pair: Sequence[float | None] | None) -> dict[str, float | None] | None:
    return None if pair is None else {"before": pair[0], "after": pair[1]}


def _results(summary: Mapping[str, Any]) -> Table:
    table = Table(title=f"training {summary['ending']}", title_justify="left", show_header=True)
    for name, justify in (("", "left"), ("before", "right"), ("after", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    loss, bits, train = (summary[key] for key in ("validation_loss", "validation_bits_per_byte", "train_loss"))
    table.add_row("validation loss", _number(loss["before"], 4), _number(loss["after"], 4))
    table.add_row("validation bits per byte", _number(bits["before"], 3), _number(bits["after"], 3), style="bold")
    if train is not None:
        table.add_row("training loss (first, last step)", f"{train['before']:.4f}", f"{train['after']:.4f}")
    table.add_section()
    table.add_row("parameters", "", f"{summary['parameters'] / 1e6:.2f} M")
    table.add_row("steps", "", f"{summary['step']} of {summary['steps']}")
    table.add_row("tokens, all ranks", "", f"{summary['tokens']:,}")
    table.add_row("time in steps", "", format_seconds(summary["seconds"]))
    table.add_row("tokens/s, all ranks", "", f"{summary['tokens_per_second']:,.0f}")
    table.add_row(
        "peak memory of a rank's process" if summary["device"] == "cpu" else "peak memory of a rank's tensors",
        "",
        format_bytes(summary["peak_memory_per_rank"]),
    )
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _memory(summary: Mapping[str, Any]) -> Table:
    own, ddp = summary["bytes_per_rank"]["fullshard"], summary["bytes_per_rank"]["ddp"]
    table = Table(title=f"bytes held per rank between steps, {summary['ranks']} ranks", title_justify="left")
    for name in ("", "fullshard", "DDP would hold", "ratio"):
        table.add_column(name, justify="left" if not name else "right")
    for key in ("parameters", "gradients", "optimizer", "total"):
        ratio = f"{own[key] / ddp[key]:.3f}" if ddp[key] else "-"
        table.add_row(key, format_bytes(own[key]), format_bytes(ddp[key]), ratio, end_section=key == "optimizer")
    return table
