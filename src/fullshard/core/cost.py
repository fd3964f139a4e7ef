"""What a stream of commands costs: bytes alive and seconds exposed, from the same commands the runtime runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fullshard.core.lifecycle import Op
from fullshard.core.schedule import Command

_ACQUIRE = (Op.GATHER, Op.GATHER_SECONDARY)
_RELEASE = (Op.FREE, Op.SHRINK)


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


def peak_full_bytes(commands: Iterable[Command | Compute], costs: Sequence[UnitCost]) -> int:
    """Most bytes of full buffers that are alive at once while the commands run."""
    held: set[int] = set()
    alive = peak = 0
    for command in commands:
        if isinstance(command, Compute):
            continue
        if command.op in _ACQUIRE and command.unit not in held:
            held.add(command.unit)
            alive += costs[command.unit].full_bytes
            peak = max(peak, alive)
        elif command.op in _RELEASE and command.unit in held:
            held.remove(command.unit)
            alive -= costs[command.unit].full_bytes
    return peak


def peak_gradient_bytes(commands: Iterable[Command | Compute], costs: Sequence[UnitCost]) -> int:
    """Most bytes of full gradients on the wire at once."""
    alive = peak = 0
    for command in commands:
        if isinstance(command, Compute):
            continue
        if command.op is Op.REDUCE:
            alive += costs[command.unit].gradient_bytes
            peak = max(peak, alive)
        elif command.op is Op.WAIT_REDUCE:
            alive -= costs[command.unit].gradient_bytes
    return peak


def exposed_seconds(stream: Iterable[Command | Compute], costs: Sequence[UnitCost]) -> float:
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
        elif item.op in (Op.WAIT_GATHER, Op.WAIT_REDUCE):
            ready = done.get((item.unit, item.op is Op.WAIT_REDUCE), now)
            exposed += max(0.0, ready - now)
            now = max(now, ready)
    return exposed
