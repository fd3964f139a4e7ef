"""The training loop: steps, validation, checkpoints, stopping. One `Trainer` per rank, all in lockstep."""

from __future__ import annotations

import math
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from fullshard import Profile, clip_grad_norm_
from fullshard.checkpoint import CheckpointError
from fullshard.train.checkpoint import Progress, Saver, TrainState
from fullshard.train.config import Config
from fullshard.train.divergence import explain_divergence
from fullshard.train.errors import DivergedError
from fullshard.train.folder import METRICS_FILE, MetricsLog, RunFolder
from fullshard.train.loss import backward_window, evaluate, valid_tokens
from fullshard.train.memory import StateBytes, memory_now, memory_peak, state_bytes
from fullshard.train.optim import learning_rate, set_learning_rate
from fullshard.train.profile import StepProfile
from fullshard.train.progress import ProgressView, StepReport, bits_per_byte
from fullshard.train.stop import SAVE_SIGNAL, StopRequest
from fullshard.train.windows import Batch, TrainStream, ValidationWindows
from fullshard.train.world import World

Ending = Literal["finished", "preempted", "interrupted"]


@dataclass(frozen=True)
class Parts:
    """What the loop works on."""

    config: Config
    world: World
    model: nn.Module
    optimizer: torch.optim.Optimizer
    stream: TrainStream
    validation: ValidationWindows
    corpus: str  # fingerprint
    folder: RunFolder

    def state(self) -> TrainState:
        """The parts a checkpoint is made of."""
        return TrainState(self.model, self.optimizer, self.world, self.config, self.corpus)


@dataclass(frozen=True)
class Result:
    """How the loop ended and what it measured."""

    ending: Ending
    step: int
    train_loss: tuple[float, float] | None  # of the first and the last step of this session
    validation_loss: tuple[float, float | None]  # before, and after a run that was not stopped
    seconds: float  # spent in steps
    tokens: int  # of all ranks in those steps
    bytes_per_rank: tuple[StateBytes, StateBytes]  # this engine (the largest rank), DDP
    peak_memory: int  # of the largest rank
    profile: Profile | None = None


@dataclass(frozen=True)
class RankNumbers:
    """What every rank reports after a backward, in rank order."""

    loss_sums: tuple[float, ...]
    tokens: tuple[int, ...]  # that count
    stops: tuple[int, ...]  # signal numbers
    saves: tuple[int, ...]  # 1 where a checkpoint is asked for
    memory: tuple[int, ...]  # bytes
    peak_memory: tuple[int, ...]

    @property
    def loss(self) -> float:
        """Mean over the tokens of all ranks."""
        return sum(self.loss_sums) / sum(self.tokens)

    @property
    def max_loss(self) -> float:
        """Mean over the tokens of the rank where it is highest."""
        return max(loss / tokens for loss, tokens in zip(self.loss_sums, self.tokens, strict=True) if tokens)


class Trainer:
    """Runs the configured steps from wherever `progress` says the run is."""

    def __init__(self, parts: Parts, progress: Progress, view: ProgressView, stop: StopRequest) -> None:
        self.parts = parts
        self.view = view
        self.stop = stop
        self.metrics: MetricsLog | None = None
        parts.world.on_first(lambda: self._open_log(progress.step))
        self.first_step = progress.step
        self.progress = progress
        self.saver = Saver(parts.folder.checkpoints, parts.state(), progress.step if parts.folder.resumes else -1)
        self.reports: list[StepReport] = []  # the first and the last one
        self.seconds = 0.0
        self.bytes: tuple[StateBytes, StateBytes] | None = None
        self.profile = StepProfile(parts.config.profile, parts.model, parts.world, parts.folder.path)

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.progress.step

    def run(self) -> Result:
        """Train to the end, or until a stop is asked for; a checkpoint is saved in both cases."""
        before = self.validate()
        self.stop.begin()
        try:
            ending = self._steps()
        except DivergedError:  # of all ranks: what is being saved is from before, and good
            with suppress(CheckpointError):
                self.saver.settle()
            raise
        self.profile.close(self.view)
        if ending != "finished" or self.parts.config.checkpoint.save_at_end:
            self.save(wait=True)
        self._tell(self.saver.settle())
        after = self.validate() if ending == "finished" and self.reports else None
        return self._result(ending, before, after)

    def _steps(self) -> Ending:
        config = self.parts.config
        while self.step < config.train.steps:
            ranks = self.train_step()
            stop, asked = max(ranks.stops), any(ranks.saves)
            self._tell(self.saver.news())
            if stop:
                self.view.note(f"{signal.Signals(stop).name}: stopping after step {self.step}; saving a checkpoint.")
                return "interrupted" if stop == signal.SIGINT else "preempted"
            if asked:
                self.view.note(f"{SAVE_SIGNAL.name}: saving a checkpoint after step {self.step}, and going on.")
            if asked or (config.checkpoint.interval and self.step % config.checkpoint.interval == 0):
                with self.profile.range("checkpoint"):
                    self.save()
            if config.eval.interval and self.step % config.eval.interval == 0 and self.step < config.train.steps:
                with self.profile.range("validation"):
                    self.validate()
        return "finished"

    def train_step(self) -> RankNumbers:
        """One optimizer step; returns what every rank has reported in it."""
        self.profile.begin_step()
        started = time.perf_counter()
        with self.profile.range("data"):
            batches = [self._to_device(batch) for batch in self.parts.stream.step(self.progress.position)]
        data_seconds = time.perf_counter() - started
        grad_norm, ranks = self._gradients(batches)
        self._check_finite(ranks, grad_norm)
        with self.profile.range("optimizer"):
            lr = self._update()
        position = self.parts.stream.next_position(self.progress.position)
        self.progress = replace(self.progress, step=self.step + 1, position=position)
        seconds = time.perf_counter() - started
        self.seconds += seconds
        report = StepReport(
            step=self.step,
            steps=self.parts.config.train.steps,
            loss=ranks.loss,
            max_loss=ranks.max_loss,
            grad_norm=grad_norm,
            lr=lr,
            seconds=seconds,
            data_seconds=data_seconds,
            tokens=sum(ranks.tokens),
            tokens_seen=position * self.parts.config.data.seq_len,
            memory=ranks.memory,
            peak_memory=ranks.peak_memory,
            seconds_left=self._seconds_left(),
        )
        with self.profile.range("report"):
            self._report(report)
        self.profile.end_step(self.view)
        return ranks

    def _gradients(self, batches: list[Batch]) -> tuple[float, RankNumbers]:
        """(norm of the gradients before they were clipped, what every rank reports)."""
        config, world, model = self.parts.config.train, self.parts.world, self.parts.model
        own_tokens = valid_tokens(batches)
        with self.profile.range("numbers of all ranks"):
            tokens = int(world.gather_numbers([own_tokens]).sum())
        with self.profile.range("optimizer"):
            self.parts.optimizer.zero_grad(set_to_none=True)
        loss_sum = backward_window(model, batches, tokens, world.size, config.gradient_sync)
        with self.profile.range("clip"):
            norm = float(clip_grad_norm_(model, config.max_grad_norm))
        with self.profile.range("numbers of all ranks"):
            asked = [self.stop.pending(), self.stop.take_save()]
            memory = [memory_now(world.device), memory_peak(world.device)]
            losses, *rest = world.gather_numbers([loss_sum, own_tokens, *asked, *memory]).T.tolist()
        return norm, RankNumbers(tuple(losses), *(tuple(map(int, column)) for column in rest))

    def _update(self) -> float:
        """The optimizer's step; returns the learning rate it used."""
        lr = learning_rate(self.step, self.parts.config.train.steps, self.parts.config.optim)
        set_learning_rate(self.parts.optimizer, lr)
        self.parts.optimizer.step()
        if self.bytes is None:  # now parameters, gradients and optimizer state all exist
            self.bytes = self._measure()
        return lr

    def validate(self) -> float:
        """Mean loss of the held-out windows over all ranks, shown and logged."""
        started = time.perf_counter()
        batches = [self._to_device(batch) for batch in self.parts.validation.batches()]
        sums = self.parts.world.gather_numbers(evaluate(self.parts.model, batches)).sum(dim=0)
        loss = float(sums[0] / sums[1])
        self.view.note(f"validation after step {self.step}: loss {loss:.4f}, {bits_per_byte(loss):.3f} bits per byte")
        if self.metrics is not None:
            self.metrics.write(
                {
                    "step": self.step,
                    "validation_metrics/global_avg_loss": loss,
                    "validation_metrics/bits_per_byte": bits_per_byte(loss),
                    "time_metrics/validation(s)": time.perf_counter() - started,
                }
            )
        return loss

    def save(self, wait: bool = False) -> None:
        """Save a checkpoint, unless this step already has one. `wait`: not in the background."""
        self._tell(self.saver.save(self.progress, wait))

    def _tell(self, news: str | None) -> None:
        if news is not None:
            self.view.note(news)

    def _open_log(self, first_step: int) -> None:
        self.metrics = MetricsLog(self.parts.folder.path / METRICS_FILE, first_step)

    def _to_device(self, batch: Batch) -> Batch:
        device = self.parts.world.device
        return Batch(batch.tokens.to(device), batch.labels.to(device))

    def _check_finite(self, ranks: RankNumbers, norm: float) -> None:
        if math.isfinite(ranks.loss) and math.isfinite(norm):
            return
        saved = f"The last checkpoint is step {self.saver.step}. " if self.saver.step >= 0 else ""
        raise DivergedError(
            f"training diverged at step {self.step + 1}: loss {ranks.loss}, gradient norm {norm}. "
            f"{explain_divergence(self.parts.model, self.parts.world, ranks.loss_sums)} "
            f"The parameters were not changed by this step. {saved}"
            "Lower optim.lr, lengthen optim.warmup_steps or lower train.max_grad_norm."
        )

    def _report(self, report: StepReport) -> None:
        self.reports = [*self.reports[:1], report]
        self.view.step(report)
        if self.metrics is not None:
            self.metrics.write(report.metrics())

    def _seconds_left(self) -> float:
        return self.seconds / (self.step - self.first_step) * (self.parts.config.train.steps - self.step)

    def _measure(self) -> tuple[StateBytes, StateBytes]:
        """(bytes of the rank that holds most, bytes DDP would hold per rank)."""
        local, full = state_bytes(self.parts.model, self.parts.optimizer)
        rows = self.parts.world.gather_numbers([local.parameters, local.gradients, local.optimizer])
        largest = rows[int(rows.sum(dim=1).argmax())]
        return StateBytes(*map(int, largest.tolist())), full

    def _result(self, ending: Ending, before: float, after: float | None) -> Result:
        peak = self.parts.world.gather_numbers([memory_peak(self.parts.world.device)])
        if self.metrics is not None:
            self.metrics.close()
        losses = [report.loss for report in self.reports]
        nothing = StateBytes(0, 0, 0)
        return Result(
            ending=ending,
            step=self.step,
            train_loss=(losses[0], losses[-1]) if losses else None,
            validation_loss=(before, after),
            seconds=self.seconds,
            tokens=sum_tokens(self.reports),
            bytes_per_rank=self.bytes or (nothing, nothing),
            peak_memory=int(peak.max()),
            profile=self.profile.found,
        )


def sum_tokens(reports: list[StepReport]) -> int:
    """Tokens of all ranks from the first to the last report."""
    if not reports:
        return 0
    return reports[-1].tokens_seen - reports[0].tokens_seen + reports[0].tokens
