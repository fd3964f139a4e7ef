"""One of three ranks fails: the others end within the time limit, with an error that says which, where and why."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forks import Ended, in_fork, make_group
from stack import batch, make_stack
from torch import nn

from cluster import Cluster
from fullshard.errors import CommunicationError, MisuseError

LIMIT_SECONDS = 1.5
STEPS = 3
BAD = 2  # the rank that fails, in its second step
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


@dataclass(frozen=True)
class Plan:
    """What goes wrong.

    Attributes:
        folder: For the store.
        transport: Of all units.
        how: Key of `HOW`.
        where: Key of `_place`.
    """

    folder: str
    transport: str
    how: str
    where: str = "forward"


def use_too_much() -> None:
    """Ask for more memory than the process may have."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (32 << 20), limits[1]))
    try:
        torch.empty(256 << 20, dtype=torch.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def raising(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


HOW: dict[str, Callable[[], Any]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "device memory": raising(torch.OutOfMemoryError("no memory for 3 GiB")),
    "host memory": raising(MemoryError("no memory for 5 GiB")),
    "limit of memory": use_too_much,
    "raises": raising(ValueError("bad sample")),
    "leaves": raising(SystemExit(0)),
}


def _place(where: str, model: nn.Module, optimizer: torch.optim.Optimizer, act: Callable[[], Any]) -> None:
    def hook(*_: Any) -> None:
        act()

    block = model.get_submodule("blocks.2")
    if where == "forward":
        block.register_forward_pre_hook(hook)
    elif where == "backward":
        block.register_full_backward_pre_hook(hook)
    elif where == "gradient":
        next(block.parameters()).register_hook(hook)
    elif where == "optimizer":
        optimizer.register_step_pre_hook(hook)


def train(rank: int, plan: Plan) -> str:
    """Train until an error; returns its text after the number of complete steps and the seconds that it took."""
    store = dist.FileStore(f"{plan.folder}/store", 3)
    make_group(rank, 3, store, LIMIT_SECONDS)
    store.set(f"process {rank}", str(os.getpid()))
    teacher = make_stack(transport=plan.transport)  # has nothing to do with it, and so nothing to say at the end
    teacher(batch(rank)).sum().backward()
    model = make_stack(transport=plan.transport)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    done, started = 0, 0.0
    try:
        for step in range(STEPS):
            if step == 1:
                dist.barrier()
                started = time.monotonic()
                if rank == BAD:
                    _place(plan.where, model, optimizer, HOW[plan.how])
            model(batch(rank, step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
    except CommunicationError as error:
        seconds = time.monotonic() - started
        with pytest.raises(MisuseError, match="communication failed earlier"):
            model(batch(rank))
        if plan.how == "stopped" and rank == 0:
            os.kill(int(store.get(f"process {BAD}")), signal.SIGCONT)
        return f"{done} {seconds} {type(error).__name__}: {error}"
    return f"{done} 0 no error"


def check(rank: int, plan: Plan) -> Ended:
    return in_fork(lambda: train(rank, plan))


def fail(cluster: Cluster, *plan: str) -> tuple[list[str], Ended]:
    """The errors of the survivors, and how the bad rank ended."""
    *survivors, bad = cluster.run(check, Plan(*plan), world_size=3, init_group=False)
    texts = []
    for survivor in survivors:
        assert survivor.code == 0, survivor.text
        _, seconds, text = survivor.text.split(" ", 2)
        # Twice the wait for the others' words, of half a second: the machine may be busy.
        assert float(seconds) < LIMIT_SECONDS + 2.0, survivor.text
        first, *rest = text.splitlines()
        assert first.startswith(("PeerLostError: ", "PeerTimeoutError: ")), text
        assert f"rank {len(texts)} waited for rank" in first
        assert f"{BAD}]" in first
        assert " of unit 'blocks." in first
        assert rest[0] == "What each rank did last:"
        for rank, line in enumerate(rest[1:4]):
            assert line.startswith(f"  rank {rank}"), text
        # On a busy machine the other survivor may be too late with its word.
        assert re.match(rf"Look first at rank(s \[[01], |) ?{BAD}\]?: ", rest[-1]), text
        texts.append(text)
    return texts, bad


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
@pytest.mark.parametrize("transport", ["shm", "direct", "torch"])
def test_killed_rank(cluster: Cluster, tmp_path: Path, transport: str, where: str) -> None:
    """B122: without a word, and long before the time limit."""
    texts, bad = fail(cluster, str(tmp_path), transport, "killed", where)
    assert bad.code == -signal.SIGKILL
    for text in texts:
        assert text.startswith("PeerLostError: ")
        assert f"  rank {BAD} posted nothing: its process has ended, it is stuck" in text
        assert text.splitlines()[-1].endswith(
            ": ended without a word. Either it was killed (the kernel's log tells of a lack of memory), or its program "
            "came to its end before those of the others."
        )


@pytest.mark.parametrize(("transport", "where"), [("shm", "backward"), ("direct", "forward"), ("torch", "optimizer")])
def test_stopped_rank_that_goes_on_too_late(cluster: Cluster, tmp_path: Path, transport: str, where: str) -> None:
    """B122: it is told that the others have given up, and does nothing more than what it had been given."""
    texts, bad = fail(cluster, str(tmp_path), transport, "stopped", where)
    for text in texts:
        assert text.startswith("PeerTimeoutError: ")
        assert f"  rank {BAD} posted nothing" in text
        assert "stopped, stuck, busy with something else, or not to be reached" in text.splitlines()[-1]
    assert bad.code == 0, bad.text
    done, _, text = bad.text.split(" ", 2)
    assert int(done) <= 2  # the step in which it was stopped, if all it needed for it had come
    first, *rest = text.splitlines()
    assert first.startswith(("PeerLostError: ", "PeerTimeoutError: ")), text
    assert f"rank {BAD} waited for" in first
    assert any(line.startswith("  rank 0: step ") and "PeerTimeoutError" in line for line in rest), text
    if first.startswith("PeerLostError"):
        assert rest[-1] == f"Look first at rank {BAD}: late, the others had given up by then.", text


RAISED = [
    ("shm", "device memory", "forward", "its forward of unit 'blocks.2' raised OutOfMemoryError: no memory for 3 GiB"),
    ("shm", "host memory", "backward", "its backward raised; its program ended with MemoryError: no memory for 5 GiB"),
    ("shm", "limit of memory", "forward", "its forward of unit 'blocks.2' raised RuntimeError: "),
    ("direct", "device memory", "backward", "its backward raised; its program ended with OutOfMemoryError: no memory"),
    ("direct", "raises", "gradient", "its backward raised; its program ended with ValueError: bad sample"),
    ("torch", "host memory", "forward", "its forward of unit 'blocks.2' raised MemoryError: no memory for 5 GiB"),
    ("torch", "limit of memory", "backward", "its backward raised; its program ended with RuntimeError: "),
    ("torch", "raises", "optimizer", "its program ended with ValueError: bad sample"),
    ("shm", "leaves", "optimizer", "its program ended with"),
]


@pytest.mark.parametrize(("transport", "how", "where", "reason"), RAISED)
def test_rank_that_raises(cluster: Cluster, tmp_path: Path, transport: str, how: str, where: str, reason: str) -> None:
    """B122: its reason is in the errors of the others, wherever it raised."""
    texts, bad = fail(cluster, str(tmp_path), transport, how, where)
    assert bad.code == 1
    for text in texts:
        assert f"Look first at rank {BAD}: {reason}" in text.splitlines()[-1], text


def train_over_cable(rank: int, folder: str, transport: str) -> str:
    """Two hosts joined by a cable, which is cut in the second step. The store is on the first host."""
    files = dist.FileStore(f"{folder}/files", 2)
    system = ctypes.CDLL(None, use_errno=True)
    if system.unshare(_NEW_NETWORK):
        return f"no network namespace: {os.strerror(ctypes.get_errno())}"
    _lay_cable(rank, files)
    os.environ["GLOO_SOCKET_IFNAME"] = f"cable{rank}"
    connect = timedelta(seconds=20)
    make_group(rank, 2, dist.TCPStore("10.77.1.1", 29500, 2, is_master=rank == 0, timeout=connect), LIMIT_SECONDS)
    model = make_stack(transport=transport)
    model(batch(rank)).sum().backward()
    dist.barrier()

    def cut(*_: Any) -> None:
        if rank == 0:
            _ip("link", "set", "cable0", "down")

    model.blocks[2].register_full_backward_pre_hook(cut)
    started = time.monotonic()
    try:
        for step in range(STEPS):
            model(batch(rank, step)).sum().backward()
    except CommunicationError as error:
        return f"{time.monotonic() - started} {type(error).__name__}: {error}"
    return "0 no error"


def _lay_cable(rank: int, files: dist.Store) -> None:
    """Both ends have namespaces of their own, which end with the processes."""
    files.set(f"process {rank}", str(os.getpid()))
    other = files.get(f"process {1 - rank}").decode()
    if rank == 0:
        _ip("link", "add", "cable0", "type", "veth", "peer", "name", "cable1", "netns", other)
        files.set("cable", "")
    files.wait(["cable"])
    _ip("address", "add", f"10.77.1.{rank + 1}/24", "dev", f"cable{rank}")
    _ip("link", "set", "lo", "up")
    _ip("link", "set", f"cable{rank}", "up")
    files.set(f"up {rank}", "")
    files.wait([f"up {1 - rank}"])


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def check_cable(rank: int, folder: str, transport: str) -> Ended:
    return in_fork(lambda: train_over_cable(rank, folder, transport))


@pytest.mark.skipif(shutil.which("ip") is None, reason="needs ip (Debian: iproute2)")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make network namespaces")
@pytest.mark.parametrize("transport", ["direct", "torch"])
def test_network_link_that_is_cut(cluster: Cluster, tmp_path: Path, transport: str) -> None:
    """B122: both ends stop within the time limit, also the one that cannot reach the store any more."""
    for rank, ended in enumerate(cluster.run(check_cable, str(tmp_path), transport, init_group=False)):
        assert ended.code == 0, ended.text
        seconds, text = ended.text.split(" ", 1)
        if seconds == "no":
            pytest.skip(ended.text)
        first, *rest = text.splitlines()
        assert first.startswith(
            ("PeerTimeoutError: reduce of unit 'blocks.", "PeerTimeoutError: gather of unit 'blocks.")
        )
        assert f"rank {rank} waited for rank" in first
        assert rest[1 + rank].startswith(f"  rank {rank}: step 2: ")
        assert rest[2 - rank].startswith(f"  rank {1 - rank} posted nothing: ")
        assert rest[2 - rank].endswith("or the network to it is cut")
        assert (
            rest[3] == f"Look first at rank {1 - rank}: stopped, stuck, busy with something else, or not to be reached."
        )
        assert float(seconds) < LIMIT_SECONDS + 3.0


PROGRAM = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
from fullshard import fully_shard

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2, timeout=timedelta(seconds=60)
)
model = torch.nn.Sequential(*(fully_shard(torch.nn.Linear(4, 4)) for _ in range(3)))
fully_shard(model)

def batches():
    yield torch.ones(2, 4)
    if rank == 1:
        raise OSError("sample 7 is damaged")
    yield torch.ones(2, 4)

for batch in batches():
    model(batch).sum().backward()
"""


def test_program_that_ends_between_steps(tmp_path: Path) -> None:
    """B122: a real interpreter that ends leaves word of why, and the others are told at once."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path)],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    texts = [program.communicate(timeout=50)[1] for program in programs]
    assert [program.returncode for program in programs] == [1, 1], texts
    said = "Look first at rank 1: its program ended with OSError: sample 7 is damaged."
    assert texts[0].rstrip().endswith(said), texts[0]
