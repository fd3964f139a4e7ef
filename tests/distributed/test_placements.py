"""Other dims and other ranks for single parameters: what `shard_placement_fn` can say."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from reference import assert_at_rest, full
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo as TorchMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult as TorchResult
from torch.distributed.tensor import Shard

from cluster import Cluster
from fullshard import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult, clip_grad_norm_, fully_shard

EXPERT_WIDTH = 6


class FlatUser(nn.Module):
    """Uses its parameters as custom kernels do: as one contiguous range of memory."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.weight = nn.Parameter(torch.randn(shape))
        self.bias = nn.Parameter(torch.randn(shape[-1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.weight.is_contiguous()
        return (self.weight.view(-1) * x).sum() + (self.bias * x[0]).sum()


def last(parameter: nn.Parameter) -> Shard:
    return Shard(parameter.dim() - 1)


def check_contiguous(rank: int, shape: tuple[int, ...], reshard: Any) -> None:
    reference, x = FlatUser(shape), torch.arange(1.0, 1 + torch.Size(shape).numel())
    ours = fully_shard(FlatUser(shape), shard_placement_fn=last, reshard_after_forward=reshard)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (reference, ours)]
    for step in range(2):
        for model, optimizer in zip((reference, ours), optimizers, strict=True):
            optimizer.zero_grad()
            model(x * (step + 1)).backward()
            optimizer.step()
        for mine, theirs in zip(ours.parameters(), reference.parameters(), strict=True):
            assert mine.placements == (Shard(mine.dim() - 1),)
            assert mine.to_local().is_contiguous()
            assert mine.grad.to_local().is_contiguous()
            torch.testing.assert_close(full(mine.grad), theirs.grad)
            torch.testing.assert_close(full(mine.detach()), theirs.detach())
    assert_at_rest(ours)


# Small ones travel in the packed message, large ones by themselves; torch refuses those that do not divide evenly.
@pytest.mark.parametrize("shape", [(3, 8), (3, 7), (5, 2), (4, 3, 5), (96, 1000), (96, 1001)], ids=str)
def test_full_and_sharded_parameters_are_contiguous_on_every_dim(cluster: Cluster, shape: tuple[int, ...]) -> None:
    cluster.run(check_contiguous, shape, None, world_size=3)


@pytest.mark.parametrize("shape", [(3, 7), (96, 1001)], ids=str)
def test_other_dims_with_a_smaller_shard_after_forward(cluster: Cluster, shape: tuple[int, ...]) -> None:
    cluster.run(check_contiguous, shape, 2, world_size=4)


class Experts(nn.Module):
    """A dense layer, and an expert that is another one on every rank of the expert-parallel axis."""

    def __init__(self, expert: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.dense = nn.Linear(EXPERT_WIDTH, EXPERT_WIDTH)
        torch.manual_seed(100 + expert)
        self.expert = nn.Linear(EXPERT_WIDTH, EXPERT_WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.expert(torch.relu(self.dense(x)))
        return result


def check_experts(rank: int, microbatches: int) -> None:
    """4 ranks hold the dense layer together; 2 and 2 hold an expert each."""
    everyone = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert_dp", "expert"))
    number = mesh.get_local_rank("expert")

    def engine(shard: Any, info: Any, result: Any) -> nn.Module:
        model = Experts(number)
        of_expert = {id(parameter) for parameter in model.expert.parameters()}

        def place(parameter: nn.Parameter) -> Any:
            return result(None, info) if id(parameter) in of_expert else None

        made: nn.Module = shard(model, mesh=everyone, shard_placement_fn=place)
        return made

    ours = engine(fully_shard, FSDPMeshInfo(mesh["expert_dp"], shard_mesh_dim=0), ShardPlacementResult)
    torchs = engine(torch_fully_shard, TorchMeshInfo(mesh["expert_dp"], shard_mesh_dim=0), TorchResult)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, torchs)]
    for step in range(2):
        for model, optimizer in zip((ours, torchs), optimizers, strict=True):
            optimizer.zero_grad()
            for micro in range(microbatches):
                model.set_requires_gradient_sync(micro == microbatches - 1)
                generator = torch.Generator().manual_seed(step * 100 + micro * 10 + rank)
                model(torch.randn(5, EXPERT_WIDTH, generator=generator)).square().mean().backward()
        for (name, mine), theirs in zip(ours.named_parameters(), torchs.parameters(), strict=True):
            assert mine.placements == theirs.placements
            assert mine.device_mesh == theirs.device_mesh
            torch.testing.assert_close(mine.grad.to_local(), theirs.grad.to_local(), msg=(name + "\n{}").format)
        for optimizer in optimizers:
            optimizer.step()
        assert_at_rest(ours)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_experts_on_other_ranks_than_the_rest(cluster: Cluster, microbatches: int) -> None:
    cluster.run(check_experts, microbatches, world_size=4)


def check_replicated_experts(rank: int) -> None:
    """One parameter with replicas, the rest without: every gradient is the mean over its own ranks."""
    everyone = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "part"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    reference = copy.deepcopy(model)
    chosen = model[0].weight
    info = HSDPMeshInfo(hybrid, shard_mesh_dim=1, replicate_mesh_dim=0)
    fully_shard(
        model,
        mesh=everyone,
        shard_placement_fn=lambda p: ShardPlacementResult(Shard(1), info) if p is chosen else None,
    )
    data = torch.randn(4, 5, 4)
    model(data[rank]).square().mean().backward()
    torch.stack([reference(each).square().mean() for each in data]).mean().backward()
    torch.testing.assert_close(clip_grad_norm_(model, 0.1), nn.utils.clip_grad_norm_(reference.parameters(), 0.1))
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)
    model.double()
    model(data[rank].double()).sum().backward()


def test_one_parameter_with_replicas(cluster: Cluster) -> None:
    cluster.run(check_replicated_experts, world_size=4)


def check_bad_info(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    with pytest.raises(ValueError, match="the last dim of its mesh must be the one to shard over"):
        fully_shard(
            nn.Linear(2, 2),
            shard_placement_fn=lambda _: ShardPlacementResult(None, FSDPMeshInfo(mesh, shard_mesh_dim=0)),
        )
    with pytest.raises(TypeError, match="expected FSDPMeshInfo"):
        fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda _: ShardPlacementResult(None, "dp"))  # type: ignore[arg-type]


def test_bad_mesh_info(cluster: Cluster) -> None:
    cluster.run(check_bad_info)
