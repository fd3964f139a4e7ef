"""Inputs and outputs of units: every container people use, tensors changed in place, views."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import register_pytree_node

from cluster import Cluster
from distributed.reference import assert_at_rest, full
from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.runtime.inputs import Inputs
from fullshard.runtime.module import unit_of

WIDTH = 4


def batch(rank: int, step: int = 0) -> Tensor:
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def check_model(rank: int, model: nn.Module, steps: int = 2) -> None:
    """Train `model`, sharded, beside itself; `model.blocks` are its inner units, its output is its loss."""
    reference = copy.deepcopy(model)
    for block in model.get_submodule("blocks").children():
        fully_shard(block)
    fully_shard(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (reference, model)]
    for step in range(steps):
        torch.stack([reference(batch(r, step)) for r in range(2)]).mean().backward()
        model(batch(rank, step)).backward()
        for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(full(ours.grad), theirs.grad, msg=f"step {step}, {name}")
        assert_at_rest(model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


# -- containers --------------------------------------------------------------------------------------------------------


class Named(NamedTuple):
    hidden: Tensor
    note: str


Plain = namedtuple("Plain", ["hidden", "note"])


@dataclasses.dataclass
class Record:
    hidden: Tensor
    note: str
    made: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        self.made += 1


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    hidden: Tensor
    note: str


@dataclasses.dataclass
class ModelOutput(OrderedDict[str, Any]):
    """As transformers makes them: fields that are items too."""

    hidden: Tensor | None = None
    note: str | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                super().__setitem__(field.name, value)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class ReadOnly(Mapping[str, Any]):
    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Labelled(list[Any]):
    """A list with an attribute and a constructor of its own."""

    def __init__(self, label: str) -> None:
        super().__init__()
        self.label = label


class Node:
    """A class of the user that pytree knows."""

    def __init__(self, hidden: Tensor, note: str) -> None:
        self.hidden = hidden
        self.note = note


register_pytree_node(Node, lambda node: ([node.hidden], node.note), lambda items, note: Node(*items, note))


def labelled(hidden: Tensor) -> Labelled:
    made = Labelled("a label")
    made.extend([hidden, "note"])
    return made


def default(hidden: Tensor) -> defaultdict[str, Any]:
    return defaultdict(list, hidden=hidden, note="note")


# Container -> (made of a tensor, the tensor in it).
CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda x: (x, None, "note"), lambda c: c[0]),
    "list": (lambda x: [None, 1, x], lambda c: c[2]),
    "dict": (lambda x: {"hidden": x, "note": None}, lambda c: c["hidden"]),
    "nested": (lambda x: {"deep": [((x,), {"note": 1})]}, lambda c: c["deep"][0][0][0]),
    "OrderedDict": (lambda x: OrderedDict(note=1, hidden=x), lambda c: c["hidden"]),
    "defaultdict": (default, lambda c: c["hidden"]),
    "UserDict": (lambda x: UserDict(hidden=x, note=1), lambda c: c["hidden"]),
    "UserList": (lambda x: UserList([1, x]), lambda c: c[1]),
    "deque": (lambda x: deque([1, x], maxlen=2), lambda c: c[1]),
    "set": (lambda x: {x}, lambda c: next(iter(c))),
    "frozenset": (lambda x: frozenset([x]), lambda c: next(iter(c))),
    "list subclass": (labelled, lambda c: c[0]),
    "typing.NamedTuple": (lambda x: Named(x, "note"), lambda c: c.hidden),
    "namedtuple": (lambda x: Plain(x, "note"), lambda c: c.hidden),
    "dataclass": (lambda x: Record(x, "note"), lambda c: c.hidden),
    "frozen dataclass": (lambda x: Frozen(x, "note"), lambda c: c.hidden),
    "ModelOutput": (lambda x: ModelOutput(x, "note"), lambda c: c["hidden"]),
    "Mapping": (lambda x: ReadOnly({"hidden": x, "note": 1}), lambda c: c["hidden"]),
    "MappingProxyType": (lambda x: MappingProxyType({"hidden": x}), lambda c: c["hidden"]),
    "pytree node": (lambda x: Node(x, "note"), lambda c: c.hidden),
}


class ContainerBlock(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Any, *, also: Any = None) -> Any:
        make, take = CONTAINERS[self.kind]
        assert type(value) is type(make(torch.zeros(1)))
        hidden = self.linear(take(value)).tanh()
        return make(hidden if also is None else hidden + take(also))


class Containers(nn.Module):
    """Blocks that take and return a container, also by keyword, with one tensor in two places."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList([ContainerBlock(kind) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        make, take = CONTAINERS[self.kind]
        value = self.blocks[1](self.blocks[0](make(x)))
        value = self.blocks[2](value, also=value)
        self.last = value
        return self.head(take(value)).square().mean()


def check_container(rank: int, kind: str) -> None:
    model = Containers(kind).double()
    check_model(rank, model)
    made = CONTAINERS[kind][0](torch.zeros(1))
    assert type(model.last) is type(made)
    if kind == "list subclass":
        assert model.last.label == "a label"
    elif kind == "dataclass":
        assert (model.last.note, model.last.made) == ("note", 1)
    elif kind == "deque":
        assert model.last.maxlen == 2
    elif kind == "ModelOutput":
        assert model.last["hidden"] is model.last.hidden
    elif kind == "defaultdict":
        assert model.last.default_factory is list
    elif kind == "pytree node":
        assert model.last.note == "note"


@pytest.mark.parametrize("kind", CONTAINERS)
def test_containers_as_inputs_and_outputs(cluster: Cluster, kind: str) -> None:
    """B45. The gradients are right; type, other items and attributes come back unchanged."""
    cluster.run(check_container, kind)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.GRU(WIDTH, WIDTH, batch_first=True) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        packed: Any = pack_padded_sequence(x.expand(2, 3, WIDTH), torch.tensor([3, 2]), batch_first=True)
        for block in self.blocks:
            packed, _ = block(packed)
            assert type(packed) is PackedSequence
        return pad_packed_sequence(packed, batch_first=True)[0].square().mean()


def check_packed(rank: int) -> None:
    check_model(rank, Packed().double())


def test_packed_sequences(cluster: Cluster) -> None:
    """B45. Also: units whose modules keep lists of their parameters (GRU)."""
    cluster.run(check_packed)


# -- inputs on another device ------------------------------------------------------------------------------------------


def test_inputs_are_moved_in_every_container() -> None:
    """Tensors go to the device, integers too; what a packed sequence says of its lengths must stay on the CPU."""
    packed = pack_padded_sequence(torch.ones(2, 3, WIDTH), torch.tensor([1, 3]), batch_first=True, enforce_sorted=False)
    source = torch.ones(2, requires_grad=True)
    inputs = Inputs((source, [torch.ones(2, dtype=torch.long), "text"]), {"packed": packed, "none": None})
    inputs.move(torch.device("meta"))
    first, (numbers, text) = inputs.args
    moved = inputs.kwargs["packed"]
    assert first.grad_fn is not None
    assert (text, inputs.kwargs["none"]) == ("text", None)
    assert all(part.is_meta for part in (first, numbers, moved.data, moved.sorted_indices, moved.unsorted_indices))
    assert type(moved) is PackedSequence
    assert not moved.batch_sizes.is_meta


def check_who_moves(rank: int, device: str) -> list[int]:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).double()
    units = [unit_of(fully_shard(module)) for module in (*model, model)]
    model(batch(rank))
    for unit in units:
        unit.place = dataclasses.replace(unit.place, device=torch.device(device))
    moved: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Inputs, "move", lambda _, device: moved.append(device.index))
        model(batch(rank)).sum().backward()
        model[1](batch(rank))  # a forward of its own
    return moved


@pytest.mark.parametrize(("device", "moved"), [("cuda:1", [1, 1]), ("cpu", [])])
def test_only_inputs_of_the_outermost_forward_are_moved(cluster: Cluster, device: str, moved: list[int]) -> None:
    """A batch may come from the CPU, to a root or to a part that is called alone; nothing is looked at on the CPU."""
    assert cluster.run(check_who_moves, device) == [moved, moved]


# -- modules that write into their inputs ------------------------------------------------------------------------------


class Collecting(nn.Module):
    """Writes what it computes into containers of its caller: losses, a cache, a state."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, losses: list[Tensor], cache: dict[int, Tensor], state: Record) -> Tensor:
        x = self.linear(x).tanh()
        losses.append(x.square().mean())
        cache[self.index] = x.sin()
        state.hidden = state.hidden * x
        return x


class Collector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Collecting(i) for i in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        losses: list[Tensor] = []
        cache: dict[int, Tensor] = {}
        state = Record(x, "state")
        for block in self.blocks:
            x = block(x, losses, cache, state)
        assert len(losses) == len(cache) == len(self.blocks)
        return x.sum() + torch.stack(losses).sum() + sum(cache.values()).sum() + state.hidden.mean()


def check_collector(rank: int) -> None:
    check_model(rank, Collector().double())


def test_what_a_unit_writes_into_a_container_of_its_caller_arrives(cluster: Cluster) -> None:
    """A list that holds tensors with gradients is passed as a copy; nothing that is appended to it may be lost."""
    cluster.run(check_collector)


class InPlace(nn.Module):
    """Writes into its input first, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "add":
            x += 1
        elif self.way == "scale by a parameter":
            x.mul_(self.linear.bias)
        elif self.way == "a view of it":
            x[:, 0].mul_(2)
        elif self.way == "relu":
            x.relu_()
        elif self.way == "without gradients":
            with torch.no_grad():
                x.clamp_(-1, 1)
        return self.linear(x).tanh()


class InPlaceModel(nn.Module):
    """Uses what was written into after the block, too."""

    def __init__(self, way: str, nest: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        blocks: list[nn.Module] = [InPlace(way), InPlace(way)]
        self.blocks = nn.ModuleList([nn.Sequential(block) for block in blocks] if nest else blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            y = block(x)
            x = x * y + x
        return x.square().mean()


def check_in_place(rank: int, way: str, nest: bool) -> None:
    model = InPlaceModel(way, nest).double()
    reference = copy.deepcopy(model)
    if nest:
        for block in model.blocks:
            fully_shard(block[0])
    check_model(rank, model) if not nest else check_nested(rank, model, reference)


def check_nested(rank: int, model: nn.Module, reference: nn.Module) -> None:
    for block in model.get_submodule("blocks").children():
        fully_shard(block)
    fully_shard(model)
    torch.stack([reference(batch(r)) for r in range(2)]).mean().backward()
    model(batch(rank)).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(ours.grad), theirs.grad)


WAYS = ["add", "scale by a parameter", "a view of it", "relu", "without gradients"]


@pytest.mark.parametrize("way", WAYS)
def test_a_unit_may_write_into_its_input(cluster: Cluster, way: str) -> None:
    """As in the plain module, the caller sees the change, and gradients flow through it."""
    cluster.run(check_in_place, way, False)


def test_nested_units_may_write_into_their_input(cluster: Cluster) -> None:
    cluster.run(check_in_place, "scale by a parameter", True)


def check_in_place_errors(rank: int) -> None:
    """What the plain module refuses, the sharded one refuses with the same words."""
    torch.manual_seed(0)
    plain, block = InPlace("add").double(), fully_shard(InPlace("add").double())
    for make, match in (
        (lambda: batch(rank).requires_grad_(), "a leaf Variable that requires grad"),
        (lambda: (batch(rank).requires_grad_() * 2).chunk(2)[0], "function that returns multiple views"),
    ):
        for module in (plain, block):
            with pytest.raises(RuntimeError, match=match):
                module(make())
    for module in (plain, block):
        x = batch(rank).requires_grad_().exp()
        y = module(x)  # exp needs its result for backward
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    block(batch(rank)).sum().backward()
    assert_at_rest(block)


def test_writes_that_autograd_forbids_are_refused_as_in_the_plain_module(cluster: Cluster) -> None:
    cluster.run(check_in_place_errors)


# -- views -------------------------------------------------------------------------------------------------------------


class Returns(nn.Module):
    """Returns its input, a view of it, a parameter, or a view of a parameter, beside what it computes."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        also = {
            "its input": x,
            "a view of its input": x[:, :2],
            "a parameter": self.linear.weight,
            "a view of a parameter": self.linear.weight.t()[1:],
        }[self.what]
        return self.linear(x).tanh(), also


class ReturnsModel(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Returns(what) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for block in self.blocks:
            x, also = block(x)
            total = total + also.square().sum()
        return total + x.sum()


def check_returns(rank: int, what: str) -> None:
    check_model(rank, ReturnsModel(what).double())


@pytest.mark.parametrize("what", ["its input", "a view of its input", "a parameter", "a view of a parameter"])
def test_outputs_that_are_inputs_or_parameters(cluster: Cluster, what: str) -> None:
    """A full parameter's memory goes when its unit leaves forward: what is returned of it is copied."""
    cluster.run(check_returns, what)


class Exempt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, table: Tensor, mask: Tensor) -> Tensor:
        self.seen = [x.dtype, table.dtype, mask.dtype, self.linear.weight.dtype]
        return self.linear(x.to(self.linear.weight.dtype)) * table * mask


def check_casts(rank: int) -> None:
    for cast, seen in ((True, torch.bfloat16), (False, torch.float32)):
        model = Exempt()
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=cast))
        model(batch(rank).float(), torch.ones(WIDTH), mask=torch.ones(WIDTH, dtype=torch.bool)).sum().backward()
        assert model.seen == [seen, seen, torch.bool, torch.bfloat16]


def test_a_unit_without_casts_gets_its_inputs_as_they_are(cluster: Cluster) -> None:
    """B47. A table that must stay exact goes to a unit with `cast_forward_inputs=False`."""
    cluster.run(check_casts)
