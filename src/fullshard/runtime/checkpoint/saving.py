"""Saving: what the ranks have becomes one manifest and a file of each; then it becomes visible."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fullshard.core.ckpt.boxes import Division
from fullshard.core.ckpt.manifest import FileEntry, Manifest, TensorEntry, file_name
from fullshard.errors import CheckpointError
from fullshard.runtime.checkpoint.agree import Ranks
from fullshard.runtime.checkpoint.collector import no_collection
from fullshard.runtime.checkpoint.copying import Copies, Tensors
from fullshard.runtime.checkpoint.describing import Description, agree, changed_by_steps, describe
from fullshard.runtime.checkpoint.files.writing import piece_of, write_file
from fullshard.runtime.checkpoint.publish import MAX_STEP, Draft, prune

# Copies what is to be written; of these later, when it is finished.
Copy = Callable[[Tensors, Mapping[str, torch.Tensor]], Copies]

_LOG = logging.getLogger("fullshard")


@dataclass(frozen=True, slots=True)
class Where:
    """Where a checkpoint goes.

    Attributes:
        root: Folder of checkpoints.
        step: Its number.
        keep: How many of the highest steps stay; None: all.
        overwrite: Replace one of this step.
    """

    root: Path
    step: int
    keep: int | None
    overwrite: bool

    @classmethod
    def checked(cls, root: str | os.PathLike[str], step: int, keep: int | None, overwrite: bool) -> Where:
        """Validate arguments of the public functions."""
        if type(step) is not int or not 0 <= step < MAX_STEP:
            raise ValueError(f"step must be an integer of at least 0 and below {MAX_STEP}, got {step!r}")
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ValueError(f"keep must be None or an integer of at least 1, got {keep!r}")
        return cls(Path(root).absolute(), step, keep, overwrite)  # the program may change its folder meanwhile

    @property
    def terms(self) -> tuple[int, int | None, bool]:
        """What must be the same on all ranks; they may know the folder by other paths."""
        return self.step, self.keep, self.overwrite


@dataclass(frozen=True, slots=True)
class _Report:
    """What a rank tells when its file is on the disk."""

    file: FileEntry
    own_tensors: Mapping[str, tuple[tuple[int, ...], str]]
    values: Mapping[str, Any]


class Save:
    """One checkpoint on its way to the disk. All ranks make it, and then write it.

    Args:
        ranks: Who saves.
        where: Where to.
        state: What the user gave.
        copy: Copies what this rank is to write, if it is not to be written at once.
        overlap: What only optimizers change is copied when it is written.

    Raises:
        CheckpointError: The state cannot be saved, or not there; on all ranks.
    """

    def __init__(
        self,
        ranks: Ranks,
        where: Where,
        state: Mapping[str, Any],
        copy: Copy | None = None,
        overlap: bool = False,
    ) -> None:
        described: list[Description] = []

        @no_collection()
        def describe_own() -> bytes:
            described.append(describe(state, ranks))
            return described[0].digest()

        digests = ranks.on_all(describe_own, "describe")
        self._ranks = ranks
        self._where = where
        self._own = described[0].own
        self._values = described[0].values
        self._shared = agree(ranks, described[0], digests)
        self._tensors = described[0].written(self._shared, ranks.rank)
        self._copies: Copies | None = None
        self._draft: Draft | None = None
        try:

            def begin() -> Path | None:
                return self._begin(copy, changed_by_steps(state, described[0]) if overlap else {})

            path = ranks.on_all(begin, "begin")[0]
        except BaseException:
            self.abandon()
            raise
        assert path is not None, "the first rank makes the folder"
        self._path = path

    def _begin(self, copy: Copy | None, later: Mapping[str, torch.Tensor]) -> Path | None:
        self._check_complete()
        if self._ranks.rank == 0:
            self._draft = Draft(self._where.root, self._where.step, self._where.overwrite)
        if copy is not None:
            self._copies = copy(self._tensors, later)
            self._tensors = {}
        return None if self._draft is None else self._draft.path

    @property
    def copied(self) -> threading.Event:
        """Set when tensors of the state may be changed."""
        assert self._copies is not None
        return self._copies.finished

    def abandon(self) -> None:
        """Remove the folder that this rank has made, if it was not published, and let nothing be copied any more."""
        if self._draft is not None:
            self._draft.abandon()
        if self._copies is not None and not self._copies.finished.is_set():
            with suppress(CheckpointError):  # nobody wants it
                self._copies.finish()  # an accelerator must not write to memory that the next save gets

    def write(self) -> Path:
        """Write this rank's file, wait for the others', and publish; returns the folder.

        Raises:
            CheckpointError: Some rank could not. Nothing of it stays.
            CommunicationError: Some rank is gone.
        """
        try:
            reports = self._ranks.on_all(self._write_own, "write")
            path = self._ranks.on_first(lambda: self._publish(reports), "publish")
        finally:
            self.abandon()
        _LOG.info("saved %s", path)
        return path

    def _write_own(self) -> _Report:
        if self._copies is not None:
            self._tensors = self._copies.finish()
        if not self._path.is_dir():
            raise CheckpointError(
                f"{self._path} is not there, though the first rank has made it: all ranks must see the same folder, "
                "so on several hosts it must be on a shared file system"
            )
        pieces = [piece_of(name, tensor) for name, tensor in self._tensors.items()]
        return _Report(write_file(self._path / file_name(self._ranks.rank), pieces), self._own, self._values)

    def _check_complete(self) -> None:
        """What all ranks say that this one has, it has: a checkpoint that lacks it could not be loaded."""
        shared, rank = self._shared, self._ranks.rank
        for name, entry in shared.tensors.items():
            box = shared.divisions[entry.division].box(entry.shape, rank)
            found = self._tensors.get(name)
            if box is not None and (found is None or tuple(found.shape) != box.sizes):
                raise CheckpointError(
                    f"tensor {name!r} is divided over ranks that do not all have it: give the same state on all ranks "
                    "(the same patterns to only(...), no tensors under `if rank == 0`)"
                )

    def _publish(self, reports: list[_Report]) -> Path:
        assert self._draft is not None
        path = self._draft.publish(self._manifest(reports))
        if self._where.keep is not None:
            with suppress(OSError):  # the checkpoint is safe; what is too many is deleted the next time
                prune(self._where.root, self._where.keep)
        return path

    @no_collection()
    def _manifest(self, reports: list[_Report]) -> Manifest:
        shared = self._shared
        divisions = list(shared.divisions)
        tensors = dict(shared.tensors)
        for rank, report in enumerate(reports):
            if report.own_tensors:
                entries = report.own_tensors.items()
                tensors.update({name: TensorEntry(shape, dtype, len(divisions)) for name, (shape, dtype) in entries})
                divisions.append(Division.whole_on(rank))
        has_values = any(report.values for report in reports)
        return Manifest(
            step=self._where.step,
            world_size=self._ranks.size,
            divisions=tuple(divisions),
            tensors=tensors,
            aliases=shared.aliases,
            files=tuple(report.file for report in reports),
            state=shared.values,
            rank_state=tuple(report.values for report in reports) if has_values else (),
        )
