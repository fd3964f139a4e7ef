"""Wrap policies: which modules they choose, what tied weights become, and what is said when they choose nothing."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed.fsdp.wrap as torch_wrap
from reference import Setup, compare, reference_step, sharded_step
from torch import nn

from cluster import Cluster
from fullshard import FSDP, MixedPrecision, ShardingStrategy, wrap
from fullshard.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from models import by_name, make_model
from networks import Blocks, Llama, Residual, SharedBlock, Tied


def wrapped_names(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, FSDP)}


def check_policies(rank: int) -> None:
    blocks = {"", "blocks.0", "blocks.1"}
    chosen: list[tuple[Any, set[str]]] = [
        (ModuleWrapPolicy([Residual]), blocks),
        (functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Residual}), blocks),
        (functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, Residual)), blocks),
        (CustomPolicy(lambda module: isinstance(module, Residual)), blocks),
        (functools.partial(size_based_auto_wrap_policy, min_num_params=60), blocks),
        (lambda module, recurse, **_: recurse or isinstance(module, Residual), blocks),
    ]
    for policy, expected in chosen:
        assert wrapped_names(FSDP(Blocks(), auto_wrap_policy=policy)) == expected, policy
    every = wrapped_names(FSDP(Blocks(), auto_wrap_policy=always_wrap_policy))
    # A list of modules has no forward: it would never be gathered.
    assert every == {name for name, module in Blocks().named_modules() if not isinstance(module, nn.ModuleList)}


def test_every_kind_of_policy_chooses_the_same_blocks(cluster: Cluster) -> None:
    cluster.run(check_policies, world_size=1)


@pytest.mark.parametrize("numel", [1, 20, 60, 100, 10**8])
def test_size_policy_answers_as_torchs(numel: int) -> None:
    for module in [*Llama().modules(), nn.MultiheadAttention(4, 2), nn.ModuleList()]:
        for recurse in (True, False):
            for seen in (0, 50, 99, 10**8):
                ours = size_based_auto_wrap_policy(module, recurse, seen, numel)
                assert ours == torch_wrap.size_based_auto_wrap_policy(module, recurse, seen, numel)
    assert {nn.ModuleList, nn.ModuleDict} == size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES
    assert {nn.MultiheadAttention} == size_based_auto_wrap_policy.FORCE_LEAF_MODULES


def test_policies_of_torch_with_private_names_are_there() -> None:
    """Training code on the web joins a policy for adapters and one for blocks with `_or_policy`."""
    from fullshard.wrap import _module_wrap_policy, _or_policy

    blocks = functools.partial(_module_wrap_policy, module_classes={nn.Conv2d})
    linears = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.Linear))
    joined = functools.partial(_or_policy, policies=[blocks, linears])
    theirs = functools.partial(torch_wrap._or_policy, policies=[blocks, linears])
    for module in (nn.Linear(1, 1), nn.Conv2d(1, 1, 1), nn.ReLU()):
        for recurse in (True, False):
            question = {"module": module, "recurse": recurse, "nonwrapped_numel": 0}
            assert joined(**question) == theirs(**question)


def test_size_policy_takes_leaves_and_exclusions() -> None:
    leaf = functools.partial(size_based_auto_wrap_policy, min_num_params=1, force_leaf_modules={nn.Sequential})
    assert not leaf(module=nn.Sequential(), recurse=True, nonwrapped_numel=5)
    excluded = functools.partial(size_based_auto_wrap_policy, min_num_params=1, exclude_wrap_modules={nn.Linear})
    assert not excluded(module=nn.Linear(1, 1), recurse=False, nonwrapped_numel=5)
    assert excluded(module=nn.ModuleList(), recurse=False, nonwrapped_numel=5)


def check_custom(rank: int) -> None:
    model = Blocks()
    second = model.blocks[1]

    def choose(module: nn.Module) -> bool | dict[str, Any]:
        if module is second:
            return {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "mixed_precision": MixedPrecision()}
        return isinstance(module, Residual)

    wrapped = FSDP(
        model, auto_wrap_policy=CustomPolicy(choose), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)
    )
    assert wrapped.blocks[0].sharding_strategy is ShardingStrategy.FULL_SHARD
    assert wrapped.blocks[0].mixed_precision.param_dtype is torch.bfloat16
    assert wrapped.blocks[1].sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
    assert wrapped.blocks[1].mixed_precision.param_dtype is None
    with pytest.raises(ValueError, match="no arguments"):
        FSDP(Blocks(), auto_wrap_policy=CustomPolicy(lambda _: {"strategy": 1}))
    with pytest.raises(ValueError, match="bool or a dict"):
        FSDP(Blocks(), auto_wrap_policy=CustomPolicy(lambda _: 3))  # type: ignore[arg-type,return-value]


def test_custom_policy_overrides_arguments(cluster: Cluster) -> None:
    cluster.run(check_custom, world_size=1)


def check_wrap_by_hand(rank: int) -> None:
    assert isinstance(wrap.wrap(nn.Linear(2, 2)), nn.Linear)
    with enable_wrap(wrapper_cls=FSDP, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP):
        inner = wrap.wrap(nn.Linear(2, 2))
        other = wrap.wrap(nn.Linear(2, 2), sharding_strategy=ShardingStrategy.FULL_SHARD)
        with pytest.raises(NotImplementedError, match="inside enable_wrap"), enable_wrap(wrapper_cls=FSDP):
            pass
    assert isinstance(inner, FSDP)
    assert inner.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
    assert isinstance(other, FSDP)
    assert other.sharding_strategy is ShardingStrategy.FULL_SHARD
    assert isinstance(wrap.wrap(nn.Linear(2, 2)), nn.Linear)


def test_enable_wrap_wraps_by_hand(cluster: Cluster) -> None:
    cluster.run(check_wrap_by_hand, world_size=1)


def check_tied(rank: int) -> None:
    """B89: a size policy makes units of both modules that share a weight."""
    case, setup = by_name("tied"), Setup()
    model, reference = make_model(case, torch.float64), make_model(case, torch.float64)
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=1)
    wrapped = FSDP(model, auto_wrap_policy=policy)
    assert isinstance(model, Tied)
    assert isinstance(model.embedding, FSDP)
    assert isinstance(model.head, FSDP)
    assert model.embedding.weight is model.head.weight
    for step in range(2):
        reference_step(case, reference, setup, step)
        sharded_step(case, wrapped, setup, step, rank)
    compare(wrapped, reference, setup, "tied")


def test_tied_weights_split_by_a_policy_stay_one_parameter(cluster: Cluster) -> None:
    """B89."""
    cluster.run(check_tied)


def check_shared(rank: int) -> None:
    model = SharedBlock()
    wrapped = FSDP(model, auto_wrap_policy=ModuleWrapPolicy([Residual]))
    again = nn.ModuleList([residual := Residual(), nn.Sequential(residual)])
    holder = nn.Sequential(again[1], nn.Linear(4, 4))
    holder.other = again[0]
    FSDP(holder, auto_wrap_policy=ModuleWrapPolicy([Residual]))
    assert len(FSDP.fsdp_modules(wrapped)) == 2
    assert holder.other is holder[0][0]
    assert isinstance(holder.other, FSDP)


def test_a_module_in_several_places_is_wrapped_once(cluster: Cluster) -> None:
    cluster.run(check_shared, world_size=1)


def check_nothing_matched(rank: int) -> None:
    for policy in (
        ModuleWrapPolicy([nn.Conv2d]),
        ModuleWrapPolicy([]),
        size_based_auto_wrap_policy,
        CustomPolicy(lambda _: False),
    ):
        with pytest.warns(UserWarning, match="matched no module, so the whole model is one unit.* Residual") as caught:
            FSDP(Blocks(), auto_wrap_policy=policy)
        assert len(caught) == 1
        assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="put all parameters into one module.*Residual"):
        FSDP(nn.Sequential(Blocks()), auto_wrap_policy=ModuleWrapPolicy([Blocks]))


def test_a_policy_that_divides_nothing_says_so_and_names_the_blocks(cluster: Cluster) -> None:
    """B89."""
    cluster.run(check_nothing_matched, world_size=1)
