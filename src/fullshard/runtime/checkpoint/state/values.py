"""Nested values of Python as JSON, and back, without running anything that a file says.

Lists, strings, numbers, `None` and dicts with strings for keys are themselves. What JSON has no word for is an object
with one member whose name begins with "$": `{"$tuple": [1, 2]}`, `{"$float": "nan"}`, `{"$bytes": "aGk="}`. A dict of
the user's with such a key is written as pairs, `{"$dict": [["$key", 1]]}`, so that nobody can mean a tag by accident.
Tensors and arrays leave the value: `{"$tensor": "scheduler/weights"}` is the name of an entry of its own.

What comes back is equal to what was written, and of the same types. What cannot be written so raises at once and names
its place; nothing is ever pickled.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch

# Levels of nesting. Each takes up to three of JSON, whose readers have limits of their own.
MAX_DEPTH = 64
# Python refuses to parse integers of more digits than this many hexadecimal ones have; nobody counts so far.
_MAX_INT_DIGITS = 4096
_PLAIN_INT = 2**63
_FACTORIES: dict[str, Callable[[], Any]] = {
    "none": None,  # type: ignore[dict-item]
    **{kind.__name__: kind for kind in (bool, int, float, str, list, dict, set, tuple)},
}
_FACTORY_NAMES = {factory: name for name, factory in _FACTORIES.items()}
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_NUMPY_KINDS = "biuf"  # of scalars: what a JSON number can be

Path = tuple[str | int, ...]
# (tensor or array, where in the value) -> the name of its entry.
Put = Callable[[torch.Tensor, Path], str]
# Name of an entry -> the tensor.
Get = Callable[[str], torch.Tensor]


def shown(path: Path) -> str:
    """A path as an expression: `scheduler.lr_lambdas[0]`."""
    text = ""
    for step in path:
        is_name = isinstance(step, str) and (step.isidentifier() or not text)
        text += f".{step}" if is_name and text else str(step) if is_name else f"[{step!r}]"
    return text


def encode(value: Any, path: Path, put: Put) -> Any:
    """`value` as JSON.

    Args:
        value: Numbers, strings, bytes, `None`, containers of Python and torch of any depth up to `MAX_DEPTH`, tensors,
            and arrays and scalars of numpy.
        path: Where it is, for names and messages; the first step is the key of the state.
        put: Takes each tensor that leaves the value. A tensor that occurs twice is put once, and comes back as one.

    Raises:
        TypeError: Something in it cannot be written; the message says what, where, and what to do.
    """
    return _Encoder(put).encode(value, path)


class _Encoder:
    def __init__(self, put: Put) -> None:
        self._put = put
        self._names: dict[int, tuple[Any, str]] = {}  # id -> the object, which must live on, and its name

    def encode(self, value: Any, path: Path) -> Any:
        if len(path) > MAX_DEPTH:
            raise TypeError(f"{shown(path[:4])}... is nested deeper than {MAX_DEPTH} levels, or contains itself")
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is list:
            return [self.encode(item, (*path, i)) for i, item in enumerate(value)]
        if kind is dict:
            return self._dict(value, path)
        if kind is int:
            return value if -_PLAIN_INT <= value < _PLAIN_INT else self._large(value, path)
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, torch.Tensor):
            return {"$tensor": self._name(value, value, path)}
        return self._tagged(value, kind, path)

    def _dict(self, value: dict[Any, Any], path: Path) -> Any:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.encode(item, (*path, key)) for key, item in value.items()}
        return {"$dict": self._pairs(value, path)}

    def _pairs(self, value: Mapping[Any, Any], path: Path) -> list[list[Any]]:
        return [[self._scalar(key, path), self.encode(item, (*path, _step(key)))] for key, item in value.items()]

    def _tagged(self, value: Any, kind: type, path: Path) -> Any:
        if kind in (tuple, deque, torch.Size):
            items = [self.encode(item, (*path, i)) for i, item in enumerate(value)]
            return {"$deque": [items, value.maxlen]} if kind is deque else {f"${_NAMES[kind]}": items}
        if kind in (set, frozenset):
            # Sorted: the same on every rank, whatever the order of hashes.
            return {f"${_NAMES[kind]}": sorted((self._scalar(item, path) for item in value), key=repr)}
        if kind in (OrderedDict, Counter):
            return {f"${_NAMES[kind]}": self._pairs(value, path)}
        if kind is defaultdict:
            if value.default_factory not in _FACTORY_NAMES:
                raise TypeError(_refusal(value, path, "its default_factory is not a built-in type; make it a dict"))
            return {"$defaultdict": [_FACTORY_NAMES[value.default_factory], self._pairs(value, path)]}
        if kind in (bytes, bytearray):
            return {f"${_NAMES[kind]}": base64.b64encode(value).decode()}
        if kind is complex:
            return {"$complex": [self.encode(part, path) for part in (value.real, value.imag)]}
        if kind in (torch.dtype, torch.device):
            return {f"${kind.__name__}": str(value).removeprefix("torch.")}
        return self._of_numpy(value, path)

    def _of_numpy(self, value: Any, path: Path) -> Any:
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in _NUMPY_KINDS:
            item = value.item()
            if type(item) in (bool, int, float):
                return {"$numpy": [value.dtype.name, self.encode(item, path)]}
        if numpy is not None and type(value) is numpy.ndarray and value.dtype.kind in _NUMPY_KINDS + "c":
            native = numpy.ascontiguousarray(value, value.dtype.newbyteorder("="))
            try:
                tensor = torch.from_numpy(native if native.flags.writeable else native.copy()).reshape(value.shape)
            except TypeError:
                raise TypeError(_refusal(value, path, f"torch has no {value.dtype}; convert it")) from None
            return {"$array": self._name(value, tensor, path)}
        raise TypeError(_refusal(value, path))

    def _scalar(self, value: Any, path: Path) -> Any:
        """A key of a dict or an element of a set: without tensors, which are equal to themselves only."""
        if isinstance(value, torch.Tensor):
            raise TypeError(_refusal(value, path, "a tensor is a key or an element of a set there"))
        return self.encode(value, (*path, _step(value)))

    def _large(self, value: int, path: Path) -> Any:
        digits = f"{value:x}"
        if len(digits) > _MAX_INT_DIGITS:
            raise TypeError(_refusal(value, path, f"it has more than {_MAX_INT_DIGITS} hexadecimal digits"))
        return {"$int": digits}

    def _name(self, value: Any, tensor: torch.Tensor, path: Path) -> str:
        if id(value) not in self._names:
            self._names[id(value)] = value, self._put(tensor, path)
        return self._names[id(value)][1]


_NAMES: dict[type, str] = {
    tuple: "tuple",
    torch.Size: "size",
    set: "set",
    frozenset: "frozenset",
    OrderedDict: "ordered",
    Counter: "counter",
    bytes: "bytes",
    bytearray: "bytearray",
}


def _step(key: Any) -> str | int:
    return key if type(key) in (str, int) else repr(key)[:40]


def _refusal(value: Any, path: Path, why: str = "") -> str:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return (
        f"{shown(path)} cannot be saved: it is a {name}{': ' + why if why else ''}. A checkpoint holds numbers, "
        "strings, bytes, None, tensors, numpy arrays, and lists, tuples, dicts and sets of them; leave it out, convert "
        "it, give the object that holds it a state_dict() that returns such values and a load_state_dict(), or, if it "
        "has those, give it a key of its own in the state"
    )


def decode(value: Any, where: str, get: Get) -> Any:
    """The reverse of `encode`, of JSON that may come from anyone.

    Args:
        value: What a JSON parser returned.
        where: What it is, for messages.
        get: Returns the tensor of a name. Arrays share memory with what it returns.

    Raises:
        ValueError: It is not what `encode` makes.
    """
    try:
        return _decode(value, get, 0)
    except (ValueError, TypeError, OverflowError, KeyError) as error:
        raise ValueError(f"the value of {where} in the checkpoint is damaged: {error}") from error


def _decode(value: Any, get: Get, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, list):
        return [_decode(item, get, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    tags = [key for key in value if key.startswith("$")]
    if not tags:
        return {key: _decode(item, get, depth + 1) for key, item in value.items()}
    if len(value) != 1 or tags[0] not in _READERS:
        raise ValueError(f"unknown tag {tags[0]!r} in an object with {len(value)} members")
    return _READERS[tags[0]](value[tags[0]], get, depth)


def _items(value: Any, get: Get, depth: int) -> list[Any]:
    return [_decode(item, get, depth + 1) for item in _checked(value, list)]


def _pairs(value: Any, get: Get, depth: int) -> list[tuple[Any, Any]]:
    pairs = [_checked(pair, list, 2) for pair in _checked(value, list)]
    made = [(_key(key, get, depth), _decode(item, get, depth + 1)) for key, item in pairs]
    if len({key for key, _ in made}) != len(made):
        raise ValueError("a dict has the same key twice")
    return made


def _key(value: Any, get: Get, depth: int) -> Hashable:
    key: Hashable = _decode(value, get, depth + 1)
    hash(key)  # a TypeError where it has none
    return key


def _elements(value: Any, get: Get, depth: int) -> Iterable[Any]:
    return [_key(item, get, depth) for item in _checked(value, list)]


def _checked(value: Any, kind: type, length: int | None = None) -> Any:
    if type(value) is not kind or (length is not None and len(value) != length):  # type: ignore[arg-type]
        raise ValueError(f"expected a {kind.__name__}{f' of {length}' if length else ''}, found {str(value)[:40]!r}")
    return value


def _float(value: Any, _get: Get, _depth: int) -> float:
    if value not in ("nan", "inf", "-inf"):
        raise ValueError(f"expected nan, inf or -inf, found {str(value)[:40]!r}")
    return float(value)


def _large(value: Any, _get: Get, _depth: int) -> int:
    if not re.fullmatch(f"-?[0-9a-f]{{1,{_MAX_INT_DIGITS}}}", _checked(value, str)):
        raise ValueError("expected an integer in hexadecimal digits")
    return int(value, 16)


def _complex(value: Any, get: Get, depth: int) -> complex:
    real, imag = (_checked(_decode(part, get, depth + 1), float) for part in _checked(value, list, 2))
    return complex(real, imag)


def _bytes(value: Any, _get: Get, _depth: int) -> bytes:
    try:
        return base64.b64decode(_checked(value, str), validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from None


def _deque(value: Any, get: Get, depth: int) -> deque[Any]:
    items, maxlen = _checked(value, list, 2)
    if maxlen is not None and (type(maxlen) is not int or maxlen < 0):
        raise ValueError(f"expected the longest length of a deque, found {maxlen!r}")
    return deque(_items(items, get, depth), maxlen)


def _defaultdict(value: Any, get: Get, depth: int) -> defaultdict[Any, Any]:
    name, pairs = _checked(value, list, 2)
    if name not in _FACTORIES:
        raise ValueError(f"unknown default_factory {str(name)[:40]!r}")
    return defaultdict(_FACTORIES[name], _pairs(pairs, get, depth))


def _dtype(value: Any, _get: Get, _depth: int) -> torch.dtype:
    if _checked(value, str) not in _DTYPES:
        raise ValueError(f"torch has no dtype {value[:40]!r}")
    return _DTYPES[value]


def _device(value: Any, _get: Get, _depth: int) -> torch.device:
    try:
        return torch.device(_checked(value, str))
    except RuntimeError:
        raise ValueError(f"torch has no device {value[:40]!r}") from None


def _tensor(value: Any, get: Get, _depth: int) -> torch.Tensor:
    return get(_checked(value, str))


def _array(value: Any, get: Get, _depth: int) -> Any:
    tensor = get(_checked(value, str))
    return _numpy().asarray(tensor.numpy())


def _numpy_scalar(value: Any, get: Get, depth: int) -> Any:
    name, item = _checked(value, list, 2)
    number = _decode(item, get, depth + 1)
    dtype = _numpy().dtype(_checked(name, str))
    if dtype.kind not in _NUMPY_KINDS or type(number) not in (bool, int, float):
        raise ValueError(f"expected a number of numpy, found {str(value)[:40]!r}")
    return dtype.type(number)


def _numpy() -> Any:
    try:
        import numpy as np  # only where a checkpoint has values of it
    except ImportError:
        raise ValueError("it has values of numpy, which is not installed: pip install numpy") from None
    return np


_READERS: dict[str, Callable[[Any, Get, int], Any]] = {
    "$tuple": lambda value, get, depth: tuple(_items(value, get, depth)),
    "$size": lambda value, get, depth: torch.Size(_items(value, get, depth)),
    "$set": lambda value, get, depth: set(_elements(value, get, depth)),
    "$frozenset": lambda value, get, depth: frozenset(_elements(value, get, depth)),
    "$dict": lambda value, get, depth: dict(_pairs(value, get, depth)),
    "$ordered": lambda value, get, depth: OrderedDict(_pairs(value, get, depth)),
    "$counter": lambda value, get, depth: Counter(dict(_pairs(value, get, depth))),
    "$bytes": _bytes,
    "$bytearray": lambda value, get, depth: bytearray(_bytes(value, get, depth)),
    "$deque": _deque,
    "$defaultdict": _defaultdict,
    "$float": _float,
    "$int": _large,
    "$complex": _complex,
    "$dtype": _dtype,
    "$device": _device,
    "$tensor": _tensor,
    "$array": _array,
    "$numpy": _numpy_scalar,
}
