"""The states of a unit's parameters and the one table along which they change.

    SHARDED     the module holds sharded parameters; there is no full buffer
    PREFETCHED  as SHARDED, but a gather into a full buffer was issued (it may be complete)
    SECONDARY   as SHARDED, but this rank also keeps a shard of a smaller group, for a cheaper gather in backward
    KEPT        the module holds full parameters; nothing computes with them now, policy or user keeps them
    HELD        as KEPT, but only until the step's next use, which is due at once
    FORWARD     the module holds full parameters; a forward is running (counted, since forwards nest)
    BACKWARD    the module holds full parameters; their gradients are being computed

Gradients have a life of their own, because a unit may be gathered again while its gradients are still on the wire:
see `Scheduler`.
"""

from __future__ import annotations

from enum import Enum


class Word(Enum):
    """An enum for keys of tables that are looked up many times a step.

    A member equals nothing but itself, so identity may be its hash; Enum's own is a function in Python.
    """

    __hash__ = object.__hash__


class State(Word):
    """State of a unit's parameters."""

    SHARDED = "sharded"
    PREFETCHED = "prefetched"
    SECONDARY = "secondary"
    KEPT = "kept"
    HELD = "held"
    FORWARD = "forward"
    BACKWARD = "backward"

    def __init__(self, value: str) -> None:
        # Whether memory for the full parameters is held; whether a computation needs them right now.
        self.has_full_buffer = value not in ("sharded", "secondary")
        self.in_use = value in ("forward", "backward")


class Step(Word):
    """A decision about one unit, made by the Scheduler from an event and the unit's policy."""

    PREFETCH = "prefetch for forward"
    PREFETCH_BACKWARD = "prefetch for backward"
    ENTER_FORWARD = "enter forward"
    EXIT_KEEP = "exit forward, keep"
    EXIT_HOLD = "exit forward, hold for the next use"
    EXIT_FREE = "exit forward, free"
    EXIT_STASH = "exit forward, keep the buffer as a prefetch for backward"
    EXIT_SHRINK = "exit forward, keep a secondary shard"
    ENTER_BACKWARD = "enter backward"
    LEAVE_KEEP = "leave backward, keep"
    LEAVE_FREE = "leave backward, free"
    UNSHARD = "unshard"
    SETTLE = "wait for an unshard"
    RESHARD = "reshard"
    ABORT = "abort"


class Op(Word):
    """What the runtime does for a unit. Nothing but the WAITs, DISCARD and FREE blocks, with one exception.

    In shared memory a GATHER or REDUCE waits for a rank that is behind by more than a unit and still uses the memory.

    FREE completes whatever is still in flight for the unit before it gives memory back.
    """

    GATHER = "gather"
    GATHER_SECONDARY = "gather from the secondary shard"
    WAIT_GATHER = "wait for gather"
    STASH = "register sharded parameters, keep the full buffer"
    SHRINK = "copy the secondary shard, free"
    FREE = "free"
    HOLD = "hold unreduced gradients"
    REDUCE = "reduce"
    WAIT_REDUCE = "wait for reduce"
    ALL_REDUCE = "all-reduce over replicas"
    WAIT_ALL_REDUCE = "wait for all-reduce over replicas"
    DISCARD = "discard gradients in flight"
    UPDATE = "update parameters by their gradients, in backward"


_S, _P, _2, _K, _H, _F, _B = State
_NOTHING: tuple[Op, ...] = ()
_GATHER_NOW = (Op.GATHER, Op.WAIT_GATHER)

# (state, step) -> (next state, what the runtime does). A pair that is missing is a bug or a misuse, and raises.
TABLE: dict[tuple[State, Step], tuple[State, tuple[Op, ...]]] = {
    (_S, Step.PREFETCH): (_P, (Op.GATHER,)),
    (_S, Step.PREFETCH_BACKWARD): (_P, (Op.GATHER,)),
    (_S, Step.ENTER_FORWARD): (_F, _GATHER_NOW),
    (_S, Step.ENTER_BACKWARD): (_B, _GATHER_NOW),
    (_S, Step.LEAVE_FREE): (_S, _NOTHING),
    (_S, Step.LEAVE_KEEP): (_S, _NOTHING),
    (_S, Step.UNSHARD): (_P, (Op.GATHER,)),
    (_S, Step.SETTLE): (_S, _NOTHING),
    (_S, Step.RESHARD): (_S, _NOTHING),
    (_S, Step.ABORT): (_S, _NOTHING),
    #
    (_P, Step.ENTER_FORWARD): (_F, (Op.WAIT_GATHER,)),
    (_P, Step.ENTER_BACKWARD): (_B, (Op.WAIT_GATHER,)),
    # Backward of a unit that does not unshard in backward may end while the unit is prefetched for a second forward.
    (_P, Step.LEAVE_FREE): (_S, (Op.FREE,)),
    (_P, Step.LEAVE_KEEP): (_P, _NOTHING),
    (_P, Step.UNSHARD): (_P, _NOTHING),
    (_P, Step.SETTLE): (_K, (Op.WAIT_GATHER,)),
    (_P, Step.RESHARD): (_S, (Op.FREE,)),
    (_P, Step.ABORT): (_S, (Op.FREE,)),
    #
    # A forward gathers from the primary shard: it is the one the optimizer writes.
    (_2, Step.PREFETCH): (_P, (Op.FREE, Op.GATHER)),
    (_2, Step.PREFETCH_BACKWARD): (_P, (Op.GATHER_SECONDARY,)),
    (_2, Step.ENTER_FORWARD): (_F, (Op.FREE, *_GATHER_NOW)),
    (_2, Step.ENTER_BACKWARD): (_B, (Op.GATHER_SECONDARY, Op.WAIT_GATHER)),
    (_2, Step.LEAVE_FREE): (_S, (Op.FREE,)),
    (_2, Step.LEAVE_KEEP): (_2, _NOTHING),
    (_2, Step.UNSHARD): (_P, (Op.GATHER_SECONDARY,)),
    (_2, Step.SETTLE): (_2, _NOTHING),
    (_2, Step.RESHARD): (_S, (Op.FREE,)),
    (_2, Step.ABORT): (_S, (Op.FREE,)),
    #
    (_K, Step.ENTER_FORWARD): (_F, _NOTHING),
    (_K, Step.ENTER_BACKWARD): (_B, _NOTHING),
    (_K, Step.LEAVE_FREE): (_S, (Op.FREE,)),
    (_K, Step.LEAVE_KEEP): (_K, _NOTHING),
    (_K, Step.UNSHARD): (_K, _NOTHING),
    (_K, Step.SETTLE): (_K, _NOTHING),
    (_K, Step.RESHARD): (_S, (Op.FREE,)),
    (_K, Step.ABORT): (_S, (Op.FREE,)),
    #
    (_H, Step.ENTER_FORWARD): (_F, _NOTHING),
    (_H, Step.ENTER_BACKWARD): (_B, _NOTHING),
    (_H, Step.LEAVE_FREE): (_S, (Op.FREE,)),
    (_H, Step.LEAVE_KEEP): (_K, _NOTHING),
    (_H, Step.UNSHARD): (_K, _NOTHING),
    (_H, Step.SETTLE): (_K, _NOTHING),
    (_H, Step.RESHARD): (_S, (Op.FREE,)),
    (_H, Step.ABORT): (_S, (Op.FREE,)),
    #
    # Forwards nest (a module that calls itself), and a backward may run inside a forward (autograd.grad in the model).
    (_F, Step.ENTER_FORWARD): (_F, _NOTHING),
    (_F, Step.EXIT_KEEP): (_K, _NOTHING),
    (_F, Step.EXIT_HOLD): (_H, _NOTHING),
    (_F, Step.EXIT_FREE): (_S, (Op.FREE,)),
    (_F, Step.EXIT_STASH): (_P, (Op.STASH,)),
    (_F, Step.EXIT_SHRINK): (_2, (Op.SHRINK,)),
    (_F, Step.ENTER_BACKWARD): (_F, _NOTHING),
    (_F, Step.LEAVE_FREE): (_F, _NOTHING),
    (_F, Step.LEAVE_KEEP): (_F, _NOTHING),
    (_F, Step.UNSHARD): (_F, _NOTHING),
    (_F, Step.SETTLE): (_F, _NOTHING),
    (_F, Step.ABORT): (_S, (Op.FREE,)),
    #
    # A forward inside backward is activation checkpointing's recomputation: it must not disturb the backward.
    (_B, Step.ENTER_FORWARD): (_B, _NOTHING),
    (_B, Step.EXIT_KEEP): (_B, _NOTHING),
    (_B, Step.EXIT_HOLD): (_B, _NOTHING),
    (_B, Step.EXIT_FREE): (_B, _NOTHING),
    (_B, Step.EXIT_STASH): (_B, _NOTHING),
    (_B, Step.EXIT_SHRINK): (_B, _NOTHING),
    (_B, Step.ENTER_BACKWARD): (_B, _NOTHING),
    (_B, Step.LEAVE_FREE): (_S, (Op.FREE,)),
    (_B, Step.LEAVE_KEEP): (_K, _NOTHING),
    (_B, Step.UNSHARD): (_B, _NOTHING),
    (_B, Step.SETTLE): (_B, _NOTHING),
    (_B, Step.ABORT): (_S, (Op.FREE,)),
}
