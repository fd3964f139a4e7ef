"""Cost: bytes and seconds of a stream of commands, by hand and against the simulator."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from core.simulator import Runner
from core.support import Core, holds, holds_for
from core.traces import Case, Ev, cases


def _stream(core: Core, text: str) -> list[object]:
    """A stream written out: "GATHER 0, 2.5, WAIT_GATHER 0" computes for 2.5 seconds in between."""
    made: list[object] = []
    for part in text.split(", "):
        words = part.split()
        if len(words) == 1:
            made.append(core.cost.Compute(float(words[0])))
        else:
            made.append(core.schedule.Command(core.lifecycle.Op[words[0]], int(words[1])))
    return made


@holds_for(cases(), examples=60)
def test_peak_is_that_of_the_simulator(core: Core, case: Case) -> None:
    """Two accounts of one run: the planner's, from the log alone, and the one of what executed it."""
    runner = Runner(core, case)
    ops = [op for commands in runner.feed_all(case.trace) for op in commands]
    stream = [core.schedule.Command(core.lifecycle.Op[op], unit) for op, unit in ops]
    costs = [core.cost.UnitCost(size) for size in case.model.full_bytes]
    assert core.cost.peak_full_bytes(stream, costs) == runner.simulator.peak_bytes


@holds_for(st.tuples(cases(), st.integers(0, 60)), examples=60)
def test_gradients_on_the_wire_are_those_of_the_simulator(core: Core, case: tuple[Case, int]) -> None:
    """Also where an abort discards them. Gradients are as large as the full buffers here."""
    run, cut = case
    runner = Runner(core, run)
    ops = [op for commands in runner.feed_all([*run.trace[:cut], Ev("ABORT"), *run.trace]) for op in commands]
    stream = [core.schedule.Command(core.lifecycle.Op[op], unit) for op, unit in ops]
    costs = [core.cost.UnitCost(0, size) for size in run.model.full_bytes]
    assert core.cost.peak_gradient_bytes(stream, costs) == runner.simulator.peak_reducing_bytes


@holds
def test_peak_bytes_by_hand(core: Core) -> None:
    cost = core.cost
    costs = [cost.UnitCost(10, 1), cost.UnitCost(20, 2), cost.UnitCost(40, 4)]
    stream = _stream(core, "GATHER 0, WAIT_GATHER 0, GATHER 1, 1.0, WAIT_GATHER 1, SHRINK 1, GATHER 2, FREE 2, FREE 0")
    assert cost.peak_full_bytes(stream, costs) == 10 + 40
    stash = _stream(
        core, "GATHER 2, WAIT_GATHER 2, STASH 2, GATHER 1, WAIT_GATHER 2, FREE 2, FREE 1, GATHER_SECONDARY 0"
    )
    assert cost.peak_full_bytes(stash, costs) == 40 + 20
    assert cost.peak_full_bytes(_stream(core, "GATHER_SECONDARY 1, FREE 1"), costs) == 20
    reduces = _stream(
        core, "REDUCE 2, REDUCE 1, WAIT_REDUCE 2, ALL_REDUCE 2, REDUCE 0, DISCARD 1, DISCARD 2, DISCARD 0"
    )
    assert cost.peak_gradient_bytes(reduces, costs) == 4 + 2
    assert cost.peak_gradient_bytes([*reduces, *reduces], costs) == 4 + 2
    assert cost.peak_full_bytes([], costs) == cost.peak_gradient_bytes([], costs) == 0


@holds
def test_exposed_seconds_by_hand(core: Core) -> None:
    cost = core.cost
    costs = [cost.UnitCost(1, 1, gather_seconds=3.0, reduce_seconds=5.0)] * 3

    def exposed(text: str) -> float:
        seconds: float = cost.exposed_seconds(_stream(core, text), costs)
        return seconds

    assert exposed("GATHER 0, WAIT_GATHER 0") == 3.0
    assert exposed("GATHER 0, 1.0, WAIT_GATHER 0, 9.0, WAIT_GATHER 0") == 2.0
    assert exposed("GATHER 0, 4.0, WAIT_GATHER 0") == 0.0
    assert exposed("GATHER 0, GATHER 1, WAIT_GATHER 1") == 6.0  # one link: the second comes after the first
    assert exposed("REDUCE 0, GATHER 1, WAIT_GATHER 1, WAIT_REDUCE 0") == 8.0
    assert exposed("GATHER 0, 1.0, FREE 0") == 2.0  # a prefetch that is dropped has to end first
    assert exposed("REDUCE 0, 1.0, DISCARD 0") == 4.0
    assert exposed("10.0, GATHER 0, 10.0, WAIT_GATHER 0, GATHER 1, WAIT_GATHER 1") == pytest.approx(3.0)
