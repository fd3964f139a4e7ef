"""Order, prefetch, memory and frozen parameters, as a running model shows them."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import torch
from reference import assert_at_rest, full
from stack import Stack, batch, engine_of, make_stack
from torch import nn

from cluster import Cluster
from fullshard import (
    fully_shard,
)
from fullshard.core.lifecycle import Op

# The order of units (B43)


def check_changing_order(rank: int) -> None:
    model = make_stack()
    reference = Stack()
    torch.manual_seed(0)
    reference.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step, order in enumerate([[0, 1, 2, 3], [3, 2, 1, 0], [1, 3], [2], [0, 0, 3, 1], [0, 1, 2, 3]]):
        model.order = reference.order = order
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(batch(rank, step)).sum().backward()
        torch.stack([reference(batch(r, step)).sum() for r in range(2)]).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        assert_at_rest(model)
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(full(ours.detach()), theirs.detach())


def test_prefetch_is_only_a_hint(cluster: Cluster) -> None:
    """B43: another order, skipped and repeated blocks in each step cost speed only."""
    cluster.run(check_changing_order)


def check_prefetch(rank: int) -> None:
    model = make_stack()
    for _ in range(2):
        engine = engine_of(model)
        if engine is not None:
            engine.log.clear()
        model(batch(rank)).sum().backward()
    log = [str(command) for command in engine_of(model).log]
    for block in (2, 3, 4):  # in forward, each gather is issued before the wait for the block before it is over
        assert log.index(f"GATHER {block}") < log.index(f"FREE {block - 1}")
    backward = log[log.index("STASH 4") :]
    assert "GATHER 4" not in backward  # the last block of forward is still there
    for block in (3, 2, 1):
        assert backward.index(f"GATHER {block}") < backward.index(f"FREE {block + 1}")
    assert log == [str(command) for command in _explicit(rank)]


def _explicit(rank: int) -> list[object]:
    model = make_stack()
    blocks = list(model.blocks)
    model.set_modules_to_forward_prefetch([blocks[0]])
    for first, second in pairwise(blocks):
        first.set_modules_to_forward_prefetch([second])
        second.set_modules_to_backward_prefetch([first])
    model(batch(rank)).sum().backward()
    engine_of(model).log.clear()
    model(batch(rank)).sum().backward()
    return list(engine_of(model).log)


def test_prefetch_follows_the_recorded_order(cluster: Cluster) -> None:
    """And the same order given as explicit lists, before the first forward, gives the same commands."""
    cluster.run(check_prefetch)


# Memory


def check_peak(rank: int, count: int) -> tuple[int, int]:
    model = make_stack(count, width=64)
    for step in range(2):
        model(batch(rank, step, 64)).sum().backward()
        model.zero_grad()
    engine = engine_of(model)
    assert engine is not None
    engine.pool.reset_peak()
    model(batch(rank, 3, 64)).sum().backward()
    unit = model.blocks[0].__dict__["_fullshard"].unit
    return engine.pool.peak_bytes, unit.full_bytes


def test_full_buffers_are_bounded_whatever_the_depth(cluster: Cluster) -> None:
    """At most the unit in use, the prefetched one, and what peers sent of one unit's gradients."""
    for count in (4, 12):
        for peak_bytes, unit_bytes in cluster.run(check_peak, count):
            assert peak_bytes <= 2 * unit_bytes + unit_bytes // 2 + 4096


def check_frozen(rank: int) -> None:
    """B19: a frozen unit is freed right after its backward."""
    model = make_stack(8)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    most = 0

    def count(_module: nn.Module, _gi: object, _go: object) -> None:
        nonlocal most
        most = max(most, sum(state.in_use for state in engine_of(model).scheduler.states[1:]))

    for block in model.blocks:
        block.register_full_backward_hook(count)
    x = batch(rank).requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None
    assert 1 <= most <= 2
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not [c for c in engine_of(model).log if c.op in (Op.REDUCE, Op.HOLD)]


def test_frozen_units_are_freed_in_backward_and_not_reduced(cluster: Cluster) -> None:
    """B17, B19."""
    cluster.run(check_frozen)


def check_freeze_and_unfreeze(rank: int) -> None:
    torch.manual_seed(0)
    reference = Stack()
    model = make_stack()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(6):
        for m in (model, reference):
            m.blocks[1].requires_grad_(step // 2 == 1)
            m.blocks[2].weight.requires_grad_(step // 2 != 1)
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(batch(rank, step)).sum().backward()
        torch.stack([reference(batch(r, step)).sum() for r in range(2)]).mean().backward()
        for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), (step, name)
        for optimizer in optimizers:
            optimizer.step()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(full(ours.detach()), theirs.detach())


def test_flags_are_read_every_forward(cluster: Cluster) -> None:
    """B20."""
    cluster.run(check_freeze_and_unfreeze)


def check_ranks_use_different_parameters(rank: int) -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.ones(4, 4))
            self.b = nn.Parameter(torch.ones(400, 100))
            self.c = nn.Parameter(torch.ones(4, 4))

        def forward(self, use_a: bool) -> torch.Tensor:
            return (self.a.sum() if use_a else self.b.sum() * 3).reshape(1)

    model = fully_shard(Either())
    for _ in range(2):
        model.zero_grad()
        model(rank == 0).backward()
        assert full(model.a.grad).unique().tolist() == [0.5]
        assert full(model.b.grad).unique().tolist() == [1.5]
        assert model.c.grad is None


def test_ranks_may_use_different_parameters_of_a_unit(cluster: Cluster) -> None:
    """B25: zeros stand for what a rank did not use; what no rank used keeps its grad."""
    cluster.run(check_ranks_use_different_parameters)


# The page that a reader begins with


class Sandwich(nn.Module):
    """The model of docs/architecture.md: two blocks between an input and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.input, self.output = nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.input(x)
        for block in self.blocks:
            x = block(x)
        return self.output(x)


def check_page(rank: int, expected: list[str]) -> None:
    model = Sandwich()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    for _ in range(2):
        engine = engine_of(model)
        if engine is not None:
            engine.log.clear()
        model(batch(rank)).sum().backward()
    assert [str(command) for command in engine_of(model).log] == expected


def test_the_architecture_page_lists_the_commands_of_a_settled_step(cluster: Cluster) -> None:
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    listing = page.partition("The commands of one settled step")[2].split("```")[1]
    cluster.run(check_page, re.findall(r"[A-Z_]+ \d", listing))
