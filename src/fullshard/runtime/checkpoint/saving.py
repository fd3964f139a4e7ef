"""Saving: what the ranks have becomes one manifest and a file of each; then it becomes visible.

[Note: what is exchanged]
All ranks usually have the same tensors, divided alike. So they compare a digest, and each computes the manifest by
itself: names and shapes of 100 000 tensors travel to nobody. Only where ranks differ (stages of a pipeline) they tell
each other everything. After the files are on the disk, each rank tells the first one their sizes and seals.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fullshard.core.ckpt.boxes import Division
from fullshard.core.ckpt.manifest import FileEntry, Manifest, TensorEntry, file_name
from fullshard.errors import CheckpointError
from fullshard.runtime.checkpoint.agree import Ranks
from fullshard.runtime.checkpoint.files.checks import checksum
from fullshard.runtime.checkpoint.files.memory import as_bytes
from fullshard.runtime.checkpoint.files.writing import piece_of, write_file
from fullshard.runtime.checkpoint.merging import PLAIN, Described, Shared, Told, merge
from fullshard.runtime.checkpoint.publish import Draft, prune
from fullshard.runtime.checkpoint.state.collect import Collected, collect
from fullshard.runtime.checkpoint.state.rows import Held

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
        if type(step) is not int or step < 0:
            raise ValueError(f"step must be an integer of at least 0, got {step!r}")
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ValueError(f"keep must be None or an integer of at least 1, got {keep!r}")
        return cls(Path(root), step, keep, overwrite)


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

    Attributes:
        tensors: What this rank's file will hold, by name.

    Raises:
        CheckpointError: The state cannot be saved, or not there; on all ranks.
    """

    def __init__(self, ranks: Ranks, where: Where, state: Mapping[str, Any]) -> None:
        collected: list[Collected] = []
        # The result stays here: only whether it worked is told.
        ranks.on_all(lambda: collected.append(collect(state)), "describe")
        self._ranks = ranks
        self._where = where
        self._shared, self._own, self.tensors = _agree(ranks, collected[0])
        self._values = collected[0].rank_values
        self._draft: Draft | None = None
        self._path = ranks.on_first(self._begin, "begin")

    def _begin(self) -> Path:
        self._draft = Draft(self._where.root, self._where.step, self._where.overwrite)
        return self._draft.path

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
            if self._draft is not None:
                self._draft.abandon()  # nothing is there any more if all went well
        _LOG.info("saved %s", path)
        return path

    def _write_own(self) -> _Report:
        if not self._path.is_dir():
            raise CheckpointError(
                f"{self._path} is not there, though the first rank has made it: all ranks must see the same folder, "
                "so on several hosts it must be on a shared file system"
            )
        pieces = [piece_of(name, tensor) for name, tensor in self.tensors.items()]
        return _Report(write_file(self._path / file_name(self._ranks.rank), pieces), self._own, self._values)

    def _publish(self, reports: list[_Report]) -> Path:
        assert self._draft is not None
        path = self._draft.publish(self._manifest(reports))
        if self._where.keep is not None:
            with suppress(OSError):  # the checkpoint is safe; what is too many is deleted the next time
                prune(self._where.root, self._where.keep)
        return path

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


def _agree(
    ranks: Ranks, collected: Collected
) -> tuple[Shared, dict[str, tuple[tuple[int, ...], str]], dict[str, torch.Tensor]]:
    """(what all ranks have, tensors that this rank has for itself, what this rank writes)."""
    places = {member: place for place, member in enumerate(ranks.members)}
    numbers: dict[int, int] = {}  # by identity: tensors that are divided alike share one object
    divisions: list[Division] = []
    own: dict[str, tuple[tuple[int, ...], str]] = {}
    told: dict[str, Described] = {}
    for name, held in collected.tensors.items():
        division = held.division
        if division is None:
            told[name] = (held.shape, held.dtype, PLAIN)
        elif name.partition("/")[0].endswith(f"@{ranks.members[ranks.rank]}"):
            own[name] = (held.shape, held.dtype)
        else:
            if id(division) not in numbers:
                numbers[id(division)] = len(divisions)
                divisions.append(_placed(division, places, name))
            told[name] = (held.shape, held.dtype, numbers[id(division)])
    everything = Told(tuple(divisions), told, collected.aliases, collected.values)
    digest = hashlib.blake2b(repr(everything).encode(), digest_size=16).digest()
    alike = len(set(ranks.exchange(digest, "compare"))) == 1
    shared = merge([everything] if alike else ranks.exchange(everything, "compare"))
    if shared.twins:
        _compare_twins(ranks, shared.twins, {name: collected.tensors.get(name) for name in shared.twins})
    tensors = {
        name: held.tensor
        for name, held in collected.tensors.items()
        if name in own or shared.divisions[shared.tensors[name].division].box(held.shape, ranks.rank) is not None
    }
    return shared, own, tensors


def _compare_twins(ranks: Ranks, twins: Mapping[str, tuple[Division, ...]], held: Mapping[str, Held | None]) -> None:
    """Make sure that tensors of one name which several sets of ranks have are the same."""
    own = {name: checksum(as_bytes(each.tensor.cpu().contiguous()).numpy().data) for name, each in held.items() if each}
    sums = ranks.exchange(own, "compare")
    for name, (first, *others) in twins.items():
        for other in others:
            pairs = zip(first.ranks, other.ranks, strict=True)
            if any(sums[one][name] != sums[two][name] for one, two in pairs):
                raise CheckpointError(
                    f"tensor {name!r} on ranks {list(first.ranks)} is not that on ranks {list(other.ranks)}, though it "
                    "has the same name. If it is meant to be the same, the ranks have drifted apart; if it is not "
                    "(experts of each rank), give it another name on each, or let each set of ranks save to a folder "
                    "of its own with group="
                )


def _placed(division: Division, places: Mapping[int, int], name: str) -> Division:
    """A division over global ranks as one over files."""
    missing = [rank for rank in division.ranks if rank not in places]
    if missing:
        raise CheckpointError(
            f"tensor {name!r} is divided over ranks {list(division.ranks)[:16]}, but {missing[:16]} do not take part: "
            "save with a group that has all ranks of the mesh"
        )
    return replace(division, ranks=tuple(places[rank] for rank in division.ranks))
