"""Checkpoints of whole jobs: saved by some ranks on some mesh, loaded by others on another, and resumed."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fullshard
from cluster import Cluster
from fullshard import checkpoint, fully_shard
from fullshard.checkpoint import CheckpointError, CheckpointExistsError, CheckpointMismatchError
from fullshard.runtime.checkpoint import loading, saving
from fullshard.runtime.checkpoint.agree import Ranks
from fullshard.runtime.checkpoint.files.folder import Checkpoint, read_manifest
from fullshard.runtime.checkpoint.saving import Save, Where
from fullshard.runtime.whole.tensors import full_tensor


def mesh_of(ranks: list[int], name: str) -> DeviceMesh:
    """By a name of its own: torch caches what it does for meshes by ranks and names, beyond the life of a group."""
    return DeviceMesh("cpu", ranks, mesh_dim_names=(name,))


class Dims(nn.Module):
    """Dims of 0, 1, 2, 3, 5 and 7, tied weights, buffers, a frozen parameter, a 0-d one, and one of many blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 2, bias=False)
        self.third = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        self.twin = nn.Linear(7, 2, bias=False)
        self.twin.weight = self.second.weight
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.ones(1))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.wide = nn.Parameter(torch.randn(300, 401))
        self.frozen = nn.Parameter(torch.rand(3), requires_grad=False)
        self.register_buffer("mean", torch.rand(3))
        self.register_buffer("count", torch.tensor(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).tanh()
        y = self.third(self.second(y) + self.twin(y)) * self.gain * self.one
        return y * self.frozen.sum() + self.wide.square().mean() + self.nothing.sum()


Job = tuple[nn.Module, torch.optim.Optimizer]


def full(tensor: torch.Tensor) -> torch.Tensor:
    return full_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def train(job: Job, steps: int, first: int = 0) -> list[float]:
    model, optimizer = job
    losses = []
    for step in range(first, first + steps):
        loss = model(torch.randn(4, 5, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def job_of(model: nn.Module, flat: bool = False) -> Job:
    parameters: Any = [{"params": [p for p in model.parameters() if p.requires_grad and p.dim() != 1]}]
    parameters.append({"params": [p for p in model.parameters() if p.requires_grad and p.dim() == 1], "lr": 0.01})
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}
    if flat:
        return model, fullshard.optim.flat(torch.optim.AdamW, parameters, **options)
    return model, torch.optim.AdamW(parameters, **options)


def sharded(seed: int, mesh: DeviceMesh, flat: bool = False) -> Job:
    torch.manual_seed(seed)
    model = Dims()
    for part in (model.first, model.third):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return job_of(model, flat)


def state_of(job: Job, **others: Any) -> dict[str, Any]:
    return {"model": job[0], "optimizer": job[1], **others}


def whole(job: Job) -> dict[str, Any]:
    """Everything of a job as whole tensors, by the names of the plain model."""
    model, optimizer = job
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    found: dict[str, Any] = {name: full(p).detach().clone() for name, p in plain.named_parameters()}
    found |= {name: buffer.clone() for name, buffer in plain.named_buffers()}
    for name, parameter in plain.named_parameters():
        for kind, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}.{kind}"] = full(value).clone()
    for number, group in enumerate(optimizer.param_groups):
        found[f"group{number}"] = {key: value for key, value in group.items() if key != "params"}
    return found


def assert_equal(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        same = torch.equal(value, two[name]) if isinstance(value, torch.Tensor) else value == two[name]
        assert same, name


# -- other numbers of ranks --------------------------------------------------------------------------------------------


def check_all_world_sizes(rank: int, root: str, flat: bool) -> None:
    meshes = [mesh_of(list(range(size)), "some") for size in (1, 2, 3, 4)]
    saved: dict[int, dict[str, Any]] = {}
    for mesh in meshes:
        if rank < mesh.size():
            job = sharded(1, mesh, flat)
            train(job, 2)
            saved[mesh.size()] = whole(job)
            checkpoint.save(f"{root}/{mesh.size()}", state_of(job), step=2, group=mesh.get_group())
    dist.barrier()
    for size, mesh in itertools.product((1, 2, 3, 4), meshes):
        if rank < mesh.size():
            job = sharded(2, mesh, flat)
            loaded = checkpoint.load(f"{root}/{size}", state_of(job), group=mesh.get_group())
            assert (loaded.step, loaded.world_size) == (2, size)
            now = whole(job)
            if rank < size:
                assert_equal(now, saved[size])
    dist.barrier()


@pytest.mark.parametrize("flat", [False, True], ids=["torch", "flat"])
def test_saved_and_loaded_by_any_number_of_ranks(cluster: Cluster, tmp_path: Path, flat: bool) -> None:
    """B105, B106: 16 pairs, bit-equal, dims of 0 to 7 and Adam's state too, without a conversion."""
    cluster.run(check_all_world_sizes, str(tmp_path), flat, world_size=4)


# -- other meshes and strategies ---------------------------------------------------------------------------------------


def shards(seed: int) -> Job:
    return sharded(seed, init_device_mesh("cpu", (4,)))


def replicas(seed: int) -> Job:
    return sharded(seed, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def ddp(seed: int) -> Job:
    torch.manual_seed(seed)
    model = DistributedDataParallel(Dims())
    return job_of(model)


def unsharded(seed: int) -> Job:
    torch.manual_seed(seed)
    return job_of(Dims())


def fsdp_class(seed: int) -> Job:
    torch.manual_seed(seed)
    return job_of(fullshard.FullyShardedDataParallel(Dims(), use_orig_params=True))


STRATEGIES = {
    "shards": shards,
    "replicas": replicas,
    "class": fsdp_class,
    "ddp": ddp,
    "unsharded": unsharded,
}


def check_strategies(rank: int, root: str) -> None:
    saved = {}
    for name, build in STRATEGIES.items():
        job = build(1)
        train(job, 2)
        saved[name] = whole(job)
        checkpoint.save(f"{root}/{name}", state_of(job), step=2)
    for source, build in itertools.product(STRATEGIES, STRATEGIES.values()):
        job = build(2)
        checkpoint.load(f"{root}/{source}", state_of(job))
        assert_equal(whole(job), saved[source])


def test_saved_and_loaded_by_any_strategy(cluster: Cluster, tmp_path: Path) -> None:
    """Shards, replicas of shards, the class FSDP, DDP, and unsharded: each loads what any other has saved."""
    cluster.run(check_strategies, str(tmp_path), world_size=4)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.norm = nn.LayerNorm(6)  # not divided over tp, so each of its ranks has it
        self.down = nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(x)).relu())


def pair(kind: str, seed: int) -> Job:
    torch.manual_seed(seed)
    model: Any = Pair()
    if kind == "tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    elif kind == "dp":
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def check_tensor_parallel(rank: int, root: str) -> None:
    kinds = ("tp", "dp", "plain")
    saved = {}
    for kind in kinds:
        job = pair(kind, 1)
        saved[kind] = whole(job)
        checkpoint.save(f"{root}/{kind}", state_of(job), step=1)
    for source, target in itertools.product(kinds, kinds):
        job = pair(target, 2)
        checkpoint.load(f"{root}/{source}", state_of(job))
        assert_equal(whole(job), saved[source])


def test_tensor_parallel_shards_are_rows_and_columns_of_the_same_tensors(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(check_tensor_parallel, str(tmp_path), world_size=4)


class Stage(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(3, 3), "norm": nn.LayerNorm(3)})


def check_false_twins(rank: int, root: str) -> None:
    """Pairs of ranks that shard different weights under one name, such as experts of their own."""
    torch.manual_seed(rank // 2)
    model = nn.Linear(4, 4)
    mesh = (mesh_of([0, 1], "twins"), mesh_of([2, 3], "twins"))[rank // 2]
    fully_shard(model, mesh=mesh)
    with pytest.raises(CheckpointError, match=r"'model/weight' on ranks \[0, 1\] is not that on ranks \[2, 3\]"):
        checkpoint.save(root, {"model": model}, step=1)


def test_other_weights_under_the_same_name_are_refused(cluster: Cluster, tmp_path: Path) -> None:
    """Where the values are the same it is one tensor, see `Pair.norm`."""
    cluster.run(check_false_twins, str(tmp_path), world_size=4)


def check_stages(rank: int, root: str) -> None:
    """Ranks 0 and 1 have layer 0, ranks 2 and 3 layer 1; both have a norm of the same name and value."""
    meshes = [mesh_of([0, 1], "stages"), mesh_of([2, 3], "stages")]

    def build(seed: int) -> Job:
        torch.manual_seed(seed)
        model = Stage(rank // 2)
        fully_shard(model.layers[str(rank // 2)], mesh=meshes[rank // 2])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return model, optimizer

    job = build(1)
    before = whole(job)
    checkpoint.save(root, state_of(job), step=1)
    other = build(2)
    loaded = checkpoint.load(root, state_of(other))
    assert loaded.unexpected == ()  # the other stage's parameters are not unexpected
    assert_equal(whole(other), before)
    less = nn.Module()
    less.layers = nn.ModuleDict({"norm": nn.LayerNorm(3)})
    with pytest.raises(CheckpointMismatchError, match=r"but not wanted: model/layers.0.bias"):
        checkpoint.load(root, {"model": less})
    names = checkpoint_names(Path(root) / "step-1")
    assert {"model/layers.0.weight", "model/layers.1.weight", "model/layers.norm.weight"} <= names


def checkpoint_names(path: Path) -> set[str]:
    return set(read_manifest(path).tensors)


def test_stages_of_a_pipeline_save_one_checkpoint(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(check_stages, str(tmp_path), world_size=4)


# -- exact resume ------------------------------------------------------------------------------------------------------


def noisy(rank: int, flat: bool) -> tuple[Job, Any]:
    job = sharded(1, init_device_mesh("cpu", (2,)), flat)
    return job, torch.optim.lr_scheduler.CosineAnnealingLR(job[1], 10)


def steps_of(job: Job, scheduler: Any, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        loss = job[0](torch.randn(4, 5)).square().mean()  # from this rank's own generator
        loss.backward()
        losses.append(loss.item())
        job[1].step()
        job[1].zero_grad()
        scheduler.step()
    return losses


def check_resume(rank: int, root: str, flat: bool) -> None:
    job, scheduler = noisy(rank, flat)
    torch.manual_seed(100 + rank)
    state = state_of(job, scheduler=scheduler, rng=checkpoint.RandomState(), position=3, note={"a": [1, None]})
    steps_of(job, scheduler, 3)
    checkpoint.save(root, state, step=3)
    expected = steps_of(job, scheduler, 4)
    job, scheduler = noisy(rank, flat)
    state = state_of(job, scheduler=scheduler, rng=checkpoint.RandomState(), position=None, note=None)
    loaded = checkpoint.load(root, state)
    assert (loaded.values["position"], loaded.values["note"]) == (3, {"a": [1, None]})
    assert steps_of(job, scheduler, 4) == expected


@pytest.mark.parametrize("flat", [False, True], ids=["torch", "flat"])
def test_losses_after_resume_are_those_of_the_uninterrupted_run(cluster: Cluster, tmp_path: Path, flat: bool) -> None:
    """B104: bit for bit, with two parameter groups, a schedule, and each rank's own random numbers."""
    cluster.run(check_resume, str(tmp_path), flat, world_size=2)


# -- in the background -------------------------------------------------------------------------------------------------


def check_async(rank: int, root: str) -> None:
    job = sharded(1, init_device_mesh("cpu", (2,)))
    train(job, 1)
    before = whole(job)
    gate = threading.Event()
    write = saving.write_file

    def late(*arguments: Any) -> Any:
        gate.wait(20)
        return write(*arguments)

    saving.write_file = late
    try:
        pending = checkpoint.async_save(root, state_of(job), step=1)
        train(job, 2)  # changes the weights, the moments, and the number of steps
        assert not pending.done()
        assert checkpoint.latest(root) is None
    finally:
        saving.write_file = write
        gate.set()
    checkpoint.async_save(root, state_of(job), step=3)  # waits for the first one
    assert pending.done()
    assert pending.result().is_dir()
    other = sharded(2, init_device_mesh("cpu", (2,)))
    checkpoint.load(pending.result(), state_of(other))
    assert_equal(whole(other), before)


def test_what_changes_after_async_save_does_not_reach_the_file(cluster: Cluster, tmp_path: Path) -> None:
    """B109."""
    cluster.run(check_async, str(tmp_path), world_size=2)


# -- what does not fit -------------------------------------------------------------------------------------------------


def check_refused(rank: int, root: str) -> None:
    job = sharded(1, init_device_mesh("cpu", (2,)))
    train(job, 1)
    checkpoint.save(root, state_of(job, extra=1), step=1)
    with pytest.raises(CheckpointExistsError, match="step-1 exists"):
        checkpoint.save(root, state_of(job), step=1)
    with pytest.raises(CheckpointError, match=r"extra.* is 0 on one rank and 1 on rank 1"):
        checkpoint.save(root, state_of(job, extra=rank), step=2)
    with pytest.raises(TypeError, match="extra"):
        checkpoint.save(root, state_of(job, extra=object()), step=2)
    for wrong in ([job[0]], job[0], {1: job[0]}):
        with pytest.raises((TypeError, ValueError), match="state"):
            checkpoint.save(root, wrong, step=2)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"no complete checkpoint in .*nowhere"):
        checkpoint.load(Path(root) / "nowhere", state_of(job))
    assert sorted(path.name for path in Path(root).iterdir()) == ["latest", "step-1"]

    torch.manual_seed(5)
    other = nn.Sequential(nn.Linear(5, 7), nn.Linear(3, 3))
    fully_shard(other)
    before = [full(p) for p in other.parameters()]
    with pytest.raises(CheckpointMismatchError) as caught:
        checkpoint.load(root, {"model": other})
    text = str(caught.value)
    assert "model/0.weight" in text  # missing
    assert "model/first.weight" in text  # unexpected
    assert all(torch.equal(full(p), b) for p, b in zip(other.parameters(), before, strict=True))
    loaded = checkpoint.load(root, {"model": other}, strict=False)
    assert "model/0.weight" in loaded.missing
    assert "model/wide" in loaded.unexpected


def test_what_does_not_fit_is_told_before_anything_changes(cluster: Cluster, tmp_path: Path) -> None:
    """B100: missing and unexpected names alike."""
    cluster.run(check_refused, str(tmp_path), world_size=2)


def check_damage(rank: int, root: str) -> None:
    job = sharded(1, init_device_mesh("cpu", (2,)))
    path = checkpoint.save(root, state_of(job), step=1)
    if rank == 0:
        with (path / "rank-00001.safetensors").open("r+b") as file:
            file.seek(5000)
            byte = file.read(1)
            file.seek(5000)
            file.write(bytes([byte[0] ^ 1]))
    dist.barrier()
    with pytest.raises(checkpoint.CheckpointDamagedError, match=r"rank-00001.safetensors: tensor 'model/wide' is dam"):
        checkpoint.load(path, state_of(job))
    checkpoint.load(path, state_of(job), verify=False)


def test_damage_of_one_ranks_file_is_named_by_all(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(check_damage, str(tmp_path), world_size=2)


# -- parts -------------------------------------------------------------------------------------------------------------


def check_parts(rank: int, root: str) -> None:
    job = sharded(1, init_device_mesh("cpu", (2,)))
    before = whole(job)
    checkpoint.save(root, {"model": checkpoint.only(job[0], "third.*")}, step=1)
    other = sharded(2, init_device_mesh("cpu", (2,)))
    untouched = whole(other)
    with pytest.raises(CheckpointMismatchError, match="model/first"):
        checkpoint.load(root, {"model": other[0]})
    checkpoint.load(root, {"model": checkpoint.only(other[0], "third.*")})
    after = whole(other)
    for name in before:
        if isinstance(before[name], torch.Tensor):
            assert torch.equal(after[name], (before if name.startswith("third") else untouched)[name]), name


def test_adapters_alone(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(check_parts, str(tmp_path), world_size=2)


# -- a checkpoint that changes meanwhile -------------------------------------------------------------------------------


def check_replaced(rank: int, root: str, when: str) -> None:
    """Between one rank's look at the manifest and the other's; or between that and the files."""
    job = sharded(1, init_device_mesh("cpu", (2,)))
    checkpoint.save(root, state_of(job, note=1), step=1)
    other = sharded(2, init_device_mesh("cpu", (2,)))
    exchange = Ranks.exchange

    def late(ranks: Ranks, value: Any, what: str) -> Any:
        told = exchange(ranks, value, what)
        if what == when:
            Ranks.exchange = exchange  # type: ignore[method-assign]
            dist.barrier()
            if rank == 0:  # another job, of one rank
                where = Where.checked(root, 1, None, overwrite=True)
                Save(Ranks(), where, {"model": nn.Linear(2, 2), "note": 2}).write()
            dist.barrier()
        return told

    Ranks.exchange = late  # type: ignore[method-assign]
    if when == "find" and rank == 1:  # this rank has its manifest already
        old = read_manifest(Path(root) / "step-1")
        loading.Checkpoint = lambda path, verify: Checkpoint(path, verify, old)  # type: ignore[misc,assignment]
    try:
        with pytest.raises(CheckpointError, match="replaced or removed while it was loaded") as caught:
            checkpoint.load(root, {"model": other[0]} if when == "compare" else {"note": None})
    finally:
        loading.Checkpoint = Checkpoint  # type: ignore[misc]
    assert "damaged" not in str(caught.value)


@pytest.mark.parametrize("when", ["find", "compare"])
def test_a_checkpoint_that_is_replaced_while_it_is_loaded_is_told_as_that(
    cluster: Cluster, tmp_path: Path, when: str
) -> None:
    cluster.run(check_replaced, str(tmp_path), when, world_size=2)


# -- ranks that do not do the same -------------------------------------------------------------------------------------


def check_disagreements(rank: int, root: str) -> None:
    job = sharded(1, init_device_mesh("cpu", (2,)))
    checkpoint.save(root, state_of(job), step=1)
    with pytest.raises(ValueError, match=r"ranks 0 and 1 do not save the same: .* \(40, None, False\) and \(41, "):
        checkpoint.save(root, state_of(job), step=40 + rank, keep=None)
    some = {"model": checkpoint.only(job[0], "first.*", *(["wide"] if rank == 0 else []))}
    with pytest.raises(CheckpointError, match=r"'model/wide' is divided over ranks that do not all have it"):
        checkpoint.save(root, some, step=2, keep=1)
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    if rank == 0:
        model["b"].weight = model["a"].weight
    with pytest.raises(CheckpointError, match=r"model/b.weight' is tied to 'model/a.weight' on some ranks"):
        checkpoint.save(root, {"model": model}, step=2, keep=1)
    with pytest.raises(fullshard.errors.MisuseError, match=r"prepare a save.*, and prepare a load"):
        (checkpoint.save(root, {}, 3) if rank == 0 else checkpoint.load(root, {}))
    with pytest.raises(fullshard.errors.MisuseError, match=r"ranks 0 and 1 do not call the same"):
        Ranks.of(None).exchange(1, ("write", "read")[rank])
    assert sorted(path.name for path in Path(root).iterdir()) == ["latest", "step-1"]
    checkpoint.load(root, state_of(job))


def test_ranks_that_do_not_save_the_same_lose_nothing(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(check_disagreements, str(tmp_path), world_size=2)


def check_unseen_error(rank: int, root: str) -> None:
    """One rank has looked at the error of a save in the background, the other has not: all raise it at the next one."""
    job = sharded(1, init_device_mesh("cpu", (2,)))
    write = saving.write_file

    def broken(*arguments: Any) -> Any:
        raise CheckpointError("the disk is gone")

    saving.write_file = broken
    try:
        pending = checkpoint.async_save(root, state_of(job), step=1)
        pending.wait()
    finally:
        saving.write_file = write
    if rank == 0:
        with pytest.raises(CheckpointError, match="the disk is gone"):
            pending.result()
    with pytest.raises(CheckpointError, match="the disk is gone"):
        checkpoint.save(root, state_of(job), step=2)
    checkpoint.save(root, state_of(job), step=2)


def test_an_error_that_one_rank_has_seen_is_raised_by_all(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(check_unseen_error, str(tmp_path), world_size=2)


def check_own_states(rank: int, root: str) -> None:
    """A value that each rank has for itself, and that one of them did not save."""
    own = {"place": checkpoint.per_rank(rank)}
    checkpoint.save(root, own if rank == 0 else {}, step=1)
    with pytest.raises(CheckpointMismatchError, match="place was saved by other ranks, but not by rank 1"):
        checkpoint.load(root, own)
    loaded = checkpoint.load(root, own, strict=False)
    assert (loaded.values, loaded.skipped) == (({"place": 0}, ()) if rank == 0 else ({}, ("place",)))


def test_a_state_that_one_rank_did_not_save_is_missing(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(check_own_states, str(tmp_path), world_size=2)


def test_a_program_may_change_its_folder_while_it_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, write = threading.Event(), saving.write_file
    monkeypatch.setattr(saving, "write_file", lambda *arguments: (gate.wait(20), write(*arguments))[1])
    monkeypatch.chdir(tmp_path)
    pending = checkpoint.async_save("root", {"model": nn.Linear(2, 2)}, step=1)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    gate.set()
    assert pending.result() == tmp_path / "root" / "step-1"


def test_an_interrupted_wait_does_not_give_the_copy_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, write = threading.Event(), saving.write_file
    monkeypatch.setattr(saving, "write_file", lambda *arguments: (gate.wait(20), write(*arguments))[1])
    model = nn.Linear(2, 2)
    nn.init.zeros_(model.weight)
    pending = checkpoint.async_save(tmp_path, {"model": model}, step=1)
    wait = pending.wait

    def interrupted(timeout: float | None = None) -> None:
        monkeypatch.setattr(pending, "wait", wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(pending, "wait", interrupted)
    nn.init.ones_(model.weight)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.async_save(tmp_path, {"model": model}, step=2)
    gate.set()
    checkpoint.async_save(tmp_path, {"model": model}, step=2).result()
    checkpoint.load(tmp_path / "step-1", {"model": model})
    assert not model.weight.any()
