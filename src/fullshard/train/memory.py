"""Bytes this rank holds: measured from the real tensors, from the process and from the accelerator."""

from __future__ import annotations

import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor, nn

from fullshard.train.checkpoint import local_part


@dataclass(frozen=True)
class StateBytes:
    """Bytes of parameters, gradients and optimizer state."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Sum of the three."""
        return self.parameters + self.gradients + self.optimizer

    def as_dict(self) -> dict[str, int]:
        """For JSON."""
        return {**asdict(self), "total": self.total}


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[StateBytes, StateBytes]:
    """(what this rank's shards hold, what every rank of DDP would hold); call it while gradients are alive."""
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    groups = (parameters, gradients, states)
    local = StateBytes(*(sum(_bytes(local_part(tensor.detach())) for tensor in group) for group in groups))
    full = StateBytes(*(sum(_bytes(tensor) for tensor in group) for group in groups))
    return local, full


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()  # a DTensor's numel is that of the whole tensor


def memory_now(device: torch.device) -> int:
    """Resident bytes of the process on CPU; bytes of tensors on an accelerator."""
    if device.type == "cpu":
        return int(psutil.Process().memory_info().rss)
    return int(torch.accelerator.memory_allocated(device.index))


def memory_peak(device: torch.device) -> int:
    """The highest `memory_now` so far."""
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device.index))
    status = Path("/proc/self/status")
    if status.exists():
        # Not ru_maxrss: on Linux it starts at what the launcher had when it forked this process.
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
