"""What must be findable from a bare tensor: which unit owns a parameter, which tensors hold no values yet.

This and the optimizer hooks that go with it are the only state of the package outside the objects that a user holds.
It never keeps a tensor alive; it exists because an optimizer or a second `fully_shard` call meets bare tensors, and
nothing may be written on a user's tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from fullshard.core.strategy import Axes
    from fullshard.runtime.hooks import UnitHooks
    from fullshard.runtime.params.shards import Member
    from fullshard.runtime.unit import Unit


class Registry:
    """Weak tables over tensors.

    Attributes:
        replaced: Full parameter that `fully_shard` took out of a module -> (unit, parameter name).
        lent: Full parameter that was shown between steps and taken back -> (unit, parameter name).
        owners: Identity of a sharded parameter -> its unit. By number, not by weak reference: torch refuses to convert
            (move, cast) a parameter that is weakly referenced. The unit keeps the parameter, so the number stays its.
        marked: Identities of sharded parameters that were materialized from meta and filled with NaN to tell them.
        hooks: Unit -> its hooks, for what is asked of a module that is not itself sharded.
        unfilled: Buffer that was materialized from meta -> its version at that moment.
        meshes: (process groups, device type, axes) -> the mesh that was made of them, until one is destroyed.
        secondary: (shard group, ranks) -> the smaller group for `reshard_after_forward=int`, until one is destroyed.
        before_writes: Called before an optimizer, or this package, changes parameters: who still reads them waits.
    """

    def __init__(self) -> None:
        self.replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.lent: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.owners: dict[int, weakref.ref[Unit]] = {}
        self.marked: set[int] = set()
        self.unfilled: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.hooks: weakref.WeakKeyDictionary[Unit, weakref.ref[UnitHooks]] = weakref.WeakKeyDictionary()
        self.meshes: dict[tuple[tuple[dist.ProcessGroup, ...], str, Axes], DeviceMesh] = {}
        self.secondary: dict[tuple[dist.ProcessGroup, tuple[int, ...]], dist.ProcessGroup] = {}
        self.before_writes: set[Callable[[], None]] = set()
        self.checked_optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()

    def about_to_write(self) -> None:
        """Parameters, or states of optimizers, are about to be changed."""
        for act in self.before_writes:
            act()

    def note_sharded(self, unit: Unit, originals: list[torch.Tensor]) -> None:
        """`unit` has replaced `originals`, in the order of its members."""
        # An optimizer that was fine before may hold what has just been replaced.
        self.checked_optimizers.clear()
        reference = weakref.ref(unit)
        numbers = [id(member.sharded) for member in unit.members]
        for number, member, original in zip(numbers, unit.members, originals, strict=True):
            self.replaced[original] = (reference, member.spec.name)
            self.owners[number] = reference
        weakref.finalize(unit, self._forget, numbers, reference)

    def note_lent(self, unit: Unit, parameters: Sequence[torch.Tensor]) -> None:
        """`unit` showed these full parameters, in the order of its members, and does not use them any more."""
        self.checked_optimizers.clear()
        reference = weakref.ref(unit)
        for member, parameter in zip(unit.members, parameters, strict=True):
            self.lent[parameter] = (reference, member.spec.name)

    def note_replaced(self, unit: Unit, members: list[Member]) -> None:
        """The sharded parameters of these members of `unit` are other objects now."""
        numbers = [id(member.sharded) for member in members]
        reference = weakref.ref(unit)
        if numbers:
            self.note_released(unit)
            self.owners.update((number, reference) for number in numbers)
            weakref.finalize(unit, self._forget, numbers, reference)

    def note_released(self, unit: Unit) -> None:
        """`unit` has given parameters up: their numbers may soon be those of other tensors."""
        reference, kept = weakref.ref(unit), {id(member.sharded) for member in unit.members}
        self._forget(
            [number for number, owner in self.owners.items() if owner is reference and number not in kept], reference
        )

    def note_copied(self, made: Unit, original: Unit) -> None:
        """`made` is a copy of `original`: it owns its parameters, and those without values are without values there."""
        self.note_replaced(made, made.members)
        pairs = zip(original.members, made.members, strict=True)
        self.marked.update(id(new.sharded) for old, new in pairs if id(old.sharded) in self.marked)

    def _forget(self, numbers: list[int], reference: weakref.ref[Unit]) -> None:
        self.marked.difference_update(numbers)
        for number in numbers:
            if self.owners.get(number) is reference:
                del self.owners[number]

    def owner(self, parameter: torch.Tensor) -> Unit | None:
        """The unit that holds this sharded parameter, or None."""
        reference = self.owners.get(id(parameter))
        return None if reference is None else reference()

    def unit_that_replaced(self, tensor: torch.Tensor) -> tuple[Unit, str] | None:
        """The unit that took this full parameter, and its name there."""
        return _alive(self.replaced.get(tensor))

    def unit_that_lent(self, tensor: torch.Tensor) -> tuple[Unit, str] | None:
        """The unit that showed this full parameter until it took it back, and its name there."""
        return _alive(self.lent.get(tensor))


def _alive(entry: tuple[weakref.ref[Unit], str] | None) -> tuple[Unit, str] | None:
    unit = entry[0]() if entry is not None else None
    return None if entry is None or unit is None else (unit, entry[1])


REGISTRY = Registry()
