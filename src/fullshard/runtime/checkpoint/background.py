"""Saving while training goes on: a copy of this rank's part is taken, and a thread writes it."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import torch

from fullshard.runtime.checkpoint.saving import Save, Tensors

_LOG = logging.getLogger("fullshard")
_ALIGN_BYTES = 64


class PendingSave:
    """A checkpoint that a thread is writing.

    The process does not end before it is written; but wait for it before the process group is destroyed.
    """

    def __init__(self, save: Save) -> None:
        self._save: Save | None = save
        self._path: Path | None = None
        self._error: BaseException | None = None
        self.error_seen = False  # by the user
        self._thread = threading.Thread(target=self._run, name="fullshard-save")
        self._thread.start()

    def _run(self) -> None:
        assert self._save is not None
        try:
            self._path = self._save.write()
        except BaseException as error:  # noqa: BLE001  it is raised where somebody can see it
            self._error = error
            _LOG.error("a checkpoint could not be saved in the background: %s", error)
        finally:
            self._save = None

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it has ended, well or not."""
        self._thread.join(timeout)

    def result(self, timeout: float | None = None) -> Path:
        """Wait until it is on the disk and visible; returns its folder.

        Args:
            timeout: Seconds to wait at most; None: as long as it takes.

        Raises:
            TimeoutError: It is not done yet.
            CheckpointError: It could not be written.
            CommunicationError: A rank is gone.
        """
        self.wait(timeout)
        if not self.done():
            raise TimeoutError(f"the checkpoint is not written within {timeout} s")
        if self._error is not None:
            self.error_seen = True
            raise self._error
        assert self._path is not None
        return self._path


class Background:
    """At most one pending save, and the memory for its copy, which is kept: fresh memory costs as much as the copy."""

    def __init__(self) -> None:
        self._pending: PendingSave | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def settle(self) -> None:
        """Wait for the pending save, if there is one. Raises its error, unless the user has seen it."""
        pending = self._pending
        if pending is None:
            return
        pending.wait()
        self._pending = None  # not before: whoever interrupts the wait must not get its memory
        if not pending.error_seen:
            pending.result()

    def start(self, save: Save) -> PendingSave:
        """Let a thread write. The save before must be settled."""
        self._pending = PendingSave(save)
        return self._pending

    def copy(self, tensors: Tensors) -> Tensors:
        """Copies on the CPU, also of tensors that are there already. They are gone with the next call."""
        total = sum(-(-tensor.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES for tensor in tensors.values())
        on_device = any(tensor.device.type != "cpu" for tensor in tensors.values())
        if self._memory.numel() < total:
            self._memory = torch.empty(total, dtype=torch.uint8, pin_memory=on_device)
        copies: Tensors = {}
        begin = 0
        for name, tensor in tensors.items():
            flat = self._memory[begin : begin + tensor.nbytes]
            copies[name] = flat.view(tensor.dtype).view(tensor.shape)
            copies[name].copy_(tensor, non_blocking=on_device)
            begin += -(-tensor.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        if on_device:
            torch.accelerator.synchronize()
        return copies


BACKGROUND = Background()
