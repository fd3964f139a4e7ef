"""Checkpoints in our own format: opened as a source, and written by one process for ranks that exist on paper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.core.ckpt.boxes import Division, shared_splits
from fullshard.core.ckpt.manifest import Manifest, TensorEntry, file_name
from fullshard.errors import CheckpointError
from fullshard.runtime.checkpoint.files.folder import Checkpoint
from fullshard.runtime.checkpoint.files.memory import dtype_name
from fullshard.runtime.checkpoint.files.writing import write_file
from fullshard.runtime.checkpoint.publish import Draft
from fullshard.tools.ckpt.pieces import Stream
from fullshard.tools.ckpt.sources import OwnTensor, Source


def own_source(checkpoint: Checkpoint) -> Source:
    """A checkpoint of ours as a source."""
    manifest = checkpoint.manifest
    tensors: dict[str, Any] = {name: OwnTensor(checkpoint, name) for name in manifest.tensors}
    return Source(tensors, dict(manifest.aliases), manifest.state, manifest.step, on_close=checkpoint.close)


@dataclass(frozen=True)
class Layout:
    """Ranks on paper.

    Attributes:
        replicas: Copies of each shard, which share the writing.
        shards: Ranks that the rows are divided over.
    """

    replicas: int
    shards: int

    @property
    def world_size(self) -> int:
        """Ranks, and files."""
        return self.replicas * self.shards

    def division(self, shape: tuple[int, ...], itemsize: int) -> Division:
        """How a tensor is divided over the files: its rows over all shards, and each shard over its replicas."""
        if not shape:
            return Division.whole_on(0)
        mesh = (self.replicas, self.shards) if self.replicas > 1 else (self.shards,)
        splits = ((0, len(mesh) - 1),)
        shared = shared_splits(shape, itemsize, mesh, splits, range(len(mesh) - 1))
        return Division(mesh, tuple(range(self.world_size)), splits + shared)


@dataclass(frozen=True)
class Target:
    """Where a checkpoint is written to.

    Attributes:
        root: Folder of checkpoints.
        step: Its number.
        overwrite: Replace one of this step.
        layout: Its ranks.
    """

    root: Path
    step: int
    overwrite: bool
    layout: Layout


def write_own(source: Source, target: Target, rank_state: tuple[Mapping[str, Any], ...] = ()) -> Path:
    """Write everything of a source as a checkpoint of ours, file after file, and publish it.

    Returns:
        Its folder.

    Raises:
        CheckpointError: It cannot be read, or not be written.
    """
    numbers: dict[Division, int] = {}
    entries: dict[str, TensorEntry] = {}
    for name, tensor in source.tensors.items():
        division = _division(name, tensor.shape, tensor.dtype.itemsize, target.layout)
        number = numbers.setdefault(division, len(numbers))
        try:
            entries[name] = TensorEntry(tuple(tensor.shape), dtype_name(tensor.dtype), number)
        except ValueError as error:
            raise CheckpointError(f"tensor {name!r}: {error}") from None
    divisions = tuple(numbers)
    draft = Draft(target.root, target.step, target.overwrite)
    stream = Stream()
    try:
        files = []
        for rank in range(target.layout.world_size):
            boxes = {name: divisions[entry.division].box(entry.shape, rank) for name, entry in entries.items()}
            pieces = [stream.piece(name, source.tensors[name], box) for name, box in boxes.items() if box is not None]
            files.append(write_file(draft.path / file_name(rank), pieces))
        manifest = Manifest(
            step=target.step,
            world_size=target.layout.world_size,
            divisions=divisions,
            tensors=entries,
            aliases=source.aliases,
            files=tuple(files),
            state=source.values,
            rank_state=rank_state,
        )
        return draft.publish(manifest)
    finally:
        draft.abandon()  # nothing is there any more if all went well


def _division(name: str, shape: tuple[int, ...], itemsize: int, layout: Layout) -> Division:
    owner = rank_of(name)
    return Division.whole_on(owner) if owner is not None else layout.division(shape, itemsize)


def rank_of(name: str) -> int | None:
    """The rank that alone has a tensor, by its name (`KEY@R/...`), or None."""
    _, at, number = name.partition("/")[0].rpartition("@")
    return int(number) if at and number.isdecimal() else None
