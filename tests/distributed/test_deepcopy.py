"""Copies of a sharded model: deepcopy, averages of weights, reference models, pickling."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from copy import deepcopy
from typing import Any

import pytest
import torch
from reference import Setup, assert_at_rest, compare, full, reference_step, shard_case, sharded_step
from stack import Stack, batch, engine_of, make_stack
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import fullshard
from cluster import Cluster
from fullshard import FSDPModule, fully_shard, register_fsdp_forward_method
from fullshard.errors import MisuseError
from models import by_name, make_model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def check_copy_trains(rank: int, name: str, setup: Setup, trained_before: bool) -> None:
    """The copy is trained against the reference; the original stays as it was, bit for bit."""
    case = by_name(name)
    reference = make_model(case, setup.dtype)
    original = shard_case(case, make_model(case, setup.dtype), setup)
    if trained_before:
        reference_step(case, reference, setup, 0)
        sharded_step(case, original, setup, 0, rank)
    before = {key: full(value).clone() for key, value in original.state_dict().items()}
    ours = deepcopy(original)
    assert type(ours) is type(original)
    assert not {id(p) for p in ours.parameters()} & {id(p) for p in original.parameters()}
    compare(ours, reference, setup, "copied")  # values and gradients
    optimizers = [optimizer_of(reference), optimizer_of(ours)]
    for step in range(1, setup.steps):
        reference_step(case, reference, setup, step)
        sharded_step(case, ours, setup, step, rank)
        for optimizer in optimizers:
            optimizer.step()
        compare(ours, reference, setup, f"{name}, step {step}")
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert_at_rest(ours)
    for key, value in original.state_dict().items():
        torch.testing.assert_close(full(value), before[key], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["uneven_mlp", "scalar", "one_element", "root_only", "grouped_unit", "tied", "llama"])
def test_copy_trains_by_itself(cluster: Cluster, name: str) -> None:
    """B93: values, gradients and settings are copied; copy and original then do not know of each other."""
    cluster.run(check_copy_trains, name, Setup(), True, world_size=2)


@pytest.mark.parametrize(
    ("name", "world_size", "setup", "trained_before"),
    [
        ("llama", 2, Setup(), False),
        ("unused_branch", 2, Setup(), True),
        ("shared_block", 2, Setup(), True),
        ("frozen", 2, Setup(), True),
        ("buffers", 2, Setup(), True),
        ("tied", 3, Setup(), False),
        ("nested", 4, Setup(replicas=2), True),
        ("uneven_mlp", 4, Setup(reshard_after_forward=2), True),
        ("grouped_unit", 3, Setup(transport="torch", reshard_after_forward=False), True),
    ],
)
def test_copy_under_other_settings(
    cluster: Cluster, name: str, world_size: int, setup: Setup, trained_before: bool
) -> None:
    cluster.run(check_copy_trains, name, setup, trained_before, world_size=world_size)


# What is copied


class Counting(nn.Module):
    """Holds what modules hold beside parameters: a buffer, a hook that is a method, another method than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.names = ["a"]
        self.same = self.linear.weight
        self.register_forward_pre_hook(Counting.count)
        self.linear.register_forward_pre_hook(self.count_here)

    def count(self, _args: Any) -> None:
        self.calls += 1

    def count_here(self, _module: nn.Module, _args: Any) -> None:
        self.calls += 10

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        """Two times forward."""
        return 2 * self.linear(x)


def check_contents(rank: int) -> None:
    torch.manual_seed(0)
    model = Counting()
    model.linear.weight.requires_grad_(False)
    model.linear.weight.scale = [0.5]
    fully_shard(model.linear)
    fully_shard(model)
    register_fsdp_forward_method(model, "twice")
    model.set_gradient_divide_factor(1.0)
    model.set_prefetch_bytes(0)
    copied = deepcopy(model)
    model.names.append("b")
    model.linear.weight.scale.append(2.0)
    assert copied.names == ["a"]
    assert copied.linear.weight.scale == [0.5]
    assert not copied.linear.weight.requires_grad
    assert copied.linear.bias.requires_grad
    assert isinstance(copied.linear.weight, nn.Parameter)
    assert copied.linear.weight.device_mesh is model.linear.weight.device_mesh
    assert copied.twice.__doc__ == "Two times forward."
    x = torch.ones(2, 5)
    with torch.no_grad():
        model.linear.bias.zero_()
    assert not torch.equal(copied.twice(x), model.twice(x))  # each is a method of its own module
    assert copied.calls == 10
    assert model.calls == 10
    torch.testing.assert_close(copied(x).detach(), copied.twice(x).detach() / 2)
    assert copied.calls == 31
    assert engine_of(copied) is not engine_of(model)
    assert engine_of(copied).scheduler.policy == engine_of(model).scheduler.policy
    assert [unit.policy for unit in engine_of(copied).units] == [unit.policy for unit in engine_of(model).units]
    assert all(unit.module_ids for unit in engine_of(copied).units)


def test_attributes_hooks_methods_and_settings_are_copied(cluster: Cluster) -> None:
    cluster.run(check_contents)


def check_states(rank: int) -> None:
    """Copies made while something is gathered, held or running."""
    model = make_stack(reshard_after_forward=False)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[2]])
    expected = deepcopy(model)(batch(rank)).detach()
    output = model(batch(rank))  # units keep their buffers
    torch.testing.assert_close(deepcopy(model)(batch(rank)), output, rtol=0, atol=0)
    output.sum().backward()
    model.unshard()
    model.blocks[1].unshard()
    copied = deepcopy(model)
    assert all(hasattr(parameter, "placements") for parameter in copied.parameters())
    assert not hasattr(model.blocks[1].weight, "placements")  # the original is left as it is
    torch.testing.assert_close(copied(batch(rank)).detach(), expected, rtol=0, atol=0)
    assert engine_of(copied).units[1].policy.forward_prefetch == (3,)
    part = deepcopy(copied.blocks[0])  # a unit without its neighbours
    torch.testing.assert_close(part(batch(rank)), copied.blocks[0](batch(rank)), rtol=0, atol=0)
    assert part.__dict__["_fullshard"].unit.wishes.prefetch == {}


def test_copy_in_every_state(cluster: Cluster) -> None:
    cluster.run(check_states)


def check_accumulation(rank: int, replicas: int, method: str) -> None:
    """Copied between microbatches, original and copy end with the same gradients."""
    setup = Setup(replicas=replicas)
    case = by_name("uneven_mlp")
    model = shard_case(case, make_model(case, setup.dtype), setup)
    getattr(model, method)(False)
    sharded_step(case, model, setup, 0, rank)
    copied = deepcopy(model)
    for each in (model, copied):
        getattr(each, method)(True)
        sharded_step(case, each, setup, 1, rank)
    for ours, theirs in zip(copied.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(ours.grad), full(theirs.grad), rtol=0, atol=0)
    reference = make_model(case, setup.dtype)
    for step in range(2):
        reference_step(case, reference, setup, step)
    compare(copied, reference, setup, "accumulated")


@pytest.mark.parametrize(
    ("replicas", "method"),
    [(1, "set_requires_gradient_sync"), (2, "set_requires_gradient_sync"), (2, "set_requires_all_reduce")],
)
def test_copy_within_an_accumulation(cluster: Cluster, replicas: int, method: str) -> None:
    cluster.run(check_accumulation, replicas, method, world_size=2 * replicas)


def check_meta(rank: int) -> None:
    torch.manual_seed(3)
    expected = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    fully_shard(model[0])
    fully_shard(model)
    copied = deepcopy(model)
    torch.manual_seed(3)
    fullshard.materialize(copied)
    assert all(parameter.is_meta for parameter in model.parameters())
    torch.testing.assert_close(copied(torch.ones(2, 5)), expected(torch.ones(2, 5)))
    model.to_empty(device="cpu")
    with pytest.raises(fullshard.errors.UninitializedError, match="never given values"):
        deepcopy(model)(torch.ones(2, 5))
    torch.manual_seed(3)
    again = deepcopy(model)
    for module in again:
        module.reset_parameters()  # sees full parameters of the copy
    torch.testing.assert_close(again(torch.ones(2, 5)), expected(torch.ones(2, 5)))


def test_copy_on_the_meta_device(cluster: Cluster) -> None:
    cluster.run(check_meta)


def check_touched(rank: int) -> None:
    """What the user replaced, or cast, since the last forward is in the copy."""
    model = make_stack()
    model(batch(rank))
    model.blocks[0].load_state_dict({k: v * 2 for k, v in model.blocks[0].state_dict().items()}, assign=True)
    model.blocks[1].weight.grad = None
    copied = deepcopy(model)
    torch.testing.assert_close(copied(batch(rank)), model(batch(rank)), rtol=0, atol=0)
    assert deepcopy(model.to(torch.float64)).blocks[1].weight.dtype is torch.float64


def test_copy_after_parameters_were_replaced(cluster: Cluster) -> None:
    cluster.run(check_touched)


def check_with_optimizer(rank: int, model_first: bool) -> None:
    """A model and its optimizer copied in one go belong together, whichever comes first."""
    model = make_stack()
    optimizer = optimizer_of(model)
    model(batch(rank)).sum().backward()
    optimizer.step()
    pair = (model, optimizer) if model_first else (optimizer, model)
    made = deepcopy(pair)
    copied, its = made if model_first else made[::-1]
    expected = [full(parameter).clone() for parameter in model.parameters()]
    for each, one in ((model, optimizer), (copied, its)):
        each(batch(rank, 1)).sum().backward()
        one.step()
    for parameter, twin, old in zip(model.parameters(), copied.parameters(), expected, strict=True):
        torch.testing.assert_close(full(twin), full(parameter), rtol=0, atol=0)
        assert not torch.equal(full(twin), old)


@pytest.mark.parametrize("model_first", [True, False])
def test_copy_together_with_its_optimizer(cluster: Cluster, model_first: bool) -> None:
    cluster.run(check_with_optimizer, model_first)


# Uses of copies


def check_ema(rank: int, use_buffers: bool, together: bool) -> None:
    """Five steps; the averages gathered from shards equal those of the unsharded model."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).double()
    ours = deepcopy(reference)
    for module in (ours[0], ours):
        fully_shard(module)
    multi = get_ema_multi_avg_fn(0.9) if together else None
    single = None if together else (lambda old, new, _count: old * 0.9 + new * 0.1)
    averages = [AveragedModel(m, avg_fn=single, multi_avg_fn=multi, use_buffers=use_buffers) for m in (reference, ours)]
    optimizers = [optimizer_of(reference), optimizer_of(ours)]
    data = torch.randn(4, 5, dtype=torch.float64)  # the same on every rank: statistics of a batch are each rank's own
    for _ in range(5):
        for model, average, optimizer in zip((reference, ours), averages, optimizers, strict=True):
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
            average.update_parameters(model)
            average.eval()
    expected, got = (average.state_dict() for average in averages)
    assert list(expected) == list(got)
    for key, value in got.items():
        torch.testing.assert_close(full(value), full(expected[key]), msg=(key + "\n{}").format)
    torch.testing.assert_close(averages[1](data), averages[0](data))
    for average in averages:
        update_bn([data, data + 1], average)
    torch.testing.assert_close(averages[1].module[1].running_var, averages[0].module[1].running_var)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("use_buffers", "together"), [(False, True), (True, False)])
def test_averaged_model_of_shards(cluster: Cluster, world_size: int, use_buffers: bool, together: bool) -> None:
    """B93: torch's AveragedModel and update_bn work on shards, without communication in the update."""
    cluster.run(check_ema, use_buffers, together, world_size=world_size)


def check_reference_model(rank: int) -> None:
    """A frozen copy in eval mode beside the model that trains, in one step, as in DPO or RL with a KL term."""
    torch.manual_seed(0)
    plain = Stack()
    frozen_plain = deepcopy(plain).eval().requires_grad_(False)
    model = deepcopy(plain)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    frozen = deepcopy(model).eval().requires_grad_(False)
    optimizers = [optimizer_of(plain), optimizer_of(model)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = [(plain(batch(r, step)) - 1.1 * frozen_plain(batch(r, step))).square().sum() for r in range(2)]
        torch.stack(losses).mean().backward()
        (model(batch(rank, step)) - 1.1 * frozen(batch(rank, step))).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    compare(model, plain, Setup(dtype=torch.float32), "policy")
    compare(frozen, frozen_plain, Setup(dtype=torch.float32), "reference model")


def test_frozen_copy_beside_a_training_model(cluster: Cluster) -> None:
    cluster.run(check_reference_model)


def check_freed(rank: int) -> None:
    gc.disable()
    try:
        model = make_stack()
        copied = deepcopy(model)
        copied(batch(rank)).sum().backward()
        alive = [weakref.ref(module) for module in copied.modules()]
        del copied
        assert not [reference for reference in alive if reference() is not None]
        model(batch(rank)).sum().backward()
    finally:
        gc.enable()


def test_copy_is_freed_without_the_garbage_collector(cluster: Cluster) -> None:
    cluster.run(check_freed)


# What is no copy


def check_pickle(rank: int) -> None:
    model = make_stack()
    for save in (pickle.dumps, lambda m: torch.save(m, io.BytesIO()), lambda m: pickle.dumps(nn.Sequential(m))):
        with pytest.raises(MisuseError, match=r"sharded module \(FSDP\w+\) cannot be pickled.*state_dict\(\)"):
            save(model)
    again = copy.copy(model)
    assert isinstance(again, FSDPModule)
    assert next(again.parameters()) is next(model.parameters())  # as of any module: another name for the same
    again(batch(rank)).sum().backward()
    model(batch(rank)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_pickling_says_what_to_do_and_a_shallow_copy_is_the_same_model(cluster: Cluster) -> None:
    cluster.run(check_pickle)


def check_pieces(rank: int) -> None:
    """What is no module can be copied, too: a state dict to return to, an optimizer, a gradient."""
    model = make_stack(width=5)
    optimizer = optimizer_of(model)
    best = deepcopy(model.state_dict())
    expected = {name: full(value) for name, value in model.state_dict().items()}
    model(batch(rank, width=5)).sum().backward()
    for parameter in model.parameters():
        torch.testing.assert_close(full(deepcopy(parameter.grad)), full(parameter.grad), rtol=0, atol=0)
    optimizer.step()
    state = deepcopy(optimizer.state_dict())
    twin = deepcopy(optimizer)
    for mine, theirs in zip(optimizer.param_groups[0]["params"], twin.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(full(theirs), full(mine), rtol=0, atol=0)
    optimizer.load_state_dict(state)
    assert not any(torch.equal(full(value), expected[name]) for name, value in model.state_dict().items())
    model.load_state_dict(best)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(full(value), expected[name], rtol=0, atol=0)
    for name, value in model.state_dict(keep_vars=True).items():
        assert value is model.get_parameter(name)


def test_state_dicts_optimizers_and_gradients_can_be_copied(cluster: Cluster) -> None:
    cluster.run(check_pieces)
