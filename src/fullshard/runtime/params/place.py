"""Where a unit's ranks are: meshes and groups of the data-parallel ranks, from the public arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fullshard.core.policy import AfterForward, after_forward
from fullshard.core.spec import World
from fullshard.runtime.collectives import TRANSPORTS, Transport
from fullshard.runtime.device import BufferPool, default_device_type
from fullshard.runtime.dtensors import concatenate
from fullshard.runtime.params.meshes import ensure_process_group, replicate_mesh, secondary_group


@dataclass
class DataParallelMeshDims:
    """Which dims of a full mesh are data-parallel, for parameters that already are `DTensor`s on that mesh.

    Attributes:
        shard: Name or names of the dims to shard over; several count as one, flattened.
        replicate: Name or names of the dims that hold replicas; several count as one, flattened.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not (self.shard_names or self.replicate_names):
            raise ValueError("DataParallelMeshDims names no dim: give shard, replicate or both")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Names of the dims to shard over."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """Names of the dims that hold replicas."""
        return _names(self.replicate)


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)


@dataclass
class FSDPMeshInfo:
    """A mesh of data-parallel ranks that one parameter is sharded over, for `ShardPlacementResult`.

    Attributes:
        mesh: 1-D (shard), or 2-D (replicate x shard) in `HSDPMeshInfo`.
        shard_mesh_dim: Dim of it that parameters are sharded over.
        replicate_mesh_dim: Dim of it that holds replicas.
    """

    mesh: DeviceMesh
    shard_mesh_dim: int | None = None
    replicate_mesh_dim: int | None = None

    def __post_init__(self) -> None:
        if self.shard_mesh_dim is None:
            raise ValueError(f"{type(self).__name__} needs shard_mesh_dim, the dim of the mesh to shard over")


@dataclass
class HSDPMeshInfo(FSDPMeshInfo):
    """The same with replicas."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replicate_mesh_dim is None:
            raise ValueError("HSDPMeshInfo needs replicate_mesh_dim, the dim of the mesh that holds replicas")


@dataclass
class ShardPlacementResult:
    """What `shard_placement_fn` returns to shard one parameter over other ranks than the rest.

    Attributes:
        placement: `Shard(dim)`, or None for dim 0.
        mesh_info: The ranks.
    """

    placement: Shard | None
    mesh_info: FSDPMeshInfo


@dataclass(frozen=True, slots=True)
class Spmd:
    """A full mesh on which all parameters are `DTensor`s, and which dims of it are data-parallel.

    Attributes:
        mesh: The full mesh.
        shard: Dims to shard over, as indices.
        replicate: Dims that hold replicas, as indices.
    """

    mesh: DeviceMesh
    shard: tuple[int, ...]
    replicate: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the dims of the mesh."""
        return self.mesh.mesh_dim_names or ()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a unit's ranks are.

    Attributes:
        mesh: 1-D (shard) or 2-D (replicate x shard) mesh of the data-parallel ranks.
        world: The same as integers, from this rank's side.
        device: Device of shards and full parameters.
        transport: Name of the transport.
        secondary: Group of the smaller world that `reshard_after_forward=int` names.
        spmd: The full mesh that `mesh` is a part of, with `dp_mesh_dims`.
    """

    mesh: DeviceMesh
    world: World
    device: torch.device
    transport: str = "auto"
    secondary: dist.ProcessGroup | None = None
    spmd: Spmd | None = None

    @property
    def shard_mesh(self) -> DeviceMesh:
        """Mesh of the ranks that hold the pieces of one parameter: 1-D, but `mesh` itself if its dims have no names."""
        names = self.mesh.mesh_dim_names
        return self.mesh[names[-1]] if self.mesh.ndim == 2 and names is not None else self.mesh

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """Ranks that hold the pieces of one parameter."""
        return self.mesh.get_group(self.mesh.ndim - 1)

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """Ranks that hold the same pieces, or None if there are no replicas."""
        return self.mesh.get_group(0) if self.mesh.ndim == 2 else None

    def placements(self, shard: Placement) -> tuple[Placement, ...]:
        """Placements on `mesh` of a parameter whose rows are divided as `shard` says."""
        return (Replicate(), shard) if self.mesh.ndim == 2 else (shard,)


@dataclass(slots=True)
class Links:
    """Transports between the ranks of one place, made when the engine starts. `shard` gathers, `reduce` sums."""

    shard: Transport
    reduce: Transport
    replicate: Transport | None
    secondary: Transport | None


@dataclass(slots=True)
class Resources:
    """What an engine gives a unit: memory for full buffers, and transports for each place of its parameters."""

    pool: BufferPool
    links: dict[Place, Links]


def make_place(
    mesh: DeviceMesh | None,
    transport: str,
    reshard_after_forward: bool | int | Literal["auto"] | None,
    dims: DataParallelMeshDims | None = None,
) -> Place:
    """Ranks and device of a unit, from the public arguments."""
    if transport not in TRANSPORTS:
        raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}, got {transport!r}")
    if mesh is None:
        ensure_process_group()
        mesh = init_device_mesh(default_device_type(), (dist.get_world_size(),))
    spmd = None
    if dims is not None:
        spmd = _spmd(mesh, dims)
        mesh = _data_parallel_part(mesh, dims)
        if not spmd.shard:
            mesh = replicate_mesh(mesh.get_group(), mesh.device_type)
    _check_mesh(mesh)
    after = after_forward(reshard_after_forward, mesh.size(-1))
    secondary = None
    if isinstance(reshard_after_forward, int) and after is AfterForward.SHRINK:
        secondary = secondary_group(mesh, reshard_after_forward)
    return Place(mesh, _world(mesh), _device(mesh), transport, secondary, spmd)


def other_place(mesh: DeviceMesh, like: Place, name: str) -> Place:
    """Where parameter `name` of a unit at `like` is, if `shard_placement_fn` chose another mesh for it."""
    _check_mesh(mesh)
    secondary = None
    if like.secondary is not None:
        size = like.secondary.size()
        if mesh.size(-1) % size:
            raise ValueError(
                f"reshard_after_forward={size} must divide every shard axis of the unit, but shard_placement_fn puts "
                f"parameter {name!r} on one of {mesh.size(-1)} ranks"
            )
        secondary = secondary_group(mesh, size)
    return Place(mesh, _world(mesh), like.device, like.transport, secondary)


def _world(mesh: DeviceMesh) -> World:
    axis = mesh.ndim - 1
    replica, replicas = (mesh.get_local_rank(0), mesh.size(0)) if mesh.ndim == 2 else (0, 1)
    return World(mesh.get_local_rank(axis), mesh.size(axis), replica, replicas)


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def mesh_of(info: object, name: str) -> DeviceMesh:
    """The mesh that `shard_placement_fn` chose for parameter `name`, from its `mesh_info` (torch's class is fine)."""
    mesh = getattr(info, "mesh", None)
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"shard_placement_fn returned mesh_info {info!r} for parameter {name!r}; expected "
            "FSDPMeshInfo(mesh, shard_mesh_dim=0) or HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)"
        )
    if getattr(info, "shard_mesh_dim", None) != mesh.ndim - 1:
        raise ValueError(
            f"shard_placement_fn returned mesh_info {info!r} for parameter {name!r}; the last dim of its mesh must be "
            "the one to shard over (replicas come first)"
        )
    return mesh


def _spmd(mesh: DeviceMesh, dims: DataParallelMeshDims) -> Spmd:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
    if not hasattr(dims, "shard_names"):  # torch's class of the same name is as good
        raise TypeError(f"dp_mesh_dims must be a DataParallelMeshDims, got {type(dims).__name__}")
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError("with dp_mesh_dims the mesh needs names for its dims: init_device_mesh(..., mesh_dim_names=)")
    for name in (*dims.shard_names, *dims.replicate_names):
        if name not in names:
            raise ValueError(f"dp_mesh_dims names {name!r}, but the dims of the mesh are {names}")
    return Spmd(
        mesh,
        tuple(names.index(name) for name in dims.shard_names),
        tuple(names.index(name) for name in dims.replicate_names),
    )


def _data_parallel_part(mesh: DeviceMesh, dims: DataParallelMeshDims) -> DeviceMesh:
    """1-D mesh of the ranks to shard over (or of the replicas, if there is nothing else), or 2-D of both."""
    parts = [_flat(mesh, names) for names in (dims.replicate_names, dims.shard_names) if names]
    return parts[0] if len(parts) == 1 else concatenate(parts)


def _flat(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


def _check_mesh(mesh: DeviceMesh) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"mesh must be 1-D (shard) or 2-D (replicate x shard), got {mesh.ndim} dims {mesh.mesh_dim_names}; "
            "pass the data-parallel part of it, such as mesh['dp']"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the mesh {mesh.mesh.tolist()}, but the world has "
            f"{dist.get_world_size()} ranks; build a mesh that covers every rank that calls fully_shard"
        )
