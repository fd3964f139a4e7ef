"""What the engine promises beside numbers: states, memory, exceptions, order, user settings."""

from __future__ import annotations

import contextlib
import weakref
from itertools import pairwise

import pytest
import torch
from reference import assert_at_rest, full
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from cluster import Cluster
from fullshard import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    clip_grad_norm_,
    fully_shard,
    register_fsdp_forward_method,
)
from fullshard.core.lifecycle import Op
from fullshard.runtime.engine import Engine


class Stack(nn.Module):
    """Blocks whose order, and failures, a test chooses."""

    def __init__(self, count: int = 4, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.order = list(range(count))
        self.fail_at: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.order:
            if i == self.fail_at:
                raise ValueError(f"bad batch in block {i}")
            x = self.blocks[i](x).relu()
        return x


class Explosive(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(_ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(_ctx: object, _gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("bad backward")


def make_stack(count: int = 4, width: int = 8, **options: object) -> Stack:
    torch.manual_seed(0)
    model = Stack(count, width)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def engine_of(model: nn.Module) -> Engine:
    engine: Engine = model.__dict__["_fullshard"].unit.engine
    return engine


def batch(rank: int, step: int = 0, width: int = 8) -> torch.Tensor:
    return torch.randn(3, width, generator=torch.Generator().manual_seed(10 * step + rank))


# B41, B42: exceptions


def check_retry_after_forward(rank: int) -> None:
    model, reference = make_stack(), make_stack()
    for _ in range(2):
        model(batch(rank)).sum().backward()
        reference(batch(rank)).sum().backward()
    for fail_at in (0, 2, 3):
        model.fail_at = fail_at
        with pytest.raises(ValueError, match=f"bad batch in block {fail_at}"):
            model(batch(rank))
        assert_at_rest(model)
        model.fail_at = None
        model(batch(rank, 1)).sum().backward()
        reference(batch(rank, 1)).sum().backward()
        assert_at_rest(model)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(full(ours.grad), full(theirs.grad))


def test_retry_after_exception_in_forward_needs_no_call(cluster: Cluster) -> None:
    """B41: earlier gradients stay, the failed forward leaves nothing behind."""
    cluster.run(check_retry_after_forward)


def check_retry_after_backward(rank: int) -> None:
    model, reference = make_stack(), make_stack()
    for where in range(4):
        handle = model.blocks[where].register_forward_hook(lambda _m, _a, output: Explosive.apply(output))
        loss = model(batch(rank)).sum()
        with pytest.raises(ValueError, match="bad backward"):
            loss.backward()
        handle.remove()
        assert list(model.state_dict()) == list(reference.state_dict())  # B42: resets first, hides nothing
        model(batch(rank)).sum().backward()
        reference(batch(rank)).sum().backward()
        assert_at_rest(model)
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(full(ours.grad), full(theirs.grad)), where
        model.zero_grad()
        reference.zero_grad()


def test_retry_after_exception_in_backward_needs_no_call(cluster: Cluster) -> None:
    """B41, B42."""
    cluster.run(check_retry_after_backward)


def check_failed_accumulation(rank: int) -> None:
    model = make_stack()
    model(batch(rank)).sum().backward()
    handle = model.blocks[0].register_forward_hook(lambda _m, _a, output: Explosive.apply(output))
    loss = model(batch(rank)).sum()
    with pytest.raises(ValueError, match="bad backward"):
        loss.backward()
    handle.remove()
    with pytest.warns(UserWarning, match="all gradients were dropped"):
        model(batch(rank))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_that_cannot_be_restored_are_dropped_aloud(cluster: Cluster) -> None:
    cluster.run(check_failed_accumulation)


# B31, B32: several graphs


def check_two_graphs(rank: int) -> None:
    results = []
    for order in ("first", "second", "sum", "twice"):
        model = make_stack()
        a, b = model(batch(rank, 0)).sum(), model(batch(rank, 1)).sum()
        if order == "first":
            a.backward()
            b.backward()
        elif order == "second":
            b.backward()
            a.backward()
        elif order == "sum":
            (a + b).backward()
        else:
            a.backward(retain_graph=True)
            b.backward()
            model.zero_grad()
            a.backward()
            b2 = model(batch(rank, 1)).sum()
            b2.backward()
        assert_at_rest(model)
        results.append([full(parameter.grad) for parameter in model.parameters()])
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            torch.testing.assert_close(got, want)


def test_two_forwards_then_two_backwards_in_any_order(cluster: Cluster) -> None:
    """B31, B32."""
    cluster.run(check_two_graphs)


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


# no_grad and inference


def check_evaluation(rank: int, mode: str) -> None:
    context = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}[mode]
    model, untouched = make_stack(), make_stack()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (model, untouched)]
    for step in range(4):
        with context():
            model(batch(rank, 100))
        for m, optimizer in zip((model, untouched), optimizers, strict=True):
            m(batch(rank, step)).sum().backward()
            if m is model:
                with context():
                    m(batch(rank, 100))
            optimizer.step()
            optimizer.zero_grad()
        plain = Stack()
        plain.load_state_dict({name: full(value) for name, value in model.state_dict().items()})
        with context():
            assert torch.equal(model(batch(rank, 100)), plain(batch(rank, 100))), "evaluation used stale parameters"
    for ours, theirs in zip(model.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(full(ours.detach()), full(theirs.detach()))


@pytest.mark.parametrize("mode", ["no_grad", "inference", "grad"])
def test_evaluation_never_changes_training(cluster: Cluster, mode: str) -> None:
    """B36, and a forward with gradients enabled whose backward never comes."""
    cluster.run(check_evaluation, mode)


def check_separate_roots(rank: int) -> None:
    models = [make_stack(reshard_after_forward=True), make_stack(reshard_after_forward=True)]
    with torch.no_grad():
        for model in models:
            model(batch(rank))
    for model in models:
        assert_at_rest(model)


def test_root_obeys_reshard_after_forward(cluster: Cluster) -> None:
    """B39."""
    cluster.run(check_separate_roots)


# Methods of FSDPModule


def check_unshard(rank: int) -> None:
    model = make_stack()
    want = full(model.blocks[0].weight.detach())
    block = model.blocks[0]
    block.unshard()
    assert torch.equal(block.weight, want)
    block.reshard()
    assert hasattr(block.weight, "placements")
    handle = model.blocks[2].unshard(async_op=True)
    assert handle is not None
    model.blocks[1].unshard(async_op=True)
    handle.wait()
    assert isinstance(model.blocks[2].weight, nn.Parameter)
    assert not hasattr(model.blocks[2].weight, "placements")
    model(batch(rank)).sum().backward()
    assert_at_rest(model)


def test_unshard_and_reshard(cluster: Cluster) -> None:
    cluster.run(check_unshard)


def check_settings(rank: int) -> None:
    model = make_stack()
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_forward(False)
    model(batch(rank))
    assert all(state.value == "kept" for state in engine_of(model).scheduler.states)
    model.reset_iter_state()
    assert_at_rest(model)
    model.set_reshard_after_forward(True)
    model.set_reshard_after_backward(False)
    model(batch(rank)).sum().backward()
    assert all(state.value == "kept" for state in engine_of(model).scheduler.states)
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    model.set_reshard_after_backward(True)
    model(batch(rank)).sum().backward()
    assert_at_rest(model)
    model.set_is_last_backward(False)
    model(batch(rank)).sum().backward()
    model.set_is_last_backward(True)
    model(batch(rank)).sum().backward()
    assert_at_rest(model)
    with pytest.raises(TypeError, match="must be a bool here"):
        model.set_reshard_after_forward(2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be positive"):
        model.set_gradient_divide_factor(0.0)
    with pytest.raises(ValueError, match="reduces_in_flight must be at least 1"):
        model.set_reduce_scatter_max_input_buffers(0)


def test_settings_of_a_sharded_module(cluster: Cluster) -> None:
    cluster.run(check_settings)


def check_checkpointing(rank: int) -> None:
    class Checkpointed(Stack):
        reentrant = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
            return x

    results = []
    for reentrant in (False, True):
        torch.manual_seed(0)
        model = Checkpointed()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        model.reentrant = reentrant
        for _ in range(2):
            model.zero_grad()
            model(batch(rank).requires_grad_()).sum().backward()
            assert_at_rest(model)
        results.append([full(parameter.grad) for parameter in model.parameters()])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_both_kinds_of_activation_checkpointing(cluster: Cluster) -> None:
    cluster.run(check_checkpointing)


def check_state_dict(rank: int) -> None:
    model = make_stack()
    keys = list(Stack().state_dict())
    loss = model(batch(rank)).sum()  # the root would keep full parameters here
    state = model.state_dict()
    assert list(state) == keys
    assert all(hasattr(value, "placements") for value in state.values())
    loss.backward()
    copied = {name: value.clone() for name, value in state.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    model.load_state_dict(copied)
    for name, parameter in model.named_parameters():
        assert torch.equal(full(parameter.detach()), full(copied[name]))


def test_state_dict_is_sharded_in_every_state(cluster: Cluster) -> None:
    """B38."""
    cluster.run(check_state_dict)


def check_two_optimizers(rank: int) -> None:
    torch.manual_seed(0)
    reference = Stack()
    torch.manual_seed(0)
    model = fully_shard(Stack())
    optimizers = [
        (torch.optim.SGD(m.blocks[0].parameters(), lr=0.1), torch.optim.SGD(m.blocks[1:].parameters(), lr=0.1))
        for m in (model, reference)
    ]
    for step in range(3):
        for first, second in optimizers:
            first.zero_grad()
            if step == 1:
                second.zero_grad()
        model(batch(rank, step)).sum().backward()
        torch.stack([reference(batch(r, step)).sum() for r in range(2)]).mean().backward()
        for first, second in optimizers:
            first.step()
            second.step()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(full(ours.grad), theirs.grad)
            torch.testing.assert_close(full(ours.detach()), theirs.detach())


def test_gradients_cleared_for_some_parameters_of_a_unit(cluster: Cluster) -> None:
    """Two optimizers on one unit: what one has cleared must not come back with what the other accumulates."""
    cluster.run(check_two_optimizers)


def check_edit_by_hand(rank: int) -> None:
    model = make_stack(reshard_after_forward=False)
    with torch.no_grad():
        model(batch(rank))  # every unit stays full
        for parameter in model.parameters():
            parameter.mul_(0)
        assert model(batch(rank)).abs().sum().item() == 0.0


def test_in_place_edits_of_shards_are_seen_at_the_next_forward(cluster: Cluster) -> None:
    """B95."""
    cluster.run(check_edit_by_hand)


class Recursive(nn.Module):
    """Calls itself a few times."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        x = self.linear(x).tanh()
        return self(x, depth - 1) * 2 if depth else x


def check_recursion(rank: int) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(Recursive())
    torch.manual_seed(0)
    model = nn.Sequential(Recursive())
    fully_shard(model[0])
    fully_shard(model)
    for step in range(2):
        model(batch(rank, step)).sum().backward()
        torch.stack([reference(batch(r, step)).sum() for r in range(2)]).mean().backward()
        assert_at_rest(model)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(ours.grad), theirs.grad)


def test_module_that_calls_itself(cluster: Cluster) -> None:
    cluster.run(check_recursion)


def check_failure_after_unfinished_backward(rank: int) -> None:
    model, reference = make_stack(), make_stack()
    model.set_is_last_backward(False)
    for m in (model, reference):
        m(batch(rank)).sum().backward()
    model.fail_at = 1
    with pytest.raises(ValueError, match="bad batch"):
        model(batch(rank))
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(full(ours.grad), full(theirs.grad))


def test_failed_forward_keeps_gradients_that_are_still_on_the_wire(cluster: Cluster) -> None:
    cluster.run(check_failure_after_unfinished_backward)


# What the user sees of parameters, and puts in their place


def check_parameters_are_sharded(rank: int) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(8, 8))
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(8, 8)))
    model(batch(rank))  # the root keeps its buffer for a backward
    assert all(hasattr(parameter, "placements") for parameter in model.parameters())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(3):
        loss = model(batch(rank, step)).sum()
        for optimizer in optimizers:
            optimizer.zero_grad()  # between forward and backward
        loss.backward()
        torch.stack([reference(batch(r, step)).sum() for r in range(2)]).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(full(ours.grad), theirs.grad)
            torch.testing.assert_close(full(ours.detach()), theirs.detach())


def test_parameters_are_sharded_in_every_state(cluster: Cluster) -> None:
    """B37, B38: an optimizer made after a forward, and zero_grad between forward and backward."""
    cluster.run(check_parameters_are_sharded)


def check_clip_of_kept_units(rank: int) -> None:
    norms = []
    for keep in (False, True):
        model = make_stack()
        model.set_reshard_after_backward(not keep)
        model(batch(rank)).sum().backward()
        norms.append(clip_grad_norm_(model, 0.1))
    assert norms[0] > 0.1
    assert torch.equal(norms[0], norms[1])


def test_clipping_sees_the_gradients_of_units_that_are_kept(cluster: Cluster) -> None:
    cluster.run(check_clip_of_kept_units)


def check_one_rank_looks(rank: int) -> None:
    model = make_stack()
    model.set_reshard_after_backward(False)
    for step in range(2):
        model(batch(rank, step)).sum().backward()
        if rank == 0:
            model.state_dict()
            other = nn.Linear(2, 2)
            other(torch.ones(1, 2)).sum().backward()
            torch.optim.SGD(other.parameters(), lr=0.1).step()


def test_what_one_rank_does_alone_changes_no_commands(cluster: Cluster) -> None:
    """A state dict, or an optimizer of another model, on one rank."""
    cluster.run(check_one_rank_looks, group_timeout=5.0)


def check_interrupt(rank: int) -> None:
    model, untouched = make_stack(), make_stack()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, untouched)]

    def interrupt(_module: nn.Module, _args: object) -> None:
        raise KeyboardInterrupt

    for step in range(3):
        handle = model.blocks[step].register_forward_pre_hook(interrupt)
        with contextlib.suppress(KeyboardInterrupt):
            model(batch(rank, step))
        handle.remove()
        for m, optimizer in zip((model, untouched), optimizers, strict=True):
            optimizer.zero_grad()
            m(batch(rank, step)).sum().backward()
            optimizer.step()
            assert_at_rest(m)
    for ours, theirs in zip(model.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(full(ours.detach()), full(theirs.detach()))


def test_keyboard_interrupt_in_forward_leaves_nothing_stale(cluster: Cluster) -> None:
    cluster.run(check_interrupt)


def check_assign(rank: int, how: str) -> None:
    if how == "meta":
        with torch.device("meta"):
            model = Stack()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    else:
        model = make_stack()
        model(batch(rank))
    source = make_stack()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(1.0)
    state = {name: value.clone() for name, value in source.state_dict().items()}
    if how == "copy":
        model.load_state_dict(state)
    else:
        model.load_state_dict(state, assign=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = torch.optim.SGD(source.parameters(), lr=0.1)
    for m, each in ((model, optimizer), (source, expected)):
        m(batch(rank)).sum().backward()
        each.step()
    for (name, ours), theirs in zip(model.named_parameters(), source.parameters(), strict=True):
        assert torch.equal(full(ours.detach()), full(theirs.detach())), name


@pytest.mark.parametrize("how", ["copy", "assign", "meta"])
def test_load_state_dict_after_a_forward_and_with_assign(cluster: Cluster, how: str) -> None:
    """B80."""
    cluster.run(check_assign, how)


def check_conversion_below(rank: int) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    fully_shard(model)
    model(batch(rank)).sum().backward()
    model.zero_grad()
    model[0][0].double().float()  # a module below the sharded one
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0)
    assert model(batch(rank)).abs().sum().item() == 0.0
    with pytest.raises(
        ValueError, match=r"'0.0.weight' was replaced after sharding by one of shape \(8, 8\) with no shar"
    ):
        _replace_and_run(model, rank)


def _replace_and_run(model: nn.Module, rank: int) -> None:
    model[0][0].weight = nn.Parameter(torch.ones(8, 8))
    model(batch(rank))


def test_parameters_converted_or_replaced_below_the_sharded_module(cluster: Cluster) -> None:
    """B80: picked up, or an error that names them."""
    cluster.run(check_conversion_below)


def check_group(rank: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard([model[0], model[2]])
    fully_shard(model)
    for _ in range(2):
        model(batch(rank).requires_grad_()).sum().backward()
    log = [str(command) for command in engine_of(model).log]
    assert log.count("REDUCE 1") == 2  # once a step, for both modules
    assert log.count("GATHER 1") <= 4
    assert_at_rest(model)


def test_group_of_modules_is_reduced_once(cluster: Cluster) -> None:
    cluster.run(check_group)


def check_segment(rank: int, reentrant: bool) -> None:
    class Segmented(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    model = Segmented(8, 64)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    for _ in range(2):
        engine = engine_of(model)
        if engine is not None:
            engine.pool.reset_peak()
        model(batch(rank, width=64).requires_grad_()).sum().backward()
    assert engine.pool.peak_bytes <= 3 * engine.units[1].full_bytes


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_segment_is_not_full_all_at_once(cluster: Cluster, reentrant: bool) -> None:
    cluster.run(check_segment, reentrant)


def check_freed(rank: int) -> None:
    model = make_stack()
    model(batch(rank)).sum().backward()
    engine = weakref.ref(engine_of(model))
    del model
    assert engine() is None, "a cycle keeps the buffers until the garbage collector runs"


def test_model_is_freed_without_the_garbage_collector(cluster: Cluster) -> None:
    cluster.run(check_freed)


def check_submodule_first(rank: int) -> None:
    torch.manual_seed(0)
    reference = Stack(2)
    torch.manual_seed(0)
    model = Stack(2)
    fully_shard(model.blocks[0])
    fully_shard(model)
    (model.blocks[0](batch(rank)).sum() + model(batch(rank, 1)).sum()).backward()
    losses = [reference.blocks[0](batch(r)).sum() + reference(batch(r, 1)).sum() for r in range(2)]
    torch.stack(losses).mean().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(ours.grad), theirs.grad)
    assert_at_rest(model)


def test_submodule_that_runs_before_its_root(cluster: Cluster) -> None:
    """It has an engine of its own until the root starts; the graph made with it stays valid."""
    cluster.run(check_submodule_first)


def check_gradient_hooks(rank: int) -> None:
    model = make_stack()
    seen = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    for _ in range(2):
        model(batch(rank)).sum().backward()
    assert seen == [True] * 16


def test_post_accumulate_hooks_of_sharded_parameters(cluster: Cluster) -> None:
    cluster.run(check_gradient_hooks)


def check_hidden_output(rank: int) -> None:
    class Hidden(nn.Linear):
        def forward(self, x: torch.Tensor) -> object:
            return {"set of tensors is not looked into": {super().forward(x)}}

    model = fully_shard(Hidden(8, 8))
    with pytest.warns(UserWarning, match="without a tensor in a tuple, list, dict or dataclass"):
        model(batch(rank))
    with torch.no_grad():
        model(batch(rank))


def test_output_whose_tensors_cannot_be_found(cluster: Cluster) -> None:
    cluster.run(check_hidden_output)


def check_limits(rank: int) -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2))
    model = fully_shard(nn.Linear(8, 8), mesh=mesh)
    model(batch(rank))
    links = model.__dict__["_fullshard"].unit.links
    return [links.shard.limit.total_seconds(), links.replicate.limit.total_seconds()]


def test_time_limit_of_the_job_holds_for_the_groups_of_a_mesh(cluster: Cluster) -> None:
    """torch makes the groups of a mesh with half an hour."""
    assert cluster.run(check_limits, world_size=4, group_timeout=7.0) == [[7.0, 7.0]] * 4


class WithNothing(nn.Linear):
    """Uses a parameter without elements."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.nothing.sum()


def check_no_elements(rank: int) -> None:
    model = fully_shard(WithNothing())
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    assert full(model.bias.grad).tolist() == [4.0, 4.0, 4.0]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parameter_without_elements(cluster: Cluster, world_size: int) -> None:
    cluster.run(check_no_elements, world_size=world_size)


class Encoder(nn.Module):
    """Has another way in than `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x) * 2

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        if x.isnan().any():
            raise ValueError("bad batch")
        return self.linear(x).tanh()


def check_other_method(rank: int) -> None:
    torch.manual_seed(0)
    reference = Encoder()
    torch.manual_seed(0)
    model = fully_shard(Encoder())
    with pytest.raises(ValueError, match="has no method 'decode'"):
        register_fsdp_forward_method(model, "decode")
    register_fsdp_forward_method(model, "encode")
    with pytest.raises(ValueError, match="bad batch"):
        model.encode(torch.full((1, 8), torch.nan))
    assert_at_rest(model)
    model.encode(batch(rank)).sum().backward()
    model(batch(rank, 1)).sum().backward()  # forward calls it, so the two nest
    for step, call in enumerate((reference.encode, reference)):
        torch.stack([call(batch(r, step)).sum() for r in range(2)]).mean().backward()
    assert_at_rest(model)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(ours.grad), theirs.grad)


def test_other_methods_than_forward(cluster: Cluster) -> None:
    """B90."""
    cluster.run(check_other_method)


def check_offload_policies(rank: int) -> None:
    for policy in (OffloadPolicy(), CPUOffloadPolicy()):  # on a CPU mesh shards are in host memory anyway
        model = fully_shard(nn.Linear(8, 8), offload_policy=policy)
        model(batch(rank)).sum().backward()
        assert model.weight.grad is not None


def test_offload_policies_on_cpu(cluster: Cluster) -> None:
    cluster.run(check_offload_policies)
