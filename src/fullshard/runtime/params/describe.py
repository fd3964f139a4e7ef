"""The only reader of modules: which parameters a module has, where they are registered, what they look like."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fullshard.core.grouping import Occurrence, group_occurrences
from fullshard.core.spec import ParamSpec
from fullshard.runtime.dtensors import local_of
from fullshard.runtime.params.dress import Dress, make_dress
from fullshard.runtime.params.place import Place, ShardPlacementResult, mesh_of, other_place
from fullshard.runtime.registry import REGISTRY

PlacementFn = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]


@dataclass(slots=True)
class Slot:
    """A place where a parameter is registered. It holds the module's dict, not the module: no reference cycle."""

    registry: dict[str, nn.Parameter | None]
    name: str
    owner: weakref.ref[nn.Module] | None = None


@dataclass(slots=True)
class Found:
    """A parameter that a unit will own: what it is, the object, its places in modules, its ranks, how it looks."""

    spec: ParamSpec
    parameter: nn.Parameter
    slots: list[Slot]
    place: Place
    dress: Dress


def find_parameters(
    modules: list[nn.Module], ignored: Iterable[nn.Parameter], placement_fn: PlacementFn | None, place: Place
) -> list[Found]:
    """Parameters in `modules` and their submodules that no unit owns yet, tied ones once, in the order of the walk.

    Args:
        modules: Modules of one unit.
        ignored: Parameters to leave alone.
        placement_fn: Chooses the dim on which a parameter is sharded, and its ranks; None for all means dim 0.
        place: The ranks of all others.
    """
    places = list(_walk(modules))
    by_identity = {id(parameter): parameter for _, _, parameter in places}
    owned = {key for key, parameter in by_identity.items() if is_owned(parameter)}
    occurrences = (Occurrence(name, id(parameter)) for name, _, parameter in places)
    slots: dict[int, list[Slot]] = {}
    for _, slot, parameter in places:
        slots.setdefault(id(parameter), []).append(slot)
    others: dict[DeviceMesh, Place] = {}
    found = []
    for group in group_occurrences(occurrences, owned | {id(parameter) for parameter in ignored}):
        key = int(group.identity)  # type: ignore[call-overload]
        parameter = by_identity[key]
        _check_supported(group.name, parameter, place)
        placement, mesh = _chosen(group.name, parameter, placement_fn)
        spec = ParamSpec(
            name=group.name,
            shape=tuple(own_part(parameter).shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
            itemsize_bytes=parameter.dtype.itemsize,
            trainable=parameter.requires_grad,
            shard_dim=_shard_dim(group.name, parameter, placement),
            aliases=group.aliases,
        )
        own = place
        if mesh is not None and mesh != place.mesh:
            if mesh not in others:
                others[mesh] = other_place(mesh, place, group.name)
            own = others[mesh]
        dress = make_dress(group.name, parameter, spec.shard_dim, own, extends=has_protocol(own_part(parameter)))
        found.append(Found(spec, parameter, slots[key], own, dress))
    return found


def own_part(parameter: torch.Tensor) -> torch.Tensor:
    """The tensor whose rows the data-parallel ranks divide: of a `DTensor`, its local tensor."""
    return local_of(parameter) if isinstance(parameter, DTensor) else parameter


def module_of(slot: Slot) -> nn.Module | None:
    """The module in which the parameter is registered."""
    return None if slot.owner is None else slot.owner()


def has_protocol(tensor: object) -> bool:
    """Whether a tensor says itself what is gathered, see `extensions.py`."""
    return hasattr(tensor, "fsdp_pre_all_gather")


def is_owned(parameter: torch.Tensor) -> bool:
    """Whether a unit has already sharded this parameter."""
    return REGISTRY.owner(parameter) is not None


def slots_of(root: nn.Module) -> list[tuple[str, Slot]]:
    """Every registration of every parameter in `root` that no unit owns, with its name."""
    return [(name, slot) for name, slot, parameter in _walk([root]) if not is_owned(parameter)]


def _walk(modules: list[nn.Module]) -> Iterable[tuple[str, Slot, nn.Parameter]]:
    """Every registration of every parameter, a shared module's only once; names are relative to the unit's module."""
    seen: set[int] = set()
    for index, root in enumerate(modules):
        for prefix, module in root.named_modules(remove_duplicate=True):
            if id(module) in seen:
                continue
            seen.add(id(module))
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    label = ".".join(part for part in (prefix, name) if part)
                    # In a group of modules two could have parameters of one name.
                    label = f"[{index}].{label}" if len(modules) > 1 else label
                    yield label, Slot(module._parameters, name, weakref.ref(module)), parameter


def _chosen(
    name: str, parameter: nn.Parameter, placement_fn: PlacementFn | None
) -> tuple[Shard | None, DeviceMesh | None]:
    """What the user's `shard_placement_fn` says: the dim, and a mesh if it is not that of the unit."""
    chosen = placement_fn(parameter) if placement_fn is not None else None
    # By its fields: the class of the same name in torch is as good.
    info = getattr(chosen, "mesh_info", None)
    mesh = mesh_of(info, name) if info is not None else None
    placement = getattr(chosen, "placement", None) if mesh is not None else chosen
    if placement is not None and not isinstance(placement, Shard):
        raise TypeError(
            f"shard_placement_fn must return a Shard, a ShardPlacementResult or None, got {chosen!r} for parameter "
            f"{name!r}; return Shard(dim) with the dim to divide over the ranks"
        )
    return placement, mesh


def _shard_dim(name: str, parameter: nn.Parameter, placement: Shard | None) -> int:
    if placement is None:
        return 0
    if not parameter.dim():
        raise ValueError(f"shard_placement_fn returned {placement} for parameter {name!r}, which is 0-d: return None")
    dim = placement.dim + parameter.dim() if placement.dim < 0 else placement.dim
    if not 0 <= dim < parameter.dim():
        raise ValueError(
            f"shard_placement_fn returned {placement} for parameter {name!r} of shape {tuple(parameter.shape)}: "
            f"the dim must be from 0 to {parameter.dim() - 1}"
        )
    return dim


def _check_supported(name: str, parameter: torch.Tensor, place: Place) -> None:
    part: object = own_part(parameter)
    if has_protocol(part):
        if not hasattr(part, "fsdp_post_all_gather"):
            raise ValueError(
                f"parameter {name!r} is a {type(part).__name__}, which has fsdp_pre_all_gather but not "
                "fsdp_post_all_gather; it needs both, or none"
            )
        if place.secondary is not None:
            raise NotImplementedError(
                f"reshard_after_forward as an int is not possible for parameter {name!r}, a {type(part).__name__} "
                "that says itself what is gathered; pass True or False"
            )
    elif is_traceable_wrapper_subclass(part):
        raise ValueError(
            f"parameter {name!r} is a {type(part).__name__}, a tensor made of other tensors; to be sharded it needs "
            "the methods fsdp_pre_all_gather and fsdp_post_all_gather"
        )
    if parameter.layout is not torch.strided:
        raise ValueError(f"parameter {name!r} has layout {parameter.layout}; only strided parameters can be sharded")
    if isinstance(parameter, nn.UninitializedParameter):
        raise ValueError(
            f"parameter {name!r} is lazy and has no shape yet; run the unsharded module once before sharding it"
        )
    if torch.is_complex(parameter):
        raise ValueError(f"parameter {name!r} is complex ({parameter.dtype}); register its real view instead")


def module_names(root: nn.Module) -> dict[int, str]:
    """Name of every submodule by identity; the root is ''."""
    return {id(module): name for name, module in root.named_modules()}
