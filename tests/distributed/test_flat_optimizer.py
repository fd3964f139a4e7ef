"""`fullshard.optim.flat`: the numbers and states of the optimizer on one tensor a parameter, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from reference import Setup, full, shard_case
from test_across_steps import begun, check_values_in_use, early_stack
from test_across_steps import train as train_early
from test_optimizers import WORKING, Odd, assert_equal, inputs, loss_of, make_pair, reference_loss
from test_tensor_parallel import loss_of as parallel_loss
from test_tensor_parallel import mesh_3d, parallelize, shard, transformer
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from cluster import Cluster
from fullshard import (
    MixedPrecisionPolicy,
    ShardedGradScaler,
    clip_grad_norm_,
    fully_shard,
    optim,
    split_param_groups,
)
from fullshard.errors import MisuseError
from fullshard.runtime.loop.flat import FlatOptimizer
from models import Case, by_name, make_model, run_case

AdamW = torch.optim.AdamW
Twins = list[tuple[nn.Module, torch.optim.Optimizer]]


def by_dim(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay on matrices only, as everybody writes it."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0, "lr": 0.02},
    ]


def make_twins(
    kind: type[torch.optim.Optimizer],
    build: Callable[[], nn.Module],
    params: Callable[[nn.Module], Any] = nn.Module.parameters,
    **options: Any,
) -> Twins:
    """The same model with the optimizer on parameters, and with the flat one."""
    plain, ours = build(), build()
    return [(plain, kind(params(plain), **options)), (ours, optim.flat(kind, params(ours), **options))]


def same(got: Any, want: Any, what: str) -> None:
    if not isinstance(want, torch.Tensor):
        assert got == want, f"{what}: {got} is not {want}"
        return
    assert type(got) is type(want), what
    got, want = full(got.detach()), full(want.detach())
    assert got.shape == want.shape, what
    assert got.dtype == want.dtype, what
    assert torch.equal(got, want), f"{what}: they differ by {(got - want).abs().max()}"


def assert_same(twins: Twins, what: str) -> None:
    """Values and optimizer states, bit for bit."""
    (plain, wanted), (ours, got) = twins
    for (name, left), right in zip(ours.named_parameters(), plain.parameters(), strict=True):
        same(left, right, f"{what}: {name}")
        left_state, right_state = got.state.get(left), wanted.state.get(right)
        assert (left_state or {}).keys() == (right_state or {}).keys(), f"{what}: state of {name}"
        for key, value in (right_state or {}).items():
            same(left_state[key], value, f"{what}: {key} of {name}")
    for left, right in zip(got.param_groups, wanted.param_groups, strict=True):
        assert {k: v for k, v in left.items() if k != "params"} == {k: v for k, v in right.items() if k != "params"}


def odd(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = Odd().to(dtype)
    fully_shard(model.middle)
    return fully_shard(model)


def train(twins: Twins, rank: int, step: int, set_to_none: bool = True) -> None:
    for model, optimizer in twins:
        dtype = next(model.parameters()).dtype
        loss_of(model, inputs(rank, step).to(dtype)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)


def check_kinds(rank: int, name: str) -> None:
    common = name in ("SGD", "Adam", "AdamW")
    more = [{"fused": True, "weight_decay": 0.1}] if name in ("Adam", "AdamW") else []
    for options in [*WORKING[name], *more] if common else WORKING[name][-1:]:
        twins = make_twins(getattr(torch.optim, name), odd, by_dim, lr=0.01, **options)
        rates = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for _, optimizer in twins]
        for step in range(3):
            train(twins, rank, step, set_to_none=step % 2 == 0)
            for rate in rates:
                rate.step()
            assert_same(twins, f"{name} {options}, step {step}")


@pytest.mark.parametrize("name", list(WORKING))
def test_flat_equals_per_parameter_bit_for_bit(cluster: Cluster, name: str) -> None:
    """With a group for weight decay, a schedule, uneven and empty shards (three ranks), a 0-d and a tied parameter."""
    cluster.run(check_kinds, name, world_size=3)


def narrow() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(a, b) for a, b in ((37, 21), (21, 13), (13, 5))]).to(torch.bfloat16)
    return fully_shard(model)


def check_narrow(rank: int) -> None:
    """In 16 bits the last elements of a tensor are rounded in another way than the rest of it."""
    for kind, options in (
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.9, "foreach": False}),
        (torch.optim.AdamW, {}),
    ):
        twins = make_twins(kind, narrow, lr=0.01, **options)
        for step in range(4):
            for model, optimizer in twins:
                x = torch.randn(4, 37, generator=torch.Generator().manual_seed(10 * step + rank)).bfloat16()
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert_same(twins, f"{kind.__name__}, step {step}")


def test_parameters_stored_in_bfloat16_bit_for_bit(cluster: Cluster) -> None:
    cluster.run(check_narrow)


ONLY_FLAT: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.Rprop, {}),
    (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
    (torch.optim.Adagrad, {"fused": True}),
]


def check_only_flat(rank: int) -> None:
    for kind, options in ONLY_FLAT:
        reference, ours = make_pair()
        optimizers = [kind(reference.parameters(), lr=0.01, **options), optim.flat(kind, ours, lr=0.01, **options)]
        for step in range(3):
            reference_loss(reference, step).backward()
            loss_of(ours, inputs(rank, step)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_equal(ours, reference, f"{kind.__name__}, step {step}")


def test_kernels_that_torch_does_not_have_for_sharded_parameters(cluster: Cluster) -> None:
    """Against the unsharded model: Rprop, and fused SGD and Adagrad, work on flat shards only."""
    cluster.run(check_only_flat)


def shard_of(case: Case) -> nn.Module:
    return shard_case(case, make_model(case, torch.float32), Setup(torch.float32))


CASES = ("conditional", "unused_branch", "skipped_unit", "frozen", "tied", "llama", "one_element")


def check_cases(rank: int) -> None:
    for name in CASES:
        case = by_name(name)
        twins = make_twins(AdamW, lambda: shard_of(case), by_dim, lr=0.01, fused=True)  # noqa: B023
        for step in range(4):
            for model, optimizer in twins:
                run_case(case, model, rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert_same(twins, f"{name}, step {step}")
        plan: Any = twins[1][1]._plan  # type: ignore[attr-defined]
        assert not any(plan.others), f"{name}: all are in flat shards"


def test_parameters_without_a_gradient_are_left_alone(cluster: Cluster) -> None:
    """No decay, no count of steps: as without `flat`; what came to differ is computed apart."""
    cluster.run(check_cases)


class Count(TorchDispatchMode):
    """Calls of kernels by name, with the number of tensors in the first list, and bytes of copies."""

    def __init__(self) -> None:
        super().__init__()
        self.fused: list[int] = []
        self.others: list[str] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name.startswith("_fused"):
            self.fused.append(len(args[0]))
        elif name not in ("detach", "slice", "_foreach_add_", "_record_function_enter_new", "_record_function_exit"):
            self.others.append(name)
        return func(*args, **(kwargs or {}))


def wide() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 512), nn.LayerNorm(512), nn.Linear(512, 64)) for _ in range(3)))
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def check_count(rank: int) -> None:
    model = wide()
    optimizer = optim.flat(AdamW, by_dim(model), lr=0.01, fused=True)
    for _ in range(3):
        model(torch.ones(2, 64)).square().mean().backward()
        with Count() as count:
            optimizer.step()
        optimizer.zero_grad()
    # 3 units of 2 groups each, the groups side by side; units are together because they are small.
    assert count.fused == [3, 3]
    # Beside the kernels only the numbers of steps are brought up to date, one a tensor.
    assert count.others == ["copy_"] * 6


def test_one_tensor_for_each_unit_and_group_and_no_copy(cluster: Cluster) -> None:
    cluster.run(check_count)


def check_gathered(rank: int) -> None:
    model = wide()
    for block in model:
        block.set_reshard_after_forward(False)
        block.set_reshard_after_backward(False)
    optimizer = optim.flat(AdamW, by_dim(model), lr=0.01, fused=True)
    engine: Any = None
    for step in range(3):
        for number, block in enumerate(model):
            block.requires_grad_(number == step % 3)
        model(torch.ones(2, 64)).square().mean().backward()
        engine = model[0].__dict__["_fullshard"].unit.engine
        optimizer.step()
        assert engine.written == {model[step % 3].__dict__["_fullshard"].unit.index}
        optimizer.zero_grad()


def test_only_units_that_were_updated_are_gathered_again(cluster: Cluster) -> None:
    """B126."""
    cluster.run(check_gathered)


def check_gradients(rank: int) -> None:
    twins = make_twins(AdamW, odd, by_dim, lr=0.01, fused=True)
    for step in range(6):
        for model, optimizer in twins:
            for _ in range(2):
                loss_of(model, inputs(rank, step).float()).backward()
            weight, bias = model.first.weight, model.first.bias
            if step == 1:
                weight.grad = weight.grad * 2
            if step == 2:
                bias.grad = None
            if step == 3:
                model.middle.weight.grad = torch.zeros_like(model.middle.weight)
            if step == 4:
                clip_grad_norm_(model, 0.01)
            if step == 5:
                bias.grad.mul_(3)
            optimizer.step()
            optimizer.zero_grad()
        assert_same(twins, f"step {step}")


def test_gradients_that_the_user_changed_replaced_or_removed(cluster: Cluster) -> None:
    cluster.run(check_gradients)


def check_written_state(rank: int) -> None:
    twins = make_twins(AdamW, odd, by_dim, lr=0.01, fused=True)
    for step in range(6):
        train(twins, rank, step)
        assert_same(twins, f"step {step}")
        for model, optimizer in twins:
            state = optimizer.state[model.first.weight]
            if step == 0:
                state["exp_avg"].mul_(2)
            if step == 1:
                state["step"].fill_(10)
            if step == 2:
                state["exp_avg_sq"] = torch.ones_like(state["exp_avg_sq"])
            if step == 3:
                del optimizer.state[model.middle.weight]
            if step == 4:
                optimizer.state.clear()


def test_state_written_by_hand_counts(cluster: Cluster) -> None:
    """In place, replaced, removed: what the user sees in `state` is what the next step computes with."""
    cluster.run(check_written_state)


def check_shown(rank: int) -> None:
    model = odd()
    optimizer = optim.flat(AdamW, model, lr=0.01)
    train([(model, optimizer)], rank, 0)
    state = optimizer.state[model.first.weight]
    held = dict(state)
    train([(model, optimizer)], rank, 1)
    assert optimizer.state[model.first.weight] is state
    assert held["step"] == 2 == state["step"]
    assert held["exp_avg"] is state["exp_avg"]
    before = full(held["exp_avg"]).clone()
    train([(model, optimizer)], rank, 2)
    assert not torch.equal(full(held["exp_avg"]), before)


def test_state_that_the_user_holds_goes_on(cluster: Cluster) -> None:
    cluster.run(check_shown)


def check_changed_model(rank: int) -> None:
    twins = make_twins(torch.optim.SGD, odd, lr=0.1, momentum=0.9)
    train(twins, rank, 0)
    for model, _ in twins:
        model.load_state_dict(model.state_dict())
    train(twins, rank, 1)
    assert_same(twins, "after a load")
    for model, optimizer in twins:
        loss_of(model, inputs(rank, 2).float()).backward()
        model.double()  # between backward and step
        for parameter in model.parameters():
            parameter.grad = parameter.grad.double() if parameter.grad is not None else None
            for name, value in optimizer.state[parameter].items():
                optimizer.state[parameter][name] = value.double()
        optimizer.step()
        optimizer.zero_grad()
    train(twins, rank, 3)
    assert_same(twins, "after a cast")
    copies = [deepcopy(twin) for twin in twins]
    train(copies, rank, 4)
    assert_same(copies, "of copies")
    train(twins, rank, 4)
    assert_same(twins, "beside copies")
    same(copies[1][0].scale, twins[1][0].scale, "a copy goes the same way")


def test_model_that_was_loaded_cast_or_copied(cluster: Cluster) -> None:
    cluster.run(check_changed_model)


def check_wrappers(rank: int) -> None:
    """What schedulers, scalers, hooks and loops expect of an optimizer."""
    calls: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("all, before")),
        register_optimizer_step_post_hook(lambda *_: calls.append("all, after")),
    ]
    twins = make_twins(AdamW, odd, lr=0.01)
    ours = twins[1][1]
    assert isinstance(ours, AdamW)
    ours.register_step_pre_hook(lambda *_: calls.append("before"))
    ours.register_step_post_hook(lambda *_: calls.append("after"))
    for model, optimizer in twins:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
        for step in range(3):

            def closure(model: nn.Module = model, optimizer: Any = optimizer, step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, inputs(rank, step).float())
                loss.backward()
                return loss

            calls.clear()
            assert optimizer.step(closure).shape == ()
            scheduler.step()
    assert calls == ["all, before", "before", "after", "all, after"]
    assert_same(twins, "with closures")
    for model, optimizer in twins:
        scaler = ShardedGradScaler("cpu", init_scale=1024.0)
        scaler.scale(loss_of(model, inputs(rank, 5).float())).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        optimizer.zero_grad()
        optimizer.step()  # without gradients
    assert_same(twins, "with a scaler")
    for model, optimizer in twins:
        parameters = optimizer.param_groups[0]["params"]
        parameters[:] = [p for p in parameters if p is not model.first.bias]
        optimizer.add_param_group({"params": [model.first.bias], "lr": 0.5, "weight_decay": 0.3})
    train(twins, rank, 6)
    assert_same(twins, "with another group")
    for handle in handles:
        handle.remove()


def test_is_an_optimizer_for_schedulers_scalers_hooks_and_closures(cluster: Cluster) -> None:
    cluster.run(check_wrappers)


def check_precision(rank: int) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return fully_shard(Odd(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))

    twins = make_twins(AdamW, build, by_dim, lr=0.01, fused=True)
    for step in range(3):
        train(twins, rank, step)
    assert_same(twins, "bfloat16 with float32 shards")
    assert next(twins[1][0].parameters()).dtype is torch.float32


def test_bfloat16_with_float32_shards(cluster: Cluster) -> None:
    cluster.run(check_precision)


def check_kinds_of_parameters(rank: int) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        model = Odd()
        ignored = {model.first.bias, model.last.weight}
        return fully_shard(model, ignored_params=ignored, average_ignored_grads=True)

    for options in ({}, {"foreach": True}):
        torch.manual_seed(0)
        groups: Any = split_param_groups if options else list
        plain, ours = build(), build()
        wanted = AdamW(groups(plain.parameters()), lr=0.01, **options)
        got = optim.flat(AdamW, groups(ours.parameters()), lr=0.01, **options)
        twins = [(plain, wanted), (ours, got)]
        for step in range(3):
            train(twins, rank, step)
            assert_same(twins, f"ignored parameters, {options}")
    mixed = build()
    together = optim.flat(AdamW, mixed, lr=0.01, fused=True)  # plain kernels take both kinds
    train([(mixed, together)], rank, 0)
    assert len(together.state) == 7


def test_ignored_parameters_are_updated_beside(cluster: Cluster) -> None:
    cluster.run(check_kinds_of_parameters)


def check_parallel(rank: int) -> None:
    dp, tp, part, _ = mesh_3d(1, 2, 2)
    twins = make_twins(
        AdamW, lambda: shard(parallelize(transformer(torch.float32), tp, False), fully_shard, mesh=dp), lr=0.01
    )
    for step in range(2):
        for model, optimizer in twins:
            parallel_loss(model, step, part).backward()
            clip_grad_norm_(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(twins, "tensor parallel")


def test_tensor_parallel_parameters(cluster: Cluster) -> None:
    cluster.run(check_parallel, world_size=4)


class Lion(torch.optim.Optimizer):
    """As many write their own: numbers in Python beside the tensors of the state."""

    def __init__(self, params: Any, lr: float = 1e-3, norms: bool = False) -> None:
        super().__init__(params, {"lr": lr, "norms": norms})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override] # noqa: ARG002
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["count"] = state.get("count", 0) + 1
                    average = state.setdefault("exp_avg", torch.zeros_like(p))
                    update = average.mul(0.9).add(p.grad, alpha=0.1).sign_()
                    p.add_(update, alpha=-group["lr"] * (p.norm() if group["norms"] else 1.0) / state["count"])
                    average.lerp_(p.grad, 0.01)


def check_own(rank: int) -> None:
    twins = make_twins(Lion, odd, by_dim, lr=0.01)
    for step in range(3):
        train(twins, rank, step)
        assert_same(twins, f"step {step}")
    assert twins[1][1].state[twins[1][0].scale]["count"] == 3


def test_optimizers_of_the_users_own(cluster: Cluster) -> None:
    cluster.run(check_own)


class Untriable(Lion):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        raise RuntimeError("needs another device")


REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (torch.optim.Muon, {}, MisuseError, "Muon cannot work on flat shards: it orthogonalizes whole matrices"),
    (torch.optim.Adafactor, {}, MisuseError, "Adafactor cannot work on flat shards: it keeps factors"),
    (torch.optim.LBFGS, {}, MisuseError, "LBFGS cannot work on flat shards: it takes dot products"),
    (torch.optim.SparseAdam, {}, MisuseError, "SparseAdam cannot work on flat shards"),
    (Lion, {"norms": True}, MisuseError, "Lion does not do the same to two parameters and to one tensor"),
    (Untriable, {}, MisuseError, "could not be tried out .* needs another device.* pass elementwise=True"),
    (AdamW, {"differentiable": True}, ValueError, "differentiable=True cannot be had on flat shards"),
    (Odd, {}, TypeError, "expected an optimizer class"),
]


@pytest.mark.parametrize(("kind", "options", "error", "match"), REFUSED)
def test_refuses_what_is_not_elementwise(
    kind: Any, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        optim.flat(kind, Odd(), **options)
    assert isinstance(optim.flat(Lion, Odd(), elementwise=True, norms=True), Lion)


def test_is_an_optimizer_of_a_model_that_is_not_sharded() -> None:
    model = Odd()
    optimizer = optim.flat(AdamW, model, lr=0.1)
    before = model.scale.item()
    loss_of(model, torch.ones(2, 5)).backward()
    optimizer.step()
    assert model.scale.item() != before
    assert torch.equal(optimizer.state[model.scale]["step"], torch.tensor(1.0))


def check_across_steps(rank: int) -> None:
    model = early_stack()
    optimizer: Any = optim.flat(AdamW, model, lr=0.01)
    seen: list[list[int]] = []
    update = FlatOptimizer._step_batch

    def spy(self: FlatOptimizer, batch: Any) -> None:
        seen.append(begun(model))
        update(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fullshard.runtime.loop.flat._TOGETHER_BYTES", 0)  # unit by unit, as large units are
        patch.setattr(FlatOptimizer, "_step_batch", spy)
        train_early(rank, model, optimizer, 4)
        assert len(seen) % 4 == 0
        last_step = seen[-len(seen) // 4 :]
        assert last_step[0] == []
        assert last_step[-1] != []  # the first units of the next forward are on their way before the last is updated
        check_values_in_use(rank, model)


def test_the_next_step_begins_while_units_are_updated(cluster: Cluster) -> None:
    """With `set_prefetch_across_steps`: units are reported one by one, in the order of forward."""
    cluster.run(check_across_steps)
