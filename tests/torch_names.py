"""Every public name of torch's FSDP1 and FSDP2, found by looking, and the place where fullshard has the same.

A name is written as a user writes it below `torch.distributed.fsdp`: "fully_shard(mesh)" is an argument,
"FSDPModule.unshard(async_op)" an argument of a method, "MixedPrecision.param_dtype" a field or an enum's member.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from torch import nn

TORCH = "torch.distributed.fsdp"
OURS = "fullshard"
MODULES = ("", "wrap", "api", "fully_sharded_data_parallel", "sharded_grad_scaler")


def torch_names() -> dict[str, Any]:
    """Name below `torch.distributed.fsdp` -> what torch has there (None for an argument or a field)."""
    names: dict[str, Any] = {}
    for module_name, name in imports():
        value = getattr(importlib.import_module(f"{TORCH}.{module_name}".rstrip(".")), name)
        if any(value is known for known in names.values()):
            continue  # a second way to import it, which is no second name
        names |= {f"{module_name}.{name}".lstrip("."): value, **_inside(f"{module_name}.{name}".lstrip("."), value)}
    return names


def our_names(wanted: dict[str, Any]) -> set[str]:
    """Those of the names in `wanted` that fullshard has too, in the same place."""
    found: set[str] = set()
    for name, theirs in wanted.items():
        if theirs is None:
            continue  # inside of another one
        module_name, _, attribute = name.rpartition(".")
        value = getattr(importlib.import_module(f"{OURS}.{module_name}".rstrip(".")), attribute, None)
        if value is not None:
            found |= {name, *_inside(name, value, everything=True)}
    return found & set(wanted)


def imports() -> list[tuple[str, str]]:
    """Every (module, name) that `from torch.distributed.fsdp.module import name` can import."""
    found = []
    for module_name in MODULES:
        module = importlib.import_module(f"{TORCH}.{module_name}".rstrip("."))
        found += [(module_name, name) for name, _ in _public(module)]
    return found


def _public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    listed = getattr(module, "__all__", None)
    for name in listed or [name for name in vars(module) if not name.startswith("_")]:
        value = getattr(module, name)
        if listed or getattr(value, "__module__", None) == module.__name__:
            yield name, value


def _inside(prefix: str, value: Any, everything: bool = False) -> dict[str, Any]:
    """Arguments, methods, members and fields; inherited ones too if `everything`."""
    if inspect.isclass(value):
        return _inside_class(prefix, value, everything)
    if inspect.isfunction(value):
        return {f"{prefix}({argument})": None for argument in arguments(value)}
    return {}


def _inside_class(prefix: str, value: Any, everything: bool) -> dict[str, Any]:
    if issubclass(value, enum.Enum):
        return {f"{prefix}.{member}": None for member in value.__members__}
    if dataclasses.is_dataclass(value):
        return {f"{prefix}.{field.name}": None for field in dataclasses.fields(value)}
    names: dict[str, Any] = {f"{prefix}({argument})": None for argument in arguments(value.__init__)}
    for name in sorted(dir(value) if everything else vars(value)):
        of_every_module = issubclass(value, nn.Module) and hasattr(nn.Module, name)
        if name.startswith("_") or of_every_module:
            continue
        method = getattr(value, name)
        names[f"{prefix}.{name}"] = None
        if callable(method):
            names |= {f"{prefix}.{name}({argument})": None for argument in arguments(method)}
    return names


def arguments(function: Any) -> dict[str, inspect.Parameter]:
    """Arguments by name, without self and without what stands for any others."""
    try:
        parameters = inspect.signature(inspect.unwrap(function)).parameters.values()
    except (TypeError, ValueError):
        return {}
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {p.name: p for p in parameters if p.name not in ("self", "cls") and p.kind not in kinds}
