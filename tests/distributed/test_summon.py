"""Full parameters outside of a step: what is shown, what is kept, and computing with them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference import assert_at_rest, full
from stack import Explosive, batch, make_stack
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from cluster import Cluster
from fullshard import FSDP, MixedPrecisionPolicy, full_parameters, full_tensor, fully_shard, use_parameters
from fullshard.errors import CommunicationError, MisuseError, StaleOptimizerError


class Odd(nn.Module):
    """Shapes that do not divide, a 0-d parameter, one without elements, a tied pair, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 2))
        self.first.bias.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(self.embedding(tokens)).relu()) * self.scale)


def make_odd(sharded: bool = True, **options: Any) -> Odd:
    torch.manual_seed(0)
    model = Odd()
    if sharded:
        fully_shard(model.first, **options)
        fully_shard(model.second, **options)
        fully_shard(model, **options)
    return model


# One tensor


def check_full_tensor(rank: int) -> None:
    world = dist.get_world_size()
    line = init_device_mesh("cpu", (world,))
    for shape, dim in itertools.product([(7, 3), (1, 5), (4, 4), (0, 2), (3, 0), (2, 3, 5)], [0, 1]):
        whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
        sharded = DTensor.from_local(
            whole.tensor_split(_splits(shape[dim], world), dim)[rank].clone(),
            line,
            [Shard(dim)],
            run_check=False,
            shape=torch.Size(shape),
            stride=whole.stride(),
        )
        found = full_tensor(sharded, f"{shape} {dim}")
        assert torch.equal(found, whole)
        assert found.is_contiguous()
        assert found.untyped_storage().nbytes() == whole.numel() * 8
    replicated = DTensor.from_local(torch.tensor(2.0), line, [Replicate()], run_check=False)
    found = full_tensor(replicated)
    found.add_(1)
    assert (found.item(), replicated.to_local().item()) == (3.0, 2.0)
    plain = torch.ones(2)
    assert full_tensor(plain) is not plain
    odd = make_odd()
    assert (odd.scale.shape, full_tensor(odd.scale).item()) == ((), 1.5)


def _splits(rows: int, world: int) -> list[int]:
    chunk = -(-rows // world)
    return [min(chunk * r, rows) for r in range(1, world)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_full_tensor_is_whole_fresh_and_contiguous(cluster: Cluster, world_size: int) -> None:
    cluster.run(check_full_tensor, world_size=world_size)


def check_full_tensor_of_two_axes(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = torch.arange(35.0).reshape(7, 5)
    for placements in ([Replicate(), Shard(0)], [Shard(0), Shard(1)], [Shard(0), Shard(0)], [Shard(1), Replicate()]):
        sharded = torch.distributed.tensor.distribute_tensor(whole, mesh, placements)
        assert torch.equal(full_tensor(sharded), whole), placements


def test_full_tensor_undoes_each_axis_of_the_mesh(cluster: Cluster) -> None:
    cluster.run(check_full_tensor_of_two_axes, world_size=4)


def _look(model: nn.Module) -> None:
    with full_parameters(model):
        pass


def check_one_rank_alone(rank: int) -> None:
    model = make_odd()
    if rank == 0:
        # Where the other rank has ended before the time limit, the error says that.
        with pytest.raises(CommunicationError, match=r"full parameters of .*waited for rank\(s\) \[1\].*weight'"):
            _look(model.first)
    assert isinstance(model.first.weight, DTensor)
    assert_at_rest(model)


def test_a_full_gather_on_one_rank_alone_ends_with_an_error_that_names_the_others(cluster: Cluster) -> None:
    """B111."""
    cluster.run(check_one_rank_alone, group_timeout=2.0)


# What is shown and what is kept


def check_edits(rank: int) -> None:
    model = make_odd()
    shapes = {name: p.shape for name, p in make_odd(sharded=False).named_parameters()}
    for flags in itertools.product([True, False], repeat=4):
        writeback, rank0_only = flags[:2]
        options = dict(zip(("writeback", "rank0_only", "offload_to_cpu", "with_grads"), flags, strict=True))
        before = {name: full_tensor(p) for name, p in model.named_parameters()}
        if writeback and rank0_only:
            with (
                pytest.raises(NotImplementedError, match=r"writeback=True with rank0_only=True is not supported"),
                full_parameters(model, **options),
            ):
                pass
        else:
            with full_parameters(model, **options):
                seen = dict(model.named_parameters())
                if rank == 0 or not rank0_only:
                    assert {name: p.shape for name, p in seen.items()} == shapes
                    assert not any(isinstance(p, DTensor) for p in seen.values())
                    assert model.head.weight is model.embedding.weight
                    with torch.no_grad():
                        for parameter in seen.values():
                            parameter.mul_(torch.arange(1.0, parameter.numel() + 1).reshape(parameter.shape))
                else:
                    assert all(isinstance(p, DTensor) for p in seen.values())
        assert_at_rest(model)
        for name, old in before.items():
            want = old * torch.arange(1.0, old.numel() + 1).reshape(old.shape) if writeback and not rank0_only else old
            assert torch.equal(full_tensor(model.get_parameter(name)), want), (name, options)
        _restore(model)


def _restore(model: nn.Module) -> None:
    plain = dict(make_odd(sharded=False).named_parameters())
    with full_parameters(model), torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(plain[name])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_edits_are_kept_with_writeback_and_dropped_without(cluster: Cluster, world_size: int) -> None:
    """B96: every combination of flags."""
    cluster.run(check_edits, world_size=world_size)


def _edit_and_raise(model: Odd) -> None:
    with full_parameters(model), torch.no_grad():
        model.first.weight.fill_(3.0)
        raise KeyError("inside")


def _replace_by_another_shape(model: Odd) -> None:
    with full_parameters(model), torch.no_grad():
        model.first.weight = nn.Parameter(torch.zeros(2, 2))
        model.second.weight.zero_()


def check_exception(rank: int) -> None:
    model = make_odd()
    with pytest.raises(KeyError, match="inside"):
        _edit_and_raise(model)
    assert_at_rest(model)
    assert bool((full_tensor(model.first.weight) == 3.0).all())
    with full_parameters(model):
        model.first.weight = nn.Parameter(torch.full((5, 3), 4.0))  # replaced, not written into
    assert_at_rest(model)
    assert bool((full_tensor(model.first.weight) == 4.0).all())
    with pytest.raises(ValueError, match=r"'weight' of shape \(5, 3\) was replaced by shape \(2, 2\)"):
        _replace_by_another_shape(model)
    assert_at_rest(model)
    assert bool((full_tensor(model.first.weight) == 4.0).all())
    assert not bool((full_tensor(model.second.weight) == 0.0).all())


def test_an_exception_inside_leaves_a_sharded_model_with_the_edits_made_until_then(cluster: Cluster) -> None:
    """B96."""
    cluster.run(check_exception)


def _train(model: nn.Module, rank: int, steps: int = 1) -> list[float]:
    losses = []
    for step in range(steps):
        tokens = torch.randint(7, (4,), generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(tokens).square().mean()
        loss.backward()
        losses.append(loss.item())
    return losses


def check_gradients(rank: int) -> None:
    model, plain = make_odd(), make_odd(sharded=False)
    _train(model, 0)
    _train(plain, 0)
    with full_parameters(model, with_grads=True):
        for name, parameter in model.named_parameters():
            want = plain.get_parameter(name).grad
            assert (parameter.grad is None) == (want is None), name
            if want is not None:
                torch.testing.assert_close(parameter.grad, want, atol=1e-6, rtol=1e-6)
        model.second.weight.grad.mul_(2)
        model.second.bias.grad = None
        model.first.bias.grad = torch.ones(5)
    torch.testing.assert_close(full(model.second.weight.grad), 2 * plain.second.weight.grad)
    assert model.second.bias.grad is None
    assert torch.equal(full(model.first.bias.grad), torch.ones(5))
    with full_parameters(model):
        assert all(p.grad is None for p in model.parameters())
    assert model.second.weight.grad is not None


def test_gradients_are_shown_and_written_back(cluster: Cluster) -> None:
    cluster.run(check_gradients, world_size=3)


def check_edits_are_used(rank: int, reshard: bool) -> None:
    model = make_odd(reshard_after_forward=reshard)
    tokens = torch.arange(7)
    with torch.no_grad():
        before = model(tokens)
        model.unshard()
    with full_parameters(model), torch.no_grad():
        model.scale.mul_(2)
        inside = model(tokens)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), 2 * before)
        torch.testing.assert_close(inside, 2 * before)
    assert model.scale.requires_grad
    assert not model.first.bias.requires_grad


@pytest.mark.parametrize("reshard", [True, False])
def test_a_forward_after_and_inside_uses_the_edits(cluster: Cluster, reshard: bool) -> None:
    cluster.run(check_edits_are_used, reshard)


def check_recurse(rank: int) -> None:
    """Generation with the root's parameters full, as trainers do it: inner units still gather by themselves."""
    model = make_odd(mp_policy=MixedPrecisionPolicy())
    plain = make_odd(sharded=False)
    tokens = torch.arange(7)
    with torch.no_grad():
        model(tokens)  # so that there is an order to prefetch by
        with full_parameters(model, recurse=False, writeback=False):
            assert isinstance(model.first.weight, DTensor)
            assert not isinstance(model.scale, DTensor)
            hidden = model.embedding(tokens)
            for _ in range(2):
                out = model.head(model.second(model.first(hidden).relu()) * model.scale)
                torch.testing.assert_close(out, plain(tokens))
            assert not isinstance(model.scale, DTensor)
            with full_parameters(model):  # the rest, too; the outer context keeps what it has
                assert not isinstance(model.first.weight, DTensor)
            assert isinstance(model.first.weight, DTensor)
            assert not isinstance(model.scale, DTensor)
    assert_at_rest(model)


def test_recurse_false_shows_only_the_unit_of_the_module(cluster: Cluster) -> None:
    cluster.run(check_recurse)


def check_copy_and_load_inside(rank: int) -> None:
    model, plain = make_odd(), make_odd(sharded=False)
    with full_parameters(model):
        assert {name: value.shape for name, value in model.state_dict().items()} == {
            name: value.shape for name, value in plain.state_dict().items()
        }
        model.load_state_dict({name: torch.full_like(value, 2.0) for name, value in plain.state_dict().items()})
    assert_at_rest(model)
    assert all(bool((full_tensor(p) == 2.0).all()) for p in model.parameters())


def test_state_dicts_inside_the_context_are_full(cluster: Cluster) -> None:
    cluster.run(check_copy_and_load_inside)


class Asks(nn.Module):
    """Enters the context in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with full_parameters(self):
            return self.linear(x)


def check_refused(rank: int) -> None:
    asks = fully_shard(Asks())
    with pytest.raises(MisuseError, match="cannot be shown while a forward or backward runs"):
        asks(torch.ones(1, 4))
    assert_at_rest(asks)
    model = make_odd()
    with full_parameters(model):
        loss = model(torch.arange(7)).sum()
        with pytest.raises(MisuseError, match=r"inside summon_full_params: its gradients would be lost"):
            loss.backward()
    assert_at_rest(model)
    assert all(p.grad is None for p in model.parameters())


def check_optimizer_from_inside(rank: int) -> None:
    model = make_odd()
    with full_parameters(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()  # edits, which are kept
    assert full(model.scale).item() == 1.0
    model(torch.arange(7)).sum().backward()
    with pytest.raises(StaleOptimizerError, match=r"built inside .* full parameter '.*Build .* outside"):
        optimizer.step()
    torch.optim.SGD(model.parameters(), lr=0.5).step()


def test_an_optimizer_from_inside_the_context_is_refused_after_it(cluster: Cluster) -> None:
    cluster.run(check_optimizer_from_inside)


def test_what_would_lose_values_is_refused(cluster: Cluster) -> None:
    cluster.run(check_refused)


def _look_finally(model: nn.Module, rank: int) -> None:
    try:
        Explosive.apply(model(batch(rank))).sum().backward()
    finally:
        with full_parameters(model):
            assert model.blocks[0].weight.shape == (8, 8)


def check_after_failed_backward(rank: int) -> None:
    model = make_stack()
    with pytest.raises(ValueError, match="bad backward"):
        _look_finally(model, rank)
    assert_at_rest(model)


def test_the_context_can_be_entered_after_a_failed_backward(cluster: Cluster) -> None:
    """B42."""
    cluster.run(check_after_failed_backward)


# Parameters used outside of their module


class Headless(nn.Module):
    """Returns hidden states; its head is applied by the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.block = nn.Linear(6, 6)
        self.head = nn.Linear(6, 7, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.block(self.embedding(tokens)).relu()


def fused_loss(head: nn.Module, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(hidden @ head.weight.T, labels)


def _tokens_and_labels(rank: int, step: int) -> torch.Tensor:
    return torch.randint(7, (2, 5), generator=torch.Generator().manual_seed(10 * step + rank))


def check_head_of_the_class(rank: int) -> None:
    torch.manual_seed(0)
    plain, inner = Headless(), Headless()
    inner.load_state_dict(plain.state_dict())
    inner.block = FSDP(inner.block)
    ours = FSDP(inner)
    tokens, labels = _tokens_and_labels(0, 0)
    fused_loss(plain.head, plain(tokens), labels).backward()
    use_parameters(inner.head, lambda h, y: fused_loss(inner.head, h, y), ours(tokens), labels).backward()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(full(parameter.grad), plain.get_parameter(name).grad, atol=1e-6, rtol=1e-6)


def test_a_head_inside_of_the_class_can_be_used_by_the_loss(cluster: Cluster) -> None:
    """B91."""
    cluster.run(check_head_of_the_class)


def check_head_outside(rank: int, own_unit: bool, tied: bool, dtype: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if dtype else MixedPrecisionPolicy()
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Headless()
        if tied:
            model.head.weight = model.embedding.weight
        models.append(model)
    plain, ours = models
    fully_shard(ours.block, mp_policy=policy)
    if own_unit:
        fully_shard(ours.head, mp_policy=policy)
    fully_shard(ours, mp_policy=policy)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, ours)]
    tolerance = 1e-6 if dtype is None else 2e-2
    world = dist.get_world_size()
    for step in range(3):
        batches = [
            torch.randint(7, (2, 5), generator=torch.Generator().manual_seed(10 * step + r)) for r in range(world)
        ]
        losses = [fused_loss(plain.head, plain(tokens), labels) for tokens, labels in batches]
        torch.stack(losses).mean().backward()
        tokens, labels = batches[rank]
        loss = use_parameters(ours.head, lambda h, y: fused_loss(ours.head, h, y), ours(tokens), labels)
        loss.backward()
        torch.testing.assert_close(loss.float(), losses[rank], atol=tolerance, rtol=tolerance)
        for name, parameter in ours.named_parameters():
            want = plain.get_parameter(name).grad
            torch.testing.assert_close(full(parameter.grad), want, atol=tolerance, rtol=tolerance, msg=name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_at_rest(ours)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(("own_unit", "tied"), [(True, False), (False, False), (False, True)])
def test_a_head_used_by_the_loss_trains_as_the_reference(
    cluster: Cluster, own_unit: bool, tied: bool, dtype: torch.dtype | None
) -> None:
    """B91."""
    cluster.run(check_head_outside, own_unit, tied, dtype)


def check_use_refused(rank: int) -> None:
    model = make_odd()
    with pytest.raises(ValueError, match="of one unit, this Linear has no sharded ones"):
        use_parameters(nn.Linear(2, 2), print)
    with pytest.raises(ValueError, match=r"those of 2 units"):
        use_parameters(nn.ModuleList([model.first, model.second]), print)
    with pytest.raises(MisuseError, match="has not run yet"):
        use_parameters(model.head, print)
    model(torch.arange(7))
    with pytest.raises(KeyError, match="inside"):
        use_parameters(model.head, _raise)
    assert torch.equal(
        use_parameters(model.head, lambda: model.head.weight.detach().clone()), full_tensor(model.head.weight)
    )
    _train(model, rank)
    model.reshard()
    assert_at_rest(model)


def _raise() -> None:
    raise KeyError("inside")


def test_use_parameters_says_what_it_needs(cluster: Cluster) -> None:
    cluster.run(check_use_refused)


class Tied(nn.Module):
    """Uses the head's weight without calling the head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3)])
        self.head = nn.Linear(3, 7, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x) @ self.head.weight.T


def check_named(rank: int) -> None:
    model = Tied()
    fully_shard(model.layers[0])
    fully_shard(model.head)
    fully_shard(model)
    with pytest.raises(RuntimeError, match="got mixed") as caught:
        model(torch.ones(1, 3))
    (note,) = caught.value.__notes__
    assert note.startswith("fullshard: parameter 'head.weight' is sharded here, because the forward of its own unit")
    assert "fullshard.use_parameters(module, function, ...)" in note
    assert_at_rest(model)


def test_an_error_about_a_sharded_weight_names_it_and_the_cure(cluster: Cluster) -> None:
    """B91."""
    cluster.run(check_named)
