"""Parameters by where they are registered, which stays true when a parameter becomes another object.

Materializing a meta module makes new parameter objects, so what is ignored or tied is kept as (module's dict, name).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fullshard.runtime.module import HANDLE
from fullshard.runtime.params.describe import Slot
from fullshard.runtime.registry import REGISTRY


def slots_in(module: nn.Module) -> Iterator[tuple[str, nn.Module, Slot]]:
    """Every registration of every parameter: its name in `module`, the module that holds it, and its place."""
    for prefix, part in module.named_modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{name}" if prefix else name, part, Slot(part._parameters, name)


@dataclass
class LeftAlone:
    """What a wrapper does not shard.

    Attributes:
        modules: Modules that the user ignores, with their submodules.
        slots: Where parameters are that the user ignores, or that belong to an outer unit.
    """

    modules: set[nn.Module] = field(default_factory=set)
    slots: list[Slot] = field(default_factory=list)

    def parameters(self) -> set[nn.Parameter]:
        """The parameters as they are now."""
        found = (slot.registry.get(slot.name) for slot in self.slots)
        return {parameter for parameter in found if parameter is not None}

    def tensors(self) -> set[int]:
        """Identities of the parameters, and of the buffers of ignored modules."""
        buffers = (buffer for module in self.modules for buffer in module.buffers(recurse=False))
        return {id(tensor) for tensor in [*self.parameters(), *buffers]}

    def __or__(self, other: LeftAlone) -> LeftAlone:
        return LeftAlone(self.modules | other.modules, self.slots + other.slots)

    def __deepcopy__(self, memo: dict[int, Any]) -> LeftAlone:
        """For the constructors of outer wrappers only, which a copy no longer has to come."""
        return LeftAlone()


def ignored_in(
    module: nn.Module, ignored_modules: Iterable[nn.Module] | None, ignored_states: Iterable[Any] | None
) -> LeftAlone:
    """What the user's arguments name in `module`.

    Raises:
        TypeError: One of them is not iterable, or holds something else than modules and parameters.
        ValueError: A module is sharded already, or `ignored_states` mixes modules and parameters.
    """
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError("ignored_modules and ignored_states cannot be given together; give ignored_states")
    modules, parameters = _split(ignored_modules, ignored_states)
    # Wrapped modules inside of an ignored one have their parameters already, and keep them.
    wrapped = {
        part for each in modules for inner in each.modules() if HANDLE in inner.__dict__ for part in inner.modules()
    }
    inside = {part for each in modules for part in each.modules()} - wrapped
    for each in modules:
        own = [parameter for part in {*each.modules()} - wrapped for parameter in part.parameters(recurse=False)]
        if each in wrapped or any(REGISTRY.owner(parameter) is not None for parameter in own):
            raise ValueError(
                f"a {type(each).__name__} cannot be ignored: it holds parameters that are sharded already. Ignore it "
                "where its own module is wrapped"
            )
    if module in inside:
        warnings.warn(
            f"the {type(module).__name__} that is wrapped is itself ignored, so none of its parameters is sharded",
            stacklevel=3,
        )
    wanted = {id(parameter) for parameter in parameters}
    wanted |= {id(parameter) for part in inside for parameter in part.parameters(recurse=False)}
    slots = [slot for _, _, slot in slots_in(module) if id(slot.registry[slot.name]) in wanted]
    return LeftAlone(inside, slots)


def _split(modules: Iterable[Any] | None, states: Iterable[Any] | None) -> tuple[list[nn.Module], list[nn.Parameter]]:
    name, given = ("ignored_modules", modules) if states is None else ("ignored_states", states)
    try:
        items = list(given or ())
    except TypeError as error:
        raise TypeError(f"{name} must be an iterable, got {type(given).__name__}") from error
    if all(isinstance(item, nn.Module) for item in items):
        return items, []
    if states is not None and all(isinstance(item, nn.Parameter) for item in items):
        return [], items
    kinds = sorted({type(item).__name__ for item in items})
    wanted = "modules" if states is None else "either modules or parameters"
    error_class = ValueError if states is not None else TypeError
    raise error_class(f"{name} must hold {wanted} only, got {kinds}")


class Ties:
    """Which registrations show one parameter, so that they can show one again after each got memory for itself."""

    def __init__(self, module: nn.Module) -> None:
        groups: dict[int, list[Slot]] = {}
        for _, _, slot in slots_in(module):
            groups.setdefault(id(slot.registry[slot.name]), []).append(slot)
        self._groups = [slots for slots in groups.values() if len(slots) > 1]

    def restore(self) -> None:
        """Register one parameter in all places of a group: the first that has memory."""
        for slots in self._groups:
            found = [parameter for slot in slots if (parameter := slot.registry[slot.name]) is not None]
            kept = next((parameter for parameter in found if not parameter.is_meta), found[0])
            for slot in slots:
                slot.registry[slot.name] = kept
