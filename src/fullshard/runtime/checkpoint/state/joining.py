"""The JSON values of one key that ranks have for different parts of a model, such as stages of a pipeline, as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def join(one: Any, other: Any) -> Any:
    """What two ranks have under one key, if they may differ in it: which parameters each of them has. Otherwise None.

    Args:
        one: JSON value of a key, as `collect` makes it; also one that was joined.
        other: Another rank's.
    """
    kinds = [value.get("kind") if isinstance(value, dict) else None for value in (one, other)]
    joiner = _JOINERS.get(kinds[0]) if kinds[0] == kinds[1] else None
    return None if joiner is None else joiner(one, other)


def _modules(one: Mapping[str, Any], other: Mapping[str, Any]) -> Any:
    extra = _union(one["extra"], other["extra"])
    return None if extra is None else {**one, "extra": extra}


def _optimizers(one: Mapping[str, Any], other: Mapping[str, Any]) -> Any:
    values = _union(one["values"], other["values"])
    if values is None or one["others"] != other["others"] or len(one["groups"]) != len(other["groups"]):
        return None
    kinds = [*one["kinds"], *(each for each in other["kinds"] if each not in one["kinds"])]
    numbers = [kinds.index(each) for each in other["kinds"]]
    groups = []
    for mine, theirs in zip(one["groups"], other["groups"], strict=True):
        if mine["settings"] != theirs["settings"]:
            return None
        states = {name: -1 if number < 0 else numbers[number] for name, number in zip(*_columns(theirs), strict=True)}
        joined = _union(dict(zip(*_columns(mine), strict=True)), states)
        if joined is None:
            return None
        groups.append({**mine, "params": list(joined), "state": list(joined.values())})
    return {**one, "groups": groups, "kinds": kinds, "values": values}


def _columns(group: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    return group["params"], group["state"]


def _union(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any] | None:
    """Both, if they do not contradict each other."""
    if any(one[name] != other[name] for name in one.keys() & other.keys()):
        return None
    return {**one, **other}


_JOINERS: dict[Any, Callable[[Mapping[str, Any], Mapping[str, Any]], Any]] = {
    "module": _modules,
    "optimizer": _optimizers,
}
