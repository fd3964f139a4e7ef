"""What each rank has to save, as one description of the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fullshard.core.ckpt.boxes import Division
from fullshard.core.ckpt.manifest import TensorEntry
from fullshard.errors import CheckpointError


@dataclass(frozen=True)
class Told:
    """What one rank has.

    Attributes:
        tensors: Shape, dtype and division by name. None as division: plain, the same wherever it is.
        aliases: Other names of tensors.
        values: JSON by key of the state.
    """

    tensors: Mapping[str, tuple[tuple[int, ...], str, Division | None]]
    aliases: Mapping[str, str]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Shared:
    """What all ranks together have."""

    divisions: tuple[Division, ...]
    tensors: Mapping[str, TensorEntry]
    aliases: Mapping[str, str]
    values: Mapping[str, Any]


def merge(told: Sequence[Told]) -> Shared:
    """Join what ranks have, each tensor once. A single entry stands for all ranks.

    Raises:
        CheckpointError: Ranks have different tensors or values under one name.
    """
    tensors: dict[str, TensorEntry] = {}
    seen: dict[str, tuple[int, tuple[tuple[int, ...], str, Division | None]]] = {}
    numbers: dict[Division, int] = {}
    aliases: dict[str, str] = {}
    for rank, own in enumerate(told):
        for name, described in own.tensors.items():
            if name in seen:
                _refuse_other(name, described, rank, *seen[name][::-1])
                continue
            shape, dtype, division = described
            seen[name] = rank, described
            number = numbers.setdefault(division or Division.whole_on(rank), len(numbers))
            tensors[name] = TensorEntry(shape, dtype, number)
        aliases.update(own.aliases)
    return Shared(tuple(numbers), tensors, aliases, _values([own.values for own in told]))


def _refuse_other(name: str, found: Any, rank: int, expected: Any, first: int) -> None:
    if found != expected:
        raise CheckpointError(
            f"tensor {name!r} is (shape, dtype, division) {found} on rank {rank}, but {expected} on rank {first}: "
            "ranks save one checkpoint together, so a name must mean the same on all of them. Give what belongs to a "
            "rank alone to per_rank(...)"
        )


def _values(all_values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for rank, values in enumerate(all_values):
        for key, value in values.items():
            if key not in made or made[key] == value:
                made[key] = value
                continue
            joined = _join_groups(made[key], value)
            if joined is None:
                where, first, other = _difference(made[key], value, key)
                raise CheckpointError(
                    f"{where} is {first!r} on one rank and {other!r} on rank {rank}: what is saved once must be the "
                    f"same on all ranks. Save it by per_rank(...) if each has its own"
                )
            made[key] = joined
    return made


def _join_groups(first: Any, other: Any) -> Any:
    """Optimizer groups of two stages of a pipeline: the same settings, each for the parameters of all stages."""
    groups = [value.get("param_groups") if isinstance(value, dict) else None for value in (first, other)]
    if not all(isinstance(each, list) for each in groups) or len(groups[0]) != len(groups[1]):
        return None
    joined = []
    for one, two in zip(*groups, strict=True):
        if {**one, "params": ()} != {**two, "params": ()}:
            return None
        joined.append(
            {**one, "params": [*one["params"], *(name for name in two["params"] if name not in one["params"])]}
        )
    rest = [{**value, "param_groups": ()} for value in (first, other)]
    return {**first, "param_groups": joined} if rest[0] == rest[1] else None


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
