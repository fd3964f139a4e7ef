"""Tensors in nested inputs and outputs of modules, in every kind of container that people pass and return."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

_SEQUENCES = (tuple, list, deque, UserList, set, frozenset)
_NO_CONTAINERS = (torch.Tensor, str, int, float, type(None))


def is_flat(values: Iterable[Any]) -> bool:
    """Whether none of `values` is a container; False if it takes more than a glance."""
    return not [value for value in values if not isinstance(value, _NO_CONTAINERS)]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in `value`, in a fixed order."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    for item in _open(value) or ():
        yield from tensors_in(item)


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with `fn` applied to every tensor in it; see `TensorMap`."""
    if isinstance(value, torch.Tensor):
        return fn(value)  # what modules return most often, without the bookkeeping
    return TensorMap(fn, into_nodes=True)(value)


class TensorMap:
    """Replaces tensors in nested values. Containers keep their type, and are copied only if something in them changed.

    The module that gets a copy of a list may append to it, and its caller looks into the original: `write_back` is for
    that.

    Args:
        fn: Called once for each tensor, however often it occurs, so that what was one tensor stays one.
        into_nodes: Also copy objects that are containers only by registration with pytree. Those may be caches that a
            module writes into; such writes could not be written back.

    Attributes:
        left: Objects that were left alone for that reason.
    """

    def __init__(self, fn: Callable[[torch.Tensor], torch.Tensor], into_nodes: bool = False) -> None:
        self._fn = fn
        self._into_nodes = into_nodes
        self.left: list[Any] = []
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # id of the old -> old, new
        self._copies: list[tuple[Any, Any, list[Any]]] = []  # container, its copy, what was put into the copy

    def __call__(self, value: Any) -> Any:
        """`value` with its tensors replaced."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self._tensors:
                self._tensors[id(value)] = value, self._fn(value)
            return self._tensors[id(value)][1]
        items = _open(value)
        if not items:
            return value
        if not self._into_nodes and _is_node(value):
            self.left.append(value)
            return value
        mapped = [self(item) for item in items]
        if all(new is old for new, old in zip(mapped, items, strict=True)):
            return value
        made = _rebuild(value, mapped)
        self._copies.append((value, made, mapped))
        return made

    def write_back(self) -> None:
        """Bring into the containers what was done to their copies since."""
        old = {id(new): old for old, new in self._tensors.values()}
        old.update((id(made), value) for value, made, _ in self._copies)
        for value, made, mapped in self._copies:
            items = _open(made) or []
            if len(items) != len(mapped) or any(now is not then for now, then in zip(items, mapped, strict=True)):
                _replace_items(value, made, [old.get(id(item), item) for item in items])


def _open(value: Any) -> list[Any] | None:
    """What a container holds, or None for what is no container."""
    if isinstance(value, _NO_CONTAINERS):
        return None
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, PackedSequence):
        return [value.data, value.sorted_indices, value.unsorted_indices]  # its batch sizes stay on the CPU
    if isinstance(value, _SEQUENCES):
        return list(value)
    if _has_fields(value):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    if not _is_node(value):
        return None
    return pytree.tree_flatten(value, is_leaf=lambda part: part is not value)[0]


def _has_fields(value: Any) -> bool:
    """Whether it is a dataclass. A module that is one is no container: its fields are its parameters."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type | nn.Module)


def _is_node(value: Any) -> bool:
    """Whether it is a container only by registration with pytree."""
    return not isinstance(value, (Mapping, *_SEQUENCES)) and not _has_fields(value) and not pytree.tree_is_leaf(value)


def _rebuild(value: Any, items: list[Any]) -> Any:
    """A container like `value` with other items. Not by its constructor, if that can be: it may compute or refuse."""
    if isinstance(value, Mapping):
        return _rebuild_mapping(value, items)
    if isinstance(value, PackedSequence):
        return PackedSequence(items[0], value.batch_sizes, *items[1:])
    if isinstance(value, tuple) and hasattr(value, "_make"):
        made = value._make(items)
        if hasattr(value, "__dict__"):
            made.__dict__.update(value.__dict__)
        return made
    if isinstance(value, _SEQUENCES):
        if type(value) is list or isinstance(value, tuple | frozenset):
            return type(value)(items)
        made = copy.copy(value)
        _refill(made, items)
        return made
    if _has_fields(value):
        made = copy.copy(value)
        _set_fields(made, items)
        return made
    return pytree.tree_unflatten(items, pytree.tree_flatten(value, is_leaf=lambda part: part is not value)[1])


def _rebuild_mapping(value: Mapping[Any, Any], items: list[Any]) -> Any:
    mapped = dict(zip(value, items, strict=True))
    kind: Any = type(value)
    if kind is dict:
        return mapped
    if isinstance(value, MutableMapping):
        made = copy.copy(value)
        for key, item in mapped.items():
            made[key] = item
        return made
    return kind(**mapped) if _has_fields(value) else kind(mapped)


def _replace_items(value: Any, made: Any, items: list[Any]) -> None:
    """Give `value` what its copy `made` holds now, if it is of a kind that can change."""
    if isinstance(value, MutableMapping):
        for key in [key for key in value if key not in made]:
            del value[key]
        for key, item in zip(made, items, strict=True):
            value[key] = item
    elif isinstance(value, list | deque | UserList | set):
        _refill(value, items)
    elif _has_fields(value):
        _set_fields(value, items)


def _refill(value: Any, items: list[Any]) -> None:
    value.clear()
    if isinstance(value, set):
        value.update(items)
    else:
        value.extend(items)


def _set_fields(value: Any, items: list[Any]) -> None:
    for field, item in zip(dataclasses.fields(value), items, strict=True):
        if getattr(value, field.name, None) is not item:
            object.__setattr__(value, field.name, item)  # frozen or not


def cast_floating(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in `dtype` if it is a floating one, else as it is."""
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor
