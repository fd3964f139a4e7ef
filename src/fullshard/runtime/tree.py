"""Walks over nested inputs and outputs of modules: tensors in tuples, lists, dicts, dataclasses and mappings."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with `fn` applied to every tensor in it; containers are rebuilt, in their type, only if one changed."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, Mapping):
        return _map_mapping(fn, value)
    if isinstance(value, tuple | list):
        return _map_sequence(fn, value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(fn, value)
    return value


def _map_mapping(fn: Callable[[torch.Tensor], torch.Tensor], value: Mapping[Any, Any]) -> Any:
    mapped = {key: map_tensors(fn, item) for key, item in value.items()}
    if all(mapped[key] is item for key, item in value.items()):
        return value
    kind: Any = type(value)
    if kind is dict:
        return mapped
    if isinstance(value, MutableMapping):
        copied = copy.copy(value)
        for key, item in mapped.items():
            copied[key] = item
        return copied
    if dataclasses.is_dataclass(kind):
        # Mappings that are dataclasses too (model outputs of some libraries) are built from their fields.
        return kind(**mapped)  # type: ignore[operator]
    try:
        return kind(mapped)
    except TypeError:
        return mapped


def _map_sequence(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    mapped = [map_tensors(fn, item) for item in value]
    if all(new is old for new, old in zip(mapped, value, strict=True)):
        return value
    if hasattr(value, "_fields"):  # namedtuple
        return type(value)(*mapped)
    return type(value)(mapped)


def _map_dataclass(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    fields = [field for field in dataclasses.fields(value) if hasattr(value, field.name)]
    changes = {}
    for field in fields:
        old = getattr(value, field.name)
        new = map_tensors(fn, old)
        if new is not old:
            changes[field.name] = new
    if not changes:
        return value
    if all(field.init for field in dataclasses.fields(value)):
        return dataclasses.replace(value, **changes)
    copied = copy.copy(value)
    for name, item in changes.items():
        object.__setattr__(copied, name, item)  # frozen or not
    return copied


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in `value`, in a fixed order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def cast_floating(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in `dtype` if it is a floating one, else as it is."""
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor
