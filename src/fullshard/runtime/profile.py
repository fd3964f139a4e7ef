"""Profiles: what the commands of some steps took, as a summary to read and a trace to look at.

Nothing of this exists unless a profile is open: an engine asks for each command whether it is watched, and that is all.
"""

from __future__ import annotations

import json
import pickle
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.core.lifecycle import Op
from fullshard.core.profile import FIRST_KINDS, Kind, Ran, Recording, Span, Step, analyse, kind_of
from fullshard.core.summary import Summary
from fullshard.core.trace import chrome_trace
from fullshard.errors import MisuseError
from fullshard.runtime.collectives import exchange
from fullshard.runtime.engine import Engine
from fullshard.runtime.module import FSDPModule
from fullshard.runtime.unit import Unit

# Of more ranks a trace is of no use to a person, and recordings are not small.
_TRACED_RANKS = 8
_COPIES = ("copy_", "_foreach_copy_", "clone", "cat", "stack", "split_with_sizes_copy", "_to_copy", "index_copy")


def profile(model: nn.Module) -> Profile:
    """Record what the commands of a sharded model take. Call it on every rank, between steps.

        with fullshard.profile(model) as profile:
            for batch in batches:
                model(batch).sum().backward()
                with profile.range("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()
                profile.step()  # at least four times
        print(profile.summary())
        profile.write_trace("trace.json")  # for https://ui.perfetto.dev

    In the first step the bytes that commands copy are counted; in the next two every transfer is waited for where it is
    started, which tells what communication takes alone; those that follow are measured. Results are the same in all.

    Args:
        model: The outermost sharded module, or a module with several of them.
    """
    return Profile(model)


class Clock(Protocol):
    """Tells the time of marks."""

    def now(self) -> Any:
        """A mark for this moment."""

    def resolve(self, marks: list[Any]) -> list[int]:
        """Nanoseconds since 1970 of marks."""


class HostClock:
    """CPU: kernels run when they are called, so the time of the host is that of the computation."""

    def __init__(self) -> None:
        # Monotonic while it is read; the same origin on all hosts, as far as their clocks agree.
        self._offset_ns = time.time_ns() - time.perf_counter_ns()
        self.now = time.perf_counter_ns

    def resolve(self, marks: list[int]) -> list[int]:
        """See `Clock`."""
        return [mark + self._offset_ns for mark in marks]


class DeviceClock:
    """An accelerator: events on the stream that computes. A wait is as long as that stream stands still for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._origin = self.now()
        torch.accelerator.synchronize(device)
        self._origin_ns = time.time_ns()

    def now(self) -> torch.Event:
        """See `Clock`."""
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def resolve(self, marks: list[torch.Event]) -> list[int]:
        """See `Clock`."""
        torch.accelerator.synchronize(self._device)
        return [self._origin_ns + round(1e6 * self._origin.elapsed_time(mark)) for mark in marks]


class Profile:
    """A profile of some steps; see `profile`. Only the `with` block communicates, at its end."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._engines: list[Engine] = []
        self._units: dict[int, int] = {}  # by identity
        self._names: list[str] = []
        self._clock: Clock
        self._kind = Kind.COUNTED
        # Marks of the beginning of every step, and of the end of the last one.
        self._marks: list[Any] = []
        self._commands: list[tuple[Op, int, Any, Any, int, int, int]] = []
        self._ranges: list[tuple[str, Any, Any]] = []
        self.recordings: list[Recording] = []
        self._summary: Summary | None = None

    def __enter__(self) -> Self:
        self._engines = _engines_of(self._model)
        for engine in self._engines:
            if engine.watch is not None:
                raise MisuseError("a profile of this model is open already; close it before another one is opened")
        for unit in (unit for engine in self._engines for unit in engine.units):
            self._units[id(unit)] = len(self._names)
            self._names.append(unit.name or "(root)")
        device = self._engines[0].units[0].place.device
        self._clock = HostClock() if device.type == "cpu" else DeviceClock(device)
        for engine in self._engines:
            engine.watch = self._watch
        self._marks = [self._clock.now()]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for engine in self._engines:
            engine.watch = None
        if error is None:  # else other ranks may never come here
            self._collect()

    def step(self) -> None:
        """A step ends here, and the next one begins."""
        self._marks.append(self._clock.now())
        self._kind = kind_of(len(self._marks) - 1)

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Call the time inside `name`, as a part of the step of its own; it counts as compute otherwise."""
        begin = self._clock.now()
        try:
            yield
        finally:
            self._ranges.append((name, begin, self._clock.now()))

    @property
    def complete(self) -> bool:
        """Whether there were enough steps for a summary."""
        return len(self._marks) - 1 > len(FIRST_KINDS)

    def summary(self) -> Summary:
        """What was found, of all ranks; `print` it.

        Raises:
            MisuseError: The `with` block has not ended, or fewer than four steps ended in it.
        """
        if self._summary is None:
            raise MisuseError(
                f"a profile is summed up after its `with` block, in which at least {len(FIRST_KINDS) + 1} steps must "
                f"end by a call of step(); {max(0, len(self._marks) - 1)} did"
            )
        return self._summary

    def trace(self) -> dict[str, Any]:
        """The trace of the first ranks in Chrome's format."""
        return chrome_trace(self.recordings, {"summary": self._summary.as_dict()} if self._summary else None)

    def write_trace(self, path: str | Path) -> None:
        """Write the trace as JSON, from the rank whose global number is 0, or the model's first one; others return."""
        if self.recordings and dist.get_rank() == self.recordings[0].rank:
            Path(path).write_text(json.dumps(self.trace()), encoding="utf-8")

    def _watch(self, unit: Unit, act: Callable[[Unit], None]) -> None:
        """Execute a command of an engine; see `Engine.watch`."""
        copies = _Copies() if self._kind is Kind.COUNTED else None
        begin = self._clock.now()
        if copies is not None:
            with copies:
                act(unit)
        else:
            act(unit)
            if self._kind is Kind.ALONE:
                for pending in unit.in_flight:
                    pending.wait()
        end = self._clock.now()
        op = Op[act.__name__.upper()]
        pool_bytes = unit.resources.pool.live_bytes
        copied_bytes = 0 if copies is None else copies.copied_bytes
        index = self._units[id(unit)]
        self._commands.append((op, index, begin, end, _payload_bytes(op, unit), copied_bytes, pool_bytes))

    def _collect(self) -> None:
        """Exchange what the ranks recorded."""
        own = self._recording()
        place = self._engines[0].units[0].place
        world = place.world
        is_traced = world.replica * world.size + world.rank < _TRACED_RANKS
        packed = zlib.compress(pickle.dumps(own)) if is_traced else b""
        told = [(analyse(own) if self.complete else None, packed)]
        for group in (place.shard_group, place.replicate_group):
            if group is not None:
                told = [item for items in exchange(told, group, "profile") for item in items]
        ranks = [found for found, _ in told if found is not None]
        self._summary = Summary(tuple(ranks)) if len(ranks) == len(told) else None
        self.recordings = [pickle.loads(zlib.decompress(packed)) for _, packed in told if packed]

    def _recording(self) -> Recording:
        marks = [
            *self._marks,
            *(m for ran in self._commands for m in ran[2:4]),
            *(m for r in self._ranges for m in r[1:]),
        ]
        times = iter(self._clock.resolve(marks))
        steps = [next(times) for _ in self._marks]
        return Recording(
            rank=dist.get_rank(),
            units=tuple(self._names),
            steps=tuple(Step(kind_of(i), *steps[i : i + 2]) for i in range(len(steps) - 1)),
            commands=tuple(Ran(op, unit, next(times), next(times), *n) for op, unit, _, _, *n in self._commands),
            ranges=tuple(Span(name, next(times), next(times)) for name, _, _ in self._ranges),
        )


def _engines_of(model: nn.Module) -> list[Engine]:
    """Engines that run the sharded modules of `model`, made now where there are none."""
    engines: dict[int, Engine] = {}
    for module in model.modules():  # outer ones first, so that inner ones find the engine of their root
        if isinstance(module, FSDPModule):
            engine = module._unit_and_engine()[1]
            engines.setdefault(id(engine), engine)
    if not engines:
        raise ValueError(f"{type(model).__name__} has no sharded module: a profile is of the commands of fully_shard")
    return list(engines.values())


def _payload_bytes(op: Op, unit: Unit) -> int:
    """Bytes that a command is about: full parameters, full gradients, or sums that replicas add up."""
    if op in (Op.GATHER, Op.GATHER_SECONDARY):
        return unit.full_bytes
    if op is Op.REDUCE:
        return sum(
            full.numel() * full.element_size()
            for flow in unit.flows
            for full, trainable in zip(flow.buffers.full, flow.plan().trainable, strict=True)
            if trainable
        )
    if op is Op.ALL_REDUCE:
        return sum(flow.plan().numel * flow.sum_dtype.itemsize for flow in unit.flows)
    return 0


class _Copies(TorchDispatchMode):
    """Adds up bytes that are copied or cast from one tensor to another."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copied_bytes = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if name in _COPIES:
            written = args[0] if name.endswith("copy_") else result
            tensors = written if isinstance(written, list | tuple) else [written]
            self.copied_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return result
