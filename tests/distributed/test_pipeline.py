"""Pipeline parallelism outside, fully sharded data parallelism inside of each stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import assert_at_rest, full
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage as TorchStage
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from cluster import Cluster
from fullshard import fully_shard
from fullshard.core.lifecycle import Op
from fullshard.pipelining import PipelineStage

WIDTH, MICROBATCHES, ROWS = 8, 4, 2


def stages(count: int) -> list[nn.Sequential]:
    torch.manual_seed(9)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(2 * count)]
    return [nn.Sequential(*blocks[start : start + 2]) for start in range(0, 2 * count, 2)]


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def check_pipeline(rank: int, schedule: Any, stage_class: Any) -> int:
    """Train for a few steps; returns the number of reductions of this rank's stages in the last one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    number, part = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    count = 4 if schedule is ScheduleInterleaved1F1B else 2
    reference, mine = nn.Sequential(*stages(count)), range(number, count, 2)
    modules = [stages(count)[index] for index in mine]
    for module in modules:
        for block in module:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(module, mesh=mesh["dp"])
    group = mesh.get_group("pp")
    made = [
        stage_class(module, index, count, torch.device("cpu"), group=group)
        for index, module in zip(mine, modules, strict=True)
    ]
    runner = schedule(made if count == 4 else made[0], MICROBATCHES, loss_fn=loss_fn)
    ours = nn.ModuleList(modules)
    theirs = nn.ModuleList([reference[index] for index in mine])
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (ours, reference)]
    engines = []
    for step in range(3):
        for engine in engines:
            engine.log.clear()
        torch.manual_seed(step)
        x, y = (torch.randn(2, MICROBATCHES * ROWS, WIDTH, dtype=torch.float64) for _ in range(2))
        runner.step(*([x[part]] if number == 0 else []), **({"target": y[part]} if number == 1 else {}))
        losses = [loss_fn(reference(a), b) for a, b in zip(x, y, strict=True)]
        torch.stack(losses).mean().backward()
        for parameter, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(full(parameter.grad), expected.grad, atol=1e-12, rtol=1e-10)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_at_rest(ours)
        engines = [module.__dict__["_fullshard"].unit.engine for module in modules]
    return sum(command.op is Op.REDUCE for engine in engines for command in engine.log)


@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
def test_torch_stage_gives_the_gradients_of_the_unsharded_model(cluster: Cluster, schedule: Any) -> None:
    """torch's stage does not know our modules: each of the 2 units reduces in each microbatch."""
    assert cluster.run(check_pipeline, schedule, TorchStage, world_size=4) == [2 * MICROBATCHES] * 4


@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B])
def test_our_stage_reduces_once_a_step(cluster: Cluster, schedule: Any) -> None:
    units = 4 if schedule is ScheduleInterleaved1F1B else 2
    assert cluster.run(check_pipeline, schedule, PipelineStage, world_size=4) == [units] * 4
