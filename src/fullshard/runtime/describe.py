"""The only reader of modules: which parameters a module has, where they are registered, what they look like."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import Shard

from fullshard.core.grouping import Occurrence, group_occurrences
from fullshard.core.spec import ParamSpec
from fullshard.runtime.registry import REGISTRY

PlacementFn = Callable[[nn.Parameter], Shard | None]


@dataclass(slots=True)
class Slot:
    """A place where a parameter is registered. It holds the module's dict, not the module: no reference cycle."""

    registry: dict[str, nn.Parameter | None]
    name: str


@dataclass(slots=True)
class Found:
    """A parameter that a unit will own: what it is, the object, and its places."""

    spec: ParamSpec
    parameter: nn.Parameter
    slots: list[Slot]


def find_parameters(
    modules: list[nn.Module], ignored: Iterable[nn.Parameter], placement_fn: PlacementFn | None
) -> list[Found]:
    """Parameters in `modules` and their submodules that no unit owns yet, tied ones once, in the order of the walk.

    Args:
        modules: Modules of one unit.
        ignored: Parameters to leave alone.
        placement_fn: Chooses the dim on which a parameter is sharded; None for all means dim 0.
    """
    places = list(_walk(modules))
    by_identity = {id(parameter): parameter for _, _, parameter in places}
    owned = {key for key, parameter in by_identity.items() if is_owned(parameter)}
    occurrences = (Occurrence(name, id(parameter)) for name, _, parameter in places)
    slots: dict[int, list[Slot]] = {}
    for _, slot, parameter in places:
        slots.setdefault(id(parameter), []).append(slot)
    found = []
    for group in group_occurrences(occurrences, owned | {id(parameter) for parameter in ignored}):
        key = int(group.identity)  # type: ignore[call-overload]
        parameter = by_identity[key]
        _check_supported(group.name, parameter)
        spec = ParamSpec(
            name=group.name,
            shape=tuple(parameter.shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
            itemsize_bytes=parameter.element_size(),
            trainable=parameter.requires_grad,
            shard_dim=_shard_dim(group.name, parameter, placement_fn),
            aliases=group.aliases,
        )
        found.append(Found(spec, parameter, slots[key]))
    return found


def is_owned(parameter: torch.Tensor) -> bool:
    """Whether a unit has already sharded this parameter."""
    return REGISTRY.owner(parameter) is not None


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
                    yield label, Slot(module._parameters, name), parameter


def _shard_dim(name: str, parameter: nn.Parameter, placement_fn: PlacementFn | None) -> int:
    placement = placement_fn(parameter) if placement_fn is not None else None
    if placement is None:
        return 0
    if not isinstance(placement, Shard):
        raise TypeError(
            f"shard_placement_fn must return a Shard or None, got {placement!r} for parameter {name!r}; "
            "return Shard(dim) with the dim to divide over the ranks"
        )
    if not parameter.dim():
        raise ValueError(f"shard_placement_fn returned {placement} for parameter {name!r}, which is 0-d: return None")
    dim = placement.dim + parameter.dim() if placement.dim < 0 else placement.dim
    if not 0 <= dim < parameter.dim():
        raise ValueError(
            f"shard_placement_fn returned {placement} for parameter {name!r} of shape {tuple(parameter.shape)}: "
            f"the dim must be from 0 to {parameter.dim() - 1}"
        )
    return dim


def _check_supported(name: str, parameter: torch.Tensor) -> None:
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
