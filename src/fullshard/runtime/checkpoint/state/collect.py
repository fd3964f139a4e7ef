"""What the user's objects hold, as this rank has it: named tensors and JSON values. Nothing is copied or sent."""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.core.ckpt.boxes import Division
from fullshard.errors import UninitializedError
from fullshard.runtime.checkpoint.files.memory import dtype_name
from fullshard.runtime.checkpoint.state.modules import ModuleState, module_state
from fullshard.runtime.checkpoint.state.optimizers import collect_optimizer
from fullshard.runtime.checkpoint.state.rows import Held, Rows
from fullshard.runtime.checkpoint.state.special import Only, PerRank, RandomState
from fullshard.runtime.checkpoint.state.values import Path, encode
from fullshard.runtime.dtensors import local_of
from fullshard.runtime.registry import REGISTRY

_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")
_UNPRINTABLE = re.compile(r"[^!-~]")


@dataclass(frozen=True, slots=True)
class Collected:
    """What one rank has of a state.

    Attributes:
        tensors: By name. Names and their order are the same on every rank, if the objects are.
        aliases: Other name of a tensor -> its name.
        values: JSON value of each key, the same on every rank.
        rank_values: The same of keys that each rank has for itself, and of which it writes its own.
    """

    tensors: dict[str, Held] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    rank_values: dict[str, Any] = field(default_factory=dict)


def collect(state: Mapping[str, Any]) -> Collected:
    """What is to be saved of `state`. Does not communicate; tensors share memory with the objects.

    Args:
        state: Key -> module, optimizer, object with `state_dict` and `load_state_dict`, `RandomState()`,
            `per_rank(...)`, `only(...)`, or a value that `values.py` can write.

    Raises:
        TypeError: A value cannot be written; the message names its place.
        ValueError: A key or the rows of a tensor cannot be written.
        MisuseError: A forward or backward of a module is running.
        UninitializedError: A parameter has no values.
    """
    check_keys(state)
    collector = _Collector()
    for key, value in state.items():  # modules first: optimizers go by the names of their parameters
        if isinstance(inner(value), nn.Module):
            collector.add_names(key, inner(value))
    for key, value in state.items():
        collector.add(key, value)
    return collector.made


def check_keys(state: Mapping[str, Any]) -> None:
    """Keys are the first part of names.

    Raises:
        TypeError: It is no mapping.
        ValueError: A key cannot be such a part.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f'the state must be a mapping, such as {{"model": model}}, got {type(state).__name__}')
    keys: Iterable[Any] = state  # of a caller who need not know types
    for key in keys:
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise ValueError(
                f"the key {key!r} of the state cannot be used: keys are made of letters, digits, '_', '-' and '.'"
            )


def inner(value: Any) -> Any:
    """What `only` is around."""
    return value.object if isinstance(value, Only) else value


def taking(value: Any) -> Callable[[str], bool]:
    """Which names of a module's or an optimizer's tensors are meant, see `only`."""
    return value.takes if isinstance(value, Only) else lambda _: True


def by_module_name(takes: Callable[[str], bool]) -> Callable[[str], bool]:
    """The same for names of tensors: patterns are of names in the module, without its key."""
    return lambda name: takes(name.partition("/")[2])


def has_state(value: Any) -> bool:
    """Whether it is an object that says and takes its state itself."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def own_rank() -> int:
    """This rank in the job."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class _Collector:
    """Collects one entry after the other.

    Attributes:
        made: The result.
        names: Identity of each parameter -> name of its tensor.
    """

    def __init__(self) -> None:
        self.made = Collected()
        self.names: dict[int, str] = {}
        self._modules: dict[str, ModuleState] = {}
        self._rows = Rows()
        self._rank: int | None = None  # while what only this rank has is collected

    def add_names(self, key: str, module: nn.Module) -> None:
        """Look through a module."""
        self._modules[key] = found = module_state(module)
        for number, name in found.parameters.items():
            self.names.setdefault(number, f"{key}/{name}")

    def add(self, key: str, value: Any) -> None:
        """Collect one entry of the state."""
        if isinstance(value, PerRank | RandomState):
            self._rank = own_rank()
            self.made.rank_values[key] = self._own(key, value)
            self._rank = None
        elif key in self._modules:
            self.made.values[key] = self._module(key, self._modules[key], value)
        elif isinstance(inner(value), torch.optim.Optimizer):
            takes = by_module_name(taking(value))
            self.made.values[key] = collect_optimizer(inner(value), key, self.names, takes, self)
            if isinstance(value, Only):
                groups = self.made.values[key]["groups"]
                _require_some(key, value, any(group["params"] for group in groups))
        else:
            self.made.values[key] = self._value(key, value)

    def _module(self, key: str, found: ModuleState, value: Any) -> dict[str, Any]:
        takes = taking(value)
        names = [name for name in (*found.tensors, *found.aliases, *found.extra) if takes(name)]
        if isinstance(value, Only):
            _require_some(key, value, bool(names))
        for name, tensor in found.tensors.items():
            if takes(name):
                _require_values(tensor, f"{key}/{name}")
                self.tensor(f"{key}/{name}", tensor)
        kept = {name: name for name in found.tensors if takes(name)}  # under which of its names a tensor is saved
        for alias, name in found.aliases.items():
            if not takes(alias):
                continue
            if kept.setdefault(name, alias) == alias:
                self.tensor(f"{key}/{alias}", found.tensors[name])
            else:
                self.made.aliases[f"{key}/{alias}"] = f"{key}/{kept[name]}"
        extra = {name: self.encode(each, (key, name)) for name, each in found.extra.items() if takes(name)}
        return {"kind": "module", "extra": extra}

    def _value(self, key: str, value: Any) -> dict[str, Any]:
        if has_state(value):
            return {"kind": "object", "value": self.encode(value.state_dict(), (key,))}
        if callable(getattr(value, "state_dict", None)):
            raise TypeError(
                f"{key!r} is a {type(value).__name__} with state_dict() and without load_state_dict(): it could not be "
                "loaded again"
            )
        return {"kind": "value", "value": self.encode(value, (key,))}

    def _own(self, key: str, value: PerRank | RandomState) -> dict[str, Any]:
        if isinstance(value, RandomState):
            return {"kind": "random", "value": self.encode(value.state_dict(), (key,))}
        if isinstance(value.object, nn.Module | torch.optim.Optimizer | Only | PerRank | RandomState):
            raise TypeError(
                f"{key!r} is per_rank({type(value.object).__name__}): modules and optimizers are saved as they are, "
                "sharded or not, and RandomState() is of each rank already"
            )
        return self._value(key, value.object)

    # Of `Sink`

    def tensor(self, name: str, tensor: torch.Tensor) -> None:
        """A tensor of its own."""
        dtype_name(tensor.dtype)  # raises where it has no name
        self.made.tensors[name] = self._rows.held(tensor, name)

    def encode(self, value: Any, path: Path) -> Any:
        """A value as JSON; tensors in it become tensors of their own."""
        return encode(value, path, self._put)

    def _put(self, tensor: torch.Tensor, path: Path) -> str:
        key = path[0] if self._rank is None else f"{path[0]}@{self._rank}"
        name = naming(str(key), path, ChainMap[str, Any](self.made.tensors, self.made.aliases))
        if self._rank is None:
            self.tensor(name, tensor)
            return name
        if isinstance(tensor, DTensor):
            raise TypeError(f"{name!r} is a DTensor, of which no rank has all: it cannot be per_rank(...)")
        held = self._rows.held(tensor, name)
        self.made.tensors[name] = replace(held, division=Division.whole_on(self._rank))
        return name


def naming(key: str, path: Path, taken: Container[str]) -> str:
    """Name of a tensor inside of a value, or one like it that is not taken: keys may contain dots."""
    name = f"{key}/" + ".".join(_UNPRINTABLE.sub("_", str(step)) for step in path[1:])
    number, free = 0, name
    while free in taken:
        number += 1
        free = f"{name}~{number}"
    return free


def _require_some(key: str, value: Only, found: bool) -> None:
    if not found:
        raise ValueError(f"only(...) of {key!r}: no name fits {', '.join(map(repr, value.patterns))}")


def _require_values(tensor: torch.Tensor, name: str) -> None:
    if nn.parameter.is_lazy(tensor):
        raise UninitializedError(f"{name!r} has no shape yet: run the model once before it is saved")
    local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    marked = id(tensor) in REGISTRY.marked and local.numel() and bool(local.isnan().all())
    if local.is_meta or marked:
        where = "is on the meta device" if local.is_meta else "was materialized and never given values"
        raise UninitializedError(f"{name!r} {where}: initialize or load the model before it is saved")
