"""State dicts of the class FSDP: the types, what is in them, and loading."""

from __future__ import annotations

import importlib
import io
import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from reference import assert_at_rest
from stack import Explosive
from test_optim_state import Odd, assert_same, full_values, make_optimizer, step
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from cluster import Cluster
from fullshard import (
    FSDP,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateKeyType,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictSettings,
    StateDictType,
    fully_shard,
)
from fullshard.errors import CommunicationError, MisuseError
from fullshard.runtime.whole.tensors import Gatherer
from fullshard.wrap import CustomPolicy

FULL, SHARDED, LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT


class WithBuffer(Odd):
    """Also has a buffer that is saved, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counted", torch.arange(3.0))
        self.register_buffer("passing", torch.ones(2), persistent=False)


def make(wrapped: bool = True, **options: Any) -> Any:
    torch.manual_seed(0)
    model = WithBuffer().double()
    if not wrapped:
        return model
    chosen = (model.first, model.second)
    policy = CustomPolicy(lambda module: any(module is each for each in chosen))
    return FSDP(model, auto_wrap_policy=policy, **options)


# What is in them


def check_full(rank: int, in_parent: bool) -> None:
    ours, plain = make(), make(wrapped=False)
    if in_parent:
        ours, plain = nn.ModuleDict({"model": ours}), nn.ModuleDict({"model": plain})
    want = plain.state_dict()
    state = ours.state_dict()
    assert_same(state, dict(want))
    assert list(state) == list(want)
    head, embedding = [state[key] for key in state if "head" in key or "embedding" in key]
    assert head is embedding  # saved once
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    assert_same(state, dict(want))  # a copy
    assert_same(ours.load_state_dict(want).missing_keys, [])
    assert_same(ours.state_dict(), dict(want))
    plain.load_state_dict(state)
    for assign in (False, True):
        with torch.no_grad():
            for parameter in ours.parameters():
                parameter.zero_()
        ours.load_state_dict(state, assign=assign)
        assert_same(ours.state_dict(), dict(want))
    assert all(isinstance(p, DTensor) for p in ours.parameters())


@pytest.mark.parametrize("in_parent", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
def test_full_state_is_the_plain_models_in_keys_order_and_values(
    cluster: Cluster, world_size: int, in_parent: bool
) -> None:
    cluster.run(check_full, in_parent, world_size=world_size)


def check_rank0_only(rank: int) -> None:
    ours, plain = make(), make(wrapped=False)
    with FSDP.state_dict_type(ours, FULL, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)):
        state = ours.state_dict()
    assert_same(dict(state), dict(plain.state_dict()) if rank == 0 else {})


def test_rank0_only_leaves_an_empty_dict_elsewhere(cluster: Cluster) -> None:
    cluster.run(check_rank0_only)


def check_sharded_and_local(rank: int) -> None:
    ours, plain = make(), make(wrapped=False)
    want = dict(plain.state_dict())
    for kind, offload in itertools.product([SHARDED, LOCAL], [False, True]):
        config = {SHARDED: ShardedStateDictConfig, LOCAL: LocalStateDictConfig}[kind](offload_to_cpu=offload)
        with FSDP.state_dict_type(ours, kind, config):
            state = ours.state_dict()
            assert list(state) == list(want)
            assert isinstance(state["first.weight"], DTensor)
            assert state["first.weight"].shape == (5, 3)
            assert type(state["counted"]) is torch.Tensor
            saved = {key: value.clone() for key, value in state.items()}
            with torch.no_grad():
                for parameter in ours.parameters():
                    parameter.zero_()
            ours.load_state_dict(saved)
        assert_same(dict(ours.state_dict()), want)
    assert_at_rest(ours)


def test_sharded_and_local_state_are_read_back(cluster: Cluster) -> None:
    cluster.run(check_sharded_and_local, world_size=3)


def check_local_checkpoint(rank: int, folder: str) -> None:
    """Plain rows would be one rank's for all: equal keys without a word about whose rows they are."""
    ours = make()
    optimizer = make_optimizer(ours)
    step(ours, optimizer)
    want, averages = dict(ours.state_dict()), full_averages(ours, optimizer)
    with FSDP.state_dict_type(ours, LOCAL):
        optimizer_state = FSDP.optim_state_dict(ours, optimizer)
        dcp.save({"model": ours.state_dict(), "optimizer": optimizer_state["state"]}, checkpoint_id=folder)
        with torch.no_grad():
            for tensor in [*ours.parameters(), *(v for s in optimizer.state.values() for v in s.values())]:
                tensor.zero_()
        state = {"model": ours.state_dict(), "optimizer": FSDP.optim_state_dict(ours, optimizer)["state"]}
        dcp.load(state, checkpoint_id=folder)
        ours.load_state_dict(state["model"])
        named = {**optimizer_state, "state": state["optimizer"]}
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(ours, optimizer, named))
    assert_same(dict(ours.state_dict()), want)
    assert_same(full_averages(ours, optimizer), averages)


def full_averages(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state: dict[str, Any] = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
    return state


def test_a_checkpoint_of_the_local_form_has_every_ranks_rows(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(check_local_checkpoint, str(tmp_path))


def check_memory(rank: int) -> None:
    """Every whole tensor is let go before the next one is gathered, where nothing is kept."""
    ours = make()
    alive: list[Any] = []
    most = 0
    gather = Gatherer.full

    def counted(self: Gatherer, tensor: torch.Tensor, name: str = "") -> torch.Tensor:
        nonlocal most
        made = gather(self, tensor, name)
        alive.append(torch.utils.weak.WeakTensorKeyDictionary({made: 1}))
        most = max(most, sum(len(each) for each in alive))
        return made

    with pytest.MonkeyPatch.context() as patch, FSDP.state_dict_type(ours, FULL, FullStateDictConfig(rank0_only=True)):
        patch.setattr(Gatherer, "full", counted)
        state = ours.state_dict()
    assert most == (len({id(value) for value in state.values()}) - 1 if rank == 0 else 1)


def test_full_state_gathers_one_tensor_at_a_time(cluster: Cluster) -> None:
    cluster.run(check_memory)


# Types


def _raise_under(model: nn.Module, kind: StateDictType) -> None:
    with FSDP.state_dict_type(model, kind):
        assert FSDP.get_state_dict_type(model.first).state_dict_type is kind
        raise KeyError("inside")


def check_types(rank: int) -> None:
    ours = make()
    assert FSDP.get_state_dict_type(ours) == StateDictSettings(FULL, FullStateDictConfig(), FullOptimStateDictConfig())
    before = FSDP.set_state_dict_type(ours, SHARDED)
    assert before.state_dict_type is FULL
    assert FSDP.get_state_dict_type(ours).state_dict_config == ShardedStateDictConfig()
    with pytest.raises(KeyError, match="inside"):
        _raise_under(ours, LOCAL)
    assert FSDP.get_state_dict_type(ours.first).state_dict_type is SHARDED
    with FSDP.state_dict_type(ours.first, FULL):
        assert not isinstance(ours.state_dict()["first.weight"], DTensor)
        assert isinstance(ours.state_dict()["second.weight"], DTensor)
        with pytest.raises(ValueError, match=r"different state dict types: \['FULL_STATE_DICT', 'SHARDED"):
            FSDP.get_state_dict_type(ours)
    with pytest.raises(TypeError, match="state_dict_config must be a LocalStateDictConfig or None, got FullState"):
        FSDP.set_state_dict_type(ours, LOCAL, FullStateDictConfig())
    with pytest.raises(TypeError, match="state_dict_type must be a StateDictType, got 'full'"):
        FSDP.set_state_dict_type(ours, "full")  # type: ignore[arg-type]
    assert FSDP.get_state_dict_type(nn.Linear(1, 1)) == StateDictSettings()


def test_types_are_set_for_every_wrapper_and_restored(cluster: Cluster) -> None:
    cluster.run(check_types)


# Loading


def _broken(state: dict[str, Any], how: str) -> dict[str, Any]:
    broken = {key: torch.full_like(value, 9.0) for key, value in state.items()}
    if how == "missing":
        del broken["second.weight"]
    elif how == "unexpected":
        broken["third.weight"] = torch.ones(2)
    else:
        broken["second.weight"] = torch.ones(2, 2)
    return broken


def check_strict(rank: int, how: str, api: str, assign: bool) -> None:
    plain = make(wrapped=False)
    if api == "class":
        ours = make()
        broken = _broken(plain.state_dict(), how)
    else:
        ours = make(wrapped=False)
        fully_shard(ours.first)
        fully_shard(ours)
        broken = _broken(ours.state_dict(), how)
    before, objects = full_values(ours), list(ours.parameters())
    text = {
        "missing": 'Missing key.*"second.weight"',
        "unexpected": 'Unexpected key.*"third.weight"',
        "shape": "size mismatch for second.weight",
    }
    with pytest.raises(RuntimeError, match=f"(?s){text[how]}"):
        ours.load_state_dict(broken, assign=assign)
    assert_same(full_values(ours), before)
    assert all(one is other for one, other in zip(ours.parameters(), objects, strict=True))
    assert torch.equal(ours.counted, plain.counted)
    step(ours, make_optimizer(ours))
    if how != "shape":
        found = ours.load_state_dict(broken, strict=False)
        assert list(found.missing_keys) == (["second.weight"] if how == "missing" else [])
        assert list(found.unexpected_keys) == (["third.weight"] if how == "unexpected" else [])
        assert bool((full_values(ours)["first.weight"] == 9.0).all())


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("api", ["class", "fully_shard"])
@pytest.mark.parametrize("how", ["missing", "unexpected", "shape"])
def test_a_load_that_does_not_fit_raises_and_changes_nothing(
    cluster: Cluster, how: str, api: str, assign: bool
) -> None:
    """B100."""
    cluster.run(check_strict, how, api, assign)


# Names


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Deep(nn.Module):
    """A root, a block, a sub-block."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.block(x))


BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
WRAPPERS = {
    "shard": fully_shard,
    "class": FSDP,
    "checkpoint": checkpoint_wrapper,
    "compile": lambda module: torch.compile(module, backend="eager"),
}


def wrapped(where: str, order: tuple[str, ...], api: str) -> Any:
    """A model of which one module has all three wrappers, the first innermost."""
    torch.manual_seed(0)
    model: Any = Deep()
    for kind in order:
        if where == "root":
            model = WRAPPERS[kind](model)
        elif where == "block":
            model.block = WRAPPERS[kind](model.block)
        else:
            model.block.up = WRAPPERS[kind](model.block.up)
    return model if where == "root" else WRAPPERS[api](model)


def check_names(rank: int, api: str) -> None:
    torch.manual_seed(0)
    plain = Deep()
    want = plain.state_dict()
    for where, order in itertools.product(
        ["root", "block", "sub"], itertools.permutations([api, "checkpoint", "compile"])
    ):
        if where == "root" and order.index("compile") > order.index(api):
            continue  # outside of what is sharded torch.compile's own module makes the keys, as of any module
        model = wrapped(where, order, api)
        state = model.state_dict()
        assert sorted(state) == sorted(want), (where, order, list(state))
        values = {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in state.items()}
        assert_same(values, dict(want))
        plain.load_state_dict(values)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        if api == "class":
            model.load_state_dict(want)
        else:
            model.load_state_dict(state)
        if api == "class":
            assert_same(dict(model.state_dict()), dict(want))
        # torch's tools see through neither torch.compile inside of checkpoint_wrapper nor inside of the class.
        inside = order[order.index("compile") :]
        if "checkpoint" not in inside and "class" not in inside:
            check_torchs_tools(model, want, f"{where} {order}")


def check_torchs_tools(model: nn.Module, want: dict[str, torch.Tensor], label: str) -> None:
    """They walk through the modules by names of their own, and give the plain model's."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    set_model_state_dict(model, {name: value.clone() for name, value in want.items()}, options=options)
    found = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        assert sorted(found) == sorted(want), label
        assert_same({name: found[name] for name in want}, dict(want))
    state = get_optimizer_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        assert set(state["state"]) == {name for name in want if name in dict(Deep().named_parameters())}, label
    set_optimizer_state_dict(model, optimizer, state if dist.get_rank() == 0 else {}, options=BROADCAST)


@pytest.mark.parametrize("api", ["shard", "class"])
def test_names_are_the_plain_models_for_every_order_of_wrappers(cluster: Cluster, api: str) -> None:
    """B99."""
    cluster.run(check_names, api, timeout=120)


# Optimizers


def check_optimizer(rank: int, rank0_only: bool) -> None:
    ours, plain = make(), make(wrapped=False)
    optimizer, reference = make_optimizer(ours), make_optimizer(plain)
    step(ours, optimizer, 2)
    step(plain, reference, 2)
    config = FullOptimStateDictConfig(rank0_only=rank0_only)
    with FSDP.state_dict_type(ours, FULL, FullStateDictConfig(), config):
        state = FSDP.optim_state_dict(ours, optimizer)
        want = FSDP.rekey_optim_state_dict(reference.state_dict(), OptimStateKeyType.PARAM_NAME, plain, optim=reference)
        if rank == 0 or not rank0_only:
            assert_same(state["state"], want["state"])
            assert [sorted(group["params"]) for group in state["param_groups"]] == [
                group["params"] for group in want["param_groups"]
            ]
        else:
            assert state == {}
        assert_same(FSDP.optim_state_dict(ours, optimizer, optimizer.state_dict()), state)
        other = make_optimizer(ours)
        made = FSDP.optim_state_dict_to_load(ours, other, state, load_directly=True)
        assert list(made["param_groups"][0]["params"]) == list(range(len(made["param_groups"][0]["params"])))
        assert_same(FSDP.optim_state_dict(ours, other), state)
        named = FSDP.optim_state_dict_to_load(ours, other, state, is_named_optimizer=True)
        assert set(named["state"]) == set(want["state"])
    step(ours, other)
    step(plain, reference)
    assert_same(full_values(ours), full_values(plain))


@pytest.mark.parametrize("rank0_only", [False, True])
def test_optimizer_state_is_the_plain_optimizers_by_names(cluster: Cluster, rank0_only: bool) -> None:
    """With `rank0_only` the others get theirs from rank 0."""
    cluster.run(check_optimizer, rank0_only, world_size=3)


def check_older_names(rank: int) -> None:
    ours = make()
    optimizer = make_optimizer(ours)
    step(ours, optimizer, 2)
    full = FSDP.full_optim_state_dict(ours, optimizer)
    assert bool(full) == (rank == 0)
    everywhere = FSDP.full_optim_state_dict(ours, optimizer, rank0_only=False)
    sharded = FSDP.sharded_optim_state_dict(ours, optimizer)
    assert isinstance(sharded["state"]["first.weight"]["exp_avg"], DTensor)
    groups = [dict(group) for group in optimizer.param_groups]
    for made in (
        FSDP.scatter_full_optim_state_dict(full if rank == 0 else None, ours, optim=optimizer),
        FSDP.shard_full_optim_state_dict(everywhere, ours, optim=optimizer),
        FSDP.shard_full_optim_state_dict(everywhere, ours, optim_input=groups),
        FSDP.flatten_sharded_optim_state_dict(sharded, ours, optimizer),
    ):
        other = make_optimizer(ours)
        other.load_state_dict(made)
        assert_same(FSDP.full_optim_state_dict(ours, other, rank0_only=False), everywhere)
    with pytest.raises(ValueError, match="rank 0 has no optimizer state"):
        FSDP.scatter_full_optim_state_dict(None, ours, optim=optimizer)
    with pytest.raises(ValueError, match="cannot be given together"):
        FSDP.shard_full_optim_state_dict(everywhere, ours, groups, optimizer)
    with pytest.raises(TypeError, match="must be an OptimStateKeyType, got 'name'"):
        FSDP.rekey_optim_state_dict(everywhere, "name", ours, optim=optimizer)  # type: ignore[arg-type]


def test_the_older_names_do_the_same(cluster: Cluster) -> None:
    cluster.run(check_older_names)


# On one rank alone, and files


def check_alone(rank: int) -> None:
    ours = make()
    if rank == 0:
        with pytest.raises(CommunicationError, match=r"full state dict of .*waited for rank\(s\) \[1\]"):
            ours.state_dict()


def test_a_full_state_dict_on_one_rank_alone_ends_with_an_error_that_names_the_others(cluster: Cluster) -> None:
    """B111."""
    cluster.run(check_alone, group_timeout=2.0)


def check_saved_by_rank_0(rank: int) -> None:
    ours, plain = make(), make(wrapped=False)
    state = ours.state_dict()
    if rank == 0:
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        plain.load_state_dict(torch.load(file, weights_only=True))
    assert dist.get_world_size() == 2


def test_what_rank_0_saves_of_the_default_state_is_whole(cluster: Cluster) -> None:
    """B112."""
    cluster.run(check_saved_by_rank_0)


def check_rows_of_another_rank(rank: int, file: str) -> None:
    ours = make()
    with FSDP.state_dict_type(ours, SHARDED):
        if rank == 0:
            torch.save(ours.state_dict(), file)
        dist.barrier()
        state, before = torch.load(file, weights_only=True), full_values(ours)
        if rank == 0:
            ours.load_state_dict(state)
        else:
            with pytest.raises(
                MisuseError, match=r"value of '[a-z.]+' holds only the rows of rank 0, .* this is rank 1"
            ):
                ours.load_state_dict(state)
        assert_same(full_values(ours), before)
    plain = make(wrapped=False)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        plain.load_state_dict(state)


def test_a_sharded_state_dict_in_one_ranks_file_is_not_taken_for_the_model(cluster: Cluster, tmp_path: Path) -> None:
    """B112."""
    cluster.run(check_rows_of_another_rank, str(tmp_path / "state.pt"))


# Whatever came before


class Saves(nn.Module):
    """Asks for the state dict of the model around it, in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.outer: list[nn.Module] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for outer in self.outer:
            outer.state_dict()
        return self.linear(x)


def _save_finally(model: nn.Module, rank: int) -> dict[str, Any]:
    state: dict[str, Any] = {}
    try:
        Explosive.apply(model(torch.ones(2, 4) * rank)).sum().backward()
    finally:
        state.update(model.state_dict())
        raise_if_wrong(state)
    return state


def raise_if_wrong(state: dict[str, Any]) -> None:
    torch.manual_seed(0)
    assert_same(state, dict(Saves().state_dict()))


def check_whatever_came_before(rank: int, strategy: str) -> None:
    torch.manual_seed(0)
    mixed = MixedPrecision(param_dtype=torch.bfloat16)
    model = FSDP(Saves(), sharding_strategy=ShardingStrategy[strategy], mixed_precision=mixed)
    plain = dict(Saves().state_dict())
    with pytest.raises(ValueError, match="bad backward"):
        _save_finally(model, rank)
    with torch.no_grad():
        model(torch.ones(2, 4))
    raise_if_wrong(model.state_dict())
    loss = model(torch.ones(2, 4)).sum()  # a unit that keeps its full parameters does so now
    state = model.state_dict()
    raise_if_wrong(state)
    loss.backward()
    raise_if_wrong(model.state_dict())
    model.module.outer.append(model)
    with pytest.raises(MisuseError, match="was called while its forward runs"):
        model(torch.ones(2, 4))
    assert sorted(state) == sorted(plain)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_full_state_is_right_in_the_stored_dtype_whatever_came_before(cluster: Cluster, strategy: str) -> None:
    """B42."""
    cluster.run(check_whatever_came_before, strategy)


def check_hybrid(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    ours, plain = make(device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD), make(wrapped=False)
    want = dict(plain.state_dict())
    assert_same(dict(ours.state_dict()), want)
    with FSDP.state_dict_type(ours, FULL, FullStateDictConfig(rank0_only=True)):
        assert_same(dict(ours.state_dict()), want if rank == 0 else {})
    with FSDP.summon_full_params(ours), torch.no_grad():
        ours.first.weight.add_(1.0)
    want["first.weight"] = want["first.weight"] + 1.0
    assert_same(dict(ours.state_dict()), want)
    ours.load_state_dict(plain.state_dict())
    optimizer, reference = make_optimizer(ours), make_optimizer(plain)
    step(ours, optimizer)
    step(plain, reference)
    with FSDP.state_dict_type(ours, FULL, FullStateDictConfig(), FullOptimStateDictConfig(rank0_only=True)):
        state = FSDP.optim_state_dict(ours, optimizer)
        assert bool(state) == (rank == 0)
        FSDP.optim_state_dict_to_load(ours, optimizer, state, load_directly=True)
    step(ours, optimizer)
    step(plain, reference)
    assert_same(full_values(ours), full_values(plain))


def test_replicas_write_and_read_the_same(cluster: Cluster) -> None:
    cluster.run(check_hybrid, world_size=4)


# Beside torch's class


class Simple(nn.Module):
    """What torch's class takes: no 0-d parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 5)
        self.down = nn.Linear(5, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.unused = nn.Linear(2, 1)
        self.register_buffer("counted", torch.arange(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.down(self.up(x).relu()))


def _dicts_of(module: Any, rank: int, **options: Any) -> list[Any]:
    """What one implementation writes: the model's state, the optimizer's, what is loaded, by number, at rank 0 only."""
    torch.manual_seed(0)
    inner = Simple()
    policy = module.wrap.ModuleWrapPolicy({nn.Linear})
    model = module.FullyShardedDataParallel(inner, auto_wrap_policy=policy, **options)
    groups = [{"params": list(inner.up.parameters()), "lr": 0.1}]
    groups.append({"params": [p for part in (inner.down, inner.frozen, inner.unused) for p in part.parameters()]})
    optimizer = torch.optim.AdamW(groups)
    for _ in range(2):
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    kind = module.StateDictType.FULL_STATE_DICT
    cls = module.FullyShardedDataParallel
    state = cls.optim_state_dict(model, optimizer)
    optimizer.load_state_dict(cls.optim_state_dict_to_load(model, optimizer, state))
    with cls.state_dict_type(model, kind, optim_state_dict_config=module.FullOptimStateDictConfig(rank0_only=True)):
        first = cls.optim_state_dict(model, optimizer)
        cls.optim_state_dict_to_load(model, optimizer, first, load_directly=True)
    torch.manual_seed(0)
    plain = Simple()
    theirs = torch.optim.AdamW([{"params": plain.up.parameters()}, {"params": [*plain.parameters()][2:]}])
    key_type = importlib.import_module(f"{module.__name__}.fully_sharded_data_parallel").OptimStateKeyType
    numbered = cls.rekey_optim_state_dict(state, key_type.PARAM_ID, plain, optim=theirs)
    theirs.load_state_dict(numbered)
    older = [cls.full_optim_state_dict(model, optimizer), cls.optim_state_dict(model, optimizer)]
    return [dict(model.state_dict()), state, first, numbered, *older]


def check_beside_torch(rank: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = _dicts_of(
            importlib.import_module("torch.distributed.fsdp"), rank, use_orig_params=True, device_id=torch.device("cpu")
        )
    ours = _dicts_of(importlib.import_module("fullshard"), rank)
    assert_same(ours[0], theirs[0], tolerance=1e-6)
    for number, (got, want) in enumerate(zip(ours, theirs, strict=True)):
        assert_same(_zeros(got), _zeros(want), f"{number}")


def _zeros(value: Any) -> Any:
    """The structure alone: torch 2.13 itself mixes up the two averages of some biases."""
    return tree_map(lambda leaf: torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)


def test_dicts_are_those_of_torchs_class(cluster: Cluster) -> None:
    """Keys, types, shapes and structure of the model's and the optimizer's state, and the model's values."""
    cluster.run(check_beside_torch)
