"""Turns parameters into shards: allocates flat shards, copies this rank's rows, makes the sharded parameters."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fullshard.core.layout import FlatLayout, Region, plan_layout
from fullshard.core.spec import ParamSpec, World
from fullshard.runtime.describe import Found, Slot
from fullshard.runtime.dtensors import local_of, set_local
from fullshard.runtime.gradients import GradientFlow
from fullshard.runtime.policy import MixedPrecisionPolicy
from fullshard.runtime.storage import FlatBuffers, rows_of


@dataclass(frozen=True, slots=True)
class Place:
    """Where a unit's ranks are.

    Attributes:
        mesh: 1-D (shard) or 2-D (replicate x shard) mesh of the data-parallel ranks.
        world: The same as integers, from this rank's side.
        device: Device of shards and full parameters.
        transport: Name of the transport.
        secondary: Group of the smaller world that `reshard_after_forward=int` names.
    """

    mesh: DeviceMesh
    world: World
    device: torch.device
    transport: str = "auto"
    secondary: dist.ProcessGroup | None = None

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """Ranks that hold the pieces of one parameter."""
        return self.mesh.get_group(self.mesh.ndim - 1)

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """Ranks that hold the same pieces, or None on a 1-D mesh."""
        return self.mesh.get_group(0) if self.mesh.ndim == 2 else None


@dataclass(slots=True)
class Member:
    """One parameter of a unit."""

    spec: ParamSpec
    slots: list[Slot]
    sharded: nn.Parameter

    def copy(self, memo: dict[int, Any]) -> Member:
        """The same for copied modules: the dicts of their parameters are copied with them, or here before them."""
        slots = [Slot(copy.deepcopy(slot.registry, memo), slot.name) for slot in self.slots]
        return Member(self.spec, slots, copy.deepcopy(self.sharded, memo))


def shard_parameters(
    found: Sequence[Found], place: Place, precision: MixedPrecisionPolicy
) -> tuple[list[Member], list[GradientFlow]]:
    """Make sharded parameters of full ones. The full ones are left as they are; nothing is registered yet.

    Returns:
        The members in the order of `found`, and one flow a dtype.
    """
    members: dict[int, Member] = {}
    flows: list[GradientFlow] = []
    for indices in _alike([item.parameter for item in found]):
        buffers = _allocate([found[i].spec for i in indices], place, found[indices[0]].parameter)
        for region in buffers.layout.regions:
            item = found[indices[region.index]]
            _copy_rows(buffers, region, item.parameter)
            sharded = _sharded_parameter(buffers, region, place, item.parameter)
            members[indices[region.index]] = Member(item.spec, item.slots, sharded)
        flows.append(_flow(buffers, [members[i].sharded for i in indices], precision))
    return [members[i] for i in range(len(found))], flows


def reflatten(members: list[Member], place: Place, precision: MixedPrecisionPolicy) -> list[GradientFlow]:
    """New flat shards for parameters whose local tensors were replaced (moved, cast, materialized).

    The sharded parameter objects stay; their local tensors become views of the new flat shards.
    """
    for member in members:
        local = local_of(member.sharded)
        dtype = str(local.dtype).removeprefix("torch.")
        member.spec = replace(member.spec, dtype=dtype, itemsize_bytes=local.element_size())
        if local.device.type not in ("meta", place.device.type):
            raise ValueError(
                f"parameter {member.spec.name!r} was moved to {local.device}, but its mesh is on {place.device.type}; "
                "build the mesh for the device that the model shall train on"
            )
    flows: list[GradientFlow] = []
    with torch.inference_mode(False), torch.no_grad():
        for indices in _alike([local_of(member.sharded) for member in members]):
            buffers = _allocate([members[i].spec for i in indices], place, local_of(members[indices[0]].sharded))
            for region in buffers.layout.regions:
                sharded = members[indices[region.index]].sharded
                local = local_of(sharded)
                if not local.is_meta:
                    buffers.local(region).copy_(local)
                set_local(sharded, buffers.local(region))
            flows.append(_flow(buffers, [members[i].sharded for i in indices], precision))
    return flows


def adopt_registered(members: list[Member]) -> list[Member]:
    """Find sharded parameters that the user replaced (`load_state_dict(assign=True)`, `setattr`) and take the new ones.

    Returns:
        Members whose parameter is another object now.

    Raises:
        ValueError: The new parameter is not a DTensor of the same shape and placements.
    """
    changed = []
    for member in members:
        found = {id(p): p for slot in member.slots if (p := slot.registry.get(slot.name)) is not None}
        news = [p for p in found.values() if p is not member.sharded]
        if not news:
            continue
        new, old = news[0], member.sharded
        if not _fits(new, old):
            what = f"placements {new.placements}" if isinstance(new, DTensor) else "no sharding"
            wanted = f"a DTensor of shape {tuple(old.shape)}"
            raise ValueError(
                f"parameter {member.spec.name!r} was replaced after sharding by one of shape {tuple(new.shape)} "
                f"with {what}; expected {wanted}. Write into the parameter, or load a sharded state dict"
            )
        member.sharded = new
        changed.append(member)
    return changed


def _fits(new: torch.Tensor, old: torch.Tensor) -> bool:
    if not (isinstance(new, DTensor) and isinstance(old, DTensor)):
        return False
    return new.shape == old.shape and tuple(new.placements) == tuple(old.placements)


def _allocate(specs: list[ParamSpec], place: Place, like: torch.Tensor) -> FlatBuffers:
    layout: FlatLayout = plan_layout(specs, place.world.size)
    device = like.device if like.is_meta else place.device
    # Zeros: padding lies between the parameters, and a norm or an optimizer may run over the whole flat shard.
    return FlatBuffers(specs, layout, place.world, torch.zeros(layout.shard_numel, dtype=like.dtype, device=device))


def _copy_rows(buffers: FlatBuffers, region: Region, value: torch.Tensor) -> None:
    if value.is_meta:
        return
    spec, world = buffers.specs[region.index], buffers.world
    start, stop = region.rank_rows(world.size, world.rank)
    with torch.no_grad():
        buffers.local(region).copy_(rows_of(value.detach(), spec, start, stop))


def _sharded_parameter(buffers: FlatBuffers, region: Region, place: Place, like: nn.Parameter) -> nn.Parameter:
    spec = buffers.specs[region.index]
    with torch.no_grad():
        dtensor = DTensor.from_local(
            # See `sharded_like`; of a 0-d parameter torch takes the shape from the local tensor, whatever is given.
            buffers.shard.new_empty(0 if spec.shape else ()),
            place.mesh,
            _placements(spec, place),
            run_check=False,
            shape=torch.Size(spec.shape),
            stride=_contiguous_stride(spec.shape),
        )
    parameter = nn.Parameter(dtensor, requires_grad=like.requires_grad)
    set_local(parameter, buffers.local(region))
    # What the user wrote on the parameter (a learning-rate scale, a name) stays with it.
    parameter.__dict__.update(like.__dict__)
    return parameter


def _placements(spec: ParamSpec, place: Place) -> list[Placement]:
    shard: Placement = Replicate() if spec.replicated else Shard(spec.shard_dim)
    return [Replicate(), shard] if place.mesh.ndim == 2 else [shard]


def _flow(buffers: FlatBuffers, sharded: list[nn.Parameter], precision: MixedPrecisionPolicy) -> GradientFlow:
    return GradientFlow(buffers, sharded, precision.sum_dtype(buffers.shard.dtype))


def _alike(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Indices of tensors that can share a flat shard: of one dtype, with memory or all on the meta device."""
    groups: dict[tuple[torch.dtype, bool], list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault((tensor.dtype, tensor.is_meta), []).append(i)
    return list(groups.values())


def _contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))
