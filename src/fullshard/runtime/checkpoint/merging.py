"""What each rank has to save, as one description of the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fullshard.core.ckpt.boxes import Division
from fullshard.core.ckpt.manifest import TensorEntry
from fullshard.errors import CheckpointError
from fullshard.runtime.checkpoint.state.joining import join

# Shape, dtype, and the number of a division; `PLAIN` for a tensor that is the same wherever it is.
Described = tuple[tuple[int, ...], str, int]
PLAIN = -1


@dataclass(frozen=True)
class Told:
    """What one rank has.

    Attributes:
        divisions: Divisions that occur.
        tensors: By name.
        aliases: Other names of tensors.
        values: JSON by key of the state.
    """

    divisions: tuple[Division, ...]
    tensors: Mapping[str, Described]
    aliases: Mapping[str, str]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Shared:
    """What all ranks together have.

    Attributes:
        divisions: All that occur.
        tensors: Each once.
        aliases: Other names of tensors.
        values: JSON by key of the state.
        twins: Divisions of tensors that several sets of ranks have, each divided among them; the first set writes. To
            be compared: weights that tensor parallel does not divide are the same, experts of the same name are not.
    """

    divisions: tuple[Division, ...]
    tensors: Mapping[str, TensorEntry]
    aliases: Mapping[str, str]
    values: Mapping[str, Any]
    twins: Mapping[str, tuple[Division, ...]]


def merge(told: Sequence[Told | None]) -> Shared:
    """Join what ranks have, each tensor once. None is a rank that would tell what one before it has told.

    Raises:
        CheckpointError: Ranks have different tensors or values under one name.
    """
    merger = _Merger()
    for rank, own in enumerate(told):
        if own is not None:
            merger.add(rank, own)
    merger.check_aliases()
    twins = {name: tuple(merger.divisions[number] for number in found) for name, found in merger.twins.items()}
    values = _values([{} if own is None else own.values for own in told])
    return Shared(tuple(merger.divisions), merger.tensors, merger.aliases, values, twins)


class _Merger:
    """Adds one rank after the other."""

    def __init__(self) -> None:
        self.divisions: list[Division] = []
        self.tensors: dict[str, TensorEntry] = {}
        self.aliases: dict[str, str] = {}
        self.twins: dict[str, list[int]] = {}
        self._numbers: dict[Division, int] = {}
        self._seen: dict[str, tuple[int, Described]] = {}

    def add(self, rank: int, own: Told) -> None:
        """Add what a rank has."""
        numbers = [self._number(division) for division in own.divisions]
        plain = -1
        for name, (shape, dtype, number) in own.tensors.items():
            described = (shape, dtype, PLAIN if number == PLAIN else numbers[number])
            if name in self._seen:
                self._compare(name, rank, described)
                continue
            self._seen[name] = rank, described
            if number == PLAIN:
                plain = plain if plain >= 0 else self._number(Division.whole_on(rank))
            self.tensors[name] = TensorEntry(shape, dtype, plain if number == PLAIN else numbers[number])
        for alias, name in own.aliases.items():
            if self.aliases.setdefault(alias, name) != name:
                raise CheckpointError(
                    f"{alias!r} is tied to {name!r} on rank {rank}, but to {self.aliases[alias]!r} on another: tie the "
                    "same parameters on all ranks"
                )

    def check_aliases(self) -> None:
        """A name that is tied on one rank must not be a tensor of its own on another."""
        for alias, name in self.aliases.items():
            if alias in self.tensors or name not in self.tensors:
                raise CheckpointError(
                    f"{alias!r} is tied to {name!r} on some ranks, and a tensor of its own on others: tie the same "
                    "parameters on all ranks, or let each set of ranks save to a folder of its own with group="
                )

    def _number(self, division: Division) -> int:
        if division not in self._numbers:
            self._numbers[division] = len(self.divisions)
            self.divisions.append(division)
        return self._numbers[division]

    def _compare(self, name: str, rank: int, found: Described) -> None:
        first, expected = self._seen[name]
        if found == expected:
            return
        if found[:2] != expected[:2] or self._form(found) != self._form(expected):
            raise CheckpointError(
                f"tensor {name!r} is {self._text(found)} on rank {rank}, but {self._text(expected)} on rank {first}: "
                "ranks save one checkpoint together, so a name must mean the same on all of them. Give what belongs "
                "to a rank alone to per_rank(...)"
            )
        twins = self.twins.setdefault(name, [expected[2]])
        if found[2] not in twins:
            twins.append(found[2])

    def _form(self, described: Described) -> Any:
        """A division without its ranks."""
        if described[2] == PLAIN:
            return None
        division = self.divisions[described[2]]
        return division.mesh, division.splits

    def _text(self, described: Described) -> str:
        shape, dtype, number = described
        how = "not sharded" if number == PLAIN else f"divided over ranks {list(self.divisions[number].ranks)[:16]}"
        return f"{dtype} {list(shape)}, {how}"


def _values(all_values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for rank, values in enumerate(all_values):
        for key, value in values.items():
            if key not in made or made[key] == value:
                made[key] = value
                continue
            joined = join(made[key], value)
            if joined is None:
                where, first, other = _difference(made[key], value, key)
                raise CheckpointError(
                    f"{where} is {first!r} on one rank and {other!r} on rank {rank}: what is saved once must be the "
                    f"same on all ranks. Save it by per_rank(...) if each has its own"
                )
            made[key] = joined
    return made


def _difference(first: Any, other: Any, path: str) -> tuple[str, Any, Any]:
    """Where two JSON values first differ."""
    if isinstance(first, dict) and isinstance(other, dict):
        for key in first.keys() | other.keys():
            if first.get(key) != other.get(key):
                return _difference(first.get(key), other.get(key), f"{path}.{key}")
    if isinstance(first, list) and isinstance(other, list) and len(first) == len(other):
        for number, (one, two) in enumerate(zip(first, other, strict=True)):
            if one != two:
                return _difference(one, two, f"{path}[{number}]")
    return path, first, other
