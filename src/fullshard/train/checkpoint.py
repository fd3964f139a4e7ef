"""What `fullshard train` puts into its checkpoints, when they fit a run, and saving them at once or in the background.

checkpoint/latest        names the newest one
checkpoint/step-40/      see fullshard.checkpoint: `model`, `optimizer`, `random` of each rank, and `run`:
run                  position in the data, windows of a step, settings, fingerprint of the text
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import checkpoint
from fullshard.checkpoint import CheckpointDamagedError, CheckpointError, CheckpointMismatchError, PendingSave
from fullshard.errors import FullshardError
from fullshard.train.config import Config
from fullshard.train.settings import to_dict
from fullshard.train.world import World

CHECKPOINT_FOLDER = "checkpoint"
# How the windows of a step are spread; a resumed run takes as many as before, unless it is told how many.
SHAPE_OF_STEP = ("train.micro_batch_size", "train.gradient_accumulation", "train.global_batch_size")
_RUN_TYPES = {"position": int, "step_windows": int, "config": dict, "corpus": str}
_EARLIER_FORM = "step-*/checkpoint.json"


@dataclass(frozen=True)
class Progress:
    """How far a run is: optimizer steps done, the place in the data, and how much of it a step takes."""

    step: int
    position: int  # windows that all ranks have consumed
    step_windows: int  # of all ranks


@dataclass(frozen=True)
class TrainState:
    """What a checkpoint holds besides the progress."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    world: World
    config: Config
    corpus: str  # fingerprint of the text

    def tensors(self) -> dict[str, Any]:
        """What is saved and loaded in place."""
        return {"model": self.model, "optimizer": self.optimizer, "random": checkpoint.RandomState()}


class Saver:
    """Saves checkpoints of one run, with `checkpoint.async_mode` in the background. All ranks call its methods alike.

    Attributes:
        step: Of the newest checkpoint that is known to be complete; -1 if there is none.
    """

    def __init__(self, root: Path, state: TrainState, step: int = -1) -> None:
        self._root = root
        self._state = state
        self._pending: PendingSave | None = None
        self._begun = self.step = step

    def save(self, progress: Progress, wait: bool) -> str | None:
        """Save, unless this step is saved already. Returns what there is to tell.

        Raises:
            CheckpointError: It cannot be saved, or the one before could not, in the background.
        """
        if progress.step == self._begun:
            return self.settle() if wait else None
        settings = self._state.config.checkpoint
        started = time.perf_counter()
        self.settle()
        # A run that goes on from an earlier step may meet a checkpoint that was complete, but not yet the latest one.
        options: dict[str, Any] = {
            "keep": settings.keep_latest_k,
            "overwrite": True,
            "group": self._state.world.control,
        }
        state = {**self._state.tensors(), "run": _run_values(self._state, progress)}
        self._begun = progress.step
        if settings.async_mode == "async" and not wait:
            # Between two steps of the optimizer nothing here changes what may be copied meanwhile.
            self._pending = checkpoint.overlapped_save(self._root, state, progress.step, **options)
            return f"saving step {progress.step} in the background, begun in {time.perf_counter() - started:.2f} s"
        path = checkpoint.save(self._root, state, progress.step, **options)
        self.step = self._begun
        return f"saved {path} in {time.perf_counter() - started:.1f} s"

    def settle(self) -> str | None:
        """Wait for the save in the background. Raises its error."""
        if self._pending is None:
            return None
        path = self._pending.result()
        self._pending = None
        self.step = self._begun
        return f"saved {path}"

    def news(self) -> str | None:
        """What this rank alone can tell of a save in the background: so it does not wait, and never raises."""
        if self._pending is not None and self._pending.done():
            with suppress(FullshardError):
                return self.settle()
        return None


def load_checkpoint(path: Path, state: TrainState) -> tuple[Progress, list[str]]:
    """Fill model, optimizer and random generators; all ranks return, or all raise the same error.

    Returns:
        Where the checkpoint was, and the settings that have changed since.

    Raises:
        CheckpointMismatchError: It is of another run. Nothing was changed.
        CheckpointDamagedError: It is not as it was written.
        CheckpointError: It cannot be read.
    """
    group = state.world.control
    # Before the tensors: where a model does not fit, the setting that was changed says more than a list of shapes.
    run = checkpoint.load(path, {"run": {}}, group=group).values["run"]
    _check_fits(path, run, state)
    # A resumed run has the optimizer's settings of its configuration, as changed as they may be, not the saved ones.
    settings = [{key: group[key] for key in group if key != "params"} for group in state.optimizer.param_groups]
    try:
        loaded = checkpoint.load(path, state.tensors(), group=group)
    except CheckpointDamagedError as error:
        raise CheckpointDamagedError(f"{error}. Remove {path} to go on from the checkpoint before it.") from None
    for one, values in zip(state.optimizer.param_groups, settings, strict=True):
        one.update(values)
    _, bending = changed_settings(run["config"], state.config)
    return Progress(loaded.step, run["position"], run["step_windows"]), bending


def changed_settings(saved: Mapping[str, Any], config: Config) -> tuple[list[str], list[str]]:
    """Settings that differ from those of a run: (those that make it another run, those that only bend it)."""
    fatal: list[str] = []
    bending: list[str] = []
    current = to_dict(config)
    for section in ("model", "data", "train", "optim"):
        for key, value in current[section].items():
            if f"{section}.{key}" not in SHAPE_OF_STEP and saved.get(section, {}).get(key) != value:
                text = f"{section}.{key} was {saved.get(section, {}).get(key)!r}, is {value!r}"
                pinned = section in ("model", "data") or key == "seed"
                (fatal if pinned else bending).append(text)
    return fatal, bending


def refuse_earlier_form(root: Path) -> None:
    """Raise if a folder has checkpoints that a version before the present form wrote: they must not be passed over."""
    for found in sorted(root.glob(_EARLIER_FORM)):
        raise CheckpointError(
            f"{found.parent} was written by an earlier version of fullshard, in a form that this one does not read. "
            f"Finish the run with the version that began it, or begin another with --run.name."
        )


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded; shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _run_values(state: TrainState, progress: Progress) -> dict[str, Any]:
    return {
        "position": progress.position,
        "step_windows": progress.step_windows,
        "config": to_dict(state.config),
        "corpus": state.corpus,
    }


def _check_fits(path: Path, run: Any, state: TrainState) -> None:
    """From what every rank has read alike, so that all raise the same."""
    wrong = not isinstance(run, dict) or [key for key, kind in _RUN_TYPES.items() if not isinstance(run.get(key), kind)]
    if wrong or not all(isinstance(section, dict) for section in run["config"].values()):
        raise CheckpointMismatchError(f"{path} is no checkpoint of `fullshard train`: its state has no usable 'run'.")
    fatal, _ = changed_settings(run["config"], state.config)
    if fatal:
        raise CheckpointMismatchError(
            f"{path} belongs to a different run: {'; '.join(fatal)}. Resume with the settings it had."
        )
    if run["corpus"] != state.corpus:
        raise CheckpointMismatchError(f"{path} was trained on other text than the corpus in this run folder.")
