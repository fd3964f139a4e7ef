"""What a user asks of one unit beside its policies; an engine carries it out, now or when it starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fullshard.runtime.collectives import AllGather, ReduceScatter
from fullshard.runtime.device import Streams

if TYPE_CHECKING:
    from fullshard.runtime.unit import Unit


@dataclass(slots=True)
class Wishes:
    """Settings that are no part of the schedule's frozen policies, because they name units, objects or functions.

    Attributes:
        prefetch: Units to gather when this one enters forward or backward; their indices are known to an engine only.
        schedule: Fields of the engine's `SchedulePolicy`.
        all_gather: The user's own all-gather.
        reduce_scatter: The user's own reduce-scatter.
        all_reduce: Puts what stands for the sum over replicas into a tensor, in place of the all-reduce.
        after_reduce: Called with the reduced gradients before they are bound: 1-D, in the dtype of the sum, in place.
        reduce_group: A group of its own for reductions, of the same ranks as the shard group.
        average_ignored: Of a root: average gradients of parameters that no unit has; None warns that they are not.
        across_steps: Of a root: gather the first units of the next step while the optimizer updates others.
        is_last_backward: Of a root: the end of a backward waits for all reductions.
        post_optim_event: Of a root: what the next forward waits for, once.
        streams: Of a root: streams that it shares with other roots.
        debug: Compare commands over ranks before they run.
    """

    prefetch: dict[str, list[Unit]] = field(default_factory=dict)
    schedule: dict[str, Any] = field(default_factory=dict)
    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    all_reduce: Callable[[torch.Tensor], None] | None = None
    after_reduce: Callable[[torch.Tensor], None] | None = None
    reduce_group: dist.ProcessGroup | None = None
    average_ignored: bool | None = None
    across_steps: bool = False
    is_last_backward: bool = True
    post_optim_event: torch.Event | None = None
    streams: Streams | None = None
    debug: bool = False
