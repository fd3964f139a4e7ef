"""What a user may decide about units, as frozen data that is validated once."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal


class AfterForward(Enum):
    """What becomes of a unit's full parameters when its forward ends."""

    AUTO = "auto"  # the root keeps them if a backward follows, every other unit frees them
    FREE = "free"
    KEEP = "keep"
    FIT = "fit"  # keep as many units as fit `SchedulePolicy.keep_bytes`; the root is as with AUTO
    SHRINK = "shrink"  # keep a shard over a smaller group


def after_forward(reshard_after_forward: bool | int | Literal["auto"] | None, shard_size: int) -> AfterForward:
    """The meaning of the public argument `reshard_after_forward` on a shard axis of `shard_size` ranks.

    Raises:
        TypeError: It is neither a bool, an int, "auto" nor None.
        ValueError: It is an int that is not a divisor of `shard_size`.
    """
    if reshard_after_forward is None:
        return AfterForward.AUTO
    if reshard_after_forward == "auto":
        return AfterForward.FIT
    if isinstance(reshard_after_forward, bool):
        return AfterForward.FREE if reshard_after_forward else AfterForward.KEEP
    if not isinstance(reshard_after_forward, int):
        raise TypeError(f"reshard_after_forward must be a bool, an int, None or 'auto', got {reshard_after_forward!r}")
    if not 1 <= reshard_after_forward <= shard_size or shard_size % reshard_after_forward:
        divisors = [n for n in range(1, shard_size + 1) if shard_size % n == 0]
        raise ValueError(
            f"reshard_after_forward={reshard_after_forward} must be a divisor of the shard axis size {shard_size}: "
            f"one of {divisors} (1 means False, {shard_size} means True)"
        )
    # The two ends of the scale: groups of one rank hold everything, one group of all ranks is the shard itself.
    ends = {shard_size: AfterForward.FREE, 1: AfterForward.KEEP}
    return ends.get(reshard_after_forward, AfterForward.SHRINK)


@dataclass(frozen=True, slots=True)
class UnitPolicy:
    """Settings of one unit that its schedule depends on.

    Attributes:
        after_forward: See `AfterForward`.
        keep_after_backward: Leave the parameters full after backward (saves a gather in the next microbatch).
        unshard_in_backward: False if backward does not need the parameters (an embedding).
        sync_gradients: False accumulates full gradients without communication.
        sync_replicas: False skips the all-reduce over replicas (HSDP) and accumulates sharded gradients.
        forward_prefetch: Units to gather when this one enters forward, in place of the recorded order.
        backward_prefetch: The same for backward.
        divide_factor: Divide summed gradients by this in place of the number of data-parallel ranks.
        reduce_unused: A parameter that no rank used in a backward gets a gradient of zeros, not none.
        update_in_backward: An optimizer updates the unit as soon as its gradients are reduced.
    """

    after_forward: AfterForward = AfterForward.AUTO
    keep_after_backward: bool = False
    unshard_in_backward: bool = True
    sync_gradients: bool = True
    sync_replicas: bool = True
    forward_prefetch: tuple[int, ...] | None = None
    backward_prefetch: tuple[int, ...] | None = None
    divide_factor: float | None = None
    reduce_unused: bool = False
    update_in_backward: bool = False


@dataclass(frozen=True, slots=True)
class SchedulePolicy:
    """Settings of a whole engine.

    Attributes:
        prefetch_bytes: Bytes of full buffers that may be gathered ahead of use. 0 means none; None one unit of any
            size, or as many as are together no larger than the largest unit below the root.
        keep_bytes: Bytes of full buffers that units with `AfterForward.FIT` may keep from forward to backward.
        reduces_in_flight: Units whose gradients may be on the wire at once.
        replicated: There is a replicate axis, so reduced gradients are all-reduced over it.
    """

    prefetch_bytes: int | None = None
    keep_bytes: int | None = None
    reduces_in_flight: int = 1
    replicated: bool = False

    def __post_init__(self) -> None:
        for name in ("prefetch_bytes", "keep_bytes"):
            number = getattr(self, name)
            if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
                raise TypeError(f"{name} must be a number of bytes, an int, or None; got {number!r}")
            if number is not None and number < 0:
                raise ValueError(f"{name} must be None or at least 0, got {number}")
        if self.reduces_in_flight < 1:
            raise ValueError(f"reduces_in_flight must be at least 1, got {self.reduces_in_flight}")
