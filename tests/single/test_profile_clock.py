"""The clocks of a profile. No accelerator is at hand: what is asked of one is played here, and no more is claimed."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fullshard.runtime.profile import DeviceClock, HostClock


def test_the_clock_of_the_host_runs_like_that_of_the_system() -> None:
    clock = HostClock()
    before = time.time_ns()
    marks = [clock.now(), clock.now()]
    first, second = clock.resolve(marks)
    assert first <= second
    assert abs(first - before) < 10**9
    assert second - first == marks[1] - marks[0]


def test_the_clock_of_an_accelerator_counts_from_its_first_event(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    timeline = iter([10.0, 10.5, 14.25])  # milliseconds

    class FakeEvent:
        def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
            assert device.type == "cuda"
            assert enable_timing

        def record(self, stream: Any) -> None:
            assert stream.name == "compute"
            self.at = next(timeline)

        def elapsed_time(self, later: FakeEvent) -> float:
            assert calls[-1] == "synchronize", "an event has a time only when it was reached"
            return later.at - self.at

    monkeypatch.setattr(torch, "Event", FakeEvent)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: SimpleNamespace(name="compute"))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda _: calls.append("synchronize"))
    clock = DeviceClock(torch.device("cuda", 0))
    marks = [clock.now(), clock.now()]
    calls.append("work")
    first, second = clock.resolve(marks)
    assert second - first == 3_750_000
    assert abs(time.time_ns() - first) < 60 * 10**9
