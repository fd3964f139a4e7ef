"""`FullyShardedDataParallel`: numbers against the unsharded model for every strategy, and what it looks like."""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.fsdp.wrap
from reference import Setup, _optimizer, compare, reference_step, sharded_step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
import fullshard.wrap
from cluster import Cluster
from fullshard import FSDP, MixedPrecision, ShardingStrategy
from fullshard.wrap import CustomPolicy
from models import CASES, by_name, make_model, run_case

STRATEGIES = list(ShardingStrategy.__members__)


def wrap_case(name: str, strategy: str, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[FSDP, nn.Module]:
    case = by_name(name)
    model = make_model(case, dtype)
    chosen = [unit for unit in case.unit_modules(model) if isinstance(unit, nn.Module)]
    if strategy in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        options["device_mesh"] = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    if chosen:
        options["auto_wrap_policy"] = CustomPolicy(lambda module: any(module is each for each in chosen))
    return FSDP(model, sharding_strategy=ShardingStrategy[strategy], **options), make_model(case, dtype)


def check_reference(rank: int, name: str, strategy: str, microbatches: int = 1) -> None:
    case, setup = by_name(name), Setup(microbatches=microbatches)
    ours, reference = wrap_case(name, strategy)
    optimizers = [_optimizer(reference), _optimizer(ours)]
    assert list(dict(ours.named_parameters())) == list(dict(reference.named_parameters()))
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        reference_step(case, reference, setup, step)
        sharded_step(case, ours, setup, step, rank)
        for optimizer in optimizers:
            optimizer.step()
        compare(ours, reference, setup, f"{name}, {strategy}, rank {rank}, step {step}")


@pytest.mark.parametrize("case", [case.name for case in CASES])
def test_every_model_of_the_menagerie_trains_like_the_unsharded_one(cluster: Cluster, case: str) -> None:
    cluster.run(check_reference, case, "FULL_SHARD")


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [(strategy, size) for strategy in STRATEGIES for size in (1, 2, 4) if size == 4 or "HYBRID" not in strategy],
)
@pytest.mark.parametrize("case", ["llama", "one_element"])
def test_every_strategy_trains_like_the_unsharded_model(
    cluster: Cluster, case: str, strategy: str, world_size: int
) -> None:
    cluster.run(check_reference, case, strategy, 2, world_size=world_size)


def check_mixed_precision(rank: int, strategy: str, accumulate: bool) -> None:
    """The reference computes in a bfloat16 copy of float32 parameters and averages gradients in float32."""
    case = by_name("llama")
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ours, reference = wrap_case("llama", strategy, torch.float32, mixed_precision=precision)
    optimizers = [_optimizer(reference), _optimizer(ours)]
    for step in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for parameter in reference.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for each in range(dist.get_world_size()):
            computing = copy.deepcopy(reference).to(torch.bfloat16)
            computing.zero_grad()
            for microbatch in range(1 + accumulate):
                run_case(case, computing, each, 2 * step + microbatch).backward()
                for parameter, own in zip(reference.parameters(), computing.parameters(), strict=True):
                    parameter.grad += own.grad.float() / dist.get_world_size()
                    own.grad = None
        for microbatch in range(1 + accumulate):
            with ours.no_sync() if accumulate and microbatch == 0 else contextlib.nullcontext():
                loss = run_case(case, ours, rank, 2 * step + microbatch)
                assert loss.dtype == torch.bfloat16
                loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        compare(ours, reference, Setup(dtype=torch.float32), f"{strategy}, step {step}")


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_mixed_precision_trains_like_a_low_precision_copy_with_wide_gradients(
    cluster: Cluster, strategy: str, accumulate: bool
) -> None:
    cluster.run(check_mixed_precision, strategy, accumulate, world_size=4 if "HYBRID" in strategy else 2)


def check_beside_torch(rank: int, param_dtype: torch.dtype | None) -> None:
    """The same code with the other import: equal losses, gradient norms, and keys and values of state dicts."""
    case, results = by_name("llama"), []
    for package in (fullshard, torch.distributed.fsdp):
        api: Any = package
        model = make_model(case, torch.float32)
        wrapped = api.FullyShardedDataParallel(
            model,
            sharding_strategy=api.ShardingStrategy.FULL_SHARD,
            mixed_precision=api.MixedPrecision(param_dtype=param_dtype, reduce_dtype=torch.float32),
            auto_wrap_policy=functools.partial(package.wrap.size_based_auto_wrap_policy, min_num_params=300),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        numbers = []
        for step in range(3):
            loss = run_case(case, wrapped, rank, step)
            loss.backward()
            numbers += [loss.item(), wrapped.clip_grad_norm_(1.0).item()]
            optimizer.step()
            optimizer.zero_grad()
        with api.FullyShardedDataParallel.summon_full_params(wrapped):
            values = {name: parameter.detach().clone() for name, parameter in wrapped.named_parameters()}
        results.append((numbers, values, len(api.FullyShardedDataParallel.fsdp_modules(wrapped))))
    (ours, our_values, our_units), (theirs, their_values, their_units) = results
    assert our_units == their_units
    assert ours == pytest.approx(theirs, rel=1e-5 if param_dtype is None else 1e-2)
    tolerance = 1e-6 if param_dtype is None else 1e-2
    assert list(our_values) == list(their_values)
    for name, value in our_values.items():
        torch.testing.assert_close(value, their_values[name], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_the_same_script_gives_the_numbers_of_torchs_class(cluster: Cluster, param_dtype: torch.dtype | None) -> None:
    cluster.run(check_beside_torch, param_dtype)
