"""Strategies are settings of one engine: what each holds and sends, and that a size-1 axis costs no second copy."""

from __future__ import annotations

import copy
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference import Setup, check_reference
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cluster import Cluster
from fullshard import FSDP, MixedPrecision, ShardingStrategy, fully_shard
from fullshard.core.lifecycle import Op
from fullshard.runtime.engine import Engine
from fullshard.runtime.unit import Unit
from fullshard.wrap import ModuleWrapPolicy

WIDTH = 32
BLOCKS = 3


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))


def sharded(**options: Any) -> tuple[nn.Sequential, Engine]:
    model = net()
    for block in model:
        fully_shard(block, **options)
    fully_shard(model, **options)
    model(torch.ones(1, WIDTH))
    engine: Engine = model.__dict__["_fullshard"].unit.engine
    engine.log.clear()
    return model, engine


def train(model: nn.Module, microbatches: int, optimizer: torch.optim.Optimizer, width: int = WIDTH) -> None:
    for microbatch in range(microbatches):
        model.set_requires_gradient_sync(microbatch == microbatches - 1)  # type: ignore[operator]
        model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def check_zero1(rank: int) -> None:
    model, engine = sharded(sharding_strategy=ShardingStrategy.ZERO1)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, 3, optimizer)
    for _ in range(2):
        engine.log.clear()
        train(model, 3, optimizer)
        counts = Counter(command.op for command in engine.log)
        assert counts[Op.GATHER] == BLOCKS  # the root has no parameters, so nothing of it was written
        assert counts[Op.REDUCE] == BLOCKS
    held = sum(
        value.to_local().numel() for state in optimizer.state.values() for value in state.values() if value.dim()
    )
    assert held == 2 * sum(parameter.numel() for parameter in model.parameters()) // 2


def test_zero1_gathers_and_reduces_once_an_optimizer_step(cluster: Cluster) -> None:
    cluster.run(check_zero1)


def check_one_copy(rank: int, strategy: str, param_dtype: torch.dtype | None, copies: int) -> None:
    model = FSDP(
        net(), sharding_strategy=ShardingStrategy[strategy], mixed_precision=MixedPrecision(param_dtype=param_dtype)
    )
    loss = model(torch.ones(1, WIDTH)).sum()
    (unit,) = model.__dict__["_fullshard"].unit.engine.units
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for flow in unit.flows
        for tensor in [flow.buffers.shard, *flow.buffers.full]
    }
    assert len(storages) == copies
    loss.backward()
    assert unit.engine.pool.live_bytes == (0 if copies == 1 else unit.full_bytes)


@pytest.mark.parametrize(("strategy", "world_size"), [("NO_SHARD", 1), ("NO_SHARD", 2), ("FULL_SHARD", 1)])
def test_parameters_on_a_shard_axis_of_one_rank_are_held_once(cluster: Cluster, strategy: str, world_size: int) -> None:
    cluster.run(check_one_copy, strategy, None, 1, world_size=world_size)


def test_other_compute_dtypes_need_a_second_copy(cluster: Cluster) -> None:
    cluster.run(check_one_copy, "NO_SHARD", torch.bfloat16, 2)


class Scales(nn.Module):
    """Parameters of one element, a unit of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 0.5))
        self.offset = nn.Parameter(torch.full((1, 1), 0.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.offset


def check_microbatches(rank: int, strategy: str) -> None:
    """B08, B15: one microbatch four times gives four times its gradient, of one-element parameters too."""
    torch.manual_seed(0)
    model = nn.Sequential(Scales(), nn.Linear(4, 2))
    reference = copy.deepcopy(model)
    model[0] = FSDP(model[0], sharding_strategy=ShardingStrategy[strategy])
    wrapped = FSDP(model, sharding_strategy=ShardingStrategy[strategy])
    x = torch.arange(8.0).view(2, 4)
    for _ in range(4):
        for each in (wrapped, reference):
            each(x).square().mean().backward()
        for name, parameter in wrapped.named_parameters():
            want = reference.get_parameter(name).grad
            torch.testing.assert_close(parameter.grad.full_tensor(), want)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "ZERO1"])
def test_gradients_of_repeated_microbatches_add_up(cluster: Cluster, strategy: str, world_size: int) -> None:
    """B08, B15."""
    cluster.run(check_microbatches, strategy, world_size=world_size)


@pytest.mark.parametrize("strategy", list(ShardingStrategy.__members__))
def test_fully_shard_takes_every_strategy(cluster: Cluster, strategy: str) -> None:
    hybrid = "HYBRID" in strategy
    options = (("sharding_strategy", ShardingStrategy[strategy]),)
    cluster.run(check_fully_shard, options, hybrid, world_size=4 if hybrid else 2)


def check_fully_shard(rank: int, options: tuple[tuple[str, Any], ...], hybrid: bool) -> None:
    check_reference(rank, "llama", Setup(replicas=2 if hybrid else 1, shard_options=options, at_rest=False))


def check_replicas(rank: int, replicas: int, size: int) -> None:
    """B12: every mesh shape averages over all ranks; the strategy that it makes is said aloud."""
    mesh = init_device_mesh("cpu", (replicas, size))
    model = nn.Linear(4, 3, bias=False)
    reference = nn.Linear(4, 3, bias=False)
    reference.load_state_dict(model.state_dict())
    if replicas > 1 and size > 1:
        wrapped = FSDP(model, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    else:
        with pytest.warns(UserWarning, match="HYBRID_SHARD has one (replica|rank)"):
            wrapped = FSDP(model, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    batches = [torch.full((1, 4), float(each + 1)) for each in range(4)]
    torch.stack([reference(batch).sum() for batch in batches]).mean().backward()
    wrapped(batches[rank]).sum().backward()
    torch.testing.assert_close(wrapped.weight.grad.full_tensor(), reference.weight.grad)
    assert wrapped.clip_grad_norm_(1.0).item() == pytest.approx(reference.weight.grad.norm().item())


@pytest.mark.parametrize(("replicas", "size"), [(4, 1), (2, 2), (1, 4)])
def test_a_mesh_axis_of_one_rank_never_turns_averaging_off(cluster: Cluster, replicas: int, size: int) -> None:
    """B12."""
    cluster.run(check_replicas, replicas, size, world_size=4)


# -- what each strategy holds and sends, as docs/strategies.md says ----------------------------------------------------

COLUMNS = ("at rest", "at most", "gradients", "Adam state", "gathered", "reduced", "all-reduced")
LARGE = 256  # a block of 256 KiB has a message of its own, and no padding


def documented() -> dict[str, tuple[float, ...]]:
    text = (Path(__file__).parents[2] / "docs" / "strategies.md").read_text()
    table = text[text.index("| strategy |") :].splitlines()
    assert [cell.strip() for cell in table[0].strip("|").split("|")][1:] == list(COLUMNS)
    rows = (re.split(r"\s*\|\s*", line.strip("| ")) for line in table[2:] if line.startswith("|"))
    return {name.strip("`"): tuple(float(cell) for cell in cells) for name, *cells in rows}


class Counted:
    """A transport that adds up the bytes which pass between this rank and others."""

    shared = None  # full buffers are this rank's own, as without shared memory

    def __init__(self, base: Any, bytes_by_kind: Counter[str]) -> None:
        self.rank, self.size = base.rank, base.size
        self._base, self._bytes = base, bytes_by_kind

    def gather(self, items: Any, call: Any) -> Any:
        self._bytes["gathered"] += self._others(item.numel * item.whole.element_size() for item in items)
        return self._base.gather(items, call)

    def reduce(self, items: Any, call: Any) -> Any:
        large = (item for item in items if item.label != "small parameters")
        self._bytes["reduced"] += self._others(item.source.nbytes for item in large)
        return self._base.reduce(items, call)

    def all_reduce(self, tensor: torch.Tensor, call: Any) -> Any:
        self._bytes["all-reduced"] += 2 * self._others([tensor.nbytes // 1024 * 1024])  # without the usage counts
        return self._base.all_reduce(tensor, call)

    def _others(self, sizes: Any) -> int:
        return sum(sizes) * (self.size - 1) // self.size


def measure(rank: int, strategy: str) -> tuple[float, ...]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(LARGE, LARGE, bias=False) for _ in range(4)))
    whole_bytes = sum(parameter.nbytes for parameter in model.parameters())
    options: dict[str, Any] = {}
    if "HYBRID" in strategy:
        options["device_mesh"] = init_device_mesh("cpu", (2, 2))
    policy = ModuleWrapPolicy({nn.Linear})
    model = FSDP(model, sharding_strategy=ShardingStrategy[strategy], auto_wrap_policy=policy, **options)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, 2, optimizer, LARGE)
    engine: Engine = model.__dict__["_fullshard"].unit.engine
    sent: Counter[str] = Counter()
    for links in {id(flow.links): flow.links for unit in engine.units for flow in unit.flows}.values():
        links.shard, links.reduce = Counted(links.shard, sent), Counted(links.reduce, sent)
        if links.replicate is not None:
            links.replicate = Counted(links.replicate, sent)
    at_most = 0

    def watch(unit: Unit, act: Any) -> None:
        nonlocal at_most
        act(unit)
        at_most = max(at_most, parameter_bytes(engine))

    engine.watch = watch
    gradients = 0
    optimizer.register_step_pre_hook(lambda *_: measure_gradients())

    def measure_gradients() -> None:
        nonlocal gradients
        gradients = sum(parameter.grad.to_local().nbytes for parameter in model.parameters())

    train(model, 2, optimizer, LARGE)
    state = sum(value.to_local().nbytes for each in optimizer.state.values() for value in each.values() if value.dim())
    found = (parameter_bytes(engine), at_most, gradients, state, *(sent[kind] for kind in COLUMNS[4:]))
    return tuple(round(value / whole_bytes, 2) for value in found)


def parameter_bytes(engine: Engine) -> int:
    """Memory under flat shards and full buffers on this rank."""
    flows = [flow for unit in engine.units for flow in unit.flows]
    return sum(flow.buffers.shard.nbytes + flow.buffers.full_bytes * flow.buffers.is_full for flow in flows)


@pytest.mark.parametrize("strategy", list(ShardingStrategy.__members__))
def test_memory_and_traffic_are_as_documented(cluster: Cluster, strategy: str) -> None:
    for found in cluster.run(measure, strategy, world_size=4):
        assert dict(zip(COLUMNS, found, strict=True)) == dict(zip(COLUMNS, documented()[strategy], strict=True))


def check_one_secondary_group(rank: int) -> None:
    groups = dist.distributed_c10d._world.pg_map
    before = len(groups)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    for block in model:
        fully_shard(block, reshard_after_forward=2)
    fully_shard(model)
    assert len(groups) == before + 1
    model(torch.ones(1, 4)).sum().backward()
    units = [block.__dict__["_fullshard"].unit for block in model]
    (secondary,) = {unit.place.secondary for unit in units}
    assert dist.get_process_group_ranks(secondary) == ([0, 1] if rank < 2 else [2, 3])
    assert len({unit.links.secondary for unit in units}) == 1


def test_units_share_the_group_of_a_smaller_world(cluster: Cluster) -> None:
    """`reshard_after_forward=int` makes one group for all units, not one a unit: groups cost memory and sockets."""
    cluster.run(check_one_secondary_group, world_size=4)
