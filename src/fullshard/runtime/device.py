"""Streams, events and buffer memory, with no-op twins on CPU."""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

# Numbers of mallopt(3) in glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

# Names of the two side streams.
GATHER = "gather"
REDUCE = "reduce"


class Streams(Protocol):
    """Side streams for communication beside the current (compute) stream."""

    def side(self, name: str, /) -> AbstractContextManager[None]:
        """Work inside runs on stream `name`, after everything already issued on the current stream."""

    def mark(self) -> torch.Event | None:
        """An event at this point of the current stream."""

    def join(self, event: torch.Event | None) -> None:
        """Later work on the current stream waits for `event`; the host does not."""


class HostStreams:
    """CPU: kernels run when they are called, so there is nothing to order."""

    def side(self, _name: str, /) -> nullcontext[None]:
        """Nothing to switch."""
        return nullcontext()

    def mark(self) -> None:
        """Nothing to mark."""

    def join(self, event: torch.Event | None) -> None:
        """Nothing to wait for."""


class AcceleratorStreams:
    """Two streams of one accelerator.

    Every buffer is allocated and freed on the compute stream, and the compute stream joins a collective's event before
    the buffer is used or freed. So the caching allocator never sees a buffer that another stream still works on, and
    `record_stream` with its unpredictable memory is not needed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {name: torch.Stream(device) for name in (GATHER, REDUCE)}

    @contextmanager
    def side(self, name: str, /) -> Iterator[None]:
        """Run on side stream `name` after what the current stream has been given so far."""
        stream = self._streams[name]
        stream.wait_event(self.mark())
        with stream:
            yield

    def mark(self) -> torch.Event:
        """Record an event on the current stream."""
        event = torch.Event(self._device)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def join(self, event: torch.Event | None) -> None:
        """Let the current stream wait for `event`."""
        if event is not None:
            torch.accelerator.current_stream(self._device).wait_event(event)


def make_streams(device: torch.device) -> Streams:
    """Streams for `device`."""
    return HostStreams() if device.type in ("cpu", "meta") else AcceleratorStreams(device)


class BufferPool:
    """Memory for full buffers and staging, which comes and goes many times a step.

    A full buffer must always appear in the *same* storage object, because autograd's saved tensors hold that object; so
    memory moves in and out of storages. On CPU a large block fresh from the kernel costs page faults worth more than
    the copy into it, so freed blocks are kept, up to `limit_bytes`, and put under the next storage of the same size.
    An accelerator's caching allocator does the same by itself.

    Attributes:
        live_bytes: Bytes under storages now, also those that come from memory which ranks share.
        peak_bytes: Most bytes under storages since `reset_peak`.
    """

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        self._device = device
        self._limit_bytes = limit_bytes if device.type == "cpu" else 0
        self._spare: list[torch.UntypedStorage] = []  # oldest first
        self.live_bytes = 0
        self.peak_bytes = 0

    @property
    def spare_bytes(self) -> int:
        """Bytes kept for reuse."""
        return sum(storage.nbytes() for storage in self._spare)

    def raise_limit(self, limit_bytes: int) -> None:
        """Keep at least `limit_bytes` of freed blocks from now on."""
        if self._device.type == "cpu":
            self._limit_bytes = max(self._limit_bytes, limit_bytes)

    def fill(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Put `nbytes` of uninitialized memory under an empty `storage`."""
        assert storage.nbytes() == 0, "the storage already holds memory"
        for i in range(len(self._spare) - 1, -1, -1):
            if self._spare[i].nbytes() == nbytes:
                swap_memory(storage, self._spare.pop(i))
                break
        else:
            storage.resize_(nbytes)
        self.count(nbytes)

    def count(self, nbytes: int) -> None:
        """So many bytes more are under storages, or less if it is negative."""
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def drain(self, storage: torch.UntypedStorage) -> None:
        """Take the memory from under `storage`, which becomes empty."""
        nbytes = storage.nbytes()
        self.live_bytes -= nbytes
        if not 0 < nbytes <= self._limit_bytes:
            storage.resize_(0)
            return
        spare = torch.UntypedStorage(0, device=self._device)
        swap_memory(spare, storage)
        self._spare.append(spare)
        while self.spare_bytes > self._limit_bytes:
            del self._spare[0]

    def reset_peak(self) -> None:
        """Start a new measurement of `peak_bytes`."""
        self.peak_bytes = self.live_bytes


def swap_memory(a: torch.UntypedStorage, b: torch.UntypedStorage) -> None:
    """Exchange what lies under two storages of one device, without a copy."""
    inside: Any = a
    inside._swap_data_ptr_(b)


def keep_freed_host_memory(nbytes: int) -> bool:
    """Let the C library keep up to `nbytes` of freed memory at the end of its heap, for the whole process.

    Gradients come from autograd and go after each reduce. Left to itself glibc gives such blocks back to the kernel and
    takes them anew, page fault by page fault, many times a step. Other C libraries and allocators are left alone.

    Returns:
        Whether it was done.
    """
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    largest_heap_block = 32 << 20  # glibc's own upper limit of this setting
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, largest_heap_block) and libc.mallopt(_M_TRIM_THRESHOLD, nbytes))


def on_stream(act: Callable[[torch.Tensor], None], stream: torch.Stream) -> Callable[[torch.Tensor], None]:
    """`act`, run on `stream` between what the current stream has been given before and what it is given after."""

    def run(tensor: torch.Tensor) -> None:
        if tensor.device.type == "cpu":
            act(tensor)
            return
        current = torch.accelerator.current_stream(tensor.device)
        stream.wait_stream(current)
        with stream:
            act(tensor)
        current.wait_stream(stream)

    return run


def default_device_type() -> str:
    """Device type for a mesh that the user did not give: the accelerator if the default group serves it, else CPU.

    A CPU-only group on a machine with accelerators keeps the model on the CPU.
    """
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        backends = torch.distributed.get_backend_config()
        if accelerator is not None and f"{accelerator.type}:gloo" not in backends and accelerator.type in backends:
            return accelerator.type
    return "cpu"
