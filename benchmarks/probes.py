"""What is measured besides time: memory (from torch's allocator) and bytes on the wire (from the process's sockets)."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import socket
import stat
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_TCP_INFO_BYTES = 232
_BYTES_RECEIVED_OFFSET = 128  # tcpi_bytes_received in Linux's struct tcp_info, since kernel 4.1
_TOTAL = re.compile(rb"total alloc (\d+) bytes")
_LOG_LEVEL_INFO = 0


def received_bytes() -> int:
    """Bytes of TCP payload that the open sockets of this process have received so far.

    The kernel counts per socket, so other programs on the loopback interface do not disturb, and headers and
    acknowledgements are not in it. The difference of two calls is right as long as no socket closes in between.
    """
    return sum(_received_bytes(int(path.name)) for path in Path("/proc/self/fd").iterdir())


def _received_bytes(descriptor: int) -> int:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return 0  # `fromfd` would leave the copy of it open
        with socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM) as copy:
            info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return 0  # a Unix socket, or a descriptor that closed meanwhile
    if len(info) < _BYTES_RECEIVED_OFFSET + 8:
        return 0
    return int(struct.unpack_from("=Q", info, _BYTES_RECEIVED_OFFSET)[0])


@dataclass(frozen=True)
class TensorMemory:
    """Tensor bytes of one rank."""

    peak_bytes: int
    """The most bytes alive at once during the measured steps."""
    between_steps_bytes: int
    """Bytes alive just before the measured steps: shards, optimizer state, buffers kept by the engine."""
    hidden_bytes: int
    """Part of the bytes alive after the steps that belongs to no tensor Python can find, such as DDP's buckets."""


def tensor_memory(prepare: Callable[[], Any], measured: Callable[[Any], None]) -> TensorMemory:
    """Follow torch's allocator through `measured(prepare())`, in a process that has made no tensors yet.

    torch's CPU allocator can log each block that it hands out or takes back, on any thread, with the running total. The
    log is on from before the model exists, so the total starts at zero and is exact. (The profiler's memory events come
    from the same place but miss what Gloo's threads free.) Not seen: memory that is not from this allocator, which is
    shared memory and Gloo's own buffers; `resident_peak_bytes` has those.
    """
    with tempfile.TemporaryFile() as log, _allocator_log(log.fileno()):
        state = prepare()
        gc.collect()
        begin = log.seek(0, os.SEEK_END)
        measured(state)
        end = log.seek(0, os.SEEK_END)
        log.seek(0)
        text = log.read()
    before, inside = _TOTAL.findall(text[:begin]), _TOTAL.findall(text[begin:end])
    if not before or not inside:
        raise RuntimeError("the allocator of this torch logs nothing; see probes._allocator_log")
    return TensorMemory(
        peak_bytes=max(map(int, inside)),
        between_steps_bytes=int(before[-1]),
        hidden_bytes=int(inside[-1]) - live_tensor_bytes(),
    )


@contextlib.contextmanager
def _allocator_log(descriptor: int) -> Iterator[None]:
    """Send this process's stderr, with each allocation in it, to `descriptor`."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    report = ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage")
    level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    level_before, stderr = level.value, os.dup(2)
    os.dup2(descriptor, 2)
    report.value, level.value = True, _LOG_LEVEL_INFO
    try:
        yield
    finally:
        report.value, level.value = False, level_before
        os.dup2(stderr, 2)
        os.close(stderr)


def live_tensor_bytes() -> int:
    """Bytes of the storages of all tensors that the garbage collector knows, each storage once."""
    sizes: dict[int, int] = {}
    for found in gc.get_objects():
        # Not isinstance: it asks objects for __class__, and some in torch answer with a warning.
        if issubclass(type(found), torch.Tensor):
            for tensor in (found, found.grad if found.is_leaf else None):
                local = getattr(tensor, "_local_tensor", tensor)
                if isinstance(local, torch.Tensor):
                    storage = local.untyped_storage()
                    sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def shared_memory_bytes() -> int:
    """This rank's part of the memory that it shares with others: of a page that n processes have touched, 1/n.

    Shared memory is not torch's, so its allocator's log has none of it.
    """
    total = 0
    counts = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first and not first.endswith(":"):  # the head of a mapping: addresses, flags, name of its file
            counts = any(mark in line for mark in (" /dev/shm/", " /memfd:"))
        elif counts and first == "Pss:":
            total += int(line.split()[1]) * 1024
    return total


def resident_peak_bytes() -> int:
    """The most physical memory this process has had since `reset_resident_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM in /proc/self/status")


def reset_resident_peak() -> None:
    """Let `resident_peak_bytes` start again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
