"""Objects to named tensors and values, and back, at any number of ranks and with any strategy; files in memory."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import test_optim_state
import torch
import torch.distributed as dist
from memory_checkpoint import Stored, load, save
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor

from cluster import Cluster
from fullshard import FSDPModule, FullyShardedDataParallel, full_parameters, full_tensor, fully_shard
from fullshard import optim as flat_optim
from fullshard.errors import CheckpointMismatchError, MisuseError, UninitializedError
from fullshard.runtime import dtensors
from fullshard.runtime.checkpoint.state.collect import collect
from fullshard.runtime.checkpoint.state.joining import join
from fullshard.runtime.checkpoint.state.special import RandomState, only, per_rank
from fullshard.runtime.dtensors import StridedShard, local_of


class Odd(test_optim_state.Odd):
    """With buffers, too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.tensor([1, 2]))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


class Wide(nn.Module):
    """Enough for a tensor-parallel plan, and large enough for replicas to share the writing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 528)
        self.second = nn.Linear(528, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def build(kind: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return kind()


def plain(model: Any) -> nn.Module:
    return model


def sharded(model: Any) -> nn.Module:
    fully_shard(model.first)
    fully_shard(model.second)
    return fully_shard(model)


def by_class(model: Any) -> nn.Module:
    model.first = FullyShardedDataParallel(model.first)
    return FullyShardedDataParallel(model)


def data_parallel(model: Any) -> nn.Module:
    return DistributedDataParallel(model)


def tensor_parallel(model: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return _parallelize(model, mesh)


def two_d(model: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    _parallelize(model, mesh["tp"])
    fully_shard(model.first, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def hybrid(model: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model.first, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def replicated(model: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    return fully_shard(model, mesh=mesh)


def _parallelize(model: Any, mesh: Any) -> nn.Module:
    return parallelize_module(model, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})


STRATEGIES: dict[str, Callable[[Any], nn.Module]] = {
    function.__name__: function
    for function in (plain, sharded, by_class, data_parallel, tensor_parallel, two_d, hybrid, replicated)
}


def whole(value: Any) -> Any:
    """The same values as plain tensors."""
    if isinstance(value, Mapping):
        return {name: whole(item) for name, item in value.items()}
    return full_tensor(value).clone() if isinstance(value, torch.Tensor) else value


def plain_model(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def contents(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Everything by plain names, as whole tensors."""
    model = plain_model(model)
    parameters = {name.replace("_fsdp_wrapped_module.", ""): p for name, p in model.named_parameters()}
    buffers = {name.replace("_fsdp_wrapped_module.", ""): b for name, b in model.named_buffers()}
    made = {"parameters": whole(parameters), "buffers": whole(buffers)}
    if optimizer is not None:
        names = {id(p): name for name, p in parameters.items()}
        made["state"] = {names[id(p)]: whole(state) for p, state in optimizer.state.items()}
        made["groups"] = [
            {
                **{k: v for k, v in group.items() if k != "params"},
                "names": sorted(names[id(p)] for p in group["params"]),
            }
            for group in optimizer.param_groups
        ]
    return made


def assert_equal(got: Any, want: Any, where: str = "") -> None:
    """Bit by bit."""
    if isinstance(want, dict):
        assert sorted(got) == sorted(want), where
        for name, value in want.items():
            assert_equal(got[name], value, f"{where}.{name}")
    elif isinstance(want, list):
        assert len(got) == len(want), where
        for number, value in enumerate(want):
            assert_equal(got[number], value, f"{where}[{number}]")
    elif isinstance(want, torch.Tensor):
        assert (got.shape, got.dtype) == (want.shape, want.dtype), where
        assert torch.equal(got, want), where
    else:
        assert got == want, where


def groups_of(model: Any) -> list[dict[str, Any]]:
    inside = plain_model(model)
    first = [p for name, p in inside.named_parameters() if "first" in name]
    rest = [p for name, p in inside.named_parameters() if "first" not in name]
    return [{"params": rest, "lr": 0.01}, {"params": first, "lr": 0.02, "weight_decay": 0.1}]


def adam(model: Any, *, flat: bool = False) -> torch.optim.Optimizer:
    if flat:
        return flat_optim.flat(torch.optim.AdamW, groups_of(model))
    return torch.optim.AdamW(groups_of(model))


def inputs_of(model: nn.Module) -> torch.Tensor:
    torch.manual_seed(7)
    return torch.arange(7) if isinstance(plain_model(model), Odd) or _is_odd(model) else torch.randn(3, 64)


def _is_odd(model: nn.Module) -> bool:
    return any(isinstance(part, Odd) for part in model.modules())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, times: int = 1) -> None:
    for _ in range(times):
        model(inputs_of(model)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


# -- the same at any number of ranks, B105, B106 -----------------------------------------------------------------------


def save_odd(rank: int) -> tuple[Stored, Any]:
    model = sharded(build(Odd, 0))
    optimizer = adam(model)
    train(model, optimizer, 2)
    return save({"model": model, "optimizer": optimizer}), contents(model, optimizer)


def load_odd(rank: int, saved: tuple[Stored, Any]) -> None:
    model = sharded(build(Odd, 1))
    optimizer = adam(model)
    done = load(saved[0], {"model": model, "optimizer": optimizer})
    assert done.missing == done.unexpected == done.skipped == ()
    assert_equal(contents(model, optimizer), saved[1])
    train(model, optimizer)


@functools.cache
def odd(cluster: Cluster, world_size: int) -> tuple[Stored, Any]:
    return cluster.run(save_odd, world_size=world_size)[0]


# All pairs through files: test_checkpoint.py.
@pytest.mark.parametrize(("before", "after"), [(3, 2), (1, 4), (4, 1)])
def test_any_number_of_ranks_loads_what_any_has_saved(cluster: Cluster, before: int, after: int) -> None:
    """B105, B106: dims 1, 2, 3, 5, 7, 0 and 0-d, tied, frozen and unused parameters, with Adam's state; bit-equal."""
    cluster.run(load_odd, odd(cluster, before), world_size=after)


# -- and with any strategy ---------------------------------------------------------------------------------------------


def save_wide(rank: int, strategy: str) -> tuple[Stored, Any]:
    model = STRATEGIES[strategy](build(Wide, 0))
    optimizer = adam(model)
    train(model, optimizer, 2)
    return save({"model": model, "optimizer": optimizer}), contents(model, optimizer)


def load_wide(rank: int, saved: tuple[Stored, Any], strategy: str) -> None:
    model = STRATEGIES[strategy](build(Wide, 1))
    optimizer = adam(model)
    for _ in range(2):  # the second time into state that is there
        load(saved[0], {"model": model, "optimizer": optimizer})
        assert_equal(contents(model, optimizer), saved[1])
        train(model, optimizer)


@functools.cache
def wide(cluster: Cluster, strategy: str) -> tuple[Stored, Any]:
    return cluster.run(save_wide, strategy, world_size=1 if strategy == "plain" else 4)[0]


_PAIRS = [
    *(("sharded", after) for after in STRATEGIES),
    *((before, "sharded") for before in STRATEGIES if before != "sharded"),
    *(("hybrid", "plain"), ("two_d", "by_class"), ("two_d", "plain"), ("data_parallel", "two_d"), ("plain", "hybrid")),
]


@pytest.mark.parametrize(("before", "after"), _PAIRS)
def test_any_strategy_loads_what_any_has_saved(cluster: Cluster, before: str, after: str) -> None:
    cluster.run(load_wide, wide(cluster, before), after, world_size=1 if after == "plain" else 4)


def check_shares(rank: int) -> None:
    model = hybrid(build(Wide, 0))
    held = collect({"model": model}).tensors
    big, small = held["model/first.weight"], held["model/first.bias"]
    # 528 rows over 2 shards, and each shard over 2 replicas; the bias is too small to be worth it.
    assert tuple(big.tensor.shape) == (132, 64)
    assert tuple(small.tensor.shape) == ((264,) if rank < 2 else (0,))
    assert big.tensor.data_ptr() >= local_of(model.first.weight).data_ptr() > 0
    assert held["model/second.weight"].division is held["model/second.bias"].division


def test_replicas_share_the_writing_of_large_pieces(cluster: Cluster) -> None:
    cluster.run(check_shares, world_size=4)


# -- sharded parameters, whatever came before --------------------------------------------------------------------------


class Fails(nn.Module):
    """Calls a function in the middle of forward when it has one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        self.inside: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.inside is not None:
            self.inside()
        return self.second(x)


def _no_backward(_gradient: torch.Tensor) -> None:
    raise KeyError("backward failed")


def _fail_behind(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
    output.register_hook(_no_backward)


def _shards(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: held.tensor.clone() for name, held in collect({"model": model}).tensors.items()}


def check_shown(rank: int) -> None:
    model: Any = build(Fails, 0)
    fully_shard(model.first, reshard_after_forward=False)
    fully_shard(model.second)
    fully_shard(model)
    before = _shards(model)
    x = torch.ones(2, 3)
    model(x)
    assert_equal(_shards(model), before)
    model.first.reshard()
    model.first.unshard()
    assert not isinstance(model.first.weight, DTensor)
    assert_equal(_shards(model), before)
    handle = model.second[0].register_forward_hook(_fail_behind)
    with pytest.raises(KeyError, match="backward failed"):
        model(x).sum().backward()
    assert not isinstance(model.second[0].weight, DTensor)
    assert_equal(_shards(model), before)
    handle.remove()
    with full_parameters(model), pytest.raises(MisuseError, match="inside full_parameters"):
        collect({"model": model})
    model.inside = lambda: collect({"model": model})
    with pytest.raises(MisuseError, match="while its forward runs"):
        model(x)
    model.inside = None
    assert_equal(_shards(model), before)
    if rank == 0:  # by itself
        assert_equal(_shards(model), before)
    model(x).sum().backward()


def test_sharded_parameters_are_saved_whatever_came_before(cluster: Cluster) -> None:
    """Units that are kept full, unsharded by hand, or left by a backward that failed; without communication."""
    cluster.run(check_shown)


def check_keeps_gathered(rank: int, stored: Stored, want: Any) -> None:
    model: Any = build(Odd, 1)
    fully_shard(model.first, reshard_after_forward=False)
    fully_shard(model)
    model.set_reshard_after_backward(False)
    model(torch.arange(7)).sum().backward()
    load(stored, {"model": model}, strict={"model": True})
    got = model(torch.arange(7))
    reference = build(Odd, 1)
    reference.load_state_dict(want["parameters"], strict=False)
    torch.testing.assert_close(got, reference(torch.arange(7)), rtol=1e-6, atol=1e-6)


def test_a_loaded_model_computes_with_what_was_loaded(cluster: Cluster) -> None:
    """What was gathered before is stale; engines hear of it."""
    stored, want = odd(cluster, 2)
    cluster.run(check_keeps_gathered, stored, want)


# -- names -------------------------------------------------------------------------------------------------------------


def _shard(model: Any) -> Any:
    return model if isinstance(model, FSDPModule) else fully_shard(model)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "shard": _shard,
    "class": FullyShardedDataParallel,
    "checkpoint": checkpoint_wrapper,
    "compile": lambda module: torch.compile(module, backend="eager"),
}
_ORDERS = [
    order
    for length in (1, 2, 3)
    for order in itertools.permutations(WRAPPERS, length)
    if not {"shard", "class"} <= set(order)
]


def check_names(rank: int) -> None:
    plain_keys = list(build(Odd, 0).state_dict())
    for order in _ORDERS:
        for place in ("first", ""):
            model: Any = build(Odd, 0)
            inside = model.get_submodule(place)
            for name in order:
                inside = WRAPPERS[name](inside)
            if place:
                model.first = inside
            else:
                model = inside
            made = collect({"model": model})
            names = {*made.tensors, *made.aliases}
            assert names == {f"model/{key}" for key in plain_keys}, (order, place)
            if len(order) == 3:
                load(save({"model": model}), {"model": model})


def test_names_are_the_plain_models_in_every_order_of_wrappers(cluster: Cluster) -> None:
    """B99."""
    cluster.run(check_names, world_size=1)


# -- what does not fit -------------------------------------------------------------------------------------------------


def check_strict(rank: int, saved: tuple[Stored, Any]) -> None:
    stored = saved[0]
    model: Any = build(Odd, 1)
    model.first = nn.Linear(3, 6)
    model.second = nn.Linear(6, 3)
    model.extra = nn.Parameter(torch.ones(2))
    model.register_buffer("seen", torch.tensor([1.0, 2.0]))
    del model.scale
    sharded(model)
    before = contents(model)
    with pytest.raises(CheckpointMismatchError) as caught:
        load(stored, {"model": model})
    text = str(caught.value)
    for part in (
        "nothing was changed",
        "not in the checkpoint: model/extra",
        "not wanted: model/scale",
        "model/first.weight has shape (5, 3) in the checkpoint, expected (6, 3)",
        "model/first.bias has shape (5,)",
        "model/second.weight has shape",
        "model/seen is torch.int64 in the checkpoint, expected torch.float32",
    ):
        assert part in text, text
    assert_equal(contents(model), before)


def check_not_strict(rank: int, saved: tuple[Stored, Any]) -> None:
    stored, want = saved
    model: Any = build(Odd, 1)
    model.extra = nn.Parameter(torch.ones(2))
    del model.scale
    sharded(model)
    optimizer = adam(model)
    optimizer.state[model.extra] = {"step": torch.tensor(5.0), "exp_avg": torch.ones_like(model.extra)}
    with pytest.raises(CheckpointMismatchError, match="not in the checkpoint: model/extra, optimizer/model/extra"):
        load(stored, {"model": model, "optimizer": optimizer})
    with pytest.raises(CheckpointMismatchError, match="not in the checkpoint: optimizer/model/extra"):
        load(stored, {"model": model, "optimizer": optimizer}, strict={"model": False})
    done = load(stored, {"model": model, "optimizer": optimizer}, strict=False)
    assert done.missing == ("model/extra", "optimizer/model/extra")
    assert done.unexpected == ("model/scale", "optimizer/model/scale")
    got = contents(model, optimizer)
    assert torch.equal(got["parameters"].pop("extra"), torch.ones(2))
    assert_equal(got["state"].pop("extra"), {"step": torch.tensor(5.0), "exp_avg": torch.ones(2)})  # left as it was
    want = {name: dict(values) if isinstance(values, dict) else values for name, values in want.items()}
    want["parameters"].pop("scale")
    want["state"].pop("scale")
    got.pop("groups")
    want.pop("groups")
    assert_equal(got, want)


def test_everything_that_does_not_fit_is_listed_and_nothing_is_changed(cluster: Cluster) -> None:
    """B100."""
    cluster.run(check_strict, odd(cluster, 2))


def test_strictness_of_model_and_optimizer_apart(cluster: Cluster) -> None:
    """B100."""
    cluster.run(check_not_strict, odd(cluster, 3))


def check_absent(rank: int, saved: tuple[Stored, Any]) -> None:
    model = sharded(build(Odd, 1))
    optimizer = adam(model)
    before = contents(model, optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    with pytest.raises(CheckpointMismatchError, match="not in the checkpoint: schedule"):
        load(saved[0], state)
    part = saved[0].without("optimizer/model/second.weight/exp_avg")
    with pytest.raises(CheckpointMismatchError, match=r"optimizer/model/second.weight/exp_avg is missing"):
        load(part, {"model": model, "optimizer": optimizer}, strict=False)
    with pytest.raises(
        CheckpointMismatchError, match="optimizer was saved as optimizer, and cannot be loaded as module"
    ):
        load(saved[0], {"model": model, "optimizer": model})
    others = torch.optim.AdamW(model.parameters())
    with pytest.raises(CheckpointMismatchError, match="were saved in 2 groups"):
        load(saved[0], {"model": model, "optimizer": others})
    for group in before["groups"]:
        group["initial_lr"] = group["lr"]
    assert_equal(contents(model, optimizer), before)
    assert load(saved[0], {"model": model}).skipped == ("optimizer",)


def test_what_is_asked_for_and_absent_is_an_error(cluster: Cluster) -> None:
    """B104: a schedule that was not saved, part of the optimizer's state, groups made otherwise."""
    cluster.run(check_absent, odd(cluster, 2))


# -- optimizers --------------------------------------------------------------------------------------------------------


def save_frozen(rank: int, flat: bool) -> tuple[Stored, Any]:
    model: Any = sharded(build(Odd, 0))
    model.unused.requires_grad_(False)
    optimizer = adam(model, flat=flat)
    train(model, optimizer)
    model.first.requires_grad_(False)
    train(model, optimizer)
    model.unused.requires_grad_(True)
    return save({"model": model, "optimizer": optimizer}), contents(model, optimizer)


def load_frozen(rank: int, saved: tuple[Stored, Any], flat: bool) -> None:
    for stepped in (False, True):
        model: Any = sharded(build(Odd, 1))
        optimizer = adam(model, flat=flat)
        if stepped:
            train(model, optimizer)
        load(saved[0], {"model": model, "optimizer": optimizer})
        got = contents(model, optimizer)
        assert_equal(got, saved[1])
        assert got["state"]["first.weight"]["step"] == 1
        assert got["state"]["second.weight"]["step"] == 2
        assert "unused.weight" not in got["state"]
        train(model, optimizer)
        assert contents(model, optimizer)["state"]["second.weight"]["step"] == 3


@pytest.mark.parametrize(("before", "after"), [(False, False), (False, True), (True, False), (True, True)])
def test_state_of_frozen_and_of_never_stepped_parameters(cluster: Cluster, before: bool, after: bool) -> None:
    """B102, also between plain and flat optimizers: what had state has it, what had none has none."""
    saved = cluster.run(save_frozen, before)[0]
    cluster.run(load_frozen, saved, after, world_size=3)


_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True, "lr": torch.tensor(0.01)},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "Adagrad": {},
    "Adadelta": {},
    "ASGD": {},
}


def check_resumes(rank: int, name: str) -> None:
    options = _OPTIMIZERS[name]
    model = sharded(build(Wide, 0))
    optimizer = getattr(torch.optim, name)(model.parameters(), **options)
    train(model, optimizer, 2)
    stored = save({"model": model, "optimizer": optimizer})
    train(model, optimizer, 2)
    again = sharded(build(Wide, 1))
    resumed = getattr(torch.optim, name)(again.parameters(), **{**options, "lr": 0.5})
    load(stored, {"model": again, "optimizer": resumed})
    train(again, resumed, 2)
    assert_equal(contents(again, resumed), contents(model, optimizer))


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_every_optimizer_goes_on_exactly(cluster: Cluster, name: str) -> None:
    """B104: bit-equal continuation."""
    cluster.run(check_resumes, name)


def check_in_backward(rank: int) -> None:
    def job(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = sharded(build(Wide, seed))
        return model, flat_optim.flat(torch.optim.AdamW, model, in_backward=True)

    model, optimizer = job(0)
    train(model, optimizer, 2)
    stored = save({"model": model, "optimizer": optimizer})
    train(model, optimizer, 2)
    again, resumed = job(1)
    train(again, resumed)
    load(stored, {"model": again, "optimizer": resumed})
    train(again, resumed, 2)
    assert_equal(contents(again, resumed), contents(model, optimizer))


def test_an_optimizer_in_backward_goes_on_exactly(cluster: Cluster) -> None:
    cluster.run(check_in_backward)


class KeepsFloats(torch.optim.Optimizer):
    """State in float32 and whole numbers beside parameters of another dtype, and state that is no tensor."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "kind": ("a", 1)})

    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["sum"] = torch.zeros_like(p, dtype=torch.float32)
                    state["codes"] = torch.zeros_like(p, dtype=torch.uint8)
                    state["history"] = [0, torch.zeros(2)]
                state["sum"].add_(p.grad.float(), alpha=1 / 3)
                state["codes"].add_(1)
                state["history"][0] += 1
                p.data.add_(state["sum"].to(p.dtype), alpha=-group["lr"])


def check_dtypes(rank: int) -> None:
    model = sharded(build(Wide, 0).bfloat16())
    optimizer = KeepsFloats(model.parameters())
    x = torch.randn(3, 64).bfloat16()
    model(x).sum().backward()
    optimizer.step()
    stored = save({"model": model, "optimizer": optimizer})
    again = sharded(build(Wide, 1).bfloat16())
    resumed = KeepsFloats(again.parameters())
    load(stored, {"model": again, "optimizer": resumed})
    got, want = contents(again, resumed), contents(model, optimizer)
    assert got["state"]["first.weight"]["codes"].dtype == torch.uint8
    assert_equal(got, want)
    wider = sharded(build(Wide, 1))
    load(stored, {"model": wider})
    assert torch.equal(full_tensor(wider.first.weight), full_tensor(model.first.weight).float())


def test_state_keeps_the_dtype_it_was_saved_in(cluster: Cluster) -> None:
    """torch's `load_state_dict` casts it to that of the parameter."""
    cluster.run(check_dtypes)


def check_lone_rows(rank: int) -> None:
    model = sharded(build(Wide, 0))
    optimizer = torch.optim.SGD(model.parameters())
    local = local_of(model.first.weight)
    optimizer.state[model.first.weight] = {"rows": torch.zeros(local.shape)}
    with pytest.raises(ValueError, match=r"optimizer/model/first.weight/rows.*cannot be told which rows"):
        collect({"model": model, "optimizer": optimizer})
    with pytest.raises(ValueError, match="save and load an optimizer together with its model"):
        collect({"optimizer": optimizer})


def test_rows_that_pass_for_a_whole_are_refused(cluster: Cluster) -> None:
    cluster.run(check_lone_rows)


# -- parts -------------------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen layer with a small one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 5).requires_grad_(False)
        self.lora_a = nn.Linear(6, 2, bias=False)
        self.lora_b = nn.Linear(2, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


def check_adapters(rank: int) -> None:
    model: Any = build(Adapted, 0)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.ones(2, 6)
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
    stored = save({"model": only(model, "*lora_*"), "optimizer": only(optimizer, "lora_*")})
    assert {name for name in stored.manifest.tensors if name.startswith("model/")} == {
        "model/lora_a.weight",
        "model/lora_b.weight",
    }
    assert stored.manifest.tensors["model/lora_b.weight"].shape == (5, 2)
    again: Any = build(Adapted, 1)
    again.base.load_state_dict(build(Adapted, 0).base.state_dict())
    fully_shard(again)
    resumed = torch.optim.AdamW(again.parameters(), lr=0.5)
    with pytest.raises(CheckpointMismatchError, match=r"not in the checkpoint: model/base.weight"):
        load(stored, {"model": again})
    load(stored, {"model": only(again, "lora_*"), "optimizer": only(resumed, "lora_*")})
    assert torch.equal(again(x), model(x))
    assert_equal(contents(again, resumed)["state"], contents(model, optimizer)["state"])
    everything = save({"model": model})
    load(everything, {"model": only(again, "lora_a.*")})
    with pytest.raises(ValueError, match=r"no name fits 'lroa_\*'"):
        collect({"model": only(model, "lroa_*")})


def test_adapters_are_saved_and_loaded_alone(cluster: Cluster) -> None:
    """B112: whole shapes, and equal outputs."""
    cluster.run(check_adapters)


# -- values of each rank -----------------------------------------------------------------------------------------------


class Reader:
    """A data loader whose state can be divided anew."""

    def __init__(self, position: int) -> None:
        self.position = position
        self.seen = torch.arange(position)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.seen = state["position"], state["seen"]


class Draws(Reader):
    """Draws a number when it is loaded."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        _draw()


class DividedReader(Reader):
    def load_state_dicts(self, states: list[dict[str, Any]], rank: int, world_size: int) -> None:  # noqa: ARG002
        self.position = sum(state["position"] for state in states)
        self.seen = torch.cat([state["seen"] for state in states])


def _draw() -> list[float]:
    import random

    import numpy as np

    return [torch.rand(1).item(), random.random(), float(np.random.rand())]  # noqa: NPY002


def save_ranks(rank: int) -> tuple[Stored, list[float]]:
    torch.manual_seed(rank)
    _draw()
    state = {"random": RandomState(), "reader": per_rank(Reader(rank + 2)), "note": per_rank({"rank": rank})}
    return save({**state, "drawing": Reader(1)}), _draw()


def load_ranks(rank: int, stored: Stored) -> tuple[list[float], int]:
    reader, world = Reader(0), dist.get_world_size()
    state = {"random": RandomState(), "reader": per_rank(reader), "note": per_rank(None)}
    if world == 2:
        done = load(stored, state)
        assert done.values == {"note": {"rank": rank}}
        assert torch.equal(reader.seen, torch.arange(rank + 2))
    else:
        with pytest.raises(CheckpointMismatchError, match="reader was saved by each of 2 ranks, and cannot be divided"):
            load(stored, state)
        done = load(stored, state, strict={"reader": False, "note": False})
        assert done.skipped == ("reader", "note", "drawing")
        divided = DividedReader(0)
        load(stored, {"reader": per_rank(divided)})
        assert (divided.position, divided.seen.tolist()) == (5, [0, 1, 0, 1, 2])
    with pytest.raises(
        CheckpointMismatchError, match="reader is loaded once for all ranks, but was saved by each rank"
    ):
        load(stored, {"reader": reader})
    load(stored, {"random": RandomState(), "drawing": Draws(0)})
    return _draw(), reader.position


def test_each_rank_gets_its_own_values_back(cluster: Cluster) -> None:
    saved = cluster.run(save_ranks)
    stored = saved[0][0]
    same = cluster.run(load_ranks, stored)
    assert [numbers for numbers, _ in same] == [numbers for _, numbers in saved]
    assert [position for _, position in same] == [2, 3]
    more = cluster.run(load_ranks, stored, world_size=4)
    assert [numbers for numbers, _ in more[:2]] == [numbers for _, numbers in saved]
    assert more == cluster.run(load_ranks, stored, world_size=4)
    assert len({tuple(numbers) for numbers, _ in more}) == 4


# -- objects and values with sharded tensors ---------------------------------------------------------------------------


class Average:
    """An exponential average of sharded parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return {"decay": 0.5, "shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert all(isinstance(value, DTensor) for value in state["shadow"].values())
        self.shadow = state["shadow"]


def save_average(rank: int) -> tuple[Stored, Any]:
    model = sharded(build(Wide, 0))
    average = Average(model)
    return save({"average": average, "states": model.state_dict()}), whole(average.shadow)


def load_average(rank: int, stored: Stored, want: Any) -> None:
    model = sharded(build(Wide, 1))
    average = Average(model)
    load(stored, {"average": average})
    assert_equal(whole(average.shadow), want)
    load(stored, {"states": model})  # a state dict that was saved as a value
    assert_equal(contents(model)["parameters"], want)
    values = load(stored, {"states": None}).values["states"]  # nobody says how to divide it: whole
    assert_equal(dict(values), want)


def test_sharded_tensors_in_the_state_of_objects(cluster: Cluster) -> None:
    """B94."""
    stored, want = cluster.run(save_average)[0]
    cluster.run(load_average, stored, want, world_size=3)


# -- what cannot be ----------------------------------------------------------------------------------------------------


def sharded_as(local: torch.Tensor, mesh: Any, placements: list[Any], shape: torch.Size) -> torch.Tensor:
    return dtensors.wrap(local, mesh, tuple(placements), shape, (1,))


def check_refused(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    uneven = DTensor.from_local(torch.ones(1 + 2 * rank), mesh, [Shard(0)], shape=torch.Size((4,)), stride=(1,))
    strided = [StridedShard(0, split_factor=3)]  # of a mesh axis that is not here
    foreign = sharded_as(torch.ones(2), mesh, strided, torch.Size((4,)))
    model = nn.Module()
    for name, value, text in (
        ("strided", foreign, r"'model/strided' has placements.*a split factor of 3 is not that of the axes behind it"),
        ("partial", partial, r"'model/partial' has the placement.*redistribute it"),
        ("uneven", uneven, r"'model/uneven' of shape \(4,\).*torch.chunk"),
        ("sparse", torch.eye(3).to_sparse(), r"'model/sparse' is a tensor of layout"),
        ("complex", torch.ones(2, dtype=torch.complex128), "complex128 cannot be written"),
        ("twice", TwoTensor(torch.ones(2), torch.ones(2)), "'model/twice' is a TwoTensor, whose rows cannot be"),
    ):
        model.register_buffer(name, value)
        with pytest.raises(ValueError, match=text):
            collect({"model": model})
        delattr(model, name)
    with pytest.raises(ValueError, match="the key 'a/b' of the state cannot be used"):
        collect({"a/b": 1})
    with pytest.raises(TypeError, match=r"^step.now cannot be saved: it is a builtin_function_or_method"):
        collect({"step": {"now": print}})
    with pytest.raises(TypeError, match="is a DTensor, of which no rank has all"):
        collect({"own": per_rank({"x": distribute_tensor(torch.ones(4), mesh, [Shard(0)])})})


def test_what_cannot_be_saved_is_named(cluster: Cluster) -> None:
    cluster.run(check_refused)


def check_meta(rank: int, saved: tuple[Stored, Any]) -> None:
    with torch.device("meta"):
        model: Any = Odd()
    sharded(model)
    with pytest.raises(UninitializedError, match="'model/scale' is on the meta device"):
        collect({"model": model})
    with pytest.raises(CheckpointMismatchError, match=r"model/embedding.weight is on the meta device"):
        load(saved[0], {"model": model})
    model.to_empty(device="cpu")
    with pytest.raises(UninitializedError, match="was materialized and never given values"):
        collect({"model": model})
    load(saved[0], {"model": model})
    model.scratch.zero_()
    model(torch.arange(7)).sum().backward()
    assert_equal(contents(model)["parameters"], saved[1]["parameters"])


def test_a_model_from_the_meta_device_is_filled(cluster: Cluster) -> None:
    cluster.run(check_meta, odd(cluster, 3))


# -- stages of a pipeline ----------------------------------------------------------------------------------------------


def save_stage(rank: int) -> Any:
    model: Any = build(Wide, 0)
    stage = nn.ModuleDict({"first": model.first} if rank == 0 else {"second": model.second})
    optimizer = torch.optim.AdamW(stage.parameters())
    for p in stage.parameters():
        p.grad = torch.ones_like(p)
    if rank == 0:
        optimizer.step()
    made = collect({"model": stage, "optimizer": optimizer})
    return made.values, list(made.tensors)


def test_values_of_stages_are_joined(cluster: Cluster) -> None:
    (one, names), (other, _) = cluster.run(save_stage)
    assert "optimizer/model/first.weight/exp_avg" in names
    both = join(one["optimizer"], other["optimizer"])
    assert both == join(both, one["optimizer"])
    (group,) = both["groups"]
    assert dict(zip(group["params"], group["state"], strict=True)) == {
        "model/first.weight": 0,
        "model/first.bias": 0,
        "model/second.weight": -1,
        "model/second.bias": -1,
    }
    other["optimizer"]["groups"][0]["settings"]["lr"] = 3.0
    assert join(one["optimizer"], other["optimizer"]) is None
    assert join(one["optimizer"], one["model"]) is None
    assert join({"kind": "value", "value": 1}, {"kind": "value", "value": 2}) is None
