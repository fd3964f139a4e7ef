"""The ranks of this run: joining them, and the few small messages the trainer itself exchanges.

Everything about parameters and gradients is the engine's business; here are only a handful of numbers a step
(loss, stop requests, memory) and the agreement on errors, so that every rank raises the same one.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard.errors import FullshardError
from fullshard.train.config import Config
from fullshard.train.errors import TrainError
from fullshard.train.rendezvous import meet

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Which rank this process is, as told by the launcher."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


@dataclass(frozen=True)
class World:
    """A joined group of ranks."""

    place: Place
    device: torch.device
    mesh: DeviceMesh  # 1-D (shards), or 2-D (replicas x shards)
    control: dist.ProcessGroup | None = None  # all ranks, with the time limit of file work; None: the default group

    @property
    def rank(self) -> int:
        """This rank."""
        return self.place.rank

    @property
    def size(self) -> int:
        """Number of ranks; all of them are data-parallel."""
        return self.place.size

    def gather_numbers(self, numbers: Sequence[float]) -> Tensor:
        """Row r is what rank r passed: float64 [ranks, len(numbers)], the same on every rank."""
        own = torch.tensor(numbers, dtype=torch.float64)
        rows = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(rows, own)
        return torch.stack(rows)

    def gather_values(self, value: T) -> list[T]:
        """What every rank passed, in rank order (any picklable value; the ranks trust each other)."""
        values: list[Any] = [None] * self.size
        # Not the default group: a rank may be busy with files for longer than a collective of a step may take.
        dist.all_gather_object(values, value, group=self.control)
        return values

    def on_first(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0; every rank gets its result, or raises its error."""
        return self.on_all(lambda: action() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def on_all(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank; every rank gets all results, or raises the first rank's error."""
        result: T | None = None
        error: Exception | None = None
        try:
            result = action()
        except Exception as caught:  # noqa: BLE001  whatever it is: a rank that left here would strand the others
            error = caught
        results = self.gather_values((result, error and _shared_error(error)))
        for _, failure in results:
            if failure is not None:
                raise failure from error
        return [value for value, _ in results]  # type: ignore[misc]


def _shared_error(error: Exception) -> FullshardError:
    """The error as all ranks raise it; one that nobody expected says where it came from."""
    if isinstance(error, FullshardError):
        return error
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError):
        return TrainError(text)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return TrainError(f"{text} ({Path(frame.filename).name}, line {frame.lineno})")


@contextmanager
def joined(config: Config, place: Place) -> Iterator[World]:
    """Join the ranks for the length of a `with` block."""
    mesh_shape = config.parallel.mesh_shape(place.size)  # before any rank waits for another
    device = pick_device(config, place)
    torch.set_num_threads(threads_per_rank(config, place))
    timeout = timedelta(seconds=config.runtime.timeout_seconds)
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{_device_backend(device)}"
    if place.size == 1:
        # One rank needs no rendezvous, so it also runs where no launcher has set an address.
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        store = meet(place.rank, place.size, timeout)
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, timeout=timeout)
    try:
        # Gloo on every device: it waits in the kernel, sees a peer that died at once, and needs no accelerator.
        limit = timedelta(seconds=config.runtime.prepare_timeout_seconds)
        control = dist.new_group(backend="gloo", timeout=limit)
        yield World(place, device, _mesh(device, mesh_shape), control)
    finally:
        dist.destroy_process_group()


def pick_device(config: Config, place: Place) -> torch.device:
    """This rank's accelerator where there is one, else the CPU."""
    if config.runtime.device == "cpu" or not torch.accelerator.is_available():
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if place.local_size > count:
        raise TrainError(
            f"{place.local_size} ranks on this host, but it has {count} accelerator(s): each rank needs its own. "
            f"Lower --nproc, or set --runtime.device cpu."
        )
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    torch.accelerator.set_device_index(place.local_rank)
    return torch.device(accelerator.type, place.local_rank)


def threads_per_rank(config: Config, place: Place) -> int:
    """The configured number of threads, or an equal part of the cores this process may use."""
    if config.runtime.threads:
        return config.runtime.threads
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    cores = len(affinity(0)) if affinity else (os.cpu_count() or 1)
    return max(1, cores // place.local_size)


def _device_backend(device: torch.device) -> str:
    return str(dist.get_default_backend_for_device(device))


def _mesh(device: torch.device, shape: tuple[int, int]) -> DeviceMesh:
    replicas, shards = shape
    if replicas == 1:
        return init_device_mesh(device.type, (shards,), mesh_dim_names=("dp_shard",))
    return init_device_mesh(device.type, (replicas, shards), mesh_dim_names=("dp_replicate", "dp_shard"))
