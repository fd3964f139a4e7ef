"""Recordings of some ranks as a trace in Chrome's format, which https://ui.perfetto.dev and chrome://tracing open.

Every rank is a process of it. Its tracks are steps with the user's ranges in them, what is left for compute, our
commands, and the collectives in flight, as many tracks of those as are in flight at once; a counter shows the bytes of
full buffers and staging.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fullshard.core.lifecycle import Op
from fullshard.core.profile import Kind, Recording, Span, Transfer, transfers

_STEPS, _COMPUTE, _COMMANDS = 1, 2, 3
_KINDS = {Kind.COUNTED: "copies counted", Kind.ALONE: "nothing overlaps", Kind.MEASURED: "measured"}


def chrome_trace(recordings: Sequence[Recording], about: dict[str, Any] | None = None) -> dict[str, Any]:
    """The trace, ready for JSON.

    Args:
        recordings: One a rank, with clocks that agree.
        about: Anything worth keeping beside, such as the summary.
    """
    begins = [
        *(step.begin_ns for recording in recordings for step in recording.steps),
        *(ran.begin_ns for recording in recordings for ran in recording.commands),
        *(span.begin_ns for recording in recordings for span in recording.ranges),
    ]
    begin_ns = min(begins, default=0)
    events = [event for recording in recordings for event in _events(recording, begin_ns)]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about or {}}


def _events(recording: Recording, begin_ns: int) -> list[dict[str, Any]]:
    names = {_STEPS: "steps", _COMPUTE: "compute", _COMMANDS: "commands"}
    spans: list[tuple[int, str, int, int, dict[str, Any]]] = [
        *((_STEPS, f"step {i} ({_KINDS[s.kind]})", s.begin_ns, s.end_ns, {}) for i, s in enumerate(recording.steps)),
        *((_STEPS, span.name, span.begin_ns, span.end_ns, {}) for span in recording.ranges),
        *((_COMPUTE, span.name, span.begin_ns, span.end_ns, {}) for span in compute_spans(recording)),
    ]
    for ran in recording.commands:
        numbers = {"payload_bytes": ran.payload_bytes, "copied_bytes": ran.copied_bytes}
        details: dict[str, Any] = {name: number for name, number in numbers.items() if number}
        spans.append((_COMMANDS, recording.label(ran), ran.begin_ns, ran.end_ns, details))
    in_flight = transfers(recording)
    gathers = [t for t in in_flight if t.op in (Op.GATHER, Op.GATHER_SECONDARY)]
    reduces = [t for t in in_flight if t.op in (Op.REDUCE, Op.ALL_REDUCE)]
    for what, some in (("gathers in flight", gathers), ("reduces in flight", reduces)):
        for lane in lanes(some):
            track = max(names) + 1
            names[track] = what
            for t in lane:
                label = f"{t.op.name.lower().replace('_', ' ')} {recording.units[t.unit]}"
                spans.append((track, label, t.begin_ns, t.end_ns, {"payload_bytes": t.payload_bytes}))
    pid = recording.rank
    return [
        _metadata(pid, "process_name", {"name": f"rank {recording.rank}"}),
        _metadata(pid, "process_sort_index", {"sort_index": recording.rank}),
        *(_metadata(pid, "thread_name", {"name": name}, tid) for tid, name in names.items()),
        *(_metadata(pid, "thread_sort_index", {"sort_index": tid}, tid) for tid in names),
        *(_complete(pid, begin_ns, span) for span in spans),
        *(_counter(pid, ran.end_ns - begin_ns, ran.pool_bytes) for ran in recording.commands),
    ]


def compute_spans(recording: Recording) -> list[Span]:
    """What of the steps is in no command and in no range."""
    busy = [(ran.begin_ns, ran.end_ns) for ran in recording.commands]
    busy += [(span.begin_ns, span.end_ns) for span in recording.ranges]
    busy.sort()
    found = []
    for step in recording.steps:
        now = step.begin_ns
        for begin, end in (*busy, (step.end_ns, step.end_ns)):
            if end <= now or begin > step.end_ns:
                continue
            if begin > now:
                found.append(Span("compute", now, begin))
            now = min(end, step.end_ns)
        # The last of `busy` is the end of the step, so nothing is left over.
    return found


def lanes(some: Iterable[Transfer]) -> list[list[Transfer]]:
    """Transfers on as few tracks as it takes for those of one track not to overlap."""
    found: list[list[Transfer]] = []
    for transfer in sorted(some, key=lambda t: t.begin_ns):
        lane = next((lane for lane in found if lane[-1].end_ns <= transfer.begin_ns), None)
        if lane is None:
            found.append(lane := [])
        lane.append(transfer)
    return found


def _metadata(pid: int, name: str, args: dict[str, Any], tid: int = 0) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": name, "args": args}


def _complete(pid: int, begin_ns: int, span: tuple[int, str, int, int, dict[str, Any]]) -> dict[str, Any]:
    """A range. Chrome's unit is the microsecond."""
    tid, name, begin, end, args = span
    times = {"ts": (begin - begin_ns) / 1e3, "dur": (end - begin) / 1e3}
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, **times, "args": args}


def _counter(pid: int, at_ns: int, pool_bytes: int) -> dict[str, Any]:
    name = "full buffers and staging"
    return {"ph": "C", "pid": pid, "tid": 0, "name": name, "ts": at_ns / 1e3, "args": {"bytes": pool_bytes}}
