"""Checkpoints in memory: what `collect` gives on every rank, kept as the files would keep it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from fullshard.core.ckpt.boxes import Box, Division
from fullshard.core.ckpt.manifest import FileEntry, Manifest, TensorEntry, file_name
from fullshard.runtime.checkpoint.files.memory import torch_dtype
from fullshard.runtime.checkpoint.state.collect import Collected, collect
from fullshard.runtime.checkpoint.state.load import Targets, refuse_unexpected, targets


@dataclass(frozen=True)
class Stored:
    """A manifest, and for each rank its pieces as bytes by name."""

    manifest: Manifest
    files: tuple[Mapping[str, torch.Tensor], ...]

    def read(self, name: str, box: Box, out: torch.Tensor) -> None:
        """As `Checkpoint.read`."""
        name = self.manifest.resolve(name)
        shape = self.manifest.tensors[name].shape
        assert tuple(out.shape) == box.sizes
        read = 0
        for rank, piece in self.manifest.division_of(name).overlapping(shape, box):
            part = piece.overlap(box)
            assert part is not None
            dtype = torch_dtype(self.manifest.tensors[name].dtype)
            rows = self.files[rank][name].view(dtype).view(piece.sizes)
            out[part.within(box)].copy_(rows[part.within(piece)])
            read += part.numel
        assert read == box.numel, f"{name} {box}: {read} elements found"

    def without(self, *names: str) -> Stored:
        """The same without some tensors."""
        tensors = {name: entry for name, entry in self.manifest.tensors.items() if name not in names}
        return replace(self, manifest=replace(self.manifest, tensors=tensors))


def save(state: Mapping[str, Any]) -> Stored:
    """Every rank gets what all have saved."""
    made = collect(state)
    world = dist.get_world_size() if dist.is_initialized() else 1
    everything: list[Any] = [made]
    if world > 1:
        everything = [None] * world
        dist.all_gather_object(everything, _sent(made))
    else:
        everything = [_sent(made)]
    return assemble(everything)


_Sent = tuple[dict[str, tuple[torch.Tensor, tuple[int, ...], tuple[int, ...], str, Division | None]], Collected]


def _sent(made: Collected) -> _Sent:
    tensors = {
        name: (_bytes(held.tensor), tuple(held.tensor.shape), held.shape, held.dtype, held.division)
        for name, held in made.tensors.items()
    }
    return tensors, replace(made, tensors={})


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def assemble(everything: list[_Sent]) -> Stored:
    """What saving does with it: plain tensors are written by the first rank that has them."""
    tensors: dict[str, TensorEntry] = {}
    divisions: dict[Division, int] = {}
    files: list[dict[str, torch.Tensor]] = []
    for rank, (own, _) in enumerate(everything):
        files.append({})
        for name, (tensor, sizes, shape, dtype, division) in own.items():
            place = Division.whole_on(rank) if division is None else division
            number = divisions.setdefault(place, len(divisions))
            if name in tensors and division is not None:
                assert tensors[name] == TensorEntry(shape, dtype, number), f"ranks disagree on {name}"
            entry = tensors.setdefault(name, TensorEntry(shape, dtype, number))
            box = place.box(shape, rank)
            if box is None or entry.division != number:
                assert division is None or not tensor.numel(), f"rank {rank} has elements of {name} for no file"
                continue
            assert sizes == box.sizes, f"{name}: {sizes} is not {box}"
            files[rank][name] = tensor
    first = everything[0][1]
    manifest = Manifest(
        step=1,
        world_size=len(everything),
        divisions=tuple(divisions),
        tensors=tensors,
        aliases=first.aliases,
        files=tuple(FileEntry(file_name(rank), 1 << 40, "") for rank in range(len(everything))),
        state=first.values,
        rank_state=tuple(made.rank_values for _, made in everything),
    )
    assert all(made.values == first.values for _, made in everything), "ranks disagree on values"
    return Stored(Manifest.from_text(manifest.to_text()), tuple(files))


def load(stored: Stored, state: Mapping[str, Any], strict: bool | Mapping[str, bool] = True) -> Targets:
    """Load on this rank."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    plan = targets(state, stored.manifest, rank, world, strict)
    refused: list[Any] = [plan.refused] * world
    if world > 1:
        dist.all_gather_object(refused, plan.refused)
    refuse_unexpected(refused)
    for name, box, out in plan.reads:
        stored.read(name, box, out)
    plan.finish()
    return plan
