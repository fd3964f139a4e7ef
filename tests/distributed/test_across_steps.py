"""`set_prefetch_across_steps`: the next step begins while optimizers write, and never with what they wrote over."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference import Setup, check_reference, full
from stack import Stack, batch, engine_of, make_stack
from torch import nn

import fullshard
from cluster import Cluster
from fullshard import FSDPModule, full_parameters
from fullshard.core.lifecycle import Op, State
from fullshard.errors import CommunicationError, MisuseError
from fullshard.runtime.unit import Unit


class WithRoot(Stack):
    """Blocks, and a parameter of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale)


def early_stack(**options: Any) -> Any:
    torch.manual_seed(0)
    model: Any = WithRoot()
    for block in model.blocks:
        fullshard.fully_shard(block, **options)
    fullshard.fully_shard(model, **options)
    model.set_prefetch_across_steps(True)
    return model


def train(rank: int, model: Any, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        model(batch(rank, step)).sum().backward()
        optimizer.step()


def begun(model: nn.Module) -> list[int]:
    return [unit for unit, state in enumerate(engine_of(model).scheduler.states) if state is State.PREFETCHED]


def plain_twin(model: Any) -> WithRoot:
    """An unsharded model with the values that the sharded parameters have now."""
    twin = WithRoot()
    with torch.no_grad():
        for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
            mine.copy_(full(theirs.detach()))
    return twin


def check_values_in_use(rank: int, model: Any) -> None:
    twin = plain_twin(model)
    with torch.no_grad():
        torch.testing.assert_close(model(batch(rank, 99)), twin(batch(rank, 99)), atol=1e-6, rtol=1e-6)


# What it does


def check_begins_early(rank: int, flat: bool, transport: str) -> None:
    model = early_stack(transport=transport)
    make: Any = fullshard.optim.flat if flat else (lambda kind, module, **options: kind(module.parameters(), **options))
    optimizer = make(torch.optim.SGD, model, lr=0.1)
    train(rank, model, optimizer, 1)
    assert begun(model) == []  # which units are written how often is seen in the first step
    log = engine_of(model).log
    train(rank, model, optimizer, 2, first=1)
    assert begun(model) == [0, 1]
    gathers = [command.unit for command in log if command.op is Op.GATHER]
    assert gathers[-9:] == [1, 2, 3, 4, 3, 2, 1, 0, 1][-9:]
    log.clear()
    train(rank, model, optimizer, 1, first=3)
    assert [command.unit for command in log if command.op is Op.GATHER] == [2, 3, 4, 3, 2, 1, 0, 1]
    units = engine_of(model).units
    assert [unit.index for unit in units if any(flow.buffers.is_full for flow in unit.flows)] == [0, 1]
    check_values_in_use(rank, model)


@pytest.mark.parametrize(("flat", "transport"), [(False, "direct"), (False, "auto"), (True, "auto")])
def test_the_next_step_begins_when_its_first_units_are_written(cluster: Cluster, flat: bool, transport: str) -> None:
    """No gather more than without it, and between steps no more memory than where a forward begins."""
    cluster.run(check_begins_early, flat, transport)


def check_while_updating(rank: int) -> None:
    torch.manual_seed(0)
    model: Any = make_stack(3, width=1024)
    model.set_prefetch_across_steps(True)
    optimizer = fullshard.optim.flat(torch.optim.SGD, model, lr=0.1)
    last = model.blocks[-1].weight
    seen: list[bool] = []

    def watch(unit: Unit, act: Callable[[Unit], None]) -> None:
        if act is Unit.gather and not torch.is_grad_enabled():
            seen.append(torch.equal(last.to_local(), before))
        act(unit)

    for step in range(3):
        model(batch(rank, step, 1024)).sum().backward()
        before = last.to_local().clone()
        engine_of(model).watch = watch
        optimizer.step()
        engine_of(model).watch = None
        optimizer.zero_grad()
    assert seen == [True, True]


def test_gathers_begin_while_the_flat_optimizer_updates_later_units(cluster: Cluster) -> None:
    cluster.run(check_while_updating)


@pytest.mark.parametrize("name", ["llama", "nested", "frozen", "checkpoint_outside"])
def test_it_equals_the_reference(cluster: Cluster, name: str) -> None:
    cluster.run(check_early_reference, name)


def check_early_reference(rank: int, name: str) -> None:
    def turn_on(_rank: int, ours: FSDPModule, _reference: nn.Module, _setup: Setup) -> None:
        ours.set_prefetch_across_steps(True)

    check_reference(rank, name, Setup(at_rest=False, steps=4), turn_on)


# What is written after it began


def _data(rank: int, model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.add_(0.01)


def _local(rank: int, model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().mul_(0.5)


def _on_one_rank(rank: int, model: Any) -> None:
    """Rows that one rank has are written by that rank alone."""
    if rank == 1:
        model.blocks[0].weight.to_local().detach().add_(0.01)


def _load(rank: int, model: Any) -> None:
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


def _summon(rank: int, model: Any) -> None:
    with full_parameters(model), torch.no_grad():
        model.blocks[0].weight.mul_(2)


def _nothing(rank: int, model: Any) -> None:
    copy.deepcopy(model)
    model.state_dict()


def check_hand_writes(rank: int, write: Callable[[int, Any], None], transport: str) -> None:
    model = early_stack(transport=transport)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        train(rank, model, optimizer, 1, first=step)
        write(rank, model)
        check_values_in_use(rank, model)
    train(rank, model, optimizer, 1)
    # What was for nothing in every step is not tried again, on no rank.
    assert begun(model) == {_nothing: [0, 1], _on_one_rank: [0]}.get(write, [])


@pytest.mark.parametrize("write", [_data, _local, _on_one_rank, _load, _summon, _nothing], ids=lambda f: f.__name__)
def test_what_is_written_between_steps_counts(cluster: Cluster, write: Callable[[int, Any], None]) -> None:
    """By hand, through views without a version counter, on one rank, by loading; if it is so always, it gives up."""
    cluster.run(check_hand_writes, write, "direct" if write in (_data, _on_one_rank) else "auto")


def check_rank_differs(rank: int, transport: str) -> None:
    """Rank 1 does not step once, then steps without one block."""
    model = early_stack(transport=transport)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(rank, model, optimizer, 2)
    for step in (2, 3):
        optimizer.zero_grad()
        model(batch(rank, step)).sum().backward()
        if rank == 0 or step == 3:
            if rank == 1:
                model.blocks[2].zero_grad()
            optimizer.step()
        check_values_in_use(rank, model)
    train(rank, model, optimizer, 2, first=4)
    # Where collectives are matched by their order, what one rank begins alone would meet another one of its peers.
    assert begun(model) == ([] if transport == "torch" else [0, 1])
    check_values_in_use(rank, model)


@pytest.mark.parametrize("transport", ["direct", "auto", "torch"])
def test_an_optimizer_that_steps_on_one_rank_only(cluster: Cluster, transport: str) -> None:
    """What one rank has begun the others take part in, and nobody uses it."""
    cluster.run(check_rank_differs, transport)


def check_several_optimizers(rank: int) -> None:
    """Weights by one, biases by the other: a unit is gathered after the second; then, with one of them, after it."""
    model = early_stack()
    weights = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    optimizers = [torch.optim.SGD(weights, lr=0.1), torch.optim.SGD(rest, lr=0.2)]
    for step in range(4):
        model.zero_grad()
        model(batch(rank, step)).sum().backward()
        optimizers[0].step()
        assert begun(model) == []
        optimizers[1].step()
        assert begun(model) == ([0, 1] if step else [])
    check_values_in_use(rank, model)


def test_units_are_gathered_when_the_last_of_several_optimizers_has_stepped(cluster: Cluster) -> None:
    cluster.run(check_several_optimizers)


def check_accumulation(rank: int) -> None:
    model = early_stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for microbatch in range(3):
            model.set_requires_gradient_sync(microbatch == 2)
            model(batch(rank, 3 * step + microbatch)).sum().backward()
        optimizer.step()
        assert begun(model) == ([0, 1] if step else [])
        optimizer.zero_grad()
    model.set_prefetch_across_steps(False)
    check_values_in_use(rank, model)
    train(rank, model, optimizer, 2)
    assert begun(model) == []
    model.eval()
    check_values_in_use(rank, model)


def test_accumulation_and_turning_it_off(cluster: Cluster) -> None:
    cluster.run(check_accumulation)


# How it ends


def check_end(rank: int, transport: str) -> None:
    for _ in range(2):  # a second model on the same group, while messages of the first may be under way
        model = early_stack(transport=transport)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(rank, model, optimizer, 3)
        assert begun(model) == [0, 1]
        del model, optimizer
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == 2
    model = early_stack(transport=transport)
    train(rank, model, torch.optim.SGD(model.parameters(), lr=0.1), 3)
    assert begun(model) == [0, 1]
    dist.destroy_process_group()
    del model


@pytest.mark.parametrize("transport", ["direct", "auto"])
def test_a_loop_may_end_with_a_gather_under_way(cluster: Cluster, transport: str) -> None:
    """The model is dropped, the group goes on or is destroyed: nothing hangs, nothing warns."""
    cluster.run(check_end, transport)


def check_rank_stops(rank: int) -> None:
    model = early_stack()
    train(rank, model, torch.optim.SGD(model.parameters(), lr=0.1), 3)
    if rank == 1:
        return
    with pytest.raises(CommunicationError, match="agreement on what was gathered between steps"):
        model(batch(rank))


def test_a_rank_that_does_not_begin_the_step_is_named(cluster: Cluster) -> None:
    cluster.run(check_rank_stops, group_timeout=2.0)


def check_post_optim_event(rank: int) -> None:
    model = early_stack()
    with pytest.raises(MisuseError, match=r"set_prefetch_across_steps\(True\) gathers before this event is known"):
        model.set_post_optim_event(torch.Event("cpu"))


def test_it_does_not_go_with_an_event_after_the_optimizer(cluster: Cluster) -> None:
    cluster.run(check_post_optim_event)
