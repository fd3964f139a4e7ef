"""`FullyShardedDataParallel`: numbers against the unsharded model for every strategy, and what it looks like."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference import Setup, _optimizer, compare, reference_step, sharded_step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cluster import Cluster
from fullshard import FSDP, ShardingStrategy
from fullshard.wrap import (
    CustomPolicy,
)
from models import CASES, by_name, make_model

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


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", ["llama", "one_element"])
def test_every_strategy_trains_like_the_unsharded_model(
    cluster: Cluster, case: str, strategy: str, world_size: int
) -> None:
    if "HYBRID" in strategy and world_size != 4:
        pytest.skip("needs two replicas of two ranks")
    cluster.run(check_reference, case, strategy, 2, world_size=world_size)
