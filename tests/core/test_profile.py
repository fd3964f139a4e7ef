"""Profiles: parts of a step, transfers, summary and trace, by hand and against an account moment by moment."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import strategies as st

from core.support import Core, holds, holds_for

UNITS = ("(root)", "a", "b")
RANGES = ("optimizer", "clip")
PART_OF = {
    "GATHER": "start gathers",
    "GATHER_SECONDARY": "start gathers",
    "WAIT_GATHER": "wait for gathers",
    "FREE": "wait for gathers",
    "SHRINK": "wait for gathers",
    "REDUCE": "start reduces",
    "ALL_REDUCE": "start reduces",
    "WAIT_REDUCE": "wait for reduces",
    "WAIT_ALL_REDUCE": "wait for reduces",
    "DISCARD": "wait for reduces",
    "STASH": "other commands",
    "HOLD": "other commands",
}


@dataclass(frozen=True)
class Node:
    """A command ("GATHER 1") or a range ("clip"), `before` moments after what was before it, with others inside."""

    what: str
    before: int
    inside: tuple[Node, ...]
    after: int


def _nodes(inside: st.SearchStrategy[Any] | None = None) -> st.SearchStrategy[Any]:
    commands = st.tuples(st.sampled_from(sorted(PART_OF)), st.integers(0, 2)).map(lambda c: f"{c[0]} {c[1]}")
    what = st.one_of(commands, st.sampled_from(RANGES))
    within = st.just(()) if inside is None else st.lists(inside, max_size=2).map(tuple)
    return st.builds(Node, what, st.integers(0, 3), within, st.integers(1, 4))


NODES = st.recursive(_nodes(), _nodes, max_leaves=4)
STEPS = st.lists(st.lists(NODES, max_size=4), min_size=4, max_size=6)


def _record(core: Core, steps: list[list[Node]], rank: int = 0) -> Any:
    """Steps of one moment and what the nodes take; what nests begins a moment after what it nests in."""
    now, marks = 100, [100]
    commands: list[Any] = []
    ranges: list[Any] = []

    def run(node: Node) -> None:
        nonlocal now
        begin = now = now + node.before
        now += 1
        for each in node.inside:
            run(each)
        now += node.after
        words = node.what.split()
        if len(words) == 1:
            ranges.append(core.profile.Span(node.what, begin, now))
        else:
            commands.append(core.profile.Ran(core.lifecycle.Op[words[0]], int(words[1]), begin, now, 7, 0, now))

    for nodes in steps:
        now += 1
        for node in nodes:
            run(node)
        marks.append(now)
    kinds = [core.profile.kind_of(i) for i in range(len(steps))]
    made = tuple(core.profile.Step(kind, *marks[i : i + 2]) for i, kind in enumerate(kinds))
    return core.profile.Recording(rank, UNITS, made, tuple(commands), tuple(ranges))


def _moment_by_moment(recording: Any, step: Any) -> dict[str, int]:
    spans = [(PART_OF[ran.op.name], ran.begin_ns, ran.end_ns) for ran in recording.commands]
    spans += [(span.name, span.begin_ns, span.end_ns) for span in recording.ranges]
    parts: dict[str, int] = {}
    for moment in range(step.begin_ns, step.end_ns):
        over = [(begin, name) for name, begin, end in spans if begin <= moment < end]
        name = max(over)[1] if over else "compute"
        parts[name] = parts.get(name, 0) + 1
    return parts


@holds_for(STEPS, examples=40)
def test_parts_of_a_step_add_up_and_are_those_of_every_moment(core: Core, steps: list[list[Node]]) -> None:
    recording = _record(core, steps)
    for step in recording.steps:
        parts = core.profile.step_parts(recording, step)
        assert sum(parts.values()) == step.end_ns - step.begin_ns
        assert {name: length for name, length in parts.items() if length} == _moment_by_moment(recording, step)


@holds_for(STEPS, examples=40)
def test_every_collective_lands_once_after_its_start(core: Core, steps: list[list[Node]]) -> None:
    recording = _record(core, steps)
    found = core.profile.transfers(recording)
    starts = [ran for ran in recording.commands if PART_OF[ran.op.name].startswith("start")]
    assert sorted((t.begin_ns, t.unit) for t in found) == sorted((ran.begin_ns, ran.unit) for ran in starts)
    last = recording.commands[-1].end_ns if recording.commands else 0
    for transfer in found:
        gathers = "GATHER" in transfer.op.name
        ends = ("WAIT_GATHER", "FREE", "SHRINK") if gathers else ("WAIT_REDUCE", "WAIT_ALL_REDUCE", "DISCARD")
        started = next(ran for ran in starts if ran.begin_ns == transfer.begin_ns)
        after = [
            ran.end_ns
            for ran in recording.commands[recording.commands.index(started) + 1 :]
            if ran.op.name in ends and ran.unit == transfer.unit
        ]
        assert transfer.end_ns == min(after, default=last)


@holds_for(STEPS, examples=30)
def test_a_trace_is_json_whose_ranges_nest(core: Core, steps: list[list[Node]]) -> None:
    recordings = [_record(core, steps, rank) for rank in (0, 3)]
    trace = json.loads(json.dumps(core.trace.chrome_trace(recordings, {"summary": None})))
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            span = (round(1e3 * event["ts"]), round(1e3 * (event["ts"] + event["dur"])))
            tracks.setdefault((event["pid"], event["tid"]), []).append(span)
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert tracks.keys() <= named.keys()
    assert {pid for pid, _ in tracks} == {0, 3}
    for track, spans in tracks.items():
        for begin, end in spans:
            for other_begin, other_end in spans:
                # Two ranges of one track are apart, or one is within the other.
                assert end <= other_begin or other_end <= begin or _within(begin, end, other_begin, other_end)
        if named[track] == "compute":
            assert sum(end - begin for begin, end in spans) == _compute_outside(recordings[0], core)
        if named[track].endswith("in flight"):
            assert all(a[1] <= b[0] for a, b in zip(sorted(spans), sorted(spans)[1:], strict=False))


def _within(begin: float, end: float, other_begin: float, other_end: float) -> bool:
    return (other_begin <= begin and end <= other_end) or (begin <= other_begin and other_end <= end)


def _compute_outside(recording: Any, core: Core) -> int:
    return sum(core.profile.step_parts(recording, step)["compute"] for step in recording.steps)


def _stream(core: Core, text: str, moment_ns: int = 1_000_000) -> Any:
    """A recording written out, in milliseconds: "|" ends a step, "3" computes, "GATHER 1 2" takes 2, "clip 4", too."""
    now, marks = 0, [0]
    commands, ranges = [], []
    for part in text.split(", "):
        words = part.split()
        if words[0] == "|":
            marks.append(now)
            continue
        begin, now = now, now + int(words[-1]) * moment_ns
        if len(words) == 3:
            op = core.lifecycle.Op[words[0]]
            payload = {"GATHER": 100, "REDUCE": 30, "ALL_REDUCE": 15}.get(words[0], 0)
            copied = 50 if words[0] == "GATHER" and len(marks) == 1 else 0
            commands.append(core.profile.Ran(op, int(words[1]), begin, now, payload, copied))
        elif len(words) == 2:
            ranges.append(core.profile.Span(words[0], begin, now))
    steps = [core.profile.Step(core.profile.kind_of(i), *marks[i : i + 2]) for i in range(len(marks) - 1)]
    return core.profile.Recording(0, UNITS, tuple(steps), tuple(commands), tuple(ranges))


COUNTED = "GATHER 1 1, WAIT_GATHER 1 1, 50, |"
ALONE = "GATHER 1 9, WAIT_GATHER 1 0, 20, REDUCE 1 11, WAIT_REDUCE 1 0, |"
FIRST = "GATHER 1 1, GATHER 2 2, 10, WAIT_GATHER 1 4, 20, FREE 1 1, REDUCE 1 3, HOLD 2 1, WAIT_REDUCE 1 2, clip 6, |"
SECOND = "GATHER 1 1, 10, WAIT_GATHER 1 0, 28, REDUCE 1 1, ALL_REDUCE 1 1, WAIT_ALL_REDUCE 1 3, clip 4, |"


@holds
def test_profile_of_a_rank_by_hand(core: Core) -> None:
    found = core.profile.analyse(_stream(core, ", ".join([COUNTED, ALONE, ALONE.replace("9", "11"), FIRST, SECOND])))
    assert found.steps == 2
    assert found.step_seconds == 0.049
    assert found.parts == {
        "compute": 0.034,
        "start gathers": 0.002,
        "wait for gathers": 0.0025,
        "start reduces": 0.0025,
        "wait for reduces": 0.0025,
        "other commands": 0.0005,
        "clip": 0.005,
    }
    assert round(found.exposed_seconds, 9) == 0.0095
    assert round(found.alone_seconds, 9) == 0.021
    assert found.alone_step_seconds == 0.041
    assert round(found.overlap, 9) == round(1 - 9.5 / 21, 9)
    assert (found.gathered_bytes, found.reduced_bytes, found.copied_bytes) == (150, 30, 50)
    assert list(found.waits.items()) == [
        ("wait gather a", 0.002),
        ("wait all reduce a", 0.0015),
        ("wait reduce a", 0.001),
        ("free a", 0.0005),
    ]


@holds
def test_waits_longer_than_transfers_are_no_overlap(core: Core) -> None:
    """Ranks that wait for each other may stand still for longer than communication takes alone."""
    found = core.profile.analyse(_stream(core, ", ".join([COUNTED, ALONE, ALONE, "WAIT_GATHER 1 30, |"])))
    assert found.overlap == 0.0


@holds
def test_too_few_steps_are_an_error(core: Core) -> None:
    for steps in range(4):
        recording = _stream(core, ", ".join([COUNTED, ALONE, ALONE][:steps]) or "1")
        with pytest.raises(ValueError, match=f"at least 4 steps, found {steps}"):
            core.profile.analyse(recording)


@holds
def test_summary_of_two_ranks_by_hand(core: Core) -> None:
    ranks = [
        core.profile.analyse(_stream(core, ", ".join([COUNTED, ALONE, ALONE, measured])))
        for measured in (
            "30, GATHER 1 2, WAIT_GATHER 1 2, clip 1, optimizer 5, |",
            "28, GATHER 1 2, WAIT_GATHER 1 4, clip 3, optimizer 3, |",
        )
    ]
    summary = core.summary.Summary(tuple(ranks))
    assert list(summary.parts) == ["compute", "start gathers", "wait for gathers", "optimizer", "clip"]
    expected = {"compute": 29, "start gathers": 2, "wait for gathers": 3, "optimizer": 4, "clip": 2}
    assert {name: round(1e3 * seconds, 9) for name, seconds in summary.parts.items()} == expected
    assert round(summary.step_seconds, 9) == 0.04
    assert round(summary.exposed_seconds, 9) == 0.005
    assert round(summary.alone_seconds, 9) == 0.02
    assert round(summary.overlap, 9) == 0.75
    assert round(1e3 * summary.waits["wait gather a"], 9) == 3
    text = str(summary)
    assert "a step of 40.0 ms, mean of 1 step(s) and 2 rank(s)" in text
    assert "5.00 ms exposed of 20.00 ms that it takes alone: 75 % overlap" in text
    wait = next(line for line in text.splitlines() if line.startswith("wait for gathers"))
    assert wait.split()[3:] == ["3.00", "7.5", "%", "2.00", "4.00", "█▊"]
    assert json.loads(json.dumps(summary.as_dict()))["overlap"] == summary.overlap
