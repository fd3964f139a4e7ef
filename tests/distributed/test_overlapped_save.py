"""Saves whose copy is taken while training goes on: nothing that changes later is in the file."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

import fullshard
from cluster import Cluster
from fullshard import checkpoint, fully_shard
from fullshard.checkpoint import CheckpointError
from fullshard.runtime.checkpoint import copying
from fullshard.runtime.checkpoint.files.folder import Checkpoint

Job = tuple[nn.Module, torch.optim.Optimizer]


class WithStatistics(nn.Sequential):
    """Forward changes buffers, the optimizer the rest but for one frozen parameter."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 3))
        self[2].requires_grad_(False)


def sharded(shard: Callable[..., Any], **options: Any) -> nn.Module:
    model = WithStatistics()
    mesh = init_device_mesh("cpu", (2,))
    shard(model[0], mesh=mesh, **options)
    return shard(model, mesh=mesh, **options)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def plain() -> Job:
    model = WithStatistics()
    return model, torch.optim.Adam(trained(model))


def ours() -> Job:
    model = sharded(fully_shard)
    return model, torch.optim.AdamW(trained(model), lr=0.1)


def flat() -> Job:
    model = sharded(fully_shard)
    return model, fullshard.optim.flat(torch.optim.AdamW, trained(model), lr=0.1, fused=True)


def in_backward() -> Job:
    model = sharded(fully_shard)
    return model, fullshard.optim.flat(torch.optim.AdamW, trained(model), lr=0.1, in_backward=True)


def torchs() -> Job:
    model = sharded(torch_fully_shard)
    return model, torch.optim.AdamW(trained(model), lr=0.1)


def ddp() -> Job:
    model = DistributedDataParallel(WithStatistics())
    return model, torch.optim.SGD(trained(model), lr=0.1, momentum=0.9)


JOBS = {job.__name__: job for job in (ours, flat, in_backward, torchs, ddp)}


def state_of(job: Job) -> dict[str, Any]:
    return {"model": job[0], "optimizer": job[1]}


def forward_backward(job: Job, seed: int) -> None:
    job[0](torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))).square().sum().backward()


def step(job: Job) -> None:
    job[1].step()
    job[1].zero_grad()


@contextmanager
def slow_copies() -> Iterator[threading.Event]:
    """What a thread copies it copies some time after the event is set."""
    gate, copy, owner = threading.Event(), copying._copy, threading.get_ident()

    def late(copies: copying.Tensors, tensors: copying.Tensors) -> None:
        if threading.get_ident() != owner and tensors:
            assert gate.wait(60)
            time.sleep(0.2)
        copy(copies, tensors)

    copying._copy = late
    try:
        yield gate
    finally:
        gate.set()
        copying._copy = copy


def assert_same_files(one: Path, two: Path) -> None:
    with Checkpoint(one) as first, Checkpoint(two) as second:
        assert first.manifest.tensors.keys() == second.manifest.tensors.keys()
        for name in first.manifest.tensors:
            assert torch.equal(first.tensor(name), second.tensor(name)), name
        assert first.manifest.state == second.manifest.state


def check(rank: int, root: Path, make: Callable[[], Job]) -> None:
    torch.manual_seed(0)
    job = make()
    for seed in range(2):
        forward_backward(job, seed)
        step(job)
    expected = checkpoint.save(root / "expected", state_of(job), 2)
    with slow_copies() as gate:
        pending = checkpoint.overlapped_save(root / "overlapped", state_of(job), 2)
        nothing = make is in_backward or (make is ddp and rank > 0)  # is left to be copied: the first rank writes all
        assert pending.wait_copied(60 if nothing else 0) == nothing
        forward_backward(job, 2)
        assert pending.wait_copied(0) == nothing, "forward or backward has waited"
        gate.set()
        step(job)
        assert pending.wait_copied(0)
    assert_same_files(expected, pending.result())
    now = checkpoint.save(root / "now", state_of(job), 3)
    with pytest.raises(AssertionError):
        assert_same_files(expected, now)


@pytest.mark.parametrize("kind", JOBS)
def test_what_changes_meanwhile_does_not_reach_the_file(cluster: Cluster, tmp_path: Path, kind: str) -> None:
    """B109."""
    cluster.run(check, tmp_path, JOBS[kind], world_size=2)


def test_it_is_so_in_one_process(tmp_path: Path) -> None:
    check(0, tmp_path, plain)


def check_change_by_hand(rank: int, root: Path) -> None:
    job = ours()
    with slow_copies() as gate:
        pending = checkpoint.overlapped_save(root, state_of(job), 1)
        with torch.no_grad():
            job[0][0].weight.add_(1)
        gate.set()
        with pytest.raises(CheckpointError, match=r"1 tensors, such as 'model/0.weight', were changed while"):
            pending.result()
    assert checkpoint.latest(root) is None
    pending = checkpoint.overlapped_save(root, state_of(job), 1)
    assert pending.wait_copied()
    with torch.no_grad():
        job[0][0].weight.add_(1)
    assert pending.result().name == "step-1"


def test_a_change_by_hand_that_comes_too_early_fails_the_save(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(check_change_by_hand, tmp_path, world_size=2)


def test_tensors_without_an_optimizer_in_the_state_are_copied_at_once(tmp_path: Path) -> None:
    model, _ = plain()
    before = model[0].weight.detach().clone()
    with slow_copies():
        pending = checkpoint.overlapped_save(tmp_path, {"model": model}, 1)
        assert pending.wait_copied(60)
        nn.init.zeros_(model[0].weight)
    with Checkpoint(pending.result()) as saved:
        assert torch.equal(saved.tensor("model/0.weight"), before)


def test_tensors_of_inference_mode_are_copied_at_once(tmp_path: Path) -> None:
    with torch.inference_mode():
        model = nn.Linear(3, 3)
    before = model.weight.detach().clone()
    job = (model, torch.optim.SGD(model.parameters()))
    with slow_copies():
        pending = checkpoint.overlapped_save(tmp_path, state_of(job), 1)
        with torch.inference_mode():
            model.weight.zero_()
    with Checkpoint(pending.result()) as saved:
        assert torch.equal(saved.tensor("model/weight"), before)


def test_any_optimizer_waits(tmp_path: Path) -> None:
    """Also one that is not saved: it may have the same parameters."""
    model, optimizer = plain()
    other = torch.optim.SGD(trained(model), lr=1.0)
    before = model[0].weight.detach().clone()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    with slow_copies() as gate:
        pending = checkpoint.overlapped_save(tmp_path, state_of((model, optimizer)), 1)
        gate.set()
        other.step()
        assert pending.wait_copied(0)
    assert not torch.equal(model[0].weight, before)
    with Checkpoint(pending.result()) as saved:
        assert torch.equal(saved.tensor("model/0.weight"), before)
