"""Reads pickles without running them.

A pickle is a program for a small stack machine, and two of its instructions import and call whatever it names. Here the
machine has no such power: a name is looked up in a table of the few that a known format uses, and each entry of the
table is a function of ours that makes plain data of its arguments. Any other name is refused, so a file that holds
`os.system` ends with an error that says so, and nothing has happened.

The standard library's unpickler is not used: restricted by `find_class`, it still lets a file set attributes of what
the table holds, and ask for memory without having the bytes to fill it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from struct import Struct
from typing import Any

from fullshard.errors import CheckpointDamagedError, CheckpointError

MAX_PICKLE_BYTES = 1 << 30
Maker = Callable[[tuple[Any, ...]], Any]
Lookup = Callable[[str], Maker | None]

_MARK = object()  # on the stack: where a list of arguments begins
_UNSIGNED_4, _SIGNED_4, _UNSIGNED_8, _DOUBLE = Struct("<I"), Struct("<i"), Struct("<Q"), Struct(">d")
_SCALARS = (str, int, float, bytes, type(None))


class UnsafePickleError(CheckpointError):
    """A pickle names something that no known format uses; it may be made to run code."""


class Named:
    """A class or function that a pickle names; never the real one."""

    __slots__ = ("make", "name")

    def __init__(self, name: str, make: Maker) -> None:
        self.name, self.make = name, make


class Made:
    """What a pickle would have made by calling `name` with `args`, and then given `state`."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name, self.args = name, args
        self.state: Any = None


def as_record(name: str) -> Maker:
    """A maker that keeps name and arguments."""
    return lambda args: Made(name, args)


def as_dict(_: tuple[Any, ...]) -> dict[Any, Any]:
    """A maker for mappings that a pickle fills after it made them."""
    return {}


def read_pickle(data: bytes, lookup: Lookup, persistent: Maker, source: str) -> Any:
    """The value of a pickle, as plain data.

    Args:
        data: The pickle.
        lookup: What to make for a name ("collections.OrderedDict"), or None to refuse it.
        persistent: What to make of a persistent id, which is a tuple.
        source: Names the file in errors.

    Raises:
        UnsafePickleError: It names something else.
        CheckpointDamagedError: It is no pickle, or uses what no known format uses.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise CheckpointError(f"{source} has a pickle of {len(data)} bytes, more than that of any real checkpoint")
    machine = _Machine(data, lookup, persistent, source)
    try:
        return _without_bomb(machine.run(), 10 * len(data) + 1_000_000, source)
    except CheckpointError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CheckpointDamagedError(f"{source} holds no valid pickle ({type(error).__name__}: {error})") from None


def _without_bomb(value: Any, limit: int, source: str) -> Any:
    """The value. Lists that share lists are small in a pickle, and endless for whoever walks through them: refused."""
    seen, waiting = 0, [value]
    while waiting:
        each = waiting.pop()
        if not isinstance(each, dict | list | tuple | set | frozenset):
            continue
        seen += len(each)
        if seen > limit:
            raise CheckpointDamagedError(f"{source} has a pickle that unfolds to more than {limit} values: refused")
        waiting.extend(each.values() if isinstance(each, dict) else each)
    return value


class _Machine:
    """The stack machine, one method for each instruction that pickles of weights use."""

    def __init__(self, data: bytes, lookup: Lookup, persistent: Maker, source: str) -> None:
        self._data, self._at = data, 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._lookup, self._persistent, self._source = lookup, persistent, source

    def run(self) -> Any:
        while True:
            code = self._data[self._at]
            self._at += 1
            if code == _STOP:
                return self._stack.pop()
            action = _ACTIONS.get(code)
            if action is None:
                raise ValueError(f"instruction {bytes([code])!r} is not used by checkpoints")
            action(self)

    # -- reading the program

    def _take(self, count: int) -> bytes:
        part = self._data[self._at : self._at + count]
        if len(part) < count:
            raise ValueError("it is cut short")
        self._at += count
        return part

    def _number(self, form: Struct) -> Any:
        return form.unpack(self._take(form.size))[0]

    def _line(self) -> str:
        end = self._data.index(b"\n", self._at)
        return self._take(end + 1 - self._at)[:-1].decode()

    def _since_mark(self) -> list[Any]:
        for place in range(len(self._stack) - 1, -1, -1):
            if self._stack[place] is _MARK:
                items = self._stack[place + 1 :]
                del self._stack[place:]
                return items
        raise ValueError("no mark on the stack")

    # -- instructions

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def skip(self, count: int) -> None:
        self._take(count)

    def text(self, length: int, encoding: str = "utf-8") -> None:
        self.push(self._take(length).decode(encoding, "surrogatepass" if encoding == "utf-8" else "strict"))

    def long(self, length: int) -> None:
        self.push(int.from_bytes(self._take(length), "little", signed=True))

    def tuple_of(self, count: int) -> None:
        items = self._stack[len(self._stack) - count :]
        if len(items) < count:
            raise ValueError("too little on the stack")
        del self._stack[len(self._stack) - count :]
        self.push(tuple(items))

    def put(self, number: int) -> None:
        self._memo[number] = self._stack[-1]

    def append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif not isinstance(target, Made):  # what fills an object of an unknown class is dropped
            raise TypeError("only lists are appended to")

    def add_items(self) -> None:
        items = self._since_mark()
        target = self._stack[-1]
        if not isinstance(target, set):
            raise TypeError("only sets are added to")
        target.update(map(_key, items))

    def set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, dict):
            target.update(zip(map(_key, items[::2]), items[1::2], strict=True))
        elif not isinstance(target, Made):
            raise TypeError("only dictionaries take members")

    def name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("a name must be text")
        full = f"{module}.{name}"
        maker = self._lookup(full)
        if maker is None:
            raise UnsafePickleError(
                f"{self._source} holds a pickle that uses {full[:200]!r}. That is no part of the weights of a model, "
                "and could be made to run code, so the file is refused. Nothing of it was run. What torch.save makes "
                "of model.state_dict() holds nothing of the kind"
            )
        self.push(Named(full, maker))

    def reduce(self) -> None:
        args, called = self._stack.pop(), self._stack.pop()
        if not isinstance(called, Named) or not isinstance(args, tuple):
            raise TypeError("only a name is called, with a tuple")
        self.push(called.make(args))

    def build(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if isinstance(target, Made):
            target.state = state
        elif not isinstance(target, dict):  # attributes of a mapping, such as versions of modules, hold no weights
            raise TypeError("only objects are given a state")

    def persist(self) -> None:
        identity = self._stack.pop()
        if not isinstance(identity, tuple):
            raise TypeError("a persistent id must be a tuple")
        self.push(self._persistent(identity))

    def named_from_stack(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self.name(module, name)

    def member(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self.set_items([key, value])

    def mapping(self) -> None:
        items = self._since_mark()
        self.push({})
        self.set_items(items)


def _key(value: Any) -> Hashable:
    """A key of a dictionary. A deep tuple would be hashed by recursion in C, which nothing bounds."""
    items = value if isinstance(value, tuple) else (value,)
    if all(isinstance(item, (*_SCALARS, Made, Named)) for item in items):
        key: Hashable = value
        return key
    raise TypeError(f"a key is a {type(value).__name__}")


_Action = Callable[[_Machine], Any]
_STOP = ord(".")
_BY_CHARACTER: dict[str, _Action] = {
    # numbers, text, constants
    "N": lambda m: m.push(None),
    "\x88": lambda m: m.push(True),
    "\x89": lambda m: m.push(False),
    "J": lambda m: m.push(m._number(_SIGNED_4)),
    "K": lambda m: m.push(m._take(1)[0]),
    "M": lambda m: m.push(int.from_bytes(m._take(2), "little")),
    "G": lambda m: m.push(m._number(_DOUBLE)),
    "\x8a": lambda m: m.long(m._take(1)[0]),
    "\x8b": lambda m: m.long(m._number(_UNSIGNED_4)),
    "X": lambda m: m.text(m._number(_UNSIGNED_4)),
    "\x8c": lambda m: m.text(m._take(1)[0]),
    "\x8d": lambda m: m.text(m._number(_UNSIGNED_8)),
    "U": lambda m: m.text(m._take(1)[0], "latin-1"),
    "T": lambda m: m.text(m._number(_UNSIGNED_4), "latin-1"),
    "B": lambda m: m.push(m._take(m._number(_UNSIGNED_4))),
    "C": lambda m: m.push(m._take(m._take(1)[0])),
    "\x8e": lambda m: m.push(m._take(m._number(_UNSIGNED_8))),
    # containers
    "(": lambda m: m.push(_MARK),
    "]": lambda m: m.push([]),
    "}": lambda m: m.push({}),
    ")": lambda m: m.push(()),
    "\x8f": lambda m: m.push(set()),
    "t": lambda m: m.push(tuple(m._since_mark())),
    "l": lambda m: m.push(m._since_mark()),
    "d": lambda m: m.mapping(),
    "\x91": lambda m: m.push(frozenset(map(_key, m._since_mark()))),
    "\x85": lambda m: m.tuple_of(1),
    "\x86": lambda m: m.tuple_of(2),
    "\x87": lambda m: m.tuple_of(3),
    "a": lambda m: m.append([m._stack.pop()]),
    "e": lambda m: m.append(m._since_mark()),
    "s": lambda m: m.member(),
    "u": lambda m: m.set_items(m._since_mark()),
    "\x90": lambda m: m.add_items(),
    # the stack and the memo
    "0": lambda m: m._stack.pop(),
    "q": lambda m: m.put(m._take(1)[0]),
    "r": lambda m: m.put(m._number(_UNSIGNED_4)),
    "\x94": lambda m: m.put(len(m._memo)),
    "h": lambda m: m.push(m._memo[m._take(1)[0]]),
    "j": lambda m: m.push(m._memo[m._number(_UNSIGNED_4)]),
    # names and what is made of them
    "c": lambda m: m.name(m._line(), m._line()),
    "\x93": lambda m: m.named_from_stack(),
    "R": lambda m: m.reduce(),
    "\x81": lambda m: m.reduce(),  # a class called with a tuple: to us the same
    "b": lambda m: m.build(),
    "Q": lambda m: m.persist(),
    # the frame of a program
    "\x80": lambda m: m.skip(1),
    "\x95": lambda m: m.skip(8),
}
_ACTIONS: dict[int, _Action] = {ord(character): action for character, action in _BY_CHARACTER.items()}
