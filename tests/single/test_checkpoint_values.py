"""Nested values as JSON and back: equal and of the same types, and nothing but what `encode` makes is read."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.core.ckpt.manifest import strict_json
from fullshard.runtime.checkpoint.state.values import MAX_DEPTH, decode, encode


class Entries:
    """Where tensors go, by name."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def put(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> str:
        name = f"{len(self.tensors)}/" + ".".join(map(str, path))
        self.tensors[name] = tensor
        return name


def there_and_back(value: Any) -> Any:
    entries = Entries()
    text = json.dumps(encode(value, ("key",), entries.put), allow_nan=False)
    return decode(strict_json(text), "key", entries.tensors.__getitem__)


def assert_same(got: Any, want: Any) -> None:
    assert type(got) is type(want), f"{got!r}, {want!r}"
    if isinstance(want, torch.Tensor):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
    elif isinstance(want, np.ndarray):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert np.array_equal(got, want)
    elif isinstance(want, dict):
        assert list(map(repr, got)) == list(map(repr, want))
        for ours, theirs in zip(got.items(), want.items(), strict=True):
            assert_same(ours, theirs)
    elif isinstance(want, list | tuple | deque):
        assert len(got) == len(want)
        for ours, theirs in zip(got, want, strict=True):
            assert_same(ours, theirs)
    elif isinstance(want, float):
        assert got == want or (math.isnan(got) and math.isnan(want))
        assert math.copysign(1, got) == math.copysign(1, want) or math.isnan(want)
    else:
        assert got == want


_NUMBERS = st.one_of(st.integers(), st.floats(), st.booleans(), st.integers(2**62, 2**70))
_KEYS = st.one_of(st.text(), st.just("$tuple"), st.integers(), st.tuples(st.integers(), st.text()), st.none())
_LEAVES = st.one_of(_NUMBERS, st.none(), st.text(), st.binary(), st.complex_numbers(allow_nan=False))


def _containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(children),
        st.lists(children).map(tuple),
        st.lists(children).map(lambda items: deque(items, 50)),
        st.dictionaries(_KEYS, children),
        st.dictionaries(_KEYS, children).map(OrderedDict),
        st.dictionaries(_KEYS, st.integers()).map(Counter),
        st.dictionaries(_KEYS, children).map(lambda items: defaultdict(list, items)),
        st.sets(st.one_of(st.integers(), st.floats(allow_nan=False), st.text())),
        st.frozensets(st.text()),
    )


@settings(max_examples=150, deadline=None)
@given(st.recursive(_LEAVES, _containers, max_leaves=20))
def test_a_value_comes_back_equal_and_of_the_same_types(value: Any) -> None:
    assert_same(there_and_back(value), value)


@pytest.mark.parametrize(
    "value",
    [
        torch.Size([2, 3]),
        torch.float8_e4m3fn,
        torch.device("cpu"),
        bytearray(b"ab"),
        -0.0,
        -(2**5000),
        np.float32(1.5),
        np.float64("nan"),
        np.int8(-3),
        np.bool_(True),
        np.array([[1, 2], [3, 4]], dtype=np.uint32),
        np.array(2.5),
        np.zeros((0, 3)),
        np.arange(6).reshape(2, 3).T,
        {"weights": [torch.arange(3), {"deep": torch.tensor(1.5)}]},
        {"$tensor": "not a tensor's name", "$": 1},
        {1: "a", False: "b"},
        deque([1, 2, 3]),
        defaultdict(None, {"a": 1}),
    ],
    ids=lambda value: f"{type(value).__name__}",
)
def test_special_values_come_back(value: Any) -> None:
    assert_same(there_and_back(value), value)


def test_one_tensor_in_two_places_stays_one() -> None:
    shared = torch.ones(2)
    entries = Entries()
    encode([shared, {"again": shared}], ("key",), entries.put)
    assert len(entries.tensors) == 1
    back = there_and_back([shared, {"again": shared}])
    assert back[0] is back[1]["again"]


class Named(tuple[int, ...]):
    """Of no type that is known."""

    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "place", "what"),
    [
        ({"lr_lambdas": [lambda step: step]}, "scheduler.lr_lambdas[0]", "function"),
        ([object()], "scheduler[0]", "object"),
        ({"a b": {3: print}}, "scheduler['a b'][3]", "builtin_function_or_method"),
        ({"group": Named([1])}, "scheduler.group", "Named"),
        (defaultdict(lambda: 1), "scheduler", "default_factory"),
        ({"names": np.array(["a"])}, "scheduler.names", "numpy.ndarray"),
        ({torch.ones(2): 1}, "scheduler", "a key"),
    ],
)
def test_what_cannot_be_saved_is_named_with_its_place(value: Any, place: str, what: str) -> None:
    with pytest.raises(TypeError) as caught:
        encode(value, ("scheduler",), Entries().put)
    assert str(caught.value).startswith(f"{place} cannot be saved")
    assert what in str(caught.value)
    assert "state_dict()" in str(caught.value)


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(TypeError, match="contains itself"):
        encode(value, ("key",), Entries().put)


def _nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        {"$pickle": "gASVAAAA"},
        {"$tuple": [1], "more": 1},
        {"$tuple": 1},
        {"$dict": [[1]]},
        {"$dict": [[1, 2], [1, 3]]},
        {"$dict": [[[], 1]]},
        {"$set": [[1]]},
        {"$size": ["a"]},
        {"$float": "1e9"},
        {"$float": ["nan"]},
        {"$int": "0x10"},
        {"$int": "f" * 5000},
        {"$bytes": "?"},
        {"$bytes": 3},
        {"$deque": [[], -1]},
        {"$deque": [[], True]},
        {"$defaultdict": ["eval", []]},
        {"$defaultdict": [[], []]},
        {"$dtype": "load"},
        {"$dtype": "_dynamo"},
        {"$device": "nowhere"},
        {"$numpy": ["object", 1]},
        {"$numpy": ["float32", "1"]},
        {"$numpy": ["int8", 1000]},
        {"$numpy": ["nothing", 1]},
        {"$complex": [1, 2]},
        {"$complex": [1.0]},
        {"$tensor": "absent"},
        {"$tensor": ["absent"]},
        {"$array": 3},
        {"$counter": [["a", []], ["a", []]]},
        _nested(MAX_DEPTH + 1),
    ],
    ids=lambda value: json.dumps(value)[:30],
)
def test_damaged_values_are_refused(value: Any) -> None:
    """B115: what a checkpoint says is compared with what may be said; nothing is looked up or run."""
    with pytest.raises(ValueError, match="value of key in the checkpoint is damaged"):
        decode(value, "key", {}.__getitem__)


_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()),
    lambda children: st.one_of(
        st.lists(children, max_size=4),
        st.dictionaries(st.text(), children, max_size=3),
        st.dictionaries(st.sampled_from(["$tuple", "$dict", "$set", "$float", "$numpy", "$deque", "$array"]), children),
    ),
    max_leaves=15,
)


@settings(max_examples=200, deadline=None)
@given(_JSON)
def test_any_json_is_a_value_or_an_error(value: Any) -> None:
    with contextlib.suppress(ValueError):
        decode(value, "key", {}.__getitem__)


def _schedulers() -> dict[str, Callable[[torch.optim.Optimizer], Any]]:
    kinds = torch.optim.lr_scheduler
    return {
        "StepLR": lambda o: kinds.StepLR(o, 2),
        "MultiStepLR": lambda o: kinds.MultiStepLR(o, [1, 3, 3]),
        "CosineAnnealingLR": lambda o: kinds.CosineAnnealingLR(o, 5),
        "CosineAnnealingWarmRestarts": lambda o: kinds.CosineAnnealingWarmRestarts(o, 3),
        "OneCycleLR": lambda o: kinds.OneCycleLR(o, 0.1, total_steps=10),
        "CyclicLR": lambda o: kinds.CyclicLR(o, 0.1, 0.2),
        "ReduceLROnPlateau": kinds.ReduceLROnPlateau,
        "LambdaLR": lambda o: kinds.LambdaLR(o, lambda step: 0.9**step),
        "ChainedScheduler": lambda o: kinds.ChainedScheduler([kinds.StepLR(o, 2), kinds.ExponentialLR(o, 0.9)]),
        "SequentialLR": lambda o: kinds.SequentialLR(o, [kinds.LinearLR(o), kinds.CosineAnnealingLR(o, 5)], [3]),
    }


@pytest.mark.parametrize("name", _schedulers())
def test_the_state_of_every_scheduler_comes_back(name: str) -> None:
    def make() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
        return optimizer, _schedulers()[name](optimizer)

    def step(optimizer: torch.optim.Optimizer, scheduler: Any) -> float:
        optimizer.step()
        scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        return float(optimizer.param_groups[0]["lr"])

    optimizer, scheduler = make()
    for _ in range(4):
        step(optimizer, scheduler)
    state = scheduler.state_dict()
    again, resumed = make()
    again.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(there_and_back(state))
    assert [step(again, resumed) for _ in range(4)] == [step(optimizer, scheduler) for _ in range(4)]
