"""What a user asks of one unit beside its policies; an engine carries it out, now or when it starts."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from fullshard.errors import MisuseError
from fullshard.runtime.collectives import AllGather, ReduceScatter
from fullshard.runtime.device import Streams

if TYPE_CHECKING:
    from fullshard.runtime.unit import Unit


class Updater(Protocol):
    """An optimizer that updates units in backward."""

    def update_unit(self, unit: Unit) -> None:
        """The gradients of the unit are complete: apply and remove them."""


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
        updaters: Optimizers that update the unit in backward, as long as the user keeps them.
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
    updaters: list[weakref.ref[Updater]] = field(default_factory=list)

    def live_updaters(self) -> list[Updater]:
        """Optimizers that update the unit in backward."""
        return [updater for reference in self.updaters if (updater := reference()) is not None]


def update(unit: Unit) -> None:
    """Update a unit in backward.

    Raises:
        MisuseError: It was updated since the forward that this backward is of.
    """
    updaters, engine = unit.wishes.live_updaters(), unit.engine
    if updaters and engine is not None and unit.index in engine.written:
        raise MisuseError(
            f"the parameters of unit {unit.name or '(root)'!r} were updated in backward, and more gradients came that "
            "were computed from the old ones: by a second backward through one graph (retain_graph=True), by the "
            "backward of another forward that ran before the update, or because a parameter is used outside of its "
            "unit. They were not applied. Run one backward for each forward (sum the losses), or build the optimizer "
            "without in_backward=True"
        )
    for updater in updaters:
        updater.update_unit(unit)


def warn_of_updates(units: Iterable[Unit]) -> None:
    """A backward failed: say which units an optimizer has updated in it."""
    names = [unit.name or "(root)" for unit in units if unit.wishes.live_updaters()]
    if names:
        warnings.warn(
            f"a backward failed after {len(names)} units were updated in it by an optimizer with in_backward=True, "
            f"such as {names[0]!r}; the others keep their old values and their gradients are dropped. Load the last "
            "checkpoint if the step must not be half done",
            stacklevel=2,
        )
