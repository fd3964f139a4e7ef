"""Which unit owns which parameter: every parameter in exactly one unit, tied names together."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Occurrence:
    """A place where a parameter is registered: its name and an identity that tied occurrences share."""

    name: str
    identity: Hashable


@dataclass(frozen=True, slots=True)
class Group:
    """One parameter of a unit: its first name, the other names, and its identity."""

    name: str
    aliases: tuple[str, ...]
    identity: Hashable


def group_occurrences(occurrences: Iterable[Occurrence], taken: Iterable[Hashable] = ()) -> tuple[Group, ...]:
    """Merge occurrences of the same parameter, leaving out those in `taken` (ignored, or owned by another unit).

    The order is that of the first occurrence, so it is the same on every rank that walks the same modules.
    """
    skip = set(taken)
    names: dict[Hashable, list[str]] = {}
    for occurrence in occurrences:
        if occurrence.identity not in skip:
            names.setdefault(occurrence.identity, []).append(occurrence.name)
    return tuple(Group(found[0], tuple(found[1:]), identity) for identity, found in names.items())


def first_difference(mine: Sequence[str], theirs: Sequence[str]) -> tuple[int, str, str] | None:
    """Index and both texts of the first line in which two descriptions differ, or None if they are equal."""
    for i in range(max(len(mine), len(theirs))):
        a = mine[i] if i < len(mine) else "(nothing)"
        b = theirs[i] if i < len(theirs) else "(nothing)"
        if a != b:
            return i, a, b
    return None
