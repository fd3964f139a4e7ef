"""Gradients of gradients: penalties on the gradient of inputs, forces that are trained, and what is refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn
from torch.autograd import forward_ad

from cluster import Cluster
from distributed.reference import assert_at_rest, full
from fullshard import fully_shard
from fullshard.errors import MisuseError


class Critic(nn.Module):
    """Layers whose backward reads parameters: matrix products, a norm, a product with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3)]
        )
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x) * self.gain
        return self.head(x)


def critics(**options: Any) -> tuple[Critic, Critic]:
    """(plain, sharded), the same values."""
    torch.manual_seed(0)
    reference = Critic().double()
    model = copy.deepcopy(reference)
    for block in model.blocks:
        fully_shard(block, **options)
    return reference, fully_shard(model, **options)


def batch(rank: int, step: int = 0) -> Tensor:
    return torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    """WGAN-GP: the score and how far the norm of its gradient is from one."""
    x = x.requires_grad_()
    score = model(x)
    (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return score.mean() + 10 * (gradient.norm(dim=1) - 1).square().mean()


def penalty_only(model: nn.Module, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return gradient.square().sum()


def forces(model: nn.Module, x: Tensor) -> Tensor:
    """Energy and forces are fitted; the first gradient enters in the middle, of two forwards."""
    x = x.requires_grad_()
    energy = model(x).square().sum() + model(x.sin()).sum()
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    return energy + F.mse_loss(force, torch.ones_like(force))


def third_order(model: nn.Module, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    return second.square().sum()


def check_losses(rank: int, loss: Callable[..., Tensor], options: dict[str, Any]) -> None:
    reference, model = critics(**options)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (reference, model)]
    for step in range(3):
        torch.stack([loss(reference, batch(r, step)) for r in range(2)]).mean().backward()
        loss(model, batch(rank, step)).backward()
        for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(full(ours.grad), theirs.grad, msg=f"step {step}, {name}")
        assert_at_rest(model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("loss", [penalty, penalty_only, forces, third_order], ids=lambda loss: loss.__name__)
def test_gradients_of_gradients(cluster: Cluster, loss: Callable[..., Tensor]) -> None:
    """The graph of the first backward holds full parameters: its own backward gathers them again."""
    cluster.run(check_losses, loss, {})


def test_gradients_of_gradients_without_resharding(cluster: Cluster) -> None:
    cluster.run(check_losses, penalty, {"reshard_after_forward": False})


def check_first_order_only(rank: int) -> None:
    """`autograd.grad` without a graph, as for saliency or adversarial inputs, leaves gradients of parameters alone."""
    reference, model = critics()
    got, want = [
        torch.autograd.grad(each(x).sum(), x)[0]
        for each, x in ((model, batch(rank).requires_grad_()), (reference, batch(rank).requires_grad_()))
    ]
    torch.testing.assert_close(got, want)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_at_rest(model)


def test_gradient_of_inputs_leaves_parameters_alone(cluster: Cluster) -> None:
    cluster.run(check_first_order_only)


def check_create_graph_warns(rank: int) -> None:
    reference, model = critics()
    warnings.filterwarnings("ignore", r"Using backward\(\) with create_graph=True")
    torch.stack([reference(batch(r)).sum() for r in range(2)]).mean().backward(create_graph=True)
    loss = model(batch(rank)).sum()
    with pytest.warns(UserWarning, match="have no graph"):
        loss.backward(create_graph=True)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert theirs.grad is not None
        assert ours.grad is not None
        torch.testing.assert_close(full(ours.grad), theirs.grad.detach())
        assert not ours.grad.requires_grad
        theirs.grad = None  # torch: breaks the cycle of a gradient and its graph
    assert_at_rest(model)


def test_backward_with_create_graph_says_that_gradients_have_no_graph(cluster: Cluster) -> None:
    cluster.run(check_create_graph_warns)


def check_forward_mode(rank: int) -> None:
    # Torch loads its rules for this by means of something that it calls deprecated.
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
    reference, model = critics()
    x, tangent = batch(rank), batch(rank, 1)
    results = []
    for each in (model, reference):
        for needs_grad in (False, True):
            with forward_ad.dual_level():
                out = each(forward_ad.make_dual(x.clone().requires_grad_(needs_grad), tangent))
                results.append(forward_ad.unpack_dual(out).tangent)
    for result in results:
        torch.testing.assert_close(result, results[-1])


def test_forward_mode(cluster: Cluster) -> None:
    cluster.run(check_forward_mode)


def check_transforms(rank: int) -> None:
    reference, model = critics()
    x = batch(rank)
    for transform in (torch.func.vmap, torch.func.jacfwd, torch.func.jacrev):
        with pytest.raises(MisuseError, match=r"torch.autograd.grad"):
            transform(model)(x)
    jacobian = torch.autograd.functional.jacobian
    for vectorize in (False, True):
        torch.testing.assert_close(jacobian(model, x, vectorize=vectorize), jacobian(reference, x))
    assert_at_rest(model)


def test_transforms_of_torch_func_are_refused(cluster: Cluster) -> None:
    """What the message names in their place works."""
    cluster.run(check_transforms)


def check_trace(rank: int) -> None:
    warnings.filterwarnings("ignore", "`torch.jit.trace(_method)?` is deprecated")
    _, model = critics()
    with pytest.raises(MisuseError, match=r"torch\.jit\.trace of a sharded Critic"):
        torch.jit.trace(model, batch(rank))
    model(batch(rank)).sum().backward()
    assert_at_rest(model)


def test_jit_trace_is_refused(cluster: Cluster) -> None:
    """A trace would hold parameters whose memory is gone at its first use."""
    cluster.run(check_trace)
