"""What a rank decides must follow from what all ranks know, not from its own rows; else the others wait for it."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from cluster import Cluster
from fullshard import FSDP, ShardedGradScaler, ShardingStrategy, fully_shard
from fullshard.errors import UninitializedError
from fullshard.runtime.module import unit_of
from fullshard.runtime.params.meshes import strategy_mesh
from fullshard.runtime.registry import REGISTRY
from fullshard.runtime.whole.optim_state import scatter_optimizer


class Pair(nn.Module):
    """Only the first of two parameters is used."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.ones(4))
        self.other = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.used


def check_unused(rank: int) -> None:
    model = fully_shard(Pair())

    def hook(gradients: torch.Tensor) -> None:
        gradients.fill_(float(rank == 0))  # what came from elsewhere is in the rows of one rank only

    model.set_all_reduce_hook(hook)
    model(torch.ones(4)).sum().backward()
    assert model.other.grad is not None
    model.zero_grad()
    model.set_all_reduce_hook(lambda _gradients: None)
    model(torch.ones(4)).sum().backward()
    assert model.other.grad is None


def test_ranks_agree_on_gradients_that_only_a_hook_brought(cluster: Cluster) -> None:
    cluster.run(check_unused)


def check_unfilled(rank: int) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1, bias=False))
    fully_shard(model)
    model.to_empty(device="cpu")
    model[0].load_state_dict(nn.Linear(4, 4).state_dict())
    with pytest.raises(UninitializedError, match=r"parameters '1.weight' were materialized"):
        model(torch.ones(1, 4))


def test_missing_values_are_refused_by_ranks_without_rows_too(cluster: Cluster) -> None:
    cluster.run(check_unfilled)


def check_clip(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float64))
    fully_shard(model, ignored_params=set(model[1].parameters()), average_ignored_grads=False)
    for parameter in model[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    if rank == 0:
        model[1].weight.grad = torch.zeros(4, 4, dtype=torch.float64)
    assert fullshard.clip_grad_norm_(model, 1.0).item() == pytest.approx(20**0.5)


def test_norms_are_summed_in_one_dtype_whoever_has_gradients(cluster: Cluster) -> None:
    cluster.run(check_clip)


def check_scaler(rank: int) -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), ShardedGradScaler("cpu", init_scale=2.0)
    loss = scaler.scale(weight.sum())
    if rank == 0:
        loss.backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == ([0.0, 0.0] if rank == 0 else [1.0, 1.0])


def test_scaler_on_a_rank_without_gradients(cluster: Cluster) -> None:
    cluster.run(check_scaler)


def check_scatter(rank: int) -> None:
    model = fully_shard(nn.Linear(4, 4))
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match="has no 'state', only"):
        scatter_optimizer(model, optimizer, {"params": 1} if rank == 0 else None)


def test_state_that_is_none_is_refused_on_every_rank(cluster: Cluster) -> None:
    cluster.run(check_scatter)


def wrapped(strategy: ShardingStrategy, **options: object) -> FSDP:
    return FSDP(nn.Linear(4, 4), sharding_strategy=strategy, average_ignored_grads=False, **options)  # type: ignore[arg-type]


def check_meshes(rank: int) -> None:
    """One rank still refers to a model when a second one is made: both ranks make its mesh, or none of them."""
    first = wrapped(ShardingStrategy.NO_SHARD)
    kept = first if rank == 0 else None
    mesh = weakref.ref(unit_of(first).place.mesh)
    del first
    gc.collect()
    assert mesh() is not None
    second = wrapped(ShardingStrategy.NO_SHARD)
    assert unit_of(second).place.mesh is mesh()
    del kept, second
    # Groups of the same first ranks, but of other replicas, are another mesh; a destroyed group is forgotten.
    alone = [dist.new_group([each]) for each in range(dist.get_world_size())][rank]
    world = dist.group.WORLD
    assert world is not None
    shapes = [
        strategy_mesh(ShardingStrategy.HYBRID_SHARD, pair, None).shape for pair in ((alone, world), (world, alone))
    ]
    assert shapes == [(2, 1), (1, 2)]
    dist.destroy_process_group(alone)
    wrapped(ShardingStrategy.NO_SHARD)
    assert not any(alone in groups for groups, _, _ in REGISTRY.meshes)


def test_meshes_made_of_groups_do_not_depend_on_what_a_rank_keeps(cluster: Cluster) -> None:
    cluster.run(check_meshes)


def check_copy(rank: int) -> None:
    model = fully_shard(nn.Linear(4, 4))
    model(torch.ones(1, 4))
    engine = unit_of(model).engine
    assert engine is not None
    step = engine.story.step
    copy.deepcopy(model)
    assert engine.story.step == step


def test_a_copy_is_no_step(cluster: Cluster) -> None:
    """A rank that keeps an averaged copy for itself is as far as the others, for the post-mortem."""
    cluster.run(check_copy)
