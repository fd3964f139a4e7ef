"""torch's own state-dict tools on sharded modules, side by side with torch's `fully_shard`, and its checkpoints."""

from __future__ import annotations

import copy
import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as theirs
from reference import full
from torch import nn
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten_with_path

import fullshard as ours
from cluster import Cluster


class Dims(nn.Module):
    """Dims of 1, 2, 3, 5 and 7, buffers, a frozen parameter; and, which torch cannot train, one without elements."""

    def __init__(self, rows: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 2, bias=False)
        self.third = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        self.rest = nn.Parameter(torch.rand(rows, 3))
        self.gain = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.rand(3), requires_grad=False)
        self.register_buffer("mean", torch.rand(3))
        self.register_buffer("count", torch.tensor(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.third(self.second(self.first(x).tanh())) * self.gain + self.rest.sum()
        return y * self.frozen.sum() * self.mean.sum()


def mesh_of(shape: tuple[int, ...]) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def build(library: Any, seed: int = 0, mesh: DeviceMesh | None = None, steps: int = 0, rows: int = 2) -> Any:
    """A model sharded by `library`, its optimizer, and a few steps on the same batch everywhere."""
    torch.manual_seed(seed)
    model = Dims(rows)
    mesh = mesh or mesh_of((dist.get_world_size(),))
    library.fully_shard(model.first, mesh=mesh)
    library.fully_shard(model.third, mesh=mesh)
    library.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1, weight_decay=0.1)
    train(model, optimizer, steps)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        model(torch.randn(4, 5, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same(one: Any, two: Any) -> None:
    """Nested dicts and lists of the same structure, kinds of tensor, placements and values."""
    (left, left_spec), (right, right_spec) = tree_flatten_with_path(one), tree_flatten_with_path(two)
    assert left_spec == right_spec
    for (path, a), (_, b) in zip(left, right, strict=True):
        assert type(a) is type(b), path
        if isinstance(a, DTensor):
            assert (a.placements, a.device_mesh, a.shape) == (b.placements, b.device_mesh, b.shape), path
            assert torch.equal(a.to_local(), b.to_local()), path
        elif isinstance(a, torch.Tensor):
            assert torch.equal(a, b), path
        else:
            assert a == b, path


# The tools, side by side

FLAGS = ("full_state_dict", "cpu_offload", "ignore_frozen_params", "flatten_optimizer_state_dict")


def check_get(rank: int, shape: tuple[int, ...]) -> None:
    mesh = mesh_of(shape)
    pairs = [build(library, mesh=mesh, steps=2) for library in (ours, theirs)]
    for values in itertools.product((False, True), repeat=len(FLAGS)):
        options = StateDictOptions(**dict(zip(FLAGS, values, strict=True)))
        assert_same(*(get_state_dict(model, optimizer, options=options) for model, optimizer in pairs))
        assert_same(*(get_model_state_dict(model, options=options) for model, _ in pairs))
        assert_same(*(get_optimizer_state_dict(model, optimizer, options=options) for model, optimizer in pairs))
    for prefixes in (False, True):
        options = StateDictOptions(keep_submodule_prefixes=prefixes)
        with pytest.warns(FutureWarning):
            assert_same(*(get_model_state_dict(m, submodules={m.third}, options=options) for m, _ in pairs))
    assert_same(*(model.state_dict() for model, _ in pairs))
    assert_same(*(optimizer.state_dict() for _, optimizer in pairs))


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=["1-D", "HSDP"])
def test_what_the_tools_return_is_the_same_as_for_torch(cluster: Cluster, shape: tuple[int, ...]) -> None:
    """Every combination of options, with uneven and empty shards, buffers and a frozen parameter."""
    cluster.run(check_get, shape, world_size=2 * len(shape))


def check_wrapped(rank: int, flat: bool) -> None:
    whole = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=flat)
    plain, models = Dims(), []
    for seed in range(2):
        torch.manual_seed(seed)
        model = Dims()
        model.first = ours.FullyShardedDataParallel(model.first)
        model = ours.FullyShardedDataParallel(model, use_orig_params=True)
        models.append((model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)))
        train(*models[-1], steps=seed + 1)
    states = [get_state_dict(*pair, options=StateDictOptions(flatten_optimizer_state_dict=flat)) for pair in models]
    assert list(states[0][0]) == list(plain.state_dict())
    own = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    names = get_optimizer_state_dict(plain, own, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    assert sorted(states[0][1] if flat else states[0][1]["state"]) == sorted(names if flat else names["state"])
    values, state = copy.deepcopy(states[1])
    put = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_state_dict(*models[0], model_state_dict=values, optim_state_dict=state, options=put)
    results = []
    for pair in models:
        train(*pair, steps=1)
        results.append(get_state_dict(*pair, options=put if flat else whole))
    assert_same(*results)


@pytest.mark.parametrize("flat", [False, True])
def test_the_tools_know_the_class_by_the_names_of_the_plain_model(cluster: Cluster, flat: bool) -> None:
    """Wrappers, nested too, are in no name of model or optimizer state."""
    cluster.run(check_wrapped, flat)


def check_set(rank: int, shape: tuple[int, ...]) -> None:
    mesh = mesh_of(shape)
    source = build(theirs, seed=1, mesh=mesh, steps=2)
    kinds = [(False, False), (True, False), (True, True)]
    for (full_dict, broadcast), offload, flat in itertools.product(kinds, (False, True), (False, True)):
        get = StateDictOptions(full_state_dict=full_dict, flatten_optimizer_state_dict=flat)
        put = StateDictOptions(
            full_state_dict=full_dict,
            cpu_offload=offload,
            broadcast_from_rank0=broadcast,
            flatten_optimizer_state_dict=flat,
            strict=offload,
        )
        if full_dict and flat:
            continue  # torch's tool cannot do this: KeyError
        results = []
        for library in (ours, theirs):
            model, optimizer = build(library, mesh=mesh)
            values, states = copy.deepcopy(get_state_dict(*source, options=get))  # state is taken over, not copied
            if broadcast and rank:
                values, states = {}, {}
            if broadcast:  # set_state_dict would leave the ranks without values out of the broadcast of the model
                set_model_state_dict(model, values, options=put)
                set_optimizer_state_dict(model, optimizer, states, options=put)
            else:
                set_state_dict(model, optimizer, model_state_dict=values, optim_state_dict=states, options=put)
            train(model, optimizer, 1)
            results.append(get_state_dict(model, optimizer))
        assert_same(*results)


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=["1-D", "HSDP"])
def test_what_the_tools_load_trains_on_the_same_as_with_torch(cluster: Cluster, shape: tuple[int, ...]) -> None:
    cluster.run(check_set, shape, world_size=2 * len(shape))


def check_not_strict(rank: int) -> None:
    for broadcast in (False, True):
        results = []
        for library in (ours, theirs):
            model, _ = build(library)
            state = {name: full(value) for name, value in build(ours, seed=1)[0].state_dict().items()}
            state.pop("first.bias")
            state["extra"] = torch.zeros(2)
            options = {"full_state_dict": True, "broadcast_from_rank0": broadcast}
            given = dict(state) if rank == 0 or not broadcast else {}
            with pytest.raises(RuntimeError, match=r"Missing key|Unexpected key|first.bias"):
                set_model_state_dict(model, given, options=StateDictOptions(**options))
            given = dict(state) if rank == 0 or not broadcast else {}
            keys = set_model_state_dict(model, given, options=StateDictOptions(strict=False, **options))
            results.append((get_model_state_dict(model), keys.missing_keys, keys.unexpected_keys))
        assert_same(*results)


def test_missing_and_unexpected_keys_are_reported_as_by_torch(cluster: Cluster) -> None:
    """B100: for the tools; `load_state_dict` itself also leaves the model as it was."""
    cluster.run(check_not_strict)


class Renamed(Dims):
    """Saves `third` under the name of its parent, as models that were split later do."""

    def _fqn_modifiers(self) -> dict[str, str]:
        return {}

    def my_modifiers(self) -> dict[str, str]:
        return {}


def check_modifiers(rank: int) -> None:
    results = []
    for library in (ours, theirs):
        torch.manual_seed(0)
        model = Renamed()
        library.fully_shard(model)
        state = get_model_state_dict(model, options=StateDictOptions(dsd_fqn_modifiers="my_modifiers"))
        set_model_state_dict(model, state, options=StateDictOptions(dsd_fqn_modifiers="my_modifiers"))
        results.append(get_model_state_dict(model))
    assert_same(*results)


def test_name_modifiers(cluster: Cluster) -> None:
    cluster.run(check_modifiers)


# State before the first step, frozen and tied parameters


def check_before_first_step(rank: int, how: str, kind: type[torch.optim.Optimizer]) -> None:
    def options() -> dict[str, Any]:
        return {"lr": 0.1, "weight_decay": 0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {})}

    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1))
    ours.fully_shard(model[0])
    ours.fully_shard(model)
    optimizers = [kind(m.parameters(), **options()) for m in (reference, model)]
    state = get_optimizer_state_dict(model, optimizers[1])
    if how == "get and set":
        set_optimizer_state_dict(model, optimizers[1], state)
    for m, optimizer in zip((reference, model), optimizers, strict=True):
        train(m, optimizer, 1)
    for one, two in zip(reference.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(two.detach()), one.detach())
        assert optimizers[1].state[two].get("step", 1) == 1
    set_optimizer_state_dict(model, optimizers[1], get_optimizer_state_dict(model, optimizers[1]))
    for m, optimizer in zip((reference, model), optimizers, strict=True):
        train(m, optimizer, 1)
    for one, two in zip(reference.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(two.detach()), one.detach())


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.NAdam, torch.optim.SGD])
@pytest.mark.parametrize("how", ["get", "get and set"])
def test_state_made_before_the_first_step_does_not_count_as_one(cluster: Cluster, how: str, kind: Any) -> None:
    """B64: torch's tools make state by a step; weight decay and step counts must not remain of it."""
    cluster.run(check_before_first_step, how, kind)


def check_frozen(rank: int) -> None:
    """Directly, every state survives; the tools do what they do for torch."""
    results = []
    for library in (ours, theirs):
        model, optimizer = build(library)
        a, b = model.first.weight, model.second.weight
        optimizer.zero_grad()
        b.requires_grad_(False)
        train(model, optimizer, 1)
        a.requires_grad_(False)
        b.requires_grad_(True)
        train(model, optimizer, 1)
        saved = optimizer.state_dict()
        other, loaded = build(library)
        loaded.load_state_dict(saved)
        for one, two in ((a, other.first.weight), (b, other.second.weight)):
            assert optimizer.state[one]["step"] == loaded.state[two]["step"] == 1
            assert torch.equal(full(optimizer.state[one]["exp_avg"]), full(loaded.state[two]["exp_avg"]))
        state = get_optimizer_state_dict(model, optimizer)
        assert state["state"]["first.weight"]["step"] == 1
        set_optimizer_state_dict(model, optimizer, state)
        results.append(get_optimizer_state_dict(model, optimizer))
    assert_same(*results)


def test_states_of_parameters_that_were_frozen_for_a_while(cluster: Cluster) -> None:
    """B102."""
    cluster.run(check_frozen)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(x)))


def check_tied(rank: int, meta: bool) -> None:
    results = []
    for library in (ours,) if meta else (ours, theirs):  # torch's own module is untied by loading on the meta device
        pair = []
        for seed in (1, 0):
            torch.manual_seed(seed)
            with torch.device("meta" if meta and not seed else "cpu"):
                model = Tied()
            library.fully_shard(model.body)
            library.fully_shard(model)
            pair.append((model, torch.optim.AdamW(model.parameters(), lr=0.1)))
        (source, stepped), (model, _) = pair
        source(torch.arange(7)).square().mean().backward()
        stepped.step()
        for broadcast in (False, True):
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
            values, states = get_state_dict(source, stepped, options=StateDictOptions(full_state_dict=True))
            expected = copy.deepcopy(values)
            if broadcast and rank:
                values, states = {}, {}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of a function of its own if nothing has a device
                set_model_state_dict(model, values, options=options)
            assert model.head.weight is model.embedding.weight
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            set_optimizer_state_dict(model, optimizer, states, options=options)
            results.append(get_state_dict(model, optimizer))
            assert_same(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), expected)
    for result in results[1:]:
        assert_same(results[0], result)


@pytest.mark.parametrize("meta", [False, True], ids=["real", "meta"])
def test_tied_weights_through_the_tools(cluster: Cluster, meta: bool) -> None:
    """B04, B05."""
    cluster.run(check_tied, meta)


# Checkpoints


class App(Stateful):
    """Model and optimizer as one entry of a checkpoint."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optimizer"]
        )


def gathered(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Everything of both, whole."""
    return get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))


def check_save(rank: int, folder: str, library: str, shape: tuple[int, ...] | None = None, rows: int = 2) -> Any:
    model, optimizer = build(NAMES[library], 1, shape and mesh_of(shape), steps=2, rows=rows)
    dcp.save({"app": App(model, optimizer)}, checkpoint_id=folder)
    return gathered(model, optimizer)


def check_load(
    rank: int, folder: str, expected: Any, library: str, shape: tuple[int, ...] | None = None, rows: int = 2
) -> None:
    model, optimizer = build(NAMES[library], 0, shape and mesh_of(shape), rows=rows)
    dcp.load({"app": App(model, optimizer)}, checkpoint_id=folder)
    assert_same(gathered(model, optimizer), expected)
    train(model, optimizer, 1)


NAMES: dict[str, Any] = {"ours": ours, "theirs": theirs}


@pytest.mark.parametrize("saved", [1, 2, 3, 4])
def test_checkpoint_of_any_world_size_loads_at_any_other(cluster: Cluster, tmp_path: Path, saved: int) -> None:
    """B105: all pairs of 1 to 4 ranks, dims that leave ranks without rows, Adam's state."""
    expected = cluster.run(check_save, str(tmp_path / "c"), "ours", None, 0, world_size=saved)[0]
    for loaded in (1, 2, 3, 4):
        cluster.run(check_load, str(tmp_path / "c"), expected, "ours", None, 0, world_size=loaded)


@pytest.mark.parametrize(("saver", "loader"), [("ours", "theirs"), ("theirs", "ours")])
def test_checkpoints_are_exchanged_with_torch(cluster: Cluster, tmp_path: Path, saver: str, loader: str) -> None:
    expected = cluster.run(check_save, str(tmp_path / "c"), saver, world_size=3)[0]
    cluster.run(check_load, str(tmp_path / "c"), expected, loader, world_size=2)
    cluster.run(check_load, str(tmp_path / "c"), expected, loader, (2, 2), world_size=4)


def test_checkpoints_between_one_axis_and_two(cluster: Cluster, tmp_path: Path) -> None:
    expected = cluster.run(check_save, str(tmp_path / "c"), "ours", (2, 2), world_size=4)[0]
    cluster.run(check_load, str(tmp_path / "c"), expected, "ours", (3,), world_size=3)
    expected = cluster.run(check_save, str(tmp_path / "d"), "ours", (3,), world_size=3)[0]
    cluster.run(check_load, str(tmp_path / "d"), expected, "ours", (2, 2), world_size=4)


def check_plain_dicts(rank: int, folder: str) -> None:
    """Without the tools: `state_dict()` in and out of a checkpoint, and from the shards of a running step."""
    model, optimizer = build(ours, seed=1, steps=1)
    loss = model(torch.ones(2, 5)).sum()  # the root keeps full parameters here
    # Its thread communicates, too: on a group of its own, or its messages would mix with those of the training.
    group = dist.new_group()
    future = dcp.async_save({"model": model.state_dict()}, checkpoint_id=f"{folder}/a", process_group=group)
    loss.backward()
    with torch.no_grad():
        expected = {name: full(value).clone() for name, value in model.state_dict().items()}
    future.result()
    optimizer.step()
    other, _ = build(ours, seed=0)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=f"{folder}/a")  # writes into the shards that the state dict shows
    other.load_state_dict(state["model"])
    for name, value in other.state_dict().items():
        assert torch.equal(full(value), expected[name]), name
    whole = {name: torch.zeros_like(value) for name, value in expected.items()}
    dcp.load({"model": whole}, checkpoint_id=f"{folder}/a")  # full tensors out of it
    for name, value in whole.items():
        assert torch.equal(value, expected[name]), name


def test_state_dicts_go_through_checkpoints_without_the_tools(cluster: Cluster, tmp_path: Path) -> None:
    """Also by `async_save`, which copies before it returns."""
    cluster.run(check_plain_dicts, str(tmp_path))


# The older loader of optimizer state, for the class


def check_sharded_optimizer_loader(rank: int, folder: str) -> None:
    def build(seed: int) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = ours.FullyShardedDataParallel(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 1)))
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.full((2, 6), 1.0 + rank)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = build(0)
    step(model, optimizer)
    tools = ours.FullyShardedDataParallel
    with tools.state_dict_type(model, ours.StateDictType.SHARDED_STATE_DICT):
        dcp.save({"model": model.state_dict(), "optim": tools.optim_state_dict(model, optimizer)}, checkpoint_id=folder)
    other, its_optimizer = build(1)
    with tools.state_dict_type(other, ours.StateDictType.SHARDED_STATE_DICT), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own function warns of its own types
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        other.load_state_dict(state["model"])
        reader = dcp.FileSystemReader(folder)
        loaded = load_sharded_optimizer_state_dict(state["model"], "optim", reader)
    with tools.state_dict_type(other, ours.StateDictType.SHARDED_STATE_DICT):
        its_optimizer.load_state_dict(tools.optim_state_dict_to_load(other, its_optimizer, loaded["optim"]))
        first = loaded["optim"]["state"]["0.weight"]["exp_avg"]
        loaded["optim"]["state"]["1.weight"]["exp_avg"] = first
        with pytest.raises(ValueError, match=r"shape \(5, 6\) has rows"):
            tools.optim_state_dict_to_load(other, its_optimizer, loaded["optim"])
    step(model, optimizer)
    step(other, its_optimizer)
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(full(mine), full(its))


def test_state_from_the_older_sharded_optimizer_loader(cluster: Cluster, tmp_path: Path) -> None:
    """torch's FSDP1 examples load with `load_sharded_optimizer_state_dict`, which gives ShardedTensors."""
    cluster.run(check_sharded_optimizer_loader, str(tmp_path), world_size=2)
