"""What the rank processes do for `checkpoint.py`: one adapter a contender, and how one of them is timed."""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from engines import Training
from llama import LlamaShape
from tasks import Handler
from workloads import Workload, sizes

PIECE_BYTES = 16 * 1024**2  # of one write or read of the disk limit
PLAIN_STEPS = 4  # steps without a save, the first of which is not counted
BYTES_A_PARAMETER = 12  # float32, with the two moments of AdamW
_SHAPES = (LlamaShape(width=1024, blocks=1, hidden=2816), LlamaShape(width=64, blocks=1, hidden=128))


class Pending(Protocol):
    """A save in the background."""

    def done(self) -> bool:
        """Whether `result` would not wait."""

    def result(self) -> Any:
        """Wait until it is on the disk."""


class Saver(Protocol):
    """Saves and loads the model and the optimizer of one job."""

    def save(self, path: Path) -> None:
        """Return when everything is on the disk."""

    def load(self, path: Path) -> None:
        """Put what is at `path` into the model and the optimizer."""

    def async_save(self, path: Path) -> Pending:
        """Return when training may go on."""


def workload_of(nbytes: int, world_size: int) -> Workload:
    """The job whose parameters and moments come nearest to `nbytes`, in the larger of two widths that fits."""
    for shape in _SHAPES:
        one = sizes(Workload("", "", shape, ()))
        blocks = 1 + round((nbytes / BYTES_A_PARAMETER - one.all) / one.block)
        if blocks >= 2 or shape is _SHAPES[-1]:
            break
    shape = LlamaShape(shape.width, max(blocks, 1), shape.hidden)
    return Workload("checkpoint", f"{shape.blocks} blocks of d {shape.width}", shape, (), 1, 64, world_size)


# -- the contenders ----------------------------------------------------------------------------------------------------


class Dcp:
    """torch.distributed.checkpoint.

    Args:
        job: Model and optimizer.
        threads: Of its writer; 0: as it comes.
        process: Saves in the background happen in a process, not on a thread.
    """

    def __init__(self, job: Any, threads: int = 0, process: bool = False) -> None:
        self._job = job
        self._threads = threads
        self._process = process
        # Its own messages: on a group in use they would meet those of the training, and both would fail.
        self._group = dist.new_group(backend="gloo")

    def save(self, path: Path) -> None:
        """Of what `get_state_dict` gives."""
        from torch.distributed import checkpoint

        writer = checkpoint.FileSystemWriter(path, thread_count=self._threads) if self._threads else None
        checkpoint.save(self._state(), checkpoint_id=path, storage_writer=writer)

    def load(self, path: Path) -> None:
        """Into the tensors of the state; `set_state_dict` is for what is no tensor."""
        from torch.distributed import checkpoint
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state()
        checkpoint.load(state, checkpoint_id=path)
        set_state_dict(
            self._job.model,
            self._job.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def async_save(self, path: Path) -> Pending:
        """On a thread or in a process, which is kept for the next save."""
        from torch.distributed import checkpoint
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        kind = AsyncCheckpointerType.PROCESS if self._process else AsyncCheckpointerType.THREAD
        return checkpoint.async_save(
            self._state(), checkpoint_id=path, async_checkpointer_type=kind, process_group=self._group
        )

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self._job.model, self._job.optimizer)
        return {"model": model, "optimizer": optimizer}


class TorchSave:
    """The full state, gathered, in one file of rank 0."""

    def __init__(self, job: Any) -> None:
        self._job = job

    def save(self, path: Path) -> None:
        """`torch.save` and fsync."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_state_dict(self._job.model, self._job.optimizer, options=options)
        if dist.get_rank() == 0:
            path.mkdir()
            with (path / "state.pt").open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()

    def load(self, path: Path) -> None:
        """Rank 0 reads and gives each rank its part."""
        from torch.distributed.checkpoint import state_dict

        model: Any = {}
        optimizer: Any = {}
        if dist.get_rank() == 0:
            model, optimizer = torch.load(path / "state.pt", weights_only=True)
        options = state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        # Not `set_state_dict`: ranks with no state would leave it before the model's has come.
        state_dict.set_model_state_dict(self._job.model, model, options=options)
        state_dict.set_optimizer_state_dict(self._job.model, self._job.optimizer, optimizer, options=options)

    def async_save(self, path: Path) -> Pending:
        """There is none."""
        raise NotImplementedError


class Ours:
    """fullshard.checkpoint.

    Args:
        job: Model and optimizer.
        overlap: Saves in the background also copy there.
    """

    def __init__(self, job: Any, overlap: bool = False) -> None:
        self._state = {"model": job.model, "optimizer": job.optimizer}
        self._overlap = overlap

    def save(self, path: Path) -> None:
        """Step 1 in the folder `path`."""
        from fullshard import checkpoint

        checkpoint.save(path, self._state, 1)

    def load(self, path: Path) -> None:
        """The latest."""
        from fullshard import checkpoint

        checkpoint.load(path, self._state)

    def async_save(self, path: Path) -> Pending:
        """As `save`."""
        from fullshard import checkpoint

        act = checkpoint.overlapped_save if self._overlap else checkpoint.async_save
        return act(path, self._state, 1)


class Disk:
    """The limit: each rank writes as many bytes as its part of the state has, from memory to one file, or reads them.

    Args:
        nbytes: Of one rank, rounded up to whole pages.
        direct: Past the page cache.
    """

    def __init__(self, nbytes: int, direct: bool) -> None:
        whole_bytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE  # O_DIRECT needs whole pages
        self._memory = mmap.mmap(-1, whole_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_HUGEPAGE)  # twice as fast
        self._flags = os.O_DIRECT if direct else 0
        torch.frombuffer(self._memory, dtype=torch.int64).random_()  # a disk may be quicker with zeros

    def save(self, path: Path) -> None:
        """Write and fsync."""
        path.mkdir(exist_ok=True)
        self._go(path, os.O_WRONLY | os.O_CREAT, os.pwrite)

    def load(self, path: Path) -> None:
        """Read into the memory that was written."""
        self._go(path, os.O_RDONLY, lambda file, piece, offset: os.preadv(file, [piece], offset))

    def async_save(self, path: Path) -> Pending:
        """There is none."""
        raise NotImplementedError

    def _go(self, path: Path, flags: int, move: Callable[[int, memoryview, int], int]) -> None:
        file = os.open(path / f"rank{dist.get_rank()}", flags | self._flags)
        offset = 0
        while offset < len(self._memory):
            offset += move(file, memoryview(self._memory)[offset : offset + PIECE_BYTES], offset)
        if flags & os.O_WRONLY:
            os.fsync(file)
        os.close(file)


SAVERS: dict[str, Callable[[Any], Saver]] = {
    "dcp": Dcp,
    "dcp-threads": lambda job: Dcp(job, threads=2),
    "dcp-process": lambda job: Dcp(job, process=True),
    "torch-save": TorchSave,
    "fullshard": Ours,
    "fullshard-overlap": lambda job: Ours(job, overlap=True),
}


# -- what a rank is sent -----------------------------------------------------------------------------------------------


def make_disk(rank: int, nbytes: int) -> Handler:
    """A rank that writes and reads `nbytes` bytes: {"saver": "disk-direct", "verb": "save", "path": ...}."""
    del rank
    savers = {name: Disk(nbytes, name == "disk-direct") for name in ("disk-buffered", "disk-direct")}

    def run(command: dict[str, str]) -> dict[str, float]:
        act = getattr(savers[command["saver"]], command["verb"])
        return {"seconds": _timed(lambda: act(Path(command["path"])))}

    return run


def make_trainer(rank: int, engine: str, nbytes: int) -> Handler:
    """A rank that trains, and saves and loads when asked: {"saver": "dcp", "verb": "save", "path": ...}.

    Replies have `seconds` and `fingerprint`: the sum of the bits of this rank's part of the state as it was saved, or
    as it is loaded. Those of "async" are others, see `_save_meanwhile`.
    """
    training = Training(engine, workload_of(nbytes, dist.get_world_size()), rank)
    training.step()  # makes the optimizer's state
    savers = {
        name: make(training.job) for name, make in SAVERS.items() if name.startswith("fullshard") == (engine != "fsdp2")
    }

    def run(command: dict[str, str]) -> dict[str, float]:
        saver, path = savers[command["saver"]], Path(command["path"])
        if command["verb"] == "async":
            return _save_meanwhile(training, lambda: saver.async_save(path))
        if command["verb"] == "load":
            for part in _state_of(training):
                part.fill_(-1)
        act = getattr(saver, command["verb"])
        return {"seconds": _timed(lambda: act(path)), "fingerprint": _fingerprint(training)}

    return run


def _save_meanwhile(training: Training, async_save: Callable[[], Pending]) -> dict[str, float]:
    """Train while a save is in flight.

    `stall_seconds` until `async_save` returned, and how long the optimizer waited for the copy if that was still being
    taken; `lost_seconds`: by how much all that and the steps until the save was done took longer than steps without a
    save; `seconds` until it was done, `step_seconds` of a plain step, and `steps`.
    """
    plain_seconds = statistics.median([_timed(training.step) for _ in range(PLAIN_STEPS)][1:])
    began = time.perf_counter()
    pending: list[Pending] = []
    stall_seconds = _timed(lambda: pending.append(async_save()))
    steps: list[float] = []
    with _timing_the_wait(training.job, pending[0]) as waits:
        while not steps or not _everywhere(pending[0].done()):
            steps.append(_timed(training.step))
    pending[0].result()
    return {
        "stall_seconds": stall_seconds + sum(waits),
        "lost_seconds": stall_seconds + sum(steps) - plain_seconds * len(steps),
        "seconds": time.perf_counter() - began,
        "step_seconds": plain_seconds,
        "steps": len(steps),
    }


@contextmanager
def _timing_the_wait(job: Any, pending: Any) -> Iterator[list[float]]:
    """How long each step of the optimizer must wait for the copy of a pending save."""
    waits: list[float] = []
    update, wait = job.update, getattr(pending, "wait_copied", lambda: None)

    def timed_update() -> None:
        began = time.perf_counter()
        wait()
        waits.append(time.perf_counter() - began)
        update()

    job.update = timed_update
    try:
        yield waits
    finally:
        job.update = update


def _timed(act: Callable[[], Any]) -> float:
    dist.barrier()
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def _everywhere(done: bool) -> bool:
    """Ranks take the same number of steps."""
    flag = torch.tensor(int(done))
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


def _state_of(training: Training) -> list[Tensor]:
    """This rank's part of everything that is sharded; it shares memory."""
    tensors = [*training.model.parameters()]
    for values in training.job.optimizer.state.values():
        tensors += [value for value in values.values() if isinstance(value, Tensor) and value.dim()]
    return [getattr(tensor, "_local_tensor", tensor).detach() for tensor in tensors]


def _fingerprint(training: Training) -> int:
    """The sums of ranks are the same however the state is divided; below 2**53, so that JSON is exact."""
    return sum(int(part.view(torch.int32).sum()) for part in _state_of(training)) % 2**48
