"""`fullshard bench` on one rank of a running group: measures, agrees with the others, and returns the same on all."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist

import fullshard
from fullshard.core.calibration import Calibration, Machine, StepTime, render_calibration
from fullshard.tools.bench.link import measure_links
from fullshard.tools.bench.speed import measure_copies, measure_matrices
from fullshard.tools.bench.step import measure_steps
from fullshard.tools.bench.subject import Subject
from fullshard.tools.bench.timing import Ranks

MIB = 1024**2


@dataclass(frozen=True)
class Plan:
    """What to measure, and how long.

    Attributes:
        link_bytes: Sizes of whole tensors that are gathered and reduced.
        matrix_sizes: Rows of square matrices.
        copy_bytes: Size of copies.
        seconds: For each measured value, about.
        step_rounds: How often every engine has its turn.
        subject: A model for whole steps; None leaves them out.
    """

    link_bytes: tuple[int, ...] = (MIB // 4, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
    matrix_sizes: tuple[int, ...] = (256, 1024, 2048)
    copy_bytes: int = 64 * MIB
    seconds: float = 1.0
    step_rounds: int = 10
    subject: Subject | None = None


def quick_plan(subject: Subject | None = None) -> Plan:
    """A few seconds: the same in fewer and smaller sizes."""
    return Plan((MIB // 4, 4 * MIB), (512,), 16 * MIB, seconds=0.1, step_rounds=3, subject=subject)


@dataclass(frozen=True)
class Finding:
    """What a run found.

    Attributes:
        calibration: The numbers.
        notes: What could not be measured, and why.
    """

    calibration: Calibration
    notes: tuple[str, ...]

    @property
    def document(self) -> str:
        """The calibration file."""
        return render_calibration(self.calibration)


def run_bench(plan: Plan, device: torch.device, ranks_per_host: int) -> Finding:
    """Measure everything in `plan`; every rank of the default process group calls it and gets the same."""
    group = dist.group.WORLD
    assert group is not None
    ranks = Ranks(group, device, plan.seconds)
    links, notes = measure_links(plan.link_bytes, ranks)
    steps: tuple[StepTime, ...] = ()
    if plan.subject is not None:
        steps = measure_steps(plan.subject, plan.step_rounds, ranks)
    calibration = Calibration(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=describe_machine(device),
        ranks=group.size(),
        ranks_per_host=ranks_per_host,
        threads_per_rank=torch.get_num_threads(),
        links=links,
        matrices=measure_matrices(plan.matrix_sizes, ranks),
        copies=measure_copies(plan.copy_bytes, ranks),
        steps=steps,
    )
    return Finding(ranks.of_first(calibration), notes)


def describe_machine(device: torch.device) -> Machine:
    """This host."""
    return Machine(
        cpu=_cpu_model(),
        cores=os.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        device=device.type,
        torch=torch.__version__,
        fullshard=fullshard.__version__,
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or "unknown")
