"""Which rows of a tensor this rank has, which of them it writes, and which it must read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from fullshard.core.ckpt.boxes import Box, Division, shared_splits
from fullshard.core.layout import row_range
from fullshard.runtime.checkpoint.files.memory import dtype_name
from fullshard.runtime.dtensors import StridedShard, finished, local_of

Splits = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor of the state, as one rank has it.

    Attributes:
        tensor: What this rank's file holds of it, sharing memory with the object that it is from: of the shape of
            `division.box(shape, rank)`, without elements if that is None. On any device, not always contiguous.
        shape: Global shape.
        division: Who holds what. None is a plain tensor, which is the same on every rank that has it: one of them
            writes it. Tensors that are divided alike share one object.
        source: The tensor of the state.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    division: Division | None
    source: torch.Tensor

    @property
    def dtype(self) -> str:
        """As safetensors writes it."""
        return dtype_name(self.tensor.dtype)


@dataclass(frozen=True, slots=True)
class _Way:
    """How DTensors of one mesh and set of placements are divided.

    Attributes:
        mesh: The mesh, kept because it is known by its identity.
        ranks: Of it, the last axis fastest.
        sizes: Of its axes.
        coordinate: This rank's.
        splits: (dim, mesh axis) in the order in which the axes split what is left.
        replicate: Axes along which ranks hold the same.
    """

    mesh: DeviceMesh
    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    coordinate: tuple[int, ...]
    splits: Splits
    replicate: tuple[int, ...]

    def box(self, shape: tuple[int, ...], splits: Splits) -> Box:
        """This rank's part."""
        box = Box.whole(shape)
        for dim, axis in splits:
            box = box.narrowed(dim, *row_range(box.sizes[dim], self.sizes[axis], self.coordinate[axis]))
        return box


@dataclass(frozen=True, slots=True)
class _Part:
    """What this rank has of tensors of one shape.

    Attributes:
        box: Its rows.
        own: Which of them it writes, as an index; () for all, None for none.
        division: Who writes what.
    """

    box: Box
    own: tuple[slice, ...] | None
    division: Division


class Rows:
    """Finds the rows of many tensors. What they have in common is computed once: there may be 100 000 of them."""

    def __init__(self) -> None:
        self._ways: dict[tuple[int, tuple[Placement, ...]], _Way] = {}
        self._parts: dict[tuple[int, tuple[Placement, ...], torch.Size, torch.dtype], _Part] = {}
        self._divisions: dict[Division, Division] = {}

    def held(self, tensor: torch.Tensor, name: str) -> Held:
        """What this rank has of `tensor`, and writes.

        Raises:
            ValueError: It cannot be written as rows of a plain tensor; the message names it.
        """
        if not isinstance(tensor, DTensor):
            return Held(_plain(tensor, name), tuple(tensor.shape), None, tensor)
        part, local = self._find(tensor, name)
        if part.own is None:
            local = local.new_empty(0)
        elif part.own:
            local = local[part.own]
        return Held(local, tuple(tensor.shape), part.division, tensor)

    def wanted(self, tensor: torch.Tensor, name: str) -> tuple[Box, torch.Tensor]:
        """(what to read, where to) to fill `tensor` on this rank.

        Raises:
            ValueError: As of `held`.
        """
        if not isinstance(tensor, DTensor):
            return Box.whole(tensor.shape), _plain(tensor, name)
        part, local = self._find(tensor, name)
        return part.box, local

    def _find(self, tensor: DTensor, name: str) -> tuple[_Part, torch.Tensor]:
        local = _plain(finished(local_of(tensor)), name)
        key = (id(tensor.device_mesh), tensor.placements, tensor.shape, local.dtype)
        part = self._parts.get(key)
        if part is None:
            part = self._parts[key] = self._part(tensor, local.dtype.itemsize, name)
        if local.shape != part.box.sizes:
            raise ValueError(
                f"{name!r} of shape {tuple(tensor.shape)} on a mesh of shape {tuple(tensor.device_mesh.shape)} with "
                f"placements {tensor.placements} has a local tensor of shape {tuple(local.shape)}, where torch.chunk "
                f"gives {part.box.sizes}: rows that are divided otherwise cannot be saved or loaded. Make it of "
                "distribute_tensor or fully_shard"
            )
        return part, local

    def _part(self, tensor: DTensor, itemsize: int, name: str) -> _Part:
        shape, way = tuple(tensor.shape), self._way(tensor.device_mesh, tuple(tensor.placements), name)
        box = way.box(shape, way.splits)
        shared = shared_splits(shape, itemsize, way.sizes, way.splits, way.replicate)
        splits = way.splits + shared
        division = Division(way.sizes, way.ranks, splits)
        division = self._divisions.setdefault(division, division)
        split = {axis for _, axis in splits}
        if any(place and axis not in split for axis, place in enumerate(way.coordinate)):
            return _Part(box, None, division)
        return _Part(box, way.box(shape, splits).within(box) if shared else (), division)

    def _way(self, mesh: DeviceMesh, placements: tuple[Placement, ...], name: str) -> _Way:
        key = (id(mesh), placements)
        if key not in self._ways:
            coordinate = mesh.get_coordinate()
            if coordinate is None:
                raise ValueError(f"this rank is not in the mesh of {name!r}, {mesh}; save it on the ranks that are")
            replicate = tuple(a for a, kind in enumerate(placements) if kind.is_replicate() and mesh.size(a) > 1)
            splits = _splits(mesh, placements, name)
            ranks = tuple(mesh.mesh.flatten().tolist())
            self._ways[key] = _Way(mesh, ranks, tuple(mesh.shape), tuple(coordinate), splits, replicate)
        return self._ways[key]


def _splits(mesh: DeviceMesh, placements: Sequence[Placement], name: str) -> Splits:
    """(dim, mesh axis) in the order in which the axes split what is left, see `dtensors.part_of_full`."""
    sharded: list[tuple[int, Any]] = []
    for axis, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        if not isinstance(placement, Shard | StridedShard):
            raise ValueError(
                f"{name!r} has the placement {placement} on axis {axis} of its mesh, which leaves no rank with rows of "
                "it; redistribute it to Shard or Replicate before saving"
            )
        sharded.append((axis, placement))
    for axis, placement in sharded:
        later = (mesh.size(other) for other, kind in sharded if other > axis and _is_plain_shard(kind, placement.dim))
        if isinstance(placement, StridedShard) and placement.split_factor != prod(later):
            raise ValueError(
                f"{name!r} has placements {tuple(placements)} on a mesh of shape {tuple(mesh.shape)}: a split factor "
                f"of {placement.split_factor} is not that of the axes behind it, so its rows cannot be told"
            )
    ordered = sorted(sharded, key=lambda item: isinstance(item[1], StridedShard))
    return tuple((placement.dim, axis) for axis, placement in ordered)


def _is_plain_shard(placement: Placement, dim: int) -> bool:
    return type(placement) is Shard and placement.dim == dim


def _plain(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """A local tensor without gradient, if its elements are in memory one after the other by strides."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or type(tensor).__torch_dispatch__ is not _PLAIN_DISPATCH:
        what = type(tensor).__qualname__ if tensor.layout is torch.strided else f"tensor of layout {tensor.layout}"
        raise ValueError(
            f"{name!r} is a {what}, whose rows cannot be written as those of a plain tensor. Save what it is made of "
            "(let the module's state_dict hooks put plain tensors in its place), or leave it out with only(...)"
        )
    return tensor


_PLAIN_DISPATCH = torch.Tensor.__torch_dispatch__
