"""Device meshes and groups that units share, from what a user has: a mesh, process groups, or nothing."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullshard.core.strategy import RULES, Axes, ShardingStrategy
from fullshard.runtime.collectives import exchange
from fullshard.runtime.device import default_device_type
from fullshard.runtime.registry import REGISTRY

# One group, or (shard group, replicate group).
Groups = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup]

_HYBRID_NAMES = ("replicate", "shard")


def ensure_process_group() -> None:
    """Under torchrun a script need not make the default group itself."""
    if dist.is_initialized():
        return
    try:
        dist.init_process_group()
    except ValueError as error:
        raise ValueError(
            "sharding needs a process group: start the script with torchrun, call "
            f"torch.distributed.init_process_group first, or pass a mesh ({error})"
        ) from error


def strategy_mesh(
    strategy: ShardingStrategy, groups: Groups | None, mesh: DeviceMesh | None, device_type: str | None = None
) -> DeviceMesh:
    """The mesh on which the engine carries out `strategy`.

    Args:
        strategy: Decides which axes the mesh has.
        groups: Ranks as process groups; not together with `mesh`.
        mesh: Ranks as a mesh.
        device_type: Type of the mesh that is made of groups; default as of the default group.

    Returns:
        A 1-D mesh to shard over, or a 2-D mesh (replicate x shard).

    Raises:
        ValueError, TypeError: Mesh or groups do not have the axes that the strategy needs.
    """
    if groups is not None and mesh is not None:
        raise ValueError("process_group and device_mesh say the same thing in two ways; pass only one of them")
    ensure_process_group()
    axes = RULES[strategy].axes
    device_type = device_type or default_device_type()
    if axes is Axes.HYBRID:
        return _hybrid_mesh(strategy, groups, mesh, device_type)
    if isinstance(groups, tuple):
        raise TypeError(f"{strategy.name} takes one process group; the pair (shard, replicate) is for HYBRID_SHARD")
    if mesh is not None and mesh.ndim == 2 and axes is Axes.REPLICATE and mesh.size(1) == 1:
        return mesh
    if mesh is not None and mesh.ndim != 1:
        raise ValueError(
            f"{strategy.name} takes a 1-D mesh, got {mesh.ndim} dims {mesh.mesh_dim_names}; a 2-D mesh (replicate x "
            "shard) is for HYBRID_SHARD"
        )
    if axes is Axes.REPLICATE:
        group = groups if mesh is None else mesh.get_group()
        return replicate_mesh(group or _world(), device_type if mesh is None else mesh.device_type)
    return _shard_mesh(groups or _world(), device_type) if mesh is None else mesh


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _shard_mesh(group: dist.ProcessGroup, device_type: str) -> DeviceMesh:
    """The 1-D mesh of a group."""
    return _made_once(group, device_type, Axes.SHARD, lambda: DeviceMesh.from_group(group, device_type))


def replicate_mesh(group: dist.ProcessGroup, device_type: str) -> DeviceMesh:
    """The mesh (ranks of the group, 1)."""

    def make() -> DeviceMesh:
        ranks = torch.tensor(dist.get_process_group_ranks(group)).view(-1, 1)
        # Only its one member makes this group, so that ranks outside of `group` need not take part.
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        return DeviceMesh.from_group([group, alone], device_type, ranks, mesh_dim_names=_HYBRID_NAMES)

    return _made_once(group, device_type, Axes.REPLICATE, make)


def _hybrid_mesh(
    strategy: ShardingStrategy, groups: Groups | None, mesh: DeviceMesh | None, device_type: str
) -> DeviceMesh:
    if mesh is not None:
        if mesh.ndim != 2:
            raise ValueError(f"{strategy.name} takes a 2-D mesh (replicate x shard), got {mesh.ndim} dims: {mesh}")
        return mesh
    if groups is None:
        world = _world()

        def find_hosts() -> DeviceMesh:
            rows = host_rows(exchange(socket.gethostname(), world))
            return DeviceMesh(device_type, rows, mesh_dim_names=_HYBRID_NAMES)

        return _made_once(world, device_type, Axes.HYBRID, find_hosts)
    if not isinstance(groups, tuple) or [isinstance(group, dist.ProcessGroup) for group in groups] != [True, True]:
        raise ValueError(
            f"{strategy.name} takes a pair of process groups (shard, replicate), a 2-D device_mesh, or neither "
            f"(hosts are found then); got {type(groups).__name__}"
        )
    shard, replicate = groups

    def join() -> DeviceMesh:
        rows = torch.tensor(exchange(dist.get_process_group_ranks(shard), replicate))
        return DeviceMesh.from_group([replicate, shard], device_type, rows, mesh_dim_names=_HYBRID_NAMES)

    return _made_once(groups, device_type, Axes.HYBRID, join)


def _made_once(groups: Groups, device_type: str, axes: Axes, make: Callable[[], DeviceMesh]) -> DeviceMesh:
    """The mesh that an earlier call made of the groups, or a new one.

    Units of one model share a mesh so, and with it groups and transports. To make one communicates, so whether it is
    known must be the same on every rank: it is kept until a group is destroyed, not until nothing refers to it, which
    depends on the garbage collector of a rank.
    """
    known = REGISTRY.meshes
    for old in [old for old in known if not _exist(*old[0])]:
        del known[old]
    key = (groups if isinstance(groups, tuple) else (groups,), device_type, axes)
    if key not in known:
        known[key] = make()
    return known[key]


def _exist(*groups: dist.ProcessGroup) -> bool:
    """Whether none of the groups has been destroyed."""
    return all(group in dist.distributed_c10d._world.pg_map for group in groups)


def secondary_group(mesh: DeviceMesh, size: int) -> dist.ProcessGroup:
    """Group of this rank and its neighbours on the shard axis, `size` in all, for `reshard_after_forward=size`.

    Units on the same ranks share it, and it is kept, as the meshes of `_made_once` are and for the same reason.
    """
    known = REGISTRY.secondary
    for old in [old for old, group in known.items() if not _exist(old[0], group)]:
        del known[old]
    rows = mesh.mesh.reshape(-1, size).tolist()
    mine = next(ranks for ranks in rows if dist.get_rank() in ranks)
    key = (mesh.get_group(mesh.ndim - 1), tuple(mine))
    if key not in known:
        # Only its own ranks make a group: ranks of other slices of a larger mesh (tensor parallel) have other rows.
        known[key] = dist.new_group(mine, use_local_synchronization=True)
    return known[key]


def host_rows(hosts: list[str]) -> torch.Tensor:
    """Ranks by host, shape [hosts, ranks a host], int64.

    Args:
        hosts: Name of the host of every rank.

    Raises:
        ValueError: Hosts do not have the same number of ranks.
    """
    rows: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        rows.setdefault(host, []).append(rank)
    if len({len(ranks) for ranks in rows.values()}) > 1:
        counts = {host: len(ranks) for host, ranks in rows.items()}
        raise ValueError(
            f"HYBRID_SHARD shards within a host, but hosts have different numbers of ranks: {counts}. Start as many "
            "ranks on each, or pass a 2-D device_mesh"
        )
    return torch.tensor(list(rows.values()))


def warn_if_not_hybrid(strategy: ShardingStrategy, mesh: DeviceMesh, stacklevel: int) -> None:
    """Say it if a hybrid strategy has one rank along an axis, and so is another one; gradients are averaged anyway."""
    if RULES[strategy].axes is not Axes.HYBRID:
        return
    replicas, size = mesh.size(0), mesh.size(1)
    if replicas * size == 1 or (replicas > 1 and size > 1):
        return
    if replicas == 1:
        became = f"one replica of {size} ranks, so it does what FULL_SHARD does"
    else:
        became = (
            f"one rank on the shard axis, so every rank holds whole parameters, as with NO_SHARD on {replicas} ranks"
        )
    warnings.warn(
        f"{strategy.name} has {became}. Gradients are averaged over all {replicas * size} ranks. To choose both sizes "
        "pass a 2-D device_mesh (replicate x shard)",
        stacklevel=stacklevel + 1,
    )
