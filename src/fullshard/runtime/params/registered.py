"""Which parameters the modules of a unit hold: the sharded ones, or full ones in their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import nn

from fullshard.runtime.params.shards import Member


class Shown(Enum):
    """Which parameters a unit's modules hold."""

    SHARDED = "sharded"
    FULL = "full, for a computation"
    SUMMONED = "full, outside of the engine's buffers, for the user"


@dataclass(slots=True)
class _Holder:
    """One module's dict of parameters, and what it holds of the unit, by name, when it is the turn of either kind."""

    registry: dict[str, nn.Parameter | None]
    sharded: dict[str, nn.Parameter] = field(default_factory=dict)
    full: dict[str, nn.Parameter] = field(default_factory=dict)


class Registration:
    """Puts parameters into the modules. Whole dicts are made beforehand: a change of kind is one update a module.

    Args:
        members: Of the unit, whose list this is; call `renew` when it or its members have changed.

    Attributes:
        shown: The kind that is registered.
    """

    def __init__(self, members: list[Member]) -> None:
        self.shown = Shown.SHARDED
        self._members = members
        self._holders: list[_Holder] = []
        self.renew({})

    def renew(self, full: Mapping[int, nn.Parameter]) -> None:
        """Take over what the members are now.

        Args:
            full: Full parameters by the identity of the sharded ones; none before an engine has started.
        """
        holders: dict[int, _Holder] = {}
        for member in self._members:
            for slot in member.slots:
                holder = holders.setdefault(id(slot.registry), _Holder(slot.registry))
                holder.sharded[slot.name] = member.sharded
                if full:
                    holder.full[slot.name] = full[id(member.sharded)]
        self._holders = list(holders.values())

    def show_full(self) -> None:
        """Put the full parameters into the modules, unless the user has summoned others."""
        if self.shown is not Shown.SUMMONED:
            self.shown = Shown.FULL
            for holder in self._holders:
                holder.registry.update(holder.full)

    def show_sharded(self) -> None:
        """Put the sharded parameters into the modules, unless the user has summoned full ones."""
        if self.shown is not Shown.SUMMONED:
            self.shown = Shown.SHARDED
            for holder in self._holders:
                holder.registry.update(holder.sharded)

    @property
    def was_touched(self) -> bool:
        """Whether modules hold others than they were given. While full ones are registered nothing can be told."""
        return self.shown is Shown.SHARDED and any(
            holder.registry.get(name) is not own for holder in self._holders for name, own in holder.sharded.items()
        )

    def lend(self, full: Sequence[nn.Parameter]) -> None:
        """Put parameters of the caller's, one a member, into the modules until `take_back`; the unit is at rest."""
        for member, parameter in zip(self._members, full, strict=True):
            for slot in member.slots:
                slot.registry[slot.name] = parameter
        self.shown = Shown.SUMMONED

    def take_back(self, lent: Sequence[nn.Parameter]) -> list[torch.Tensor | None]:
        """Register the sharded parameters again.

        Returns:
            Per member what the modules held in the end: the lent parameter, or what the user put in its place.
        """
        held: list[torch.Tensor | None] = []
        for member, parameter in zip(self._members, lent, strict=True):
            found = [slot.registry.get(slot.name) for slot in member.slots]
            held.append(next((value for value in found if value is not parameter), parameter))
        self.shown = Shown.SHARDED
        self.show_sharded()
        return held
