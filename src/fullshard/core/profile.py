"""Where the time of a step goes, from what the commands of one rank took.

A step is cut into parts that add up to it, to the nanosecond: every moment belongs to the innermost command or range
that was running, and what is left is compute. Of communication only that is seen here which the computation has to
stand still for; what it would take if nothing overlapped is measured, not guessed: in some steps of a profile every
transfer is waited for where it is started.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from fullshard.core.lifecycle import Op

COMPUTE = "compute"
START_GATHER = "start gathers"
WAIT_GATHER = "wait for gathers"
START_REDUCE = "start reduces"
WAIT_REDUCE = "wait for reduces"
OTHER = "other commands"
COMMUNICATION = (START_GATHER, WAIT_GATHER, START_REDUCE, WAIT_REDUCE)

# FREE and DISCARD complete what is in flight: memory cannot go while messages fill it.
_PARTS = {
    Op.GATHER: START_GATHER,
    Op.GATHER_SECONDARY: START_GATHER,
    Op.WAIT_GATHER: WAIT_GATHER,
    Op.FREE: WAIT_GATHER,
    Op.SHRINK: WAIT_GATHER,
    Op.REDUCE: START_REDUCE,
    Op.ALL_REDUCE: START_REDUCE,
    Op.WAIT_REDUCE: WAIT_REDUCE,
    Op.WAIT_ALL_REDUCE: WAIT_REDUCE,
    Op.DISCARD: WAIT_REDUCE,
}  # of commands that are about communication; the rest is OTHER
_GATHERS = (Op.GATHER, Op.GATHER_SECONDARY)
_REDUCES = (Op.REDUCE, Op.ALL_REDUCE)
_ENDS_GATHER = (Op.WAIT_GATHER, Op.FREE, Op.SHRINK)
_ENDS_REDUCE = (Op.WAIT_REDUCE, Op.WAIT_ALL_REDUCE, Op.DISCARD)


class Kind(Enum):
    """What a step of a profile is for."""

    COUNTED = "bytes copied are counted"
    ALONE = "every transfer is waited for where it is started"
    MEASURED = "as without a profile"


# The first steps of a profile; all that follow are measured.
FIRST_KINDS = (Kind.COUNTED, Kind.ALONE, Kind.ALONE)


def kind_of(number: int) -> Kind:
    """The kind of step `number` (from 0) of a profile."""
    return FIRST_KINDS[number] if number < len(FIRST_KINDS) else Kind.MEASURED


@dataclass(frozen=True, slots=True)
class Ran:
    """One command that was executed.

    Attributes:
        op: What was done.
        unit: Index of the unit in the recording.
        begin_ns: When it began, in nanoseconds of a clock that is the same for all of a recording.
        end_ns: When it returned.
        payload_bytes: Full parameters gathered, full gradients reduced, partial sums all-reduced; else 0.
        copied_bytes: Bytes that were copied meanwhile, in a step that counts them.
        pool_bytes: Full buffers and staging alive when it returned.
    """

    op: Op
    unit: int
    begin_ns: int
    end_ns: int
    payload_bytes: int = 0
    copied_bytes: int = 0
    pool_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """A range of time that somebody gave a name."""

    name: str
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the profile."""

    kind: Kind
    begin_ns: int
    end_ns: int


@dataclass(frozen=True)
class Recording:
    """Everything one rank recorded.

    Attributes:
        rank: This rank.
        units: Names of the units.
        steps: Complete steps, in order.
        commands: In the order in which they ended.
        ranges: The user's, in the order in which they ended.
    """

    rank: int
    units: tuple[str, ...]
    steps: tuple[Step, ...] = ()
    commands: tuple[Ran, ...] = ()
    ranges: tuple[Span, ...] = ()

    def label(self, command: Ran) -> str:
        """Such as "gather layers.3"."""
        return f"{command.op.name.lower().replace('_', ' ')} {self.units[command.unit]}"


@dataclass(frozen=True, slots=True)
class Transfer:
    """A collective in flight: from the beginning of the command that starts it to the end of the one that waits for it.

    It may have been complete before; a host does not see that.
    """

    op: Op
    unit: int
    begin_ns: int
    end_ns: int
    payload_bytes: int


@dataclass(frozen=True)
class RankProfile:
    """What one rank's measured steps were made of, as means a step.

    Attributes:
        rank: This rank.
        steps: Number of measured steps.
        step_seconds: Length of a step.
        parts: Seconds by name, which add up to `step_seconds`: compute, the commands, the user's ranges.
        alone_step_seconds: Length of a step in which nothing overlaps; None if there was none.
        alone_seconds: Communication in such a step; None if there was none.
        gathered_bytes: Full parameters gathered.
        reduced_bytes: Full gradients reduced.
        copied_bytes: Bytes that commands copied; None if they were not counted.
        waits: Seconds by wait and unit, longest first.
    """

    rank: int
    steps: int
    step_seconds: float
    parts: dict[str, float]
    alone_step_seconds: float | None
    alone_seconds: float | None
    gathered_bytes: int
    reduced_bytes: int
    copied_bytes: int | None
    waits: dict[str, float]

    @property
    def exposed_seconds(self) -> float:
        """Communication for which the computation stands still: starting transfers and waiting for them."""
        return sum(self.parts.get(part, 0.0) for part in COMMUNICATION)

    @property
    def overlap(self) -> float | None:
        """Share of communication that is hidden behind computation, 0 to 1."""
        if not self.alone_seconds:
            return None
        return max(0.0, 1.0 - self.exposed_seconds / self.alone_seconds)


def analyse(recording: Recording) -> RankProfile:
    """Sum up the measured steps of one rank.

    Raises:
        ValueError: There are none.
    """
    measured = [step for step in recording.steps if step.kind is Kind.MEASURED]
    alone = [step for step in recording.steps if step.kind is Kind.ALONE]
    counted = [step for step in recording.steps if step.kind is Kind.COUNTED]
    if not measured:
        raise ValueError(f"a profile needs at least {len(FIRST_KINDS) + 1} steps, found {len(recording.steps)}")
    count = len(measured)
    parts = _mean_parts(recording, measured)
    alone_parts = _mean_parts(recording, alone)
    return RankProfile(
        rank=recording.rank,
        steps=count,
        step_seconds=_length_ns(measured) / count / 1e9,
        parts=parts,
        alone_step_seconds=_length_ns(alone) / len(alone) / 1e9 if alone else None,
        alone_seconds=sum(alone_parts.get(part, 0.0) for part in COMMUNICATION) if alone else None,
        gathered_bytes=sum(ran.payload_bytes for ran in _within(recording, measured) if ran.op in _GATHERS) // count,
        reduced_bytes=sum(ran.payload_bytes for ran in _within(recording, measured) if ran.op is Op.REDUCE) // count,
        copied_bytes=sum(ran.copied_bytes for ran in _within(recording, counted)) if counted else None,
        waits=_waits(recording, measured),
    )


def step_parts(recording: Recording, step: Step) -> dict[str, int]:
    """Nanoseconds of one step by name; they add up to its length."""
    named = [(_PARTS.get(ran.op, OTHER), ran.begin_ns, ran.end_ns) for ran in recording.commands]
    named += [(span.name, span.begin_ns, span.end_ns) for span in recording.ranges]
    clipped = [(name, max(begin, step.begin_ns), min(end, step.end_ns)) for name, begin, end in named]
    inside = [(name, begin, end) for name, begin, end in clipped if begin < end]
    parts = {COMPUTE: step.end_ns - step.begin_ns}
    for (name, begin, end), (outer, length) in zip(inside, _innermost(inside), strict=True):
        parts[name] = parts.get(name, 0) + length
        # What is in no other range is taken from compute, and what is in one has been counted there.
        parts[COMPUTE] -= (end - begin) if outer else 0
    return parts


def _innermost(spans: Sequence[tuple[str, int, int]]) -> list[tuple[bool, int]]:
    """Per span: whether it is in no other, and its nanoseconds that are in no span within it. Spans nest."""
    own = [end - begin for _, begin, end in spans]
    outermost = [True] * len(spans)
    open_spans: list[int] = []
    for i in sorted(range(len(spans)), key=lambda i: (spans[i][1], -spans[i][2])):
        _, begin, end = spans[i]
        while open_spans and spans[open_spans[-1]][2] <= begin:
            open_spans.pop()
        if open_spans:
            outermost[i] = False
            own[open_spans[-1]] -= end - begin
        open_spans.append(i)
    return list(zip(outermost, own, strict=True))


def transfers(recording: Recording) -> list[Transfer]:
    """Every collective that was started, in the order of their ends; those never waited for end with the recording."""
    in_flight: dict[tuple[int, bool], list[Ran]] = {}
    found: list[Transfer] = []

    def land(started: Iterable[Ran], end_ns: int) -> None:
        found.extend(Transfer(ran.op, ran.unit, ran.begin_ns, end_ns, ran.payload_bytes) for ran in started)

    for ran in recording.commands:
        if ran.op in _GATHERS or ran.op in _REDUCES:
            in_flight.setdefault((ran.unit, ran.op in _GATHERS), []).append(ran)
        elif ran.op in _ENDS_GATHER or ran.op in _ENDS_REDUCE:
            land(in_flight.pop((ran.unit, ran.op in _ENDS_GATHER), ()), ran.end_ns)
    for left in in_flight.values():
        land(left, recording.commands[-1].end_ns)
    return found


def _within(recording: Recording, steps: Sequence[Step]) -> list[Ran]:
    """Commands that began in some of the steps."""
    return [ran for ran in recording.commands if any(s.begin_ns <= ran.begin_ns < s.end_ns for s in steps)]


def _length_ns(steps: Iterable[Step]) -> int:
    return sum(step.end_ns - step.begin_ns for step in steps)


def _mean_parts(recording: Recording, steps: Sequence[Step]) -> dict[str, float]:
    total: dict[str, int] = {}
    for step in steps:
        for name, length in step_parts(recording, step).items():
            total[name] = total.get(name, 0) + length
    return {name: length / len(steps) / 1e9 for name, length in total.items()}


def _waits(recording: Recording, steps: Sequence[Step]) -> dict[str, float]:
    total: dict[str, int] = {}
    for ran in _within(recording, steps):
        if ran.op in _ENDS_GATHER or ran.op in _ENDS_REDUCE:
            label = recording.label(ran)
            total[label] = total.get(label, 0) + ran.end_ns - ran.begin_ns
    longest = sorted(total.items(), key=lambda item: -item[1])
    return {label: length / len(steps) / 1e9 for label, length in longest}
