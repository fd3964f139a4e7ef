"""Saves whose copy is taken while training goes on: nothing that changes later is in the file."""

from __future__ import annotations

import gc
import os
import runpy
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fullshard
from cluster import Cluster
from fullshard import checkpoint, fully_shard
from fullshard.checkpoint import CheckpointError
from fullshard.runtime.checkpoint import copying, saving
from fullshard.runtime.checkpoint.background import Background
from fullshard.runtime.checkpoint.files.folder import Checkpoint
from fullshard.runtime.whole.tensors import full_tensor

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
        assert pending.wait_copied(0) == nothing
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


def test_only_what_optimizers_change_is_copied_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the settings of an optimizer, which a scheduler may change before the next step."""
    later: list[set[str]] = []
    make = copying.Copies.__init__

    def making(copies: copying.Copies, tensors: copying.Tensors, memory: Any, found: Any) -> None:
        later.append(set(found))
        make(copies, tensors, memory, found)

    monkeypatch.setattr(copying.Copies, "__init__", making)
    model = WithStatistics()
    rate = torch.tensor(0.1)
    optimizer = torch.optim.Adam(trained(model), lr=rate)
    forward_backward((model, optimizer), 0)
    step((model, optimizer))
    state = {"model": model, "optimizer": optimizer, "other": {"tensor": torch.ones(2)}}
    with slow_copies():
        pending = checkpoint.overlapped_save(tmp_path, state, 1)
        rate.mul_(0.5)
    names = {f"model/{name}" for name, parameter in model.named_parameters() if parameter.requires_grad}
    kinds = ("step", "exp_avg", "exp_avg_sq")
    assert later == [names | {f"optimizer/{name}/{kind}" for name in names for kind in kinds}]
    with Checkpoint(pending.result()) as saved:
        assert saved.tensor("optimizer/param_groups.0.lr").item() == pytest.approx(0.1)


def test_what_a_hook_puts_in_the_place_of_a_parameter_is_copied_at_once(tmp_path: Path) -> None:
    model, optimizer = plain()
    model[0].register_state_dict_post_hook(
        lambda module, state, prefix, _: state.update({f"{prefix}weight": module.weight.data})
    )
    before = model[0].weight.detach().clone()
    with slow_copies():
        pending = checkpoint.overlapped_save(tmp_path, state_of((model, optimizer)), 1)
        with torch.no_grad():
            model[0].weight.add_(1)
    with Checkpoint(pending.result()) as saved:
        assert torch.equal(saved.tensor("model/0.weight"), before)


def test_an_optimizer_may_keep_more_than_states_of_parameters(tmp_path: Path) -> None:
    job = plain()
    job[1].state["rounds"] = 3  # type: ignore[index,assignment]
    checkpoint.overlapped_save(tmp_path, state_of(job), 1).result()
    job[1].state["rounds"] = 0  # type: ignore[index,assignment]
    checkpoint.load(tmp_path, state_of(job))
    assert job[1].state["rounds"] == 3  # type: ignore[index]


def test_what_a_hook_puts_in_the_place_of_a_state_is_copied_at_once(tmp_path: Path) -> None:
    job = plain()
    forward_backward(job, 0)
    step(job)
    average = torch.zeros(8, 6)

    def put(_: Any, state: dict[str, Any]) -> None:
        state["state"][0] = {**state["state"][0], "average": average.data}

    job[1].register_state_dict_post_hook(put)
    with slow_copies():
        pending = checkpoint.overlapped_save(tmp_path, state_of(job), 1)
        average.add_(1)
    with Checkpoint(pending.result()) as saved:
        assert not saved.tensor("optimizer/model/0.weight/average").any()


def test_an_optimizer_waits_for_the_copy_but_not_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, write = threading.Event(), saving.write_file
    monkeypatch.setattr(saving, "write_file", lambda *arguments: (gate.wait(60), write(*arguments))[1])
    job = plain()
    forward_backward(job, 0)
    pending = checkpoint.overlapped_save(tmp_path, state_of(job), 1)
    step(job)
    assert not pending.done()
    gate.set()
    pending.result()


def test_async_save_leaves_nothing_to_be_copied(tmp_path: Path) -> None:
    with slow_copies():
        pending = checkpoint.async_save(tmp_path, state_of(plain()), 1)
        assert pending.wait_copied(0)
    pending.result()


def test_a_start_that_is_interrupted_does_not_hold_the_program_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "fullshard-save":
            monkeypatch.undo()
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    job = plain()
    with pytest.raises(KeyboardInterrupt):
        checkpoint.overlapped_save(tmp_path, state_of(job), 1)
    checkpoint.save(tmp_path, state_of(job), 2)  # waits for the first one, which goes on
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1", "step-2"]


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()])
def test_a_save_whose_thread_does_not_start_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    start = threading.Thread.start

    def refusing(thread: threading.Thread) -> None:
        if thread.name == "fullshard-save":
            monkeypatch.undo()
            raise error
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refusing)
    job = plain()
    forward_backward(job, 0)
    with pytest.raises(type(error)):
        checkpoint.overlapped_save(tmp_path, state_of(job), 1)
    step(job)
    assert list(tmp_path.iterdir()) == []
    checkpoint.save(tmp_path, state_of(job), 1)


def test_a_save_that_fails_keeps_nothing_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = plain()
    alive = weakref.ref(model[0].weight)
    copy = Background.copy

    def failing(*arguments: Any) -> Any:
        copy(*arguments)
        raise CheckpointError("no memory, say")

    monkeypatch.setattr(Background, "copy", failing)
    with pytest.raises(CheckpointError, match="no memory"):
        checkpoint.overlapped_save(tmp_path, state_of((model, optimizer)), 1)
    del model, optimizer
    gc.collect()
    assert alive() is None


def step_in_a_fork(rank: int) -> str:
    job = plain()
    forward_backward(job, 0)
    with tempfile.TemporaryDirectory() as folder, slow_copies() as gate:
        pending = checkpoint.overlapped_save(folder, state_of(job), 1)
        process = os.fork()
        if process == 0:
            job[1].step()
            assert pending.wait_copied()
            with pytest.raises(CheckpointError, match="forked"):
                pending.result()
            checkpoint.save(folder, state_of(job), 2)
            os._exit(0)
        code = os.waitpid(process, 0)[1]
        gate.set()
        pending.result()
    return str(code)


def test_a_forked_process_does_not_wait_for_a_copy(cluster: Cluster) -> None:
    assert cluster.run(step_in_a_fork, world_size=1, init_group=False) == ["0"]


class Renormed(nn.Module):
    """Forward writes to a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 6, max_norm=1.0)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x))


def check_forward_that_writes(rank: int, root: Path, kind: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = Renormed()
    if kind == "tensor parallel":
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"head": ColwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    else:
        strategy = fullshard.ShardingStrategy.NO_SHARD if kind == "no shard" else None
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), sharding_strategy=strategy)
    model.head.register_forward_pre_hook(lambda module, _: scale(module.weight))
    job = (model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    model(torch.arange(8)).square().sum().backward()
    step(job)
    expected = checkpoint.save(root / "expected", state_of(job), 1)
    with slow_copies() as gate:
        pending = checkpoint.overlapped_save(root / "overlapped", state_of(job), 1)
        model(torch.arange(8)).square().sum().backward()
        gate.set()
        step(job)
    assert_same_files(expected, pending.result())


def scale(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.mul_(0.5)


@pytest.mark.parametrize("kind", ["one rank", "no shard", "tensor parallel"])
def test_a_forward_that_writes_does_not_reach_the_file(cluster: Cluster, tmp_path: Path, kind: str) -> None:
    """A rank that shares a parameter with nobody computes with the memory that is saved."""
    cluster.run(check_forward_that_writes, tmp_path, kind, world_size=1 if kind == "one rank" else 2)


def check_own_writers(rank: int, root: Path) -> None:
    job = ours()
    weights = {name: torch.ones_like(full_tensor(value)) for name, value in job[0].state_dict().items() if "2" in name}
    for number, write in enumerate((lambda: job[0].load_state_dict(weights, strict=False), lambda: edit(job[0]))):
        expected = checkpoint.save(root / f"expected{number}", state_of(job), 1)
        with slow_copies() as gate:
            pending = checkpoint.overlapped_save(root / f"overlapped{number}", state_of(job), 1)
            gate.set()
            write()
            assert pending.wait_copied(0)
        assert_same_files(expected, pending.result())


def edit(model: nn.Module) -> None:
    with fullshard.full_parameters(model), torch.no_grad():
        model[0].weight.mul_(2)


def test_what_this_package_writes_waits(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(check_own_writers, tmp_path, world_size=2)


@contextmanager
def ctrl_c_in_the_wait(pending: checkpoint.PendingSave) -> Iterator[None]:
    """Inside, whoever waits for a save is interrupted."""
    waiting, wait = threading.Event(), pending._ended.wait

    def noted(timeout: float | None = None) -> bool:
        waiting.set()
        return wait(timeout)

    def interrupt() -> None:
        assert waiting.wait(60)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    pending._ended.wait = noted  # type: ignore[method-assign]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        yield
    thread.join()
    signal.signal(signal.SIGINT, before)
    pending._ended.wait = wait  # type: ignore[method-assign]


def interrupt(rank: int, root: Path) -> list[str]:
    """Ctrl-C in the wait for a save: the save goes on, and its memory is not given away."""
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight)
    gate, write = threading.Event(), saving.write_file
    saving.write_file = lambda *arguments: (gate.wait(60), write(*arguments))[1]
    try:
        pending = checkpoint.async_save(root, {"model": model}, 1)
        for wait in (pending.result, lambda: checkpoint.load(root, {"model": model})):
            with ctrl_c_in_the_wait(pending):
                wait()
            assert not pending.done()
        nn.init.zeros_(model.weight)
        gate.set()
        checkpoint.async_save(root, {"model": model}, 2).result()
    finally:
        gate.set()
        saving.write_file = write
    values = []
    for number in (1, 2):
        with Checkpoint(root / f"step-{number}") as saved:
            values.append(str(saved.tensor("model/weight").unique().tolist()))
    return values


def test_an_interrupted_wait_leaves_the_save_alone(cluster: Cluster, tmp_path: Path) -> None:
    assert cluster.run(interrupt, tmp_path, world_size=1, init_group=False) == [["[1.0]", "[0.0]"]]


def check_example(rank: int, root: Path) -> None:
    main = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "train_and_resume.py"))["main"]
    whole = main(str(root / "a"), 14)
    assert (whole, []) == (main(str(root / "b"), 9) + main(str(root / "b"), 14), main(str(root / "b"), 14))
    assert sorted(path.name for path in (root / "b").iterdir()) == ["latest", "step-10", "step-14"]


def test_the_example_goes_on_where_it_was(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(check_example, tmp_path, world_size=2)


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
