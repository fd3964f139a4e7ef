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

from fullshard.core.ckpt.boxes import Box, Division
from fullshard.core.layout import row_range
from fullshard.runtime.checkpoint.files.memory import dtype_name
from fullshard.runtime.dtensors import StridedShard, finished, local_of

# Replicas share the writing of pieces from this size on; below it, one entry more in each file costs more.
SHARED_PIECE_BYTES = 64 << 10

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
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    division: Division | None

    @property
    def dtype(self) -> str:
        """As safetensors writes it."""
        return dtype_name(self.tensor.dtype)


class Rows:
    """Finds the rows of many tensors. What they have in common is computed once: there may be 100 000 of them."""

    def __init__(self) -> None:
        # The mesh is kept: its identity is part of the key.
        self._divisions: dict[tuple[int, tuple[Placement, ...], Splits], tuple[DeviceMesh, Division]] = {}
        self._splits: dict[tuple[int, tuple[Placement, ...]], tuple[DeviceMesh, Splits]] = {}

    def held(self, tensor: torch.Tensor, name: str) -> Held:
        """What this rank has of `tensor`, and writes.

        Raises:
            ValueError: It cannot be written as rows of a plain tensor; the message names it.
        """
        if not isinstance(tensor, DTensor):
            return Held(_plain(tensor, name), tuple(tensor.shape), None)
        mesh, placements, shape = tensor.device_mesh, tuple(tensor.placements), tuple(tensor.shape)
        splits = self._order(mesh, placements, name)
        local = _plain(finished(local_of(tensor)), name)
        box = _box(mesh, splits, shape)
        if tuple(local.shape) != box.sizes:
            raise ValueError(
                f"{name!r} of shape {shape} on a mesh of shape {tuple(mesh.shape)} with placements {placements} has a "
                f"local tensor of shape {tuple(local.shape)}, where torch.chunk gives {box.sizes}: rows that are "
                "divided otherwise cannot be saved. Make it of distribute_tensor or fully_shard"
            )
        shared = _shared(mesh, placements, splits, shape, local.dtype.itemsize)
        division = self._division(mesh, placements, splits + shared)
        own = _box(mesh, splits + shared, shape)
        if not _writes(mesh, splits + shared):
            return Held(local.new_empty(0), shape, division)
        return Held(local[own.within(box)] if shared else local, shape, division)

    def wanted(self, tensor: torch.Tensor, name: str) -> tuple[Box, torch.Tensor]:
        """(what to read, where to) to fill `tensor` on this rank.

        Raises:
            ValueError: As of `held`.
        """
        if not isinstance(tensor, DTensor):
            return Box.whole(tensor.shape), _plain(tensor, name)
        splits = self._order(tensor.device_mesh, tuple(tensor.placements), name)
        box = _box(tensor.device_mesh, splits, tuple(tensor.shape))
        local = _plain(finished(local_of(tensor)), name)
        if tuple(local.shape) != box.sizes:
            raise ValueError(f"{name!r} has a local tensor of shape {tuple(local.shape)}, expected {box.sizes}")
        return box, local

    def _order(self, mesh: DeviceMesh, placements: tuple[Placement, ...], name: str) -> Splits:
        key = (id(mesh), placements)
        if key not in self._splits:
            if mesh.get_coordinate() is None:
                raise ValueError(f"this rank is not in the mesh of {name!r}, {mesh}; save it on the ranks that are")
            self._splits[key] = mesh, _splits(mesh, placements, name)
        return self._splits[key][1]

    def _division(self, mesh: DeviceMesh, placements: tuple[Placement, ...], splits: Splits) -> Division:
        key = (id(mesh), placements, splits)
        if key not in self._divisions:
            ranks = tuple(int(rank) for rank in mesh.mesh.flatten().tolist())
            self._divisions[key] = mesh, Division(tuple(mesh.shape), ranks, splits)
        return self._divisions[key][1]


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


def _box(mesh: DeviceMesh, splits: Splits, shape: tuple[int, ...]) -> Box:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "checked when its splits were found"
    box = Box.whole(shape)
    for dim, axis in splits:
        box = box.narrowed(dim, *row_range(box.sizes[dim], mesh.size(axis), coordinate[axis]))
    return box


def _writes(mesh: DeviceMesh, splits: Splits) -> bool:
    """Whether this rank's coordinate is 0 on all axes that split nothing."""
    split = {axis for _, axis in splits}
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "checked when its splits were found"
    return not any(place and axis not in split for axis, place in enumerate(coordinate))


def _shared(
    mesh: DeviceMesh, placements: Sequence[Placement], splits: Splits, shape: tuple[int, ...], itemsize: int
) -> Splits:
    """Further splits, by which replicas of a piece each write a part of it. The same on every rank."""
    axes = [axis for axis, placement in enumerate(placements) if placement.is_replicate() and mesh.size(axis) > 1]
    if not axes or not shape:
        return ()
    largest = list(shape)
    for dim, axis in splits:
        largest[dim] = -(-largest[dim] // mesh.size(axis))
    made: list[tuple[int, int]] = []
    for axis in axes:
        if prod(largest) * itemsize >= SHARED_PIECE_BYTES and largest[0] > 1:
            made.append((0, axis))
            largest[0] = -(-largest[0] // mesh.size(axis))
    return tuple(made)


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
