"""What a parameter looks like outside of the buffers, which know plain rows only.

The buffers of a unit hold the rows that this rank's data-parallel group divides among itself. What the user sees can be
more than that: the parameter may have been a `DTensor` already (tensor parallel, expert parallel), whose *local* tensor
is what is divided, or a subclass of `nn.Parameter` with attributes. A `Dress` says how to make the sharded parameter of
this rank's rows, the full parameter of a view of the full buffer, and the plain gradient of what autograd made.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fullshard.runtime.dtensors import StridedShard, concatenate, contiguous_stride, finished, local_of, set_local, wrap
from fullshard.runtime.params.place import Place


@dataclass(frozen=True, slots=True)
class Outer:
    """A parameter that was a `DTensor` before it was sharded: the module sees one in its forward, too.

    Attributes:
        mesh: Its mesh.
        placements: Its placements on that mesh.
        unreduced: Dims of the mesh over which the unit itself sums gradients, so that a partial sum stays one.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    unreduced: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Dress:
    """See the module.

    Attributes:
        mesh: Mesh of the sharded parameter: the data-parallel one, with that of `outer` behind it.
        placements: Placements of the sharded parameter.
        shape: Global shape.
        stride: Global stride.
        outer: For a parameter that was a `DTensor`.
        kind: Class of the parameter.
        extends: It is a subclass with the protocol of `extensions.py`, whose attributes are its inner tensors.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    outer: Outer | None = None
    kind: type[nn.Parameter] = nn.Parameter
    extends: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether gradients come as plain tensors."""
        return self.outer is None

    def sharded(self, local: torch.Tensor, like: nn.Parameter, nothing: torch.Tensor) -> nn.Parameter:
        """The sharded parameter around this rank's rows.

        Args:
            local: The rows.
            like: The parameter as the user made it.
            nothing: Empty plain tensor of its dtype and device, see `sharded_like`.
        """
        made: Any = wrap(nothing, self.mesh, self.placements, self.shape, self.stride)
        # What `nn.Parameter(dtensor)` makes of it, without the alias that it takes first, a dispatched operation.
        made.requires_grad_(like.requires_grad)._is_param = True
        parameter: nn.Parameter = made
        set_local(parameter, local)
        if not self.extends:
            # What the user wrote on the parameter (a learning-rate scale, a quantization state) stays with it.
            parameter.__dict__.update(like.__dict__)
        return parameter

    def full(self, view: torch.Tensor) -> nn.Parameter:
        """The parameter that the module sees, a leaf around `view` of the full buffer; frozen until registered."""
        if self.outer is not None:
            view = wrap(view, self.outer.mesh, self.outer.placements, self.shape, self.stride)
        if self.kind is nn.Parameter:
            return nn.Parameter(view, requires_grad=False)
        made: nn.Parameter = torch.Tensor._make_subclass(self.kind, view, False)
        return made

    def plain_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of this rank's part of the parameter, a plain tensor in the shape of the part.

        A gradient whose placements are not the parameter's (a partial sum, mostly) is communicated on the outer mesh.
        """
        if isinstance(gradient, DTensor):
            assert self.outer is not None, "a plain parameter has a DTensor as its gradient"
            wanted = tuple(
                found if dim in self.outer.unreduced else own
                for dim, (found, own) in enumerate(zip(gradient.placements, self.outer.placements, strict=True))
            )
            if tuple(gradient.placements) != wanted:
                gradient = gradient.redistribute(placements=wanted)
            gradient = local_of(gradient)
        return finished(gradient)

    def sharding_groups(self) -> Iterable[torch.distributed.ProcessGroup]:
        """Groups beside the data-parallel ones whose ranks hold different parts of the parameter."""
        if self.outer is None:
            return
        for axis, placement in enumerate(self.outer.placements):
            if is_shard(placement) and axis not in self.outer.unreduced:
                yield self.outer.mesh.get_group(axis)


def is_shard(placement: Placement, dim: int | None = None) -> bool:
    """Whether ranks along the mesh dim hold different rows (of tensor dim `dim`)."""
    return isinstance(placement, Shard | StridedShard) and (dim is None or placement.dim == dim)


def make_dress(name: str, parameter: nn.Parameter, shard_dim: int, place: Place, *, extends: bool = False) -> Dress:
    """The dress of a parameter that is about to be sharded.

    Args:
        name: For messages.
        parameter: As the user made it.
        shard_dim: Tensor dim that the data-parallel ranks divide.
        place: Those ranks.
        extends: See `Dress`.

    Raises:
        ValueError: It is a `DTensor` that cannot be sharded on this mesh.
    """
    shard: Placement = Shard(shard_dim) if parameter.dim() else Replicate()
    if not isinstance(parameter, DTensor):
        if place.spmd is not None:
            raise ValueError(
                f"with dp_mesh_dims all parameters must be DTensors on the mesh {place.spmd.mesh}, but {name!r} is a "
                "plain tensor: distribute it first (torch.distributed.tensor.distribute_module), or leave out "
                "dp_mesh_dims and pass the data-parallel mesh"
            )
        kind = nn.Parameter if extends else type(parameter)
        stride = contiguous_stride(parameter.shape)
        return Dress(place.mesh, place.placements(shard), parameter.shape, stride, None, kind, extends)
    if any(isinstance(placement, Partial) for placement in parameter.placements):
        raise ValueError(f"parameter {name!r} is a partial sum ({parameter.placements}); redistribute it first")
    if place.spmd is not None:
        return replace(_spmd_dress(name, parameter, shard_dim, place), extends=extends)
    mesh = _joint_mesh(name, parameter, place)
    factor = prod(
        parameter.device_mesh.size(axis)
        for axis, placement in enumerate(parameter.placements)
        if is_shard(placement, shard_dim)
    )
    # The rows of one rank are spread over the global parameter: it divides what tensor parallelism divided before.
    if parameter.dim() and factor > 1:
        shard = StridedShard(shard_dim, split_factor=factor)
    outer = Outer(parameter.device_mesh, tuple(parameter.placements))
    placements = (*place.placements(shard), *parameter.placements)
    return Dress(mesh, placements, parameter.shape, parameter.stride(), outer, extends=extends)


def _joint_mesh(name: str, parameter: DTensor, place: Place) -> DeviceMesh:
    try:
        return concatenate([place.mesh, parameter.device_mesh])
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"parameter {name!r} already is a DTensor with placements {parameter.placements} on "
            f"{parameter.device_mesh}, which cannot be joined with the data-parallel mesh {place.mesh}: {error}. Both "
            "must be named slices of one mesh without a common axis, as mesh['dp'] and mesh['tp'] of "
            "init_device_mesh(..., mesh_dim_names=('dp', 'tp'))"
        ) from error


def _spmd_dress(name: str, parameter: DTensor, shard_dim: int, place: Place) -> Dress:
    """The parameter is on a mesh that has the data-parallel dims among its own."""
    spmd = place.spmd
    assert spmd is not None
    mesh, own = parameter.device_mesh, list(parameter.placements)
    if mesh != spmd.mesh:
        raise ValueError(
            f"parameter {name!r} is a DTensor on {mesh}, but fully_shard with dp_mesh_dims got the mesh {spmd.mesh}; "
            "distribute all parameters on the mesh that is passed"
        )
    dims = (*spmd.replicate, *spmd.shard)
    for axis in dims:
        if not isinstance(own[axis], Replicate):
            raise ValueError(
                f"parameter {name!r} must be replicated on the data-parallel dim {spmd.names[axis]!r} of its mesh, "
                f"found {own[axis]}"
            )
    placements = list(own)
    for axis in spmd.shard if parameter.dim() else ():
        inner = range(axis + 1, mesh.ndim)
        factor = prod(mesh.size(other) for other in inner if is_shard(own[other], shard_dim))
        placements[axis] = StridedShard(shard_dim, split_factor=factor) if factor > 1 else Shard(shard_dim)
    outer = Outer(mesh, tuple(own), frozenset(dims))
    if len(spmd.shard) > 1:
        mesh, placements = _with_one_shard_dim(placements, place)
    return Dress(mesh, tuple(placements), parameter.shape, parameter.stride(), outer)


def _with_one_shard_dim(placements: list[Placement], place: Place) -> tuple[DeviceMesh, list[Placement]]:
    """Mesh and placements in which the data-parallel dims stand as `place.mesh` has them, at the first shard dim."""
    spmd = place.spmd
    assert spmd is not None
    meshes: list[DeviceMesh] = []
    kept: list[Placement] = []
    for axis, placement in enumerate(placements):
        if axis == spmd.shard[0]:
            meshes.append(place.mesh)
            kept.extend(place.placements(placement))
        elif axis not in spmd.shard and axis not in spmd.replicate:
            meshes.append(spmd.mesh[spmd.names[axis]])
            kept.append(placement)
    return concatenate(meshes), kept
