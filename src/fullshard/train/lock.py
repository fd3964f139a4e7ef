"""One run at a time in a run folder: a lock that the kernel takes back when its process ends, however it ends."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path
from types import TracebackType
from typing import Self

from fullshard.train.errors import FolderInUseError

LOCK_FILE = ".lock"
# What file systems without locks say. There the folder is used unprotected, and the run says so.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class RunLock:
    """Held by rank 0 from the choice of the folder to the end of the run; a context manager."""

    def __init__(self) -> None:
        self._handle: int | None = None
        self.works = True  # False: the file system has no locks

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.release()

    def take(self, folder: Path) -> bool:
        """Take the lock of a folder, instead of the one held; False if a running process has it, or it is gone."""
        self.release()
        path = folder / LOCK_FILE
        while self._handle is None:
            try:
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except FileNotFoundError:
                return False
            if not self._lock(handle):
                os.close(handle)
                return False
            if _is_at(handle, path):
                self._handle = handle
            else:  # the one who had it has removed the folder, and with it this file
                os.close(handle)
        os.ftruncate(self._handle, 0)
        os.write(self._handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        return True

    def require(self, folder: Path) -> None:
        """Take the lock, or raise."""
        if not self.take(folder):
            raise FolderInUseError(
                f"{folder} is in use by {_holder(folder / LOCK_FILE)}: two runs must not write into one folder. "
                f"Wait until it has ended, or give this run another --run.name."
            )

    def release(self) -> None:
        """Let others have the folder."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _lock(self, handle: int) -> bool:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            self.works = False
        return True


def _holder(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or "another process"
    except FileNotFoundError:
        return "another process"


def _is_at(handle: int, path: Path) -> bool:
    """Whether an open file is still the one that has this name."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
