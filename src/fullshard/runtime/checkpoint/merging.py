"""What each rank has to save, as one description of the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fullshard.core.ckpt.boxes import Division
from fullshard.core.ckpt.manifest import TensorEntry
from fullshard.errors import CheckpointError
from fullshard.runtime.checkpoint.state.joining import join

_Described = tuple[tuple[int, ...], str, Division | None]


@dataclass(frozen=True)
class Told:
    """What one rank has.

    Attributes:
        tensors: Shape, dtype and division by name. None as division: plain, the same wherever it is.
        aliases: Other names of tensors.
        values: JSON by key of the state.
    """

    tensors: Mapping[str, _Described]
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


def merge(told: Sequence[Told]) -> Shared:
    """Join what ranks have, each tensor once. A single entry stands for all ranks.

    Raises:
        CheckpointError: Ranks have different tensors or values under one name.
    """
    tensors: dict[str, TensorEntry] = {}
    seen: dict[str, tuple[int, _Described]] = {}
    numbers: dict[Division, int] = {}
    aliases: dict[str, str] = {}
    twins: dict[str, dict[Division, None]] = {}
    for rank, own in enumerate(told):
        for name, described in own.tensors.items():
            shape, dtype, division = described
            if name in seen:
                first = _refuse_other(name, described, rank, *seen[name])
                if division is not None and first is not None and division != first:
                    twins.setdefault(name, {first: None})[division] = None
                continue
            seen[name] = rank, described
            number = numbers.setdefault(division or Division.whole_on(rank), len(numbers))
            tensors[name] = TensorEntry(shape, dtype, number)
        aliases.update(own.aliases)
    return Shared(
        tuple(numbers),
        tensors,
        aliases,
        _values([own.values for own in told]),
        {name: tuple(found) for name, found in twins.items()},
    )


def _refuse_other(name: str, found: _Described, rank: int, first: int, expected: _Described) -> Division | None:
    """Refuse another tensor of the same name; returns the division that was seen first."""
    alike = [
        (shape, dtype, None if division is None else (division.mesh, division.splits))
        for shape, dtype, division in (found, expected)
    ]
    if alike[0] != alike[1]:
        raise CheckpointError(
            f"tensor {name!r} is (shape, dtype, division) {found} on rank {rank}, but {expected} on rank {first}: "
            "ranks save one checkpoint together, so a name must mean the same on all of them. Give what belongs to a "
            "rank alone to per_rank(...)"
        )
    return expected[2]


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
