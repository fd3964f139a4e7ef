"""Checkpoints: every rank writes and reads its own part, at any number of ranks, in a plain and safe form.

    from fullshard import checkpoint

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": checkpoint.RandomState(),
             "loader": checkpoint.per_rank(loader), "position": position}
    checkpoint.save("checkpoints", state, step=40, keep=3)       # checkpoints/step-40; or async_save
    loaded = checkpoint.load("checkpoints", state)               # the newest one; loaded.values["position"]

Files are described in docs/checkpoint-format.md; nothing is pickled, in or out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fullshard.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointMismatchError,
)
from fullshard.runtime.checkpoint.agree import Ranks
from fullshard.runtime.checkpoint.background import BACKGROUND, PendingSave
from fullshard.runtime.checkpoint.loading import Loaded, Strict, load_state
from fullshard.runtime.checkpoint.publish import latest
from fullshard.runtime.checkpoint.saving import Save, Where
from fullshard.runtime.checkpoint.state.special import RandomState, only, per_rank

__all__ = [
    "CheckpointDamagedError",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointMismatchError",
    "Loaded",
    "PendingSave",
    "RandomState",
    "async_save",
    "latest",
    "load",
    "only",
    "overlapped_save",
    "per_rank",
    "save",
]

Folder = str | os.PathLike[str]


def save(
    root: Folder,
    state: Mapping[str, Any],
    step: int,
    *,
    keep: int | None = None,
    overwrite: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Save a checkpoint as `root/step-N`; all ranks call it, and all return or all raise.

    Each rank writes the rows it holds, nothing is gathered. The folder appears under its name, and `root/latest` names
    it, only when everything is on the disk; whatever is killed when, earlier checkpoints stay as they are.

    Args:
        root: Folder of checkpoints, the same one for all ranks.
        state: By key: modules, optimizers, objects with `state_dict` and `load_state_dict`, `RandomState()`,
            `per_rank(...)`, `only(...)`, or values that JSON knows.
        step: Its number.
        keep: Delete all but the `keep` highest steps afterwards; None: nothing is deleted.
        overwrite: Replace a checkpoint of this step.
        group: Ranks that save together; None: all. Its time limit bounds every wait.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointExistsError: There is one of this step.
        CheckpointError: Some rank cannot describe or write its part; says which and why. Or the `async_save` before
            failed.
        CommunicationError: A rank is gone, or later than the time limit.
    """
    ranks, where = _agreed(group, lambda: Where.checked(root, step, keep, overwrite))
    return Save(ranks, where, state).write()


def async_save(
    root: Folder,
    state: Mapping[str, Any],
    step: int,
    *,
    keep: int | None = None,
    overwrite: bool = False,
    group: dist.ProcessGroup | None = None,
) -> PendingSave:
    """Like `save`, but return as soon as this rank's part is copied; a thread writes the copy.

    What is changed afterwards does not reach the file. One save is pending at most: this and every other function here
    first waits for the one before, and raises its error if that was not seen yet. The copy takes as much memory of the
    host as this rank's part, and is kept for the next one.

    Returns:
        The pending save; `result()` waits for it. Call it before the process group is destroyed.
    """
    ranks, where = _agreed(group, lambda: Where.checked(root, step, keep, overwrite))
    return BACKGROUND.start(Save(ranks, where, state, BACKGROUND.copy))


def overlapped_save(
    root: Folder,
    state: Mapping[str, Any],
    step: int,
    *,
    keep: int | None = None,
    overwrite: bool = False,
    group: dist.ProcessGroup | None = None,
) -> PendingSave:
    """Like `async_save`, but the copy too is taken in the background, while the next forward and backward run.

    So it is with the parameters and the states of the torch optimizers in `state`; all other tensors (buffers, frozen
    parameters, settings, those of other objects, and of optimizers that update in backward) are copied before this
    returns. Every torch optimizer waits for the copy before it steps. **Whoever else changes one of these tensors must
    call `wait_copied()` of the pending save before.** Most changes that come too early are noticed, and the save fails;
    not those that torch does not count, see docs/checkpoints.md.

    Returns:
        The pending save.
    """
    ranks, where = _agreed(group, lambda: Where.checked(root, step, keep, overwrite))
    return BACKGROUND.start(Save(ranks, where, state, BACKGROUND.copy, overlap=True))


def _agreed(group: dist.ProcessGroup | None, where: Callable[[], Where]) -> tuple[Ranks, Where]:
    """Who saves, and where to. First they wait for what is pending, and all raise its error if it failed on one."""
    ranks = Ranks.of(group)

    def prepare() -> Where:
        BACKGROUND.settle()
        return where()

    found = ranks.on_all(prepare, "prepare a save")
    for rank, other in enumerate(found):
        if other.terms != found[0].terms:
            raise ValueError(
                f"ranks {ranks.members[0]} and {ranks.members[rank]} do not save the same: (step, keep, overwrite) are "
                f"{found[0].terms} and {other.terms}. One of them may be a step ahead"
            )
    return ranks, found[ranks.rank]


def load(
    path: Folder,
    state: Mapping[str, Any],
    *,
    strict: Strict = True,
    verify: bool = True,
    group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Load a checkpoint into what `state` has; all ranks call it, and all return or all raise.

    It may have been saved by any number of ranks, on any mesh, sharded or not. Each rank reads the rows it needs.

    Args:
        path: A checkpoint, or a folder of them: then the newest complete one.
        state: As of `save`. Keys that are not asked for are not loaded.
        strict: Whether names that only one side has are an error; for all keys, or by key.
        verify: Compare what is read with its checksums.
        group: Ranks that load together; None: all.

    Returns:
        What was loaded, with the values of the state.

    Raises:
        CheckpointMismatchError: Names, shapes or dtypes do not fit. Nothing was changed.
        CheckpointDamagedError: A file is missing or altered; says which. Tensors may be half loaded.
        CheckpointError: There is no complete checkpoint.
        CommunicationError: A rank is gone, or later than the time limit.
    """
    ranks = Ranks.of(group)
    ranks.on_all(BACKGROUND.settle, "prepare a load")
    return load_state(ranks, Path(path), state, strict, verify)
