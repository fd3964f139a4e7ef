"""What the Scheduler hears and says: events of hooks, and commands for the runtime."""

from __future__ import annotations

from typing import Any, NamedTuple

from fullshard.core.lifecycle import Op, Word

# What a Scheduler remembers between events, to be compared, and to be put back.
Memory = tuple[Any, ...]


class EventKind(Word):
    """What a hook or a method reports."""

    PRE_FORWARD = "pre-forward"
    POST_FORWARD = "post-forward"
    PRE_BACKWARD = "pre-backward"
    POST_BACKWARD = "post-backward"
    END_BACKWARD = "end of backward"
    FORWARD_FAILED = "forward raised"
    UNSHARD = "unshard"
    SETTLE = "wait for an unshard"
    RESHARD = "reshard"
    CHANGED = "parameters changed"
    NEXT_STEP = "the next step begins with these units"
    ABORT = "abort"


class Event(NamedTuple):
    """One report. A tuple, since it is looked up by value, many times a step.

    Attributes:
        kind: What happened.
        unit: To which unit; -1 for events of the whole engine.
        will_backward: POST_FORWARD: the output requires gradients, so a backward is expected.
        more: POST_FORWARD: other modules of the same unit have not run yet in this step.
        inside_backward: PRE_FORWARD, POST_FORWARD, FORWARD_FAILED: autograd is running (recomputation), or the
            parameters are used outside of a forward. ABORT: it is a backward that failed.
        reducible: POST_BACKWARD: the unit has parameters that require gradients.
        units: END_BACKWARD: units that hold full gradients which no POST_BACKWARD has reported. CHANGED: units whose
            shards were not written. NEXT_STEP: those that will not change any more.
        last: END_BACKWARD: wait for all reductions.
    """

    kind: EventKind
    unit: int = -1
    will_backward: bool = False
    more: bool = False
    inside_backward: bool = False
    reducible: bool = True
    units: tuple[int, ...] = ()
    last: bool = True


class Command(NamedTuple):
    """One thing for the runtime to do to one unit."""

    op: Op
    unit: int

    def __str__(self) -> str:
        return f"{self.op.name} {self.unit}"
