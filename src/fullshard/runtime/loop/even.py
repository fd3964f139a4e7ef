"""Ranks with different amounts of work take the same number of steps, because every step needs every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, TypeVar

import torch.distributed as dist

from fullshard.runtime.collectives import exchange_flags

_Batch = TypeVar("_Batch")
_MODES = ("join", "shortest")


def even_batches(
    batches: Iterable[_Batch],
    *,
    mode: Literal["join", "shortest"] = "join",
    divide_by_initial_world_size: bool = True,
    group: dist.ProcessGroup | None = None,
) -> Iterator[tuple[_Batch, float]]:
    """Iterate over this rank's batches so that every rank takes the same number of steps.

        for batch, share in even_batches(loader):
            (share * loss_of(model(batch))).backward()

    Every rank must iterate to the end. Each step costs one exchange of a flag, so no rank's number of batches needs to
    be known ahead; in evaluation use it the same way, and leave out results whose share is 0.

    Args:
        batches: This rank's batches.
        mode: "join" goes on until the last rank has run out; a rank that ran out earlier gets its last batch again,
            with share 0, so that it takes part but adds nothing (its loss must be finite for that). "shortest" ends
            when the first rank has run out.
        divide_by_initial_world_size: True: gradients are the sum of the remaining ranks' over the number of all ranks,
            as with torch's `Join`. False: they are the mean over the ranks that still have batches.
        group: Ranks that run the model together; default all.

    Yields:
        A batch, and what to multiply its loss by.

    Raises:
        ValueError: A rank has no batch at all, which it would need one of; on every rank. Or `mode` is unknown.
    """
    if mode not in _MODES:
        raise ValueError(f"mode must be one of {', '.join(_MODES)}, got {mode!r}")
    iterator = iter(batches)
    latest: list[_Batch] = []  # the last batch, once there is one
    more = True
    while True:
        if more:
            try:
                latest = [next(iterator)]
            except StopIteration:
                more = False
        flags = _everywhere([more, bool(latest)], group)
        active = sum(has_more for has_more, _ in flags)
        if active == 0 or (mode == "shortest" and active < len(flags)):
            return
        empty = [rank for rank, (_, has_any) in enumerate(flags) if not has_any]
        if empty:
            raise ValueError(
                f"ranks {empty} of the group have no batch at all, so they have nothing to run beside the others; give "
                "every rank at least one batch, or use mode='shortest'"
            )
        share = 1.0 if divide_by_initial_world_size else len(flags) / active
        yield latest[0], share if more else 0.0


def any_rank(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Whether `flag` is true on any rank; every rank must ask. For loops whose length is each rank's own.

    while any_rank(not finished):
        logits = model(tokens)  # also on ranks that have finished, which leave the result alone
    """
    return any(found for (found,) in _everywhere([bool(flag)], group))


def _everywhere(flags: list[bool], group: dist.ProcessGroup | None) -> list[list[bool]]:
    group = group or (dist.group.WORLD if dist.is_initialized() else None)
    return [flags] if group is None else exchange_flags(flags, group, "agreement on a step")
