"""What a stream of commands costs: bytes alive and seconds exposed, from the same commands the runtime runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fullshard.core.lifecycle import Op
from fullshard.core.schedule import Command

_ACQUIRE = (Op.GATHER, Op.GATHER_SECONDARY)
_RELEASE = (Op.FREE, Op.SHRINK)
# FREE and DISCARD complete what is in flight: memory cannot go while messages fill it.
_WAITS_FOR_REDUCE = (Op.WAIT_REDUCE, Op.DISCARD)
_WAITS = (Op.WAIT_GATHER, Op.FREE, *_WAITS_FOR_REDUCE)


@dataclass(frozen=True, slots=True)
class UnitCost:
    """Sizes and times of one unit.

    Attributes:
        full_bytes: Full buffers.
        gradient_bytes: Gradients as autograd makes them.
        gather_seconds: One gather on the link.
        reduce_seconds: One reduce on the link.
    """

    full_bytes: int
    gradient_bytes: int = 0
    gather_seconds: float = 0.0
    reduce_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Compute:
    """Computation between two commands of a stream."""

    seconds: float


Stream = Iterable[Command | Compute]


def peak_full_bytes(stream: Stream, costs: Sequence[UnitCost]) -> int:
    """Most bytes of full buffers that are alive at once while the commands run."""
    return _peak(stream, [cost.full_bytes for cost in costs], _ACQUIRE, _RELEASE)


def peak_gradient_bytes(stream: Stream, costs: Sequence[UnitCost]) -> int:
    """Most bytes of full gradients on the wire at once."""
    return _peak(stream, [cost.gradient_bytes for cost in costs], (Op.REDUCE,), (Op.WAIT_REDUCE, Op.DISCARD))


def _peak(stream: Stream, sizes: Sequence[int], acquire: tuple[Op, ...], release: tuple[Op, ...]) -> int:
    held: set[int] = set()
    peak = 0
    for item in stream:
        if isinstance(item, Compute):
            continue
        if item.op in acquire:
            held.add(item.unit)
            peak = max(peak, sum(sizes[unit] for unit in held))
        elif item.op in release:
            held.discard(item.unit)
    return peak


def exposed_seconds(stream: Stream, costs: Sequence[UnitCost]) -> float:
    """Seconds that waits block, on one link that serves transfers in the order in which they were issued."""
    now = link_free = exposed = 0.0
    done: dict[tuple[int, bool], float] = {}
    for item in stream:
        if isinstance(item, Compute):
            now += item.seconds
            continue
        cost = costs[item.unit]
        if item.op in _ACQUIRE or item.op is Op.REDUCE:
            seconds = cost.reduce_seconds if item.op is Op.REDUCE else cost.gather_seconds
            link_free = max(now, link_free) + seconds
            done[item.unit, item.op is Op.REDUCE] = link_free
        elif item.op in _WAITS:
            ready = done.get((item.unit, item.op in _WAITS_FOR_REDUCE), now)
            exposed += max(0.0, ready - now)
            now = max(now, ready)
    return exposed
