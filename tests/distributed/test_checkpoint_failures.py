"""What goes wrong while a checkpoint is saved or loaded: ranks say what, and the checkpoint before it is still there.

B108. After each failure other processes load what is there and compare it, bit for bit, with a run that nothing went
wrong in; then they save, which must remove what the failed job has left.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forks import Ended, in_fork, make_group
from stack import batch, make_stack
from torch import nn

from cluster import Cluster
from fullshard import checkpoint
from fullshard.errors import CheckpointError, CheckpointExistsError, CommunicationError, FullshardError
from fullshard.runtime.checkpoint import copying, publish
from fullshard.runtime.checkpoint.files import folder as folder_module
from fullshard.runtime.checkpoint.files import writing

LIMIT_SECONDS = 1.5
_NEW_MOUNTS = 0x20000  # CLONE_NEWNS

Job = tuple[nn.Module, torch.optim.Optimizer]


def make_job(rank: int, steps: int = 0) -> Job:
    model = make_stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(steps):
        model(batch(rank, step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state_of(job: Job, **more: Any) -> dict[str, Any]:
    return {"model": job[0], "optimizer": job[1], **more}


def join(rank: int, folder: Path, name: str) -> dist.Store:
    store = dist.FileStore(str(folder / name), 2)
    make_group(rank, 2, store, LIMIT_SECONDS)
    return store


SAVES: dict[str, Callable[..., Any]] = {
    "save": checkpoint.save,
    "async_save": lambda root, state, step: checkpoint.async_save(root, state, step).result(),
    "overlapped_save": lambda root, state, step: checkpoint.overlapped_save(root, state, step).result(),
}


def try_saving(root: Path, job: Job, step: int, save: str = "save", **more: Any) -> str:
    """The error of a save, or ""."""
    try:
        SAVES[save](root, state_of(job, **more), step)
    except (FullshardError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def hidden(root: Path) -> list[str]:
    """What interrupted jobs have left."""
    return sorted(path.name for path in root.iterdir() if path.name.startswith("."))


def load_and_go_on(rank: int, folder: Path) -> str:
    """What other processes find: a sound checkpoint; they save the next one, and nothing is left beside."""
    join(rank, folder, "after")
    root = folder / "root"
    job = make_job(rank)
    step = checkpoint.load(root, state_of(job)).step
    model, _ = make_job(rank, step)
    for ours, reference in zip(job[0].parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.to_local(), reference.to_local())  # type: ignore[attr-defined]
    checkpoint.save(root, state_of(job), step + 1)
    dist.barrier()
    assert hidden(root) == []
    assert checkpoint.latest(root) == root / f"step-{step + 1}"
    return str(step)


# -- ranks that end or stop --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What happens to a rank in its second save.

    Attributes:
        folder: For the store, and the checkpoints.
        bad: The rank.
        where: Key of `PLACES`.
        number: Of the signal that it gets.
        save: Which function saves.
    """

    folder: Path
    bad: int
    where: str
    number: int
    save: str = "save"


def in_copy(act: Callable[[], None]) -> None:
    """In the thread that copies what optimizers change, while training goes on."""
    original = copying.Copies.finish

    def finish(copies: copying.Copies) -> copying.Tensors:
        act()
        return original(copies)

    copying.Copies.finish = finish  # type: ignore[method-assign]


def at_second_write(act: Callable[[], None]) -> None:
    """In the thread that writes the rank's file, when some of it is there."""
    writing.STAGING_BYTES = 4096
    original, calls = writing._write, []

    def write(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            act()
        original(*args)

    writing._write = write


def before_manifest(act: Callable[[], None]) -> None:
    """All files of ranks are there."""
    original = publish._write_durably

    def write(path: Path, data: bytes) -> None:
        if path.name == folder_module.MANIFEST_FILE:
            act()
        original(path, data)

    publish._write_durably = write


def before_rename(act: Callable[[], None]) -> None:
    """All is there under its temporary name."""
    original = publish.Draft._rename

    def rename(draft: publish.Draft) -> None:
        act()
        original(draft)

    publish.Draft._rename = rename  # type: ignore[method-assign]


def after_rename(act: Callable[[], None]) -> None:
    """The new checkpoint has its name, but `latest` is still the old one."""
    original = publish.Draft._rename

    def rename(draft: publish.Draft) -> None:
        original(draft)
        act()

    publish.Draft._rename = rename  # type: ignore[method-assign]


PLACES = {f.__name__: f for f in (in_copy, at_second_write, before_manifest, before_rename, after_rename)}


def save_twice(rank: int, plan: Plan) -> str:
    store = join(rank, plan.folder, "job")
    store.set(f"process {rank}", str(os.getpid()))
    job = make_job(rank, 1)
    root = plan.folder / "root"
    checkpoint.save(root, state_of(job), 1)
    dist.barrier()
    if rank == plan.bad:
        PLACES[plan.where](lambda: os.kill(os.getpid(), plan.number))
    text = try_saving(root, make_job(rank, 2), 2, plan.save)
    if plan.number == signal.SIGSTOP and rank != plan.bad:
        os.kill(int(store.get(f"process {plan.bad}")), signal.SIGCONT)
    return text


def check_signal(rank: int, plan: Plan) -> tuple[Ended, Ended]:
    return in_fork(lambda: save_twice(rank, plan)), in_fork(lambda: load_and_go_on(rank, plan.folder))


@pytest.mark.parametrize(
    ("save", "bad", "where", "step"),
    [
        ("save", 1, "at_second_write", 1),
        ("async_save", 0, "at_second_write", 1),
        ("overlapped_save", 1, "in_copy", 1),
        ("save", 0, "before_manifest", 1),
        ("async_save", 0, "before_rename", 1),
        ("save", 0, "after_rename", 2),
    ],
)
def test_rank_killed_in_a_save(cluster: Cluster, tmp_path: Path, save: str, bad: int, where: str, step: int) -> None:
    """B108."""
    ended = cluster.run(check_signal, Plan(tmp_path, bad, where, signal.SIGKILL, save), init_group=False)
    (killed, _), (survivor, _) = ended[bad], ended[1 - bad]
    assert killed.code == -signal.SIGKILL
    assert survivor.code == 0, survivor.text
    phase = "write" if where in ("in_copy", "at_second_write") else "publish"
    assert survivor.text.startswith(f"PeerLostError: {phase} of a checkpoint: rank {1 - bad} waited for"), survivor.text
    assert f"Look first at rank {bad}: ended without a word" in survivor.text
    for _, after in ended:
        assert (after.code, after.text) == (0, str(step))


def test_rank_stopped_in_a_save(cluster: Cluster, tmp_path: Path) -> None:
    """Both get an error, the stopped one when it goes on; what it wrote too late is nowhere."""
    ended = cluster.run(check_signal, Plan(tmp_path, 1, "at_second_write", signal.SIGSTOP), init_group=False)
    (survivor, _), (stopped, _) = ended
    assert survivor.text.startswith("PeerTimeoutError: write of a checkpoint: rank 0 waited for"), survivor.text
    assert "Look first at rank 1: stopped" in survivor.text
    assert stopped.code == 0
    assert stopped.text.startswith(("CheckpointError: ", "PeerLostError: ", "PeerTimeoutError: ")), stopped.text
    for _, after in ended:
        assert (after.code, after.text) == (0, "1")


def save_and_be_killed_loading(rank: int, folder: Path) -> str:
    join(rank, folder, "job")
    root = folder / "root"
    checkpoint.save(root, state_of(make_job(rank, 1)), 1)
    dist.barrier()
    if rank == 1:
        folder_module.Checkpoint.read_all = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    try:
        checkpoint.load(root, state_of(make_job(rank)))
    except FullshardError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def check_killed_loading(rank: int, folder: Path) -> tuple[Ended, Ended]:
    return in_fork(lambda: save_and_be_killed_loading(rank, folder)), in_fork(lambda: load_and_go_on(rank, folder))


def test_rank_killed_in_a_load(cluster: Cluster, tmp_path: Path) -> None:
    ended = cluster.run(check_killed_loading, tmp_path, init_group=False)
    (survivor, _), (killed, _) = ended
    assert killed.code == -signal.SIGKILL
    assert survivor.text.startswith("PeerLostError: read of a checkpoint: rank 0 waited for"), survivor.text
    assert "Look first at rank 1: ended without a word" in survivor.text
    for _, after in ended:
        assert (after.code, after.text) == (0, "1")


def first_save_alone(rank: int, folder: Path) -> str:
    """The first save of a job, on one rank; the other one goes on to something else."""
    join(rank, folder, "job")
    job = make_job(rank)
    try:
        if rank == 0:
            checkpoint.save(folder / "root", state_of(job), 1)
        else:
            job[0](batch(rank, 0))
    except FullshardError as error:
        if rank == 0:  # once is all: others may have met half of it
            with pytest.raises(CommunicationError, match="failed to connect before; restart the job"):
                checkpoint.save(folder / "root", state_of(job), 1)
        return f"{type(error).__name__}: {error}"
    return ""


def check_first_save_alone(rank: int, folder: Path) -> Ended:
    return in_fork(lambda: first_save_alone(rank, folder))


def test_first_save_on_one_rank_only(cluster: Cluster, tmp_path: Path) -> None:
    alone, other = cluster.run(check_first_save_alone, tmp_path, init_group=False)
    expected = (
        "PeerTimeoutError: connect to save or load a checkpoint: rank 0 waited for ranks [1]: nothing arrived within"
    )
    assert alone.text.startswith(expected), alone.text
    assert "a call on one rank only" in alone.text
    assert other.text.startswith("PeerTimeoutError: comparison of the model"), other.text
    assert not (tmp_path / "root").exists()


# -- errors that ranks hear of -----------------------------------------------------------------------------------------


class Raising:
    """State that cannot be had."""

    def state_dict(self) -> dict[str, Any]:
        raise ValueError("no state today")

    def load_state_dict(self, _state: dict[str, Any]) -> None:
        raise AssertionError


class Sound(Raising):
    def state_dict(self) -> dict[str, Any]:
        return {"sound": True}


def check_errors(rank: int, folder: Path) -> dict[str, str]:
    """Saves that fail on one rank, one after the other; each time the ranks stay together."""
    root = folder / "root"
    job = make_job(rank, 1)
    checkpoint.save(root, state_of(job), 1)
    texts = {"raises": try_saving(root, job, 2, other=Raising() if rank == 1 else Sound())}
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(writing, "_write", no_space)
        texts["no space"] = try_saving(root, job, 3)
        pending = checkpoint.async_save(root, state_of(job), 4)
        with pytest.raises(CheckpointError) as caught:
            pending.result()
        texts["result"] = str(caught.value)
        unseen = checkpoint.async_save(root, state_of(job), 5)
        while not unseen.done():
            time.sleep(0.01)
    texts["next save"] = try_saving(root, job, 6)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            original = publish._write_durably
            patch.setattr(
                publish, "_write_durably", lambda path, data: (shutil.rmtree(path.parent), original(path, data))
            )
        texts["folder gone"] = try_saving(root, job, 7)
    dist.barrier()
    assert hidden(root) == []
    assert [path.name for path in sorted(root.glob("step-*"))] == ["step-1"]
    checkpoint.save(root, state_of(job), 8)
    assert checkpoint.load(root, state_of(make_job(rank))).step == 8
    return texts


def no_space(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_errors_of_one_rank_are_raised_by_all(cluster: Cluster, tmp_path: Path) -> None:
    first, second = cluster.run(check_errors, tmp_path)
    assert first == second
    full = "rank 1: cannot write {}/root/.step-{}."
    assert "ValueError: rank 1: no state today" in first["raises"]
    assert "rank 1: cannot write" in first["no space"]
    assert "No space left on device" in first["no space"]
    assert "Free space" in first["no space"]
    assert full.format(tmp_path, 4) in first["result"]
    assert full.format(tmp_path, 5) in first["next save"]
    assert "rank 0: cannot publish" in first["folder gone"]
    assert "No such file or directory" in first["folder gone"]


# -- disks -------------------------------------------------------------------------------------------------------------


@contextmanager
def small_disk(path: Path, kilobytes: int) -> Iterator[None]:
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount a disk in memory")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def check_disk(rank: int, root: Path, large: bool) -> str:
    job = make_job(rank, 1)
    return try_saving(root, job, 2 if large else 1, more=torch.zeros(large * 200_000))


def check_loads(rank: int, root: Path) -> int:
    return checkpoint.load(root, state_of(make_job(rank)), strict=False).step


def test_full_and_read_only_disks(cluster: Cluster, tmp_path: Path) -> None:
    """A disk that takes one checkpoint, not a larger one; later it takes nothing."""
    root = tmp_path / "disk"
    with small_disk(root, 300):
        assert cluster.run(check_disk, root, False) == ["", ""]
        for text in cluster.run(check_disk, root, True):
            # Of one rank, which is named, or of both: whoever writes last may find nothing left.
            assert re.match(r"CheckpointError: (rank [01]: )?cannot write .*step-2", text), text
            assert "No space left on device. Free space, keep fewer checkpoints" in text
        assert hidden(root) == []
        subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
        for text in cluster.run(check_disk, root, True):
            assert text.startswith("CheckpointError: "), text
            assert "Read-only file system" in text
            assert str(root) in text
        assert cluster.run(check_loads, root) == [1, 1]


def save_unseen(rank: int, folder: Path) -> str:
    join(rank, folder, "job")
    root = folder / "root"
    job = make_job(rank, 1)
    checkpoint.save(root, state_of(job), 1)
    dist.barrier()
    if rank == 1:  # as on a host where the shared disk is not mounted
        system = ctypes.CDLL(None, use_errno=True)
        private = 1 << 18 | 1 << 14  # MS_PRIVATE | MS_REC
        if system.unshare(_NEW_MOUNTS) or system.mount(b"none", b"/", None, private, None):
            return "no namespace"
        if system.mount(b"tmpfs", os.fsencode(root), b"tmpfs", 0, None):
            return "no namespace"
    return try_saving(root, job, 2)


def check_unseen(rank: int, folder: Path) -> tuple[Ended, Ended]:
    return in_fork(lambda: save_unseen(rank, folder)), in_fork(lambda: load_and_go_on(rank, folder))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount something on one rank alone")
def test_folder_that_one_rank_does_not_see(cluster: Cluster, tmp_path: Path) -> None:
    ended = cluster.run(check_unseen, tmp_path, init_group=False)
    if ended[1][0].text == "no namespace":
        pytest.skip("needs the right to make namespaces")
    for first, after in ended:
        assert "CheckpointError: rank 1: " in first.text
        assert "all ranks must see the same folder" in first.text
        assert (after.code, after.text) == (0, "1")


# -- two jobs in one folder --------------------------------------------------------------------------------------------


def save_alone(job: int, folder: Path, stop: bool) -> str:
    """One of two jobs, of one rank each."""
    root = folder / "root"
    state = {"value": torch.full((3000,), float(job)), "job": job}
    if stop:
        at_second_write(lambda: (Path(folder / "stopped").touch(), os.kill(os.getpid(), signal.SIGSTOP)))
        (folder / "process").write_text(str(os.getpid()))
    else:
        while not (folder / "stopped").exists():
            time.sleep(0.01)
    exists = ""
    for step in range(3):
        try:
            checkpoint.save(root, state, step)
        except CheckpointExistsError as error:
            exists += f"{step} {error}"
        if not stop and step == 1:
            left = hidden(root)
            os.kill(int((folder / "process").read_text()), signal.SIGCONT)
            assert len(left) == 1, left  # the draft of the job that lives
    return exists


def check_two_jobs(rank: int, folder: Path) -> Ended:
    return in_fork(lambda: save_alone(rank, folder, stop=rank == 0))


def test_two_jobs_in_one_folder_do_not_mix(cluster: Cluster, tmp_path: Path) -> None:
    """Job 0 is stopped in its first save while job 1 saves; its draft must stay, and it must not win any more."""
    first, second = cluster.run(check_two_jobs, tmp_path, init_group=False)
    assert (first.code, second.code) == (0, 0), (first.text, second.text)
    assert first.text.startswith(f"0 {tmp_path}/root/step-0 exists by now: another job saves to the same place")
    root = tmp_path / "root"
    assert hidden(root) == []
    for step in range(3):
        target = torch.zeros(3000)
        loaded = checkpoint.load(root / f"step-{step}", {"value": target, "job": None})
        job = loaded.values["job"]
        value = loaded.values["value"]
        assert torch.equal(value, torch.full((3000,), float(job))), step
