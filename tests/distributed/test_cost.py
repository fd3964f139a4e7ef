"""What one step costs in copies, allocations and memory: counted, not timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cluster import Cluster
from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.core.lifecycle import Op
from fullshard.core.schedule import Command
from fullshard.runtime.engine import Engine
from fullshard.runtime.unit import Unit

WIDTH = 256  # a parameter of 256 x 256 float32 is 256 KiB: large, with a message of its own
BLOCKS = 4
PARAMETER_BYTES = WIDTH * WIDTH * 4

COPIES = ("copy_", "_foreach_copy_", "clone", "cat", "stack", "split_with_sizes_copy", "_to_copy", "index_copy")
ALLOCATIONS = ("empty", "new_empty", "zeros", "new_zeros", "empty_like", "zeros_like", "empty_strided")


class Net(nn.Module):
    """Blocks of one large matrix and a bias, in which the only large tensors are parameters and their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x


class Counting(TorchDispatchMode):
    """Adds up the bytes of copies and allocations above a size, for tensors and lists of tensors."""

    def __init__(self, from_bytes: int) -> None:
        super().__init__()
        self._from_bytes = from_bytes
        self.copied: list[tuple[str, int]] = []
        self.allocated: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if name in COPIES:
            self._note(self.copied, name, args[0] if name.endswith("copy_") else result)
        if name in ALLOCATIONS:
            self._note(self.allocated, name, result)
        return result

    def _note(self, where: list[tuple[str, int]], name: str, tensors: Any) -> None:
        for tensor in tensors if isinstance(tensors, list | tuple) else [tensors]:
            nbytes = tensor.numel() * tensor.element_size()
            if nbytes >= self._from_bytes:
                where.append((name, nbytes))


def trained(**options: Any) -> tuple[Net, Engine]:
    """A sharded model two steps into training, so that everything which is made once has been made."""
    model = Net()
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    for _ in range(2):
        step(model)
    engine: Engine = model.__dict__["_fullshard"].unit.engine
    return model, engine


def step(model: nn.Module) -> None:
    model(torch.ones(2, WIDTH)).sum().backward()
    for parameter in model.parameters():
        parameter.grad = None


def check_copies(rank: int, world: int, transport: str, dtype: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32)
    model, engine = trained(mp_policy=policy, transport=transport)
    engine.log.clear()
    smallest = 16 * 1024
    with Counting(from_bytes=smallest) as counting:
        step(model)
    itemsize = 4 if dtype is None else dtype.itemsize
    gathers = [command for command in engine.log if command.op is Op.GATHER]
    own_rows = WIDTH * WIDTH // world * itemsize
    assert len(gathers) == 1 + BLOCKS + (BLOCKS - 1)  # the root, forward, and backward but for the stashed last one
    # One copy (or cast) of 1/N a gather, and nothing else that is large: no pack, no unpack, no temporary.
    expected = [("_foreach_copy_", own_rows)] * (len(gathers) - 1)
    own_sum = WIDTH * WIDTH // world * 4
    if transport == "torch":
        expected += [("copy_", own_sum)] * BLOCKS  # inside Gloo: its reduce-scatter works in a temporary
        if dtype is not None:  # the backend can only sum one dtype: gradients are widened before
            expected += [("_to_copy", WIDTH * WIDTH * 4)] * BLOCKS
    elif dtype is not None:  # widened on arrival, straight into the flat gradient shard
        expected += [("copy_", own_sum)] * BLOCKS
    if transport == "shm":  # what goes to each other rank goes through memory, not over a wire
        expected += [("_foreach_copy_", own_rows)] * (BLOCKS * (world - 1))
    assert sorted(counting.copied) == sorted(expected), (counting.copied, expected)
    # Of tensors only the flat gradient shards are made: buffers and staging come from the pool.
    flat_gradients = [nbytes for _, nbytes in counting.allocated]
    assert len(flat_gradients) == BLOCKS
    assert all(nbytes < PARAMETER_BYTES // world + 8192 for nbytes in flat_gradients)


@pytest.mark.parametrize("transport", ["shm", "direct", "torch"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_only_own_rows_are_copied_and_only_gradient_shards_allocated(
    cluster: Cluster, world_size: int, dtype: torch.dtype | None, transport: str
) -> None:
    cluster.run(check_copies, world_size, transport, dtype, world_size=world_size)


def check_full_size_memory(rank: int, world: int, transport: str) -> None:
    """Watches every command: full buffers and full gradients that are alive at once."""
    model, engine = trained(transport=transport)
    unit_bytes = engine.units[1].full_bytes
    most_buffers = most_gradients = 0

    def watch(unit: Unit, command: Callable[[Unit], None]) -> None:
        nonlocal most_buffers, most_gradients
        command(unit)
        buffers = sum(each.full_bytes for each in engine.units if any(flow.buffers.is_full for flow in each.flows))
        most_buffers = max(most_buffers, buffers)
        on_the_wire = sum(
            source.numel() * source.element_size()
            for each in engine.units
            for flow in each.flows
            if flow._sum is not None
            for source in flow._sum.sources
        )
        most_gradients = max(most_gradients, on_the_wire)

    engine.watch = watch
    step(model)
    root_bytes = engine.units[0].full_bytes
    assert unit_bytes < most_buffers <= 2 * unit_bytes + root_bytes  # the unit in use and the prefetched one
    assert 0 < most_gradients <= unit_bytes + 16 * 1024  # one unit's gradients, and the packed message
    staging = (world - 1) * PARAMETER_BYTES // world
    assert 2 * unit_bytes <= engine.pool.peak_bytes <= 2 * unit_bytes + root_bytes + staging + 8192


@pytest.mark.parametrize("transport", ["shm", "direct"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_full_size_memory_is_two_units_and_one_units_gradients(
    cluster: Cluster, world_size: int, transport: str
) -> None:
    cluster.run(check_full_size_memory, world_size, transport, world_size=world_size)


def check_deterministic(rank: int, transport: str) -> tuple[int, int, list[str]]:
    model, engine = trained(transport=transport)
    engine.log.clear()
    engine.pool.reset_peak()
    step(model)
    return engine.pool.peak_bytes, engine.shared_bytes, [str(command) for command in engine.log]


@pytest.mark.parametrize("transport", ["shm", "direct", "torch"])
def test_every_rank_runs_the_same_commands_with_the_same_peak(cluster: Cluster, transport: str) -> None:
    first, second = cluster.run(check_deterministic, transport), cluster.run(check_deterministic, transport)
    assert first[0] == first[1] == second[0] == second[1]
    assert (first[0][1] > 0) == (transport == "shm")


def check_reduced_bytes(rank: int) -> None:
    """B17: what is frozen is not reduced, and has no gradient memory."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
    model[1].requires_grad_(False)
    fully_shard(model)
    model(torch.ones(2, WIDTH)).sum().backward()
    flow = model.__dict__["_fullshard"].unit.flows[0]
    flat = flow.flat()
    assert flat is not None
    assert flat.numel() * 4 == PARAMETER_BYTES // 2
    assert model[1].weight.grad is None


def test_frozen_parameters_have_no_gradient_memory(cluster: Cluster) -> None:
    cluster.run(check_reduced_bytes)


def check_reduce_count(rank: int) -> None:
    model, engine = trained()
    for sync, expected in ((True, 4 * (BLOCKS)), (False, BLOCKS)):
        engine.log.clear()
        for microbatch in range(4):
            model.set_requires_gradient_sync(sync or microbatch == 3)
            model(torch.ones(2, WIDTH)).sum().backward()
            held = sum(p.grad is not None for p in model.parameters())
            assert held == (len(list(model.parameters())) if sync or microbatch == 3 else 0)
        reduces = [command for command in engine.log if command == Command(Op.REDUCE, command.unit)]
        assert len(reduces) == expected
        for parameter in model.parameters():
            parameter.grad = None


def test_unsynchronized_microbatches_reduce_once(cluster: Cluster) -> None:
    """B69, B71: deferral counts one reduce a unit; without it gradients stay sharded."""
    cluster.run(check_reduce_count)


def check_shard_bytes(rank: int, world: int) -> None:
    model, _ = trained()
    whole = sum(parameter.numel() for parameter in model.parameters())
    flat = [
        flow.buffers.shard
        for module in model.modules()
        if "_fullshard" in module.__dict__
        for flow in module.__dict__["_fullshard"].unit.flows
    ]
    held = sum(shard.numel() for shard in flat)
    assert held <= whole // world + (WIDTH + 8) * BLOCKS  # padding: less than a row, and alignment
    for parameter in model.parameters():
        local = parameter._local_tensor
        assert any(0 <= local.data_ptr() - shard.data_ptr() <= shard.nbytes - local.nbytes for shard in flat)
        assert local.data_ptr() % 16 == 0


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_rank_holds_one_nth_in_flat_shards(cluster: Cluster, world_size: int) -> None:
    cluster.run(check_shard_bytes, world_size, world_size=world_size)
