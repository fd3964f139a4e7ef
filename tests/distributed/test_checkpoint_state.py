"""Objects to named tensors and values, and back, at any number of ranks and with any strategy; files in memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from memory_checkpoint import Stored, load, save
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from cluster import Cluster
from fullshard import FullyShardedDataParallel, full_tensor, fully_shard
from fullshard import optim as flat_optim

WORLD_SIZES = [1, 2, 3, 4]
KEYS = ("model", "optimizer")


class Odd(nn.Module):
    """Dims 1, 2, 3, 5, 7 and 0, a 0-d parameter, a tied pair, a frozen layer, one that gets no gradient, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 3)
        self.narrow = nn.Linear(3, 1)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 2))
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("seen", torch.tensor([1, 2]))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.second(self.first(self.embedding(tokens)).relu()) * self.scale)
        return self.head(x) * self.narrow(x)


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
    return torch.optim.AdamW(groups_of(model), foreach=False)


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


@pytest.mark.parametrize("before", WORLD_SIZES)
@pytest.mark.parametrize("after", WORLD_SIZES)
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
