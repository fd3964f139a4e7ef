"""Budgets of bytes in a running model: what is gathered ahead, what is kept from forward to backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import Setup, check_reference
from stack import Stack, batch, engine_of, make_stack
from torch import nn

from cluster import Cluster
from fullshard import FSDPModule, fully_shard
from fullshard.errors import MisuseError, RanksDisagreeError


def log_of_steps(rank: int, model: FSDPModule, steps: int = 3) -> list[str]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(rank, step)).sum().backward()
        optimizer.step()
    return [str(command) for command in engine_of(model).log]


def kept_stack(keep_bytes: int | None, **options: Any) -> Any:
    model = make_stack(reshard_after_forward="auto", **options)
    if keep_bytes is not None:
        model.set_keep_bytes(keep_bytes)
    return model


def check_two_ends(rank: int) -> None:
    block_bytes = 8 * 9 * 4
    assert log_of_steps(rank, kept_stack(0)) == log_of_steps(rank, make_stack())
    both = Stack()
    torch.manual_seed(0)
    for block in both.blocks:
        fully_shard(block, reshard_after_forward=False)
    assert log_of_steps(rank, kept_stack(4 * block_bytes)) == log_of_steps(rank, fully_shard(both))
    counts = []
    for blocks in range(5):
        log = log_of_steps(rank, kept_stack(blocks * block_bytes), steps=1)
        counts.append(sum(command.startswith("GATHER") for command in log))
    assert counts == [8, 7, 6, 5, 5]  # the root, four blocks, and again three of them but for those that are kept


def test_auto_is_one_scale_from_zero3_to_zero2(cluster: Cluster) -> None:
    """The logs of commands at the two ends are those of True and False; in between every kept block saves a gather."""
    cluster.run(check_two_ends)


@pytest.mark.parametrize("name", ["nested", "shared_block", "checkpoint_outside"])
def test_auto_equals_the_reference(cluster: Cluster, name: str) -> None:
    cluster.run(check_auto_reference, name)


def check_auto_reference(rank: int, name: str) -> None:
    def change_budget(_rank: int, ours: FSDPModule, _reference: nn.Module, _setup: Setup) -> None:
        ours.set_keep_bytes(100_000)

    setup = Setup(reshard_after_forward="auto", keep_bytes=600)
    check_reference(rank, name, setup, change_budget)


def check_number_is_asked_for(rank: int) -> None:
    model = make_stack(reshard_after_forward="auto")
    with pytest.raises(
        MisuseError, match=r"'auto' \(of 5 units\) needs .*model.set_keep_bytes\(number\).*have 1152 byt"
    ):
        model(batch(rank))
    model.set_keep_bytes(0)
    model(batch(rank)).sum().backward()
    with pytest.raises(TypeError, match="keep_bytes must be a number of bytes, got None"):
        model.set_keep_bytes(None)
    with pytest.raises(TypeError, match="keep_bytes must be a number of bytes, an int, or None; got '1 GiB'"):
        model.set_keep_bytes("1 GiB")
    with pytest.raises(ValueError, match="prefetch_bytes must be None or at least 0, got -1"):
        model.set_prefetch_bytes(-1)
    with pytest.raises(TypeError, match="must be a bool, an int, None or 'auto', got 'some'"):
        fully_shard(nn.Linear(2, 2), reshard_after_forward="some")


def test_auto_asks_for_a_number(cluster: Cluster) -> None:
    """Free memory differs between ranks and says nothing about the peak of a step, so it is not guessed."""
    cluster.run(check_number_is_asked_for)


def check_ranks_differ(rank: int) -> None:
    model = kept_stack(600 * (rank + 1))
    with pytest.raises(RanksDisagreeError, match=r"schedule \{'keep_bytes': 600\}.*schedule \{'keep_bytes': 1200\}"):
        model(batch(rank))


def test_budgets_that_differ_between_ranks_are_an_error(cluster: Cluster) -> None:
    """A unit kept on one rank and gathered on another would be waited for without end."""
    cluster.run(check_ranks_differ)


def check_kept_peak(rank: int, fit: int) -> tuple[int, int]:
    torch.manual_seed(0)
    model = kept_stack(None, count=8, width=64)
    unit_bytes = model.blocks[0].__dict__["_fullshard"].unit.full_bytes
    model.set_keep_bytes(fit * unit_bytes)
    for step in range(2):
        model(batch(rank, step, 64)).sum().backward()
        model.zero_grad()
    pool = engine_of(model).pool
    pool.reset_peak()
    model(batch(rank, 3, 64)).sum().backward()
    return pool.peak_bytes, unit_bytes


@pytest.mark.parametrize("fit", [0, 3])
def test_kept_buffers_are_bounded(cluster: Cluster, fit: int) -> None:
    """Full buffers are those kept, the unit in use, the prefetched one; beside them what peers sent of gradients."""
    for peak_bytes, unit_bytes in cluster.run(check_kept_peak, fit):
        assert peak_bytes <= (2 + fit) * unit_bytes + unit_bytes // 2 + 4096


class Unequal(Stack):
    """Two wide blocks with narrow ones between them."""

    def __init__(self) -> None:
        super().__init__(0)
        self.blocks.extend([nn.Linear(8, 64), nn.Linear(64, 8), *(nn.Linear(8, 8) for _ in range(6)), nn.Linear(8, 64)])
        self.order = list(range(9))


def check_small_units(rank: int) -> None:
    model = Unequal()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    for step in range(2):
        model(batch(rank, step)).sum().backward()
    engine = engine_of(model)
    engine.log.clear()
    with torch.no_grad():
        model(batch(rank))
    log = [str(command) for command in engine.log]
    # 6 of the narrow ones are smaller than the wide one together: all are under way when the first is used.
    assert log.index("GATHER 8") < log.index("WAIT_GATHER 3")
    assert log.index("GATHER 9") > log.index("WAIT_GATHER 7")
    model.set_prefetch_bytes(0)
    engine.log.clear()
    with torch.no_grad():
        model(batch(rank))
    gathers = [str(command) for command in engine.log if "GATHER" in command.op.name]
    assert all(f"WAIT_{one}" == two for one, two in zip(gathers[::2], gathers[1::2], strict=True))


def test_small_units_are_gathered_together(cluster: Cluster) -> None:
    """By default up to the bytes of the largest unit below the root; with 0 none."""
    cluster.run(check_small_units)
