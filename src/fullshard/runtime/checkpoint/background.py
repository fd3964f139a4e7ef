"""Saving while training goes on: a copy of this rank's part is taken, and a thread writes it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path

import torch

from fullshard.errors import CheckpointError
from fullshard.runtime.checkpoint.copying import Copies, HostMemory, Tensors
from fullshard.runtime.checkpoint.saving import Save
from fullshard.runtime.hooks import OPTIMIZER_HOOKS
from fullshard.runtime.registry import REGISTRY

_LOG = logging.getLogger("fullshard")


class PendingSave:
    """A checkpoint that a thread is writing.

    The process does not end before it is written; but wait for it before the process group is destroyed.
    """

    def __init__(self, save: Save) -> None:
        self._save: Save | None = save
        self._copied = save.copied
        self._path: Path | None = None
        self._error: BaseException | None = None
        self.error_seen = False  # by the user
        self._process = os.getpid()
        # Not `join` and `is_alive` of the thread: a wait in them that is interrupted makes it pass for ended.
        self._ended = threading.Event()
        # Whoever starts a thread lets it run until it waits or has had its turn, and that is longer than all the rest.
        self._begin = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fullshard-save")
        self._taken = threading.Lock()  # by who ends it

    def start(self) -> None:
        """Begin to write. If that raises, `give_up`: it may not have begun.

        Raises:
            RuntimeError: There may be no more threads.
        """
        try:
            self._thread.start()
        finally:  # it may be interrupted while the thread runs already
            self._begin.set()

    def give_up(self, error: BaseException) -> None:
        """Unless the thread runs, it never will."""
        if self._thread.ident is None and self._taken.acquire(blocking=False):
            assert self._save is not None
            self._save.abandon()
            self.error_seen = True
            self._end(error if isinstance(error, Exception) else CheckpointError("interrupted before it was begun"))

    def _run(self) -> None:
        self._begin.wait()
        if not self._taken.acquire(blocking=False):
            return
        assert self._save is not None
        error: BaseException | None = None
        try:
            self._path = self._save.write()
        except BaseException as caught:  # noqa: BLE001  it is raised where somebody can see it
            error = caught
            _LOG.error("a checkpoint could not be saved in the background: %s", error)
        finally:
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        self._error, self._save = error, None
        self._copied.set()
        self._ended.set()

    def wait_copied(self, timeout: float | None = None) -> bool:
        """Wait until any tensor of the state may be changed; returns whether that is so, after `timeout` seconds.

        It is so when `async_save` returns, but not when `overlapped_save` does; and always in a process that was forked
        from the one that copies, which has tensors of its own.
        """
        return not self.runs_here() or self._copied.wait(timeout)

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set() or not self.runs_here()

    def runs_here(self) -> bool:
        """Whether this process writes it, and is not one that was forked from it since."""
        return os.getpid() == self._process

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it has ended, well or not."""
        if self.runs_here():
            self._ended.wait(timeout)

    def result(self, timeout: float | None = None) -> Path:
        """Wait until it is on the disk and visible; returns its folder.

        Args:
            timeout: Seconds to wait at most; None: as long as it takes.

        Raises:
            TimeoutError: It is not done yet.
            CheckpointError: It could not be written; or a process asks that was forked from the one that writes it.
            CommunicationError: A rank is gone.
        """
        self.wait(timeout)
        if not self.done():
            raise TimeoutError(f"the checkpoint is not written within {timeout} s")
        if self._error is not None:
            self.error_seen = True
            raise self._error
        if self._path is None:
            raise CheckpointError(f"the checkpoint is saved by process {self._process}; this one was forked from it")
        return self._path


class Background:
    """At most one pending save, and the memory for its copy."""

    def __init__(self) -> None:
        self._pending: PendingSave | None = None
        self._memory = HostMemory()

    def settle(self) -> None:
        """Wait for the pending save, if there is one. Raises its error, unless the user has seen it."""
        pending = self._pending
        if pending is None:
            return
        pending.wait()
        self._pending = None  # not before: whoever interrupts the wait must not get its memory
        if pending.runs_here() and not pending.error_seen:
            pending.result()

    def start(self, save: Save) -> PendingSave:
        """Let a thread write, and finish the copy. The save before must be settled."""
        pending = PendingSave(save)
        try:
            self._pending = pending  # before it starts: from then on optimizers must wait
            pending.start()
        except BaseException as error:
            pending.give_up(error)
            raise
        return pending

    def copy(self, tensors: Tensors, later: Mapping[str, torch.Tensor]) -> Copies:
        """Copies on the CPU, also of tensors that are there already. Those of the call before are gone."""
        if later:
            OPTIMIZER_HOOKS.ensure()
            REGISTRY.before_writes.add(self._wait_copied)
        return Copies(tensors, self._memory, later)

    def _wait_copied(self) -> None:
        """Somebody is about to change what is still being copied."""
        if self._pending is not None:
            self._pending.wait_copied()


BACKGROUND = Background()
