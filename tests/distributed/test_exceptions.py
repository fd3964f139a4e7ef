"""Exceptions, interrupts and failed backwards: the next step just works, and no gradient is silently wrong."""

from __future__ import annotations

import contextlib

import pytest
import torch
from reference import assert_at_rest, full
from stack import Explosive, batch, make_stack
from torch import nn

from cluster import Cluster
from fullshard.errors import StaleOptimizerError

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
    handle = model.blocks[1].register_forward_pre_hook(interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        model(batch(rank))
    handle.remove()
    late = torch.optim.SGD(model.parameters(), lr=0.1)  # of what the forward has left in the modules
    model(batch(rank)).sum().backward()
    with pytest.raises(StaleOptimizerError, match=r"after Ctrl-C in one.*call reset_iter_state\(\)"):
        late.step()
    with contextlib.suppress(KeyboardInterrupt):
        handle = model.blocks[1].register_forward_pre_hook(interrupt)
        model(batch(rank))
    handle.remove()
    model.reset_iter_state()
    assert_at_rest(model)


def test_keyboard_interrupt_in_forward_leaves_nothing_stale(cluster: Cluster) -> None:
    cluster.run(check_interrupt)


def check_zero_grad_after_failure(rank: int) -> None:
    """The unit whose backward raised has full parameters registered; its old gradients are behind them."""
    model = make_stack(count=3)
    model(batch(rank)).sum().backward()
    fail = model.blocks[1].register_full_backward_pre_hook(raise_in_backward)
    with pytest.raises(ValueError, match="bad hook"):
        model(batch(rank)).sum().backward()
    fail.remove()
    model.zero_grad()
    model(batch(rank)).sum().backward()
    other = make_stack(count=3)
    other(batch(rank)).sum().backward()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours.grad.full_tensor(), theirs.grad.full_tensor())


def raise_in_backward(_module: nn.Module, _gradients: object) -> None:
    raise ValueError("bad hook")


@pytest.mark.filterwarnings("ignore")
def test_zero_grad_after_a_failed_backward_clears_every_unit(cluster: Cluster) -> None:
    cluster.run(check_zero_grad_after_failure)
