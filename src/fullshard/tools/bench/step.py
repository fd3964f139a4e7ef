"""Whole training steps of fullshard beside torch's FSDP2 and DDP, in turns in one process.

All of them use the process's one allocator, with the settings that fullshard makes there. That favours the others, if
anyone; `benchmarks/step_time.py` gives each a process of its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from fullshard.core.calibration import StepTime
from fullshard.runtime.api import fully_shard
from fullshard.tools.bench import peers
from fullshard.tools.bench.subject import Subject
from fullshard.tools.bench.timing import Ranks

_WARM_UP = 2


def measure_steps(subject: Subject, rounds: int, ranks: Ranks) -> tuple[StepTime, ...]:
    """Seconds of a step of every engine; each has its turn in each round."""
    engines: dict[str, Callable[[nn.Module], nn.Module]] = {
        "fullshard": lambda model: _shard(model, subject.block),
        "FSDP2": lambda model: peers.shard_with_fsdp2(model, subject.block),
        "DDP": lambda model: peers.replicate_with_ddp(model, ranks.device),
    }
    steps = {name: _Step(make(subject.build().to(ranks.device)), subject, ranks) for name, make in engines.items()}
    for step in steps.values():
        for _ in range(_WARM_UP):
            step.run()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            seconds[name].append(step.run())
    return tuple(_summary(name, subject.title, values) for name, values in seconds.items())


def _summary(name: str, model: str, seconds: list[float]) -> StepTime:
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    return StepTime(name, model, median, low, high)


def _shard(model: nn.Module, block: type[nn.Module]) -> nn.Module:
    for module in model.modules():
        if isinstance(module, block):
            fully_shard(module)
    fully_shard(model)
    return model


class _Step:
    """A model, its optimizer and one batch."""

    def __init__(self, model: nn.Module, subject: Subject, ranks: Ranks) -> None:
        self._model = model
        self._ranks = ranks
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        draw = torch.Generator().manual_seed(ranks.group.rank())
        tokens = torch.randint(subject.vocabulary, (1, subject.positions + 1), generator=draw).to(ranks.device)
        self._tokens, self._targets = tokens[:, :-1], tokens[:, 1:]

    def run(self) -> float:
        """One step; seconds of the slowest rank."""
        self._ranks.slowest(0.0)
        started = time.perf_counter()
        logits: Tensor = self._model(self._tokens)
        functional.cross_entropy(logits.flatten(0, 1).float(), self._targets.flatten()).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._ranks.device.type != "cpu":
            torch.accelerator.synchronize(self._ranks.device)
        return self._ranks.slowest(time.perf_counter() - started)
