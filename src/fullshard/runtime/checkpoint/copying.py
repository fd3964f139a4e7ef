"""Copies of tensors in memory of the host: taken at once, or of some tensors later, by the thread that writes them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

import torch

from fullshard.errors import CheckpointError

Tensors = dict[str, torch.Tensor]

_ALIGN_BYTES = 64


class HostMemory:
    """Memory for copies, which is kept: fresh memory costs as much as a copy into it."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, nbytes: int, pinned: bool) -> torch.Tensor:
        """So many bytes, uint8 [nbytes], page-locked if `pinned`. What was in them is gone."""
        if self._memory.numel() < nbytes or (pinned and not self._memory.is_pinned()):
            self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        return self._memory[:nbytes]


class Copies:
    """Copies of tensors on any device.

    Args:
        tensors: Of what, by name.
        memory: Where to.
        later: Name -> tensor of the state, for those that may be copied in `finish`: nobody changes them before.

    Attributes:
        finished: Set when all tensors may be changed again.
    """

    def __init__(self, tensors: Tensors, memory: HostMemory, later: Mapping[str, torch.Tensor]) -> None:
        self._later = {name: t for name, t in tensors.items() if name in later and not t.is_inference()}
        # A DTensor counts changes made by way of it, its local tensor others; one of inference mode counts none.
        self._counts = {name: (tensor, later[name]) for name, tensor in self._later.items()}
        self._versions = {name: _versions(pair) for name, pair in self._counts.items()}
        now = {name: tensor for name, tensor in tensors.items() if name not in self._later}
        split = sum(map(_room, now.values()))
        total = split + sum(map(_room, self._later.values()))
        memory_bytes = memory.reserve(total, pinned=bool(_accelerators(tensors)))
        self._copies = _like(now, memory_bytes[:split])
        self._memory = memory_bytes[split:]
        self.finished = threading.Event()
        _copy(self._copies, now)
        # The copies are on their way, and what is later is computed. On an accelerator nothing that this thread's
        # stream is given from now on can overtake that; others may, so without `later` it is waited for here.
        self._ready = {device: _mark(device) for device in _accelerators(tensors)}
        if not self._later:
            self.finish()

    def finish(self) -> Tensors:
        """Copy what is left, from any thread; returns all copies, by name.

        Raises:
            CheckpointError: A tensor was changed meanwhile.
        """
        later, streams = self._later, []
        try:
            copies = _like(later, self._memory)
            for device, event in self._ready.items():
                streams.append(torch.Stream(device))
                streams[-1].wait_event(event)
                with streams[-1]:
                    _copy(copies, {name: tensor for name, tensor in later.items() if tensor.device == device})
            _copy(copies, {name: tensor for name, tensor in later.items() if tensor.device.type == "cpu"})
        finally:
            try:
                for stream in streams:
                    stream.synchronize()
            finally:
                changed = [name for name, pair in self._counts.items() if _versions(pair) != self._versions[name]]
                self._later, self._counts, self._ready = {}, {}, {}
                self.finished.set()
        if changed:
            raise CheckpointError(
                f"{len(changed)} tensors, such as {changed[0]!r}, were changed while they were copied in the "
                "background: optimizers wait for the copy before they step, but before anything else changes a "
                "parameter, or a state of an optimizer, call wait_copied() of the pending save; or use async_save"
            )
        self._copies.update(copies)
        return self._copies


def _versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _like(tensors: Tensors, memory: torch.Tensor) -> Tensors:
    """Tensors of these shapes and dtypes in `memory`."""
    made, begin = {}, 0
    for name, tensor in tensors.items():
        made[name] = memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        begin += _room(tensor)
    return made


@torch.no_grad()
def _copy(copies: Tensors, tensors: Tensors) -> None:
    """Begin to copy; those of an accelerator come when its current stream has come so far."""
    if tensors:  # in one call: a call for each would take the interpreter from a training that goes on
        torch._foreach_copy_([copies[name] for name in tensors], list(tensors.values()), non_blocking=True)


def _accelerators(tensors: Tensors) -> set[torch.device]:
    return {tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"}


def _mark(device: torch.device) -> torch.Event:
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event
