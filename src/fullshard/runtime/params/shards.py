"""Turns parameters into shards: allocates flat shards, copies this rank's rows, makes the sharded parameters."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.core.layout import FlatLayout, Region, plan_layout
from fullshard.core.spec import ParamSpec
from fullshard.errors import MisuseError
from fullshard.runtime.dtensors import local_of, set_local
from fullshard.runtime.params.describe import Found, Slot, has_protocol, own_part
from fullshard.runtime.params.dress import Dress
from fullshard.runtime.params.extensions import ExtensionBuffers, shard_of
from fullshard.runtime.params.gathers import rows_of
from fullshard.runtime.params.gradients import GradientFlow
from fullshard.runtime.params.origin import Origin
from fullshard.runtime.params.place import Place
from fullshard.runtime.params.storage import FlatBuffers
from fullshard.runtime.policy import MixedPrecisionPolicy


@dataclass(slots=True)
class Member:
    """One parameter of a unit."""

    spec: ParamSpec
    slots: list[Slot]
    sharded: nn.Parameter
    place: Place
    dress: Dress
    origin: Origin | None = None

    def copy(self, memo: dict[int, Any]) -> Member:
        """The same for copied modules: the dicts of their parameters are copied with them, or here before them."""
        slots = [Slot(copy.deepcopy(slot.registry, memo), slot.name, slot.owner) for slot in self.slots]
        return Member(self.spec, slots, copy.deepcopy(self.sharded, memo), self.place, self.dress)


def shard_parameters(
    found: Sequence[Found], precision: MixedPrecisionPolicy
) -> tuple[list[Member], list[GradientFlow]]:
    """Make sharded parameters of full ones. The full ones are left as they are; nothing is registered yet.

    Returns:
        The members in the order of `found`, and one flow for each dtype and set of ranks.
    """
    members: dict[int, Member] = {}
    flows: list[GradientFlow] = []
    for indices in _alike([(own_part(item.parameter), item.place) for item in found]):
        group = [found[i] for i in indices]
        if group[0].dress.extends:
            made = [_extended(item) for item in group]
            members.update(zip(indices, made, strict=True))
            flows.append(_extended_flow(made, precision))
            continue
        buffers = _allocate(group, own_part(group[0].parameter))
        for region in buffers.layout.regions:
            item = group[region.index]
            _copy_rows(buffers, region, own_part(item.parameter))
            sharded = item.dress.sharded(buffers.own_local(region), item.parameter, buffers.shard.new_empty(0))
            members[indices[region.index]] = Member(item.spec, item.slots, sharded, item.place, item.dress)
        flows.append(_flow(buffers, [members[i] for i in indices], precision))
    return [members[i] for i in range(len(found))], flows


def reflatten(members: list[Member], precision: MixedPrecisionPolicy) -> list[GradientFlow]:
    """New flat shards for parameters whose local tensors were replaced (moved, cast, materialized).

    The sharded parameter objects stay; their local tensors become views of the new flat shards.
    """
    for member in members:
        local, place = local_of(member.sharded), member.place
        dtype = str(local.dtype).removeprefix("torch.")
        member.spec = replace(member.spec, dtype=dtype, itemsize_bytes=local.dtype.itemsize)
        if local.device.type not in ("meta", place.device.type):
            raise ValueError(
                f"parameter {member.spec.name!r} was moved to {local.device}, but its mesh is on {place.device.type}; "
                "build the mesh for the device that the model shall train on"
            )
    flows: list[GradientFlow] = []
    with torch.inference_mode(False), torch.no_grad():
        for indices in _alike([(local_of(member.sharded), member.place) for member in members]):
            group = [members[i] for i in indices]
            if group[0].dress.extends:
                flows.append(_extended_flow(group, precision))
                continue
            buffers = _allocate(group, local_of(group[0].sharded))
            for region in buffers.layout.regions:
                sharded = group[region.index].sharded
                local = local_of(sharded)
                if not local.is_meta:
                    buffers.local(region).copy_(local)
                set_local(sharded, buffers.own_local(region))
            flows.append(_flow(buffers, group, precision))
    return flows


def adopt_registered(members: list[Member]) -> list[Member]:
    """Find sharded parameters that the user replaced (`load_state_dict(assign=True)`, `setattr`) and take the new ones.

    Returns:
        Members whose parameter is another object now.

    Raises:
        ValueError: The new parameter is not a DTensor of the same shape and placements.
        MisuseError: A parameter is not registered any more.
    """
    changed = []
    for member in members:
        found = {id(p): p for p in _registered(member)}
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


def _registered(member: Member) -> list[nn.Parameter]:
    """What the modules hold in the member's places."""
    found = []
    for slot in member.slots:
        parameter = slot.registry.get(slot.name)
        if parameter is None:
            raise MisuseError(
                f"parameter {member.spec.name!r} was sharded, but its module has no parameter {slot.name!r} any more: "
                "it was deleted or set to None after sharding, as torch.nn.utils.parametrize, prune and others do, "
                "too. Do that before fully_shard or FSDP(...), or register the sharded parameter again"
            )
        found.append(parameter)
    return found


def _fits(new: torch.Tensor, old: torch.Tensor) -> bool:
    if not (isinstance(new, DTensor) and isinstance(old, DTensor)):
        return False
    return new.shape == old.shape and tuple(new.placements) == tuple(old.placements)


def _allocate(parameters: Sequence[Found | Member], like: torch.Tensor) -> FlatBuffers:
    """Buffers for parameters of one dtype on the same ranks."""
    specs, place = [each.spec for each in parameters], parameters[0].place
    layout: FlatLayout = plan_layout(specs, place.world.size)
    device = like.device if like.is_meta else place.device
    # Zeros: padding lies between the parameters, and a norm or an optimizer may run over the whole flat shard.
    shard = torch.zeros(layout.shard_numel, dtype=like.dtype, device=device)
    return FlatBuffers(specs, layout, place, shard, [each.dress for each in parameters])


def _copy_rows(buffers: FlatBuffers, region: Region, value: torch.Tensor) -> None:
    if value.is_meta:
        return
    spec, world = buffers.specs[region.index], buffers.world
    start, stop = region.rank_rows(world.size, world.rank)
    with torch.no_grad():
        buffers.local(region).copy_(rows_of(value.detach(), spec, start, stop))


def _flow(buffers: FlatBuffers, members: list[Member], precision: MixedPrecisionPolicy) -> GradientFlow:
    sharded = [member.sharded for member in members]
    return GradientFlow(buffers, sharded, precision.sum_dtype(buffers.shard.dtype))


def _extended(item: Found) -> Member:
    """The member of a parameter that shards itself."""
    value = own_part(item.parameter)
    nothing = torch.empty(0, dtype=value.dtype, device=value.device)
    with torch.no_grad():
        sharded = item.dress.sharded(shard_of(value, item.spec, item.place.world), item.parameter, nothing)
    return Member(item.spec, item.slots, sharded, item.place, item.dress)


def _extended_flow(members: list[Member], precision: MixedPrecisionPolicy) -> GradientFlow:
    """A flow for parameters that say themselves what is gathered; their gradients are ordinary ones."""
    specs, dresses = [member.spec for member in members], [member.dress for member in members]
    parameters = [(member.sharded, member.slots[0]) for member in members]
    buffers = ExtensionBuffers(specs, members[0].place, dresses, parameters, precision)
    return GradientFlow(buffers, [sharded for sharded, _ in parameters], precision.sum_dtype(buffers.shard.dtype))


def _alike(parameters: Sequence[tuple[torch.Tensor, Place]]) -> list[list[int]]:
    """Indices of parameters that can share a flat shard: of one dtype, with memory or all on meta, on equal ranks."""
    groups: dict[tuple[torch.dtype, bool, bool, Place], list[int]] = {}
    for i, (tensor, place) in enumerate(parameters):
        groups.setdefault((tensor.dtype, tensor.is_meta, has_protocol(tensor), place), []).append(i)
    return list(groups.values())
