"""Between the names and values of our checkpoints and the nested state dicts that `torch.distributed.checkpoint` saves.

Ours                                        torch's path, joined by dots
`model/blocks.0.weight`                     ("model", "blocks.0.weight")
`optim/model/blocks.0.weight/exp_avg`       ("optim", "state", "blocks.0.weight", "exp_avg")
settings of a group of "optim"              ("optim", "param_groups", 0, "lr"), and "params", a list of names
other values                                dicts by their keys, one entry for each that is none

These are the state dicts that `torch.distributed.checkpoint.state_dict.get_state_dict` returns. Its flat form, with
("optim", "state.blocks.0.weight.exp_avg") and ("optim", "param_groups.blocks.0.weight.lr"), is read, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fullshard.core.ckpt.manifest import Manifest
from fullshard.errors import CheckpointDamagedError
from fullshard.runtime.checkpoint.state.values import decode, encode
from fullshard.tools.ckpt.own import rank_of

Path = tuple[str | int, ...]


@dataclass
class TorchState:
    """A checkpoint of ours as torch would save it.

    Attributes:
        tensors: Our name of each tensor, aliases included -> path.
        values: Path -> value.
        notes: What has no place there.
    """

    tensors: dict[str, Path] = field(default_factory=dict)
    values: dict[Path, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def to_torch(manifest: Manifest, get: Callable[[str], torch.Tensor]) -> TorchState:
    """Names and values of a checkpoint of ours as torch has them.

    Args:
        manifest: Of the checkpoint.
        get: Reads a tensor; only of those inside of values.

    Raises:
        CheckpointDamagedError: Its values are not as they were written.
    """
    made = TorchState()
    inside: set[str] = set()  # tensors that a value refers to; the value has them

    def taken(name: str) -> torch.Tensor:
        inside.add(name)
        return get(name)

    for key, value in manifest.state.items():
        try:
            _add_values(made, key, value, taken)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointDamagedError(f"the values of {key!r} in the checkpoint are damaged: {error}") from None
    for name in (*manifest.tensors, *manifest.aliases):
        if rank_of(name) is None and name not in inside:
            made.tensors[name] = _path(name, manifest)
    keys = sorted({key for values in manifest.rank_state for key in values})
    if keys:
        made.notes.append(f"{', '.join(keys)}: what each rank has for itself is left out")
    return made


def _add_values(made: TorchState, key: str, value: Any, taken: Callable[[str], torch.Tensor]) -> None:
    """What the JSON value of a key says that is no tensor."""
    if value["kind"] == "optimizer":
        for number, group in enumerate(value["groups"]):
            settings = decode(group["settings"], key, taken)
            names = [_parameter(name) for name in group["params"]]
            made.values.update(flatten((key, "param_groups", number), {**settings, "params": names}))
        for name, rest in value["values"].items():
            made.values.update(flatten((key, "state", _parameter(name)), decode(rest, key, taken)))
        if value.get("others") is not None:
            made.notes.append(f"{key}: state that belongs to no parameter is left out")
    elif value["kind"] == "module":
        for name, extra in value["extra"].items():
            made.values.update(flatten((key, name), decode(extra, key, taken)))
    else:
        made.values.update(flatten((key,), decode(value["value"], key, taken)))


def _parameter(name: str) -> str:
    """Name of a parameter in its model, of the name of its tensor."""
    return name.partition("/")[2]


def _path(name: str, manifest: Manifest) -> Path:
    key, _, rest = name.partition("/")
    value = manifest.state.get(key)
    if isinstance(value, dict) and value.get("kind") == "optimizer" and rest.count("/") >= 2:
        tensor, _, kind = rest.rpartition("/")
        return (key, "state", _parameter(tensor), kind)
    return (key, rest)


def flatten(path: Path, value: Any) -> dict[Path, Any]:
    """Leaves of a nested value, as torch divides it: dicts always, lists that have dicts or tensors in them."""
    if isinstance(value, Mapping):
        items: Iterator[tuple[str | int, Any]] = ((str(key), item) for key, item in value.items())
    elif isinstance(value, list) and _is_divided(value):
        items = iter(enumerate(value))
    else:
        return {path: value}
    return {leaf: item for key, part in items for leaf, item in flatten((*path, key), part).items()}


def _is_divided(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_is_divided, value))
    return isinstance(value, Mapping | torch.Tensor)


@dataclass
class _Found:
    """What is under one key of torch's state dict: leaves by the rest of their paths."""

    tensors: dict[Path, str] = field(default_factory=dict)  # -> torch's name
    values: dict[Path, Any] = field(default_factory=dict)


@dataclass
class OwnState:
    """A checkpoint of torch as ours.

    Attributes:
        tensors: Our name -> torch's.
        values: JSON of each key.
        notes: What has no place there.
    """

    tensors: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def from_torch(tensors: Mapping[str, Path], values: Mapping[Path, Any], key: str) -> OwnState:
    """Names and values of torch as ours.

    Args:
        tensors: Torch's name of each tensor -> path.
        values: Path -> value.
        key: Of the model, if the state dict is that of a model alone.
    """
    flat = any(len(path) == 1 for path in tensors.values())
    found: dict[str, _Found] = {}
    for name, path in tensors.items():
        whole = (key, *path) if flat else path
        found.setdefault(str(whole[0]), _Found()).tensors[whole[1:]] = name
    for path, value in values.items():
        found.setdefault(str(path[0]), _Found()).values[path[1:]] = value
    made = OwnState()
    optimizers = [name for name, part in found.items() if _is_optimizer(part)]
    for name, part in found.items():
        if name not in optimizers:
            _add_other(made, name, part)
    for name in optimizers:
        _Optimizer(made, name).add(found[name])
    return made


def _is_optimizer(part: _Found) -> bool:
    first = {str(path[0]) for path in (*part.tensors, *part.values) if path}
    return bool(first) and all(name.partition(".")[0] in ("state", "param_groups") for name in first)


def _add_other(made: OwnState, key: str, part: _Found) -> None:
    """A module, or a value without tensors."""
    for path, name in part.tensors.items():
        made.tensors[f"{key}/{'.'.join(map(str, path))}"] = name
    plain = {path: value for path, value in part.values.items() if _json(made, (key, *path), value) is not _NOTHING}
    if part.tensors:
        extra = {".".join(map(str, path)): _json(made, (key, *path), value) for path, value in plain.items()}
        made.values[key] = {"kind": "module", "extra": extra}
    elif list(plain) == [()]:
        made.values[key] = {"kind": "value", "value": _json(made, (key,), plain[()])}
    elif plain:
        made.values[key] = {"kind": "object", "value": _json(made, (key,), _nested(plain))}


def _nested(values: Mapping[Path, Any]) -> Any:
    """Leaves as one value; a level whose keys are numbers is a list."""
    if () in values:
        return values[()]
    below: dict[str | int, dict[Path, Any]] = {}
    for path, value in values.items():
        below.setdefault(path[0], {})[path[1:]] = value
    if all(type(key) is int for key in below):
        return [_nested(below[key]) for key in sorted(below)]
    return {str(key): _nested(part) for key, part in below.items()}


_NOTHING = object()


def _json(made: OwnState, path: Path, value: Any) -> Any:
    """A value as JSON, or `_NOTHING` if it cannot be one: objects of classes, tensors in lists."""
    try:
        return encode(value, path, _refuse)
    except TypeError:
        note = f"{'.'.join(map(str, path))} is left out: it is no plain value"
        if note not in made.notes:
            made.notes.append(note)
        return _NOTHING


def _refuse(_tensor: torch.Tensor, _path: Any) -> str:
    raise TypeError("a tensor")


class _Optimizer:
    """Adds one optimizer."""

    def __init__(self, made: OwnState, key: str) -> None:
        self._made, self._key = made, key
        self._states: dict[str, list[str]] = {}  # parameter's tensor -> its kinds
        self._others: dict[str, dict[str, Any]] = {}  # the same for kinds that are no tensors
        self._model = {name.partition("/")[2]: name for name in made.tensors}

    def add(self, part: _Found) -> None:
        groups: dict[int, dict[str, Any]] = {}
        flat: dict[str, dict[str, Any]] = {}  # parameter -> settings
        for path, value in (*part.tensors.items(), *part.values.items()):
            is_tensor = path in part.tensors
            what, *rest = self._divided(path)
            if what == "state" and len(rest) == 2:
                self._add_state(str(rest[0]), str(rest[1]), value, is_tensor)
            elif what == "param_groups" and len(rest) >= 2:
                settings = groups.setdefault(rest[0], {}) if type(rest[0]) is int else flat.setdefault(str(rest[0]), {})
                settings[".".join(map(str, rest[1:]))] = self._setting(path, value, is_tensor)
            else:
                self._made.notes.append(f"{self._key}.{'.'.join(map(str, path))} is left out: it is of no parameter")
        made = [self._group(groups[number], groups[number].pop("params", None)) for number in sorted(groups)]
        made += [self._group(settings, names) for settings, names in _alike(flat)]
        kinds: dict[tuple[str, ...], int] = {}
        for group in made:
            states = [tuple(self._states[name]) if name in self._states else None for name in group["params"]]
            group["state"] = [-1 if own is None else kinds.setdefault(own, len(kinds)) for own in states]
        self._made.values[self._key] = {
            "kind": "optimizer",
            "groups": made,
            "kinds": [list(own) for own in kinds],
            "values": self._others,
            "others": None,
        }

    def _divided(self, path: Path) -> Path:
        """A path of the flat form as one of the nested form."""
        first = str(path[0])
        if first in ("state", "param_groups"):
            return path
        what, _, rest = first.partition(".")
        name, _, kind = rest.rpartition(".")
        return (what, name, kind, *path[1:])

    def _tensor_name(self, parameter: str) -> str:
        return self._model.get(parameter, f"model/{parameter}")

    def _add_state(self, parameter: str, kind: str, value: Any, is_tensor: bool) -> None:
        name = self._tensor_name(parameter)
        kinds = self._states.setdefault(name, [])
        if is_tensor:
            kinds.append(kind)
            self._made.tensors[f"{self._key}/{name}/{kind}"] = value
        else:
            self._others.setdefault(name, {})[kind] = _json(self._made, (self._key, name, kind), value)

    def _setting(self, path: Path, value: Any, is_tensor: bool) -> Any:
        if not is_tensor:
            return value
        name = f"{self._key}/{'.'.join(map(str, path))}"
        self._made.tensors[name] = value
        return _TensorOf(name)

    def _group(self, settings: dict[str, Any], names: Any) -> dict[str, Any]:
        tensors = {name: {"$tensor": value.name} for name, value in settings.items() if isinstance(value, _TensorOf)}
        plain = {name: value for name, value in settings.items() if name not in tensors}
        encoded = {name: _json(self._made, (self._key, "param_groups", name), value) for name, value in plain.items()}
        kept = {name: value for name, value in encoded.items() if value is not _NOTHING}
        parameters = [self._tensor_name(name) for name in names or () if isinstance(name, str)]
        return {"params": parameters, "settings": {**kept, **tensors}}


@dataclass(frozen=True)
class _TensorOf:
    """A setting that is a tensor."""

    name: str


def _alike(flat: Mapping[str, dict[str, Any]]) -> list[tuple[dict[str, Any], list[str]]]:
    """Parameters with the same settings as groups."""
    groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for name, settings in flat.items():
        groups.setdefault(repr(sorted(settings.items())), (settings, []))[1].append(name)
    return list(groups.values())
