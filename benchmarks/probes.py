"""What is measured besides time: memory (from torch's allocator) and bytes on the wire (from the process's sockets)."""

from __future__ import annotations

import gc
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_TCP_INFO_BYTES = 232
_BYTES_RECEIVED_OFFSET = 128  # tcpi_bytes_received in Linux's struct tcp_info, since kernel 4.1
_MEASURED = "measured steps"


def received_bytes() -> int:
    """Bytes of TCP payload that the open sockets of this process have received so far.

    The kernel counts per socket, so other programs on the loopback interface do not disturb, and headers and
    acknowledgements are not in it. The difference of two calls is right as long as no socket closes in between.
    """
    return sum(_received_bytes(int(path.name)) for path in Path("/proc/self/fd").iterdir())


def _received_bytes(descriptor: int) -> int:
    try:
        with socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM) as copy:
            info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return 0  # a file, a pipe, a Unix socket, or a descriptor that closed meanwhile
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
    unaccounted_bytes: int
    """After the steps: bytes alive by the allocator's count minus bytes of all tensors that Python can find."""


def tensor_memory(prepare: Callable[[], Any], measured: Callable[[Any], None]) -> TensorMemory:
    """Profile `measured(prepare())`; must be called before the process has made any tensor that matters.

    torch's CPU allocator reports each block that it hands out or takes back, with the running total, to a profiler that
    is on. It is on from before the model exists, so the total starts at zero and nothing has to be guessed. Not seen:
    blocks that no torch allocator made (shared memory, Gloo's own buffers), and blocks freed on a thread that the
    profiler does not follow; `unaccounted_bytes` shows the latter, `resident_peak_bytes` the former.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        state = prepare()
        gc.collect()
        with torch.profiler.record_function(_MEASURED):
            measured(state)
        torch.empty(1)  # an event after the last free, so that the final total is known
    events = list(_flatten(profiler.profiler.kineto_results.experimental_event_tree()))  # type: ignore[union-attr]
    region = next(event for event in events if event.name == _MEASURED)
    totals = sorted(
        (event.start_time_ns, event.extra_fields.total_allocated)
        for event in events
        if event.tag == torch._C._profiler._EventType.Allocation
    )
    before = [total for when, total in totals if when < region.start_time_ns]
    inside = [total for when, total in totals if region.start_time_ns <= when <= region.end_time_ns]
    return TensorMemory(
        peak_bytes=max(inside),
        between_steps_bytes=before[-1],
        unaccounted_bytes=totals[-1][1] - live_tensor_bytes(),
    )


def _flatten(events: list[Any]) -> Iterator[Any]:
    stack = list(events)
    while stack:
        event = stack.pop()
        yield event
        stack.extend(event.children)


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


def resident_peak_bytes() -> int:
    """The most physical memory this process has had since `reset_resident_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM in /proc/self/status")


def reset_resident_peak() -> None:
    """Let `resident_peak_bytes` start again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
