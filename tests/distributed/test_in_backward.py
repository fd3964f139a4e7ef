"""`fullshard.optim.flat(..., in_backward=True)`: units are updated in backward, to the same numbers."""

from __future__ import annotations

import gc
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from reference import Setup, assert_at_rest, full, shard_case
from test_flat_optimizer import Lion, Twins, assert_same, by_dim, odd, same, train
from test_optimizers import inputs, loss_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from cluster import Cluster
from fullshard import FSDPModule, ShardedGradScaler, clip_grad_norm_, fully_shard, optim
from fullshard.core.lifecycle import Op
from fullshard.errors import MisuseError
from models import by_name, make_model, run_case

AdamW = torch.optim.AdamW
# The first ones are tried with every setup.
CASES = ("shared_block", "tied", "conditional", "frozen", "checkpoint_inside", "checkpoint_outside", "grouped_unit")


def twins_of(build: Callable[[], nn.Module], **options: Any) -> Twins:
    """The optimizer on parameters, and the one that runs in backward."""
    plain, ours = build(), build()
    return [
        (plain, AdamW(by_dim(plain), **options)),
        (ours, optim.flat(AdamW, by_dim(ours), in_backward=True, **options)),
    ]


def check_cases(rank: int, setup: Setup) -> None:
    for name in CASES if setup == Setup(torch.float32) else CASES[:3]:
        case = by_name(name)
        twins = twins_of(
            lambda: shard_case(case, make_model(case, torch.float32), setup),  # noqa: B023
            lr=0.01,
            fused=True,
        )
        for step in range(3):
            for model, optimizer in twins:
                for microbatch in range(setup.microbatches):
                    if setup.sync:
                        model.set_requires_gradient_sync(setup.sync[microbatch])
                    run_case(case, model, rank, step).backward()
                if optimizer is twins[1][1]:
                    assert all(parameter.grad is None for parameter in model.parameters()), name
                optimizer.step()
                optimizer.zero_grad()
                assert_at_rest(model)
            assert_same(twins, f"{name}, step {step}")


@pytest.mark.parametrize(
    ("setup", "world_size"),
    [
        (Setup(torch.float32), 2),
        (Setup(torch.float32), 1),
        (Setup(torch.float32, reshard_after_forward=False), 2),
        (Setup(torch.float32, microbatches=2, sync=(False, True)), 2),
        (Setup(torch.float32, replicas=2), 4),
    ],
    ids=["shards", "one rank", "kept full", "accumulated", "HSDP"],
)
def test_updates_in_backward_give_the_same_numbers(cluster: Cluster, setup: Setup, world_size: int) -> None:
    """Blocks that run twice, tied and frozen parameters, units that get no gradient, checkpointing; bit for bit."""
    cluster.run(check_cases, setup, world_size=world_size)


def stack(blocks: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(blocks)))
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def alive(model: nn.Module) -> int:
    return sum(parameter.grad is not None for parameter in model.parameters())


def check_memory(rank: int) -> None:
    most = []
    for in_backward in (False, True):
        model = stack()
        optimizer = optim.flat(AdamW, model, lr=0.01, in_backward=in_backward)
        counts: list[int] = []
        for block in model:
            block.register_full_backward_pre_hook(lambda *_: counts.append(alive(model)))  # noqa: B023
        for _ in range(2):
            model(torch.ones(2, 64, requires_grad=True)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        most.append(max(counts))
    # Two parameters a block: without, the gradients of all blocks that are reduced; with, none between two blocks.
    assert most == [8, 0]


def test_gradients_of_a_unit_are_freed_when_it_is_updated(cluster: Cluster) -> None:
    cluster.run(check_memory)


def check_order(rank: int) -> None:
    model = stack(3)
    optimizer = optim.flat(AdamW, model, in_backward=True)
    for _ in range(3):
        model(torch.ones(2, 64, requires_grad=True)).sum().backward()
        optimizer.step()
    unit = model[0].__dict__["_fullshard"].unit
    log = [str(command) for command in unit.engine.log][-12:]
    updates = [line for line in log if line.startswith(Op.UPDATE.name)]
    assert updates == ["UPDATE 3", "UPDATE 2", "UPDATE 1"]  # blocks are units 1 to 3; the root has no parameters
    assert log.index("UPDATE 3") < log.index("REDUCE 1")  # before the last unit has even begun


def test_a_unit_is_updated_while_others_still_compute(cluster: Cluster) -> None:
    cluster.run(check_order)


def check_refused(rank: int) -> None:
    model = odd()
    optimizer = optim.flat(AdamW, model, in_backward=True, fused=True)
    loss = loss_of(model, inputs(rank, 0).float())
    loss.backward()
    with pytest.raises(MisuseError, match=r"cannot be clipped by their global norm: this optimizer was made with in_b"):
        clip_grad_norm_(model, 1.0)
    for scaler in (torch.amp.GradScaler("cpu"), ShardedGradScaler("cpu")):
        scaler.scale(loss_of(model, inputs(rank, 0).float())).backward()
        with pytest.raises(MisuseError, match="loss scaling cannot be used here"):
            scaler.step(optimizer)
    with pytest.raises(MisuseError, match="pass elementwise=True"):
        optim.flat(Lion, model, in_backward=True)
    del optimizer
    gc.collect()
    loss_of(model, inputs(rank, 0).float()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())  # nobody updates any more
    clip_grad_norm_(model, 1.0)


def test_clipping_and_loss_scaling_are_refused(cluster: Cluster) -> None:
    cluster.run(check_refused)


def check_stale_graphs(rank: int) -> None:
    model = odd()
    optimizer = optim.flat(AdamW, model, in_backward=True)
    before = None
    for two in ("retain_graph", "two forwards"):
        losses = [loss_of(model, inputs(rank, step).float()) for step in range(2)]
        losses[0].backward(retain_graph=two == "retain_graph")
        before = [full(parameter.detach()).clone() for parameter in model.parameters()]
        with pytest.raises(MisuseError, match="were updated in backward, and more gradients came"):
            (losses[0] if two == "retain_graph" else losses[1]).backward()
        for now, then in zip(model.parameters(), before, strict=True):
            assert torch.equal(full(now.detach()), then)
        loss_of(model, inputs(rank, 2).float())  # the engine is at rest again
        optimizer.step()


def test_gradients_from_before_an_update_are_refused(cluster: Cluster) -> None:
    cluster.run(check_stale_graphs)


def check_failure(rank: int) -> None:
    twins = twins_of(lambda: stack(3), lr=0.01)
    x = torch.ones(2, 64, requires_grad=True)
    model = twins[1][0]

    def fail(*_: Any) -> None:
        raise ArithmeticError("in backward")

    handle = model[0].register_full_backward_pre_hook(fail)
    before = [full(parameter.detach()).clone() for parameter in model.parameters()]
    with pytest.raises(ArithmeticError):
        model(x).sum().backward()
    handle.remove()
    with pytest.warns(UserWarning, match=r"failed after 1 units were updated in it .* such as '2'"):
        model(x)
    changed = [not torch.equal(full(p.detach()), old) for p, old in zip(model.parameters(), before, strict=True)]
    assert changed == [False] * 4 + [True] * 2
    assert all(parameter.grad is None for parameter in model.parameters())
    for own, other in zip(twins[0][0].parameters(), model.parameters(), strict=True):
        own.data.copy_(other.data)
    twins[0][1].load_state_dict(deepcopy(twins[1][1].state_dict()))
    train_stacks(twins)
    assert_same(twins, "after a failed backward")


def train_stacks(twins: Twins) -> None:
    for model, optimizer in twins:
        model(torch.ones(2, 64, requires_grad=True)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_failed_backward_tells_what_it_has_updated(cluster: Cluster) -> None:
    cluster.run(check_failure)


def check_others(rank: int) -> None:
    """Parameters that no unit has, schedules, copies, groups that come later."""

    def build() -> FSDPModule:
        model = odd_plain()
        ignored = {model.first.bias}
        return fully_shard(model, ignored_params=ignored, average_ignored_grads=True)

    plain, ours = build(), build()
    some = [[p for name, p in model.named_parameters() if "last" not in name] for model in (plain, ours)]
    twins: Twins = [
        (plain, AdamW(some[0], lr=0.1)),
        (ours, optim.flat(AdamW, some[1], lr=0.1, in_backward=True)),
    ]
    rates = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for _, optimizer in twins]
    for step in range(4):
        if step == 2:
            for model, optimizer in twins:
                optimizer.zero_grad()
                model.zero_grad()
                optimizer.add_param_group({"params": list(model.last.parameters()), "lr": 0.05})
        train(twins, rank, step)
        for rate in rates:
            rate.step()
        assert_same(twins, f"step {step}")
    model, optimizer = deepcopy((ours, twins[1][1]))
    loss_of(model, inputs(rank, 4).float()).backward()
    assert model.middle.weight.grad is not None  # a copy updates in `step`
    same(model.middle.weight, ours.middle.weight, "the original's backward is its own")
    optimizer.step()
    assert not torch.equal(full(model.middle.weight.detach()), full(ours.middle.weight.detach()))


def odd_plain() -> Any:
    from test_optimizers import Odd

    torch.manual_seed(0)
    return Odd()


def test_parameters_outside_of_units_schedules_and_copies(cluster: Cluster) -> None:
    cluster.run(check_others)


def check_reentrant(rank: int) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = checkpoint(self.block, x, use_reentrant=True)
            return x

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = Twice()
        fully_shard(model.block)
        return fully_shard(model)

    twins = twins_of(build, lr=0.01)
    for _ in range(3):
        for model, optimizer in twins:
            model(torch.ones(2, 8, requires_grad=True)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same(twins, "recomputed twice")


def test_a_block_that_is_recomputed_twice_is_updated_once(cluster: Cluster) -> None:
    cluster.run(check_reentrant)


def check_shared_parameters(rank: int) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    first = optim.flat(torch.optim.SGD, model[0].parameters(), lr=0.1, in_backward=True)
    other = optim.flat(torch.optim.SGD, model[1].parameters(), lr=0.1, in_backward=True)
    with pytest.raises(MisuseError, match="in two optimizers of which each was made with in_backward"):
        optim.flat(torch.optim.SGD, model.parameters(), lr=0.2, in_backward=True)
    model(torch.ones(2, 8)).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    del first, other


def test_a_parameter_has_one_optimizer_in_backward(cluster: Cluster) -> None:
    cluster.run(check_shared_parameters)
