"""Ranks that may be killed, stopped or cut off: forks of the pool's workers.

A fork costs milliseconds, where the pool would need seconds to replace a worker. Call with `init_group=False`: a
process that has a process group has threads that a fork would not get.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from fullshard.runtime.failures import postmortem

CONNECT_SECONDS = 20
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class Ended:
    """How a fork ended.

    Attributes:
        code: Its exit code; negative: the signal that killed it.
        text: What its function returned, or the traceback of what it raised.
    """

    code: int
    text: str


def in_fork(act: Callable[[], str]) -> Ended:
    """Run `act` in a fork of this process and wait for its end."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the worker's other thread only waits for its parent
        child = os.fork()
    if child == 0:
        os.close(reading)
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        _perform(act, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        text = stream.read().decode()
    return Ended(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text)


def _perform(act: Callable[[], str], writing: int) -> None:
    code, text = 1, ""
    try:
        text, code = act(), 0
    except BaseException as error:  # noqa: BLE001 - nothing of the parent's may run in the child
        text = traceback.format_exc()
        # What an interpreter does at its end, as far as this package hears of it.
        if not isinstance(error, SystemExit):
            sys.last_value = error
        weakref.finalize._exitfunc()  # type: ignore[attr-defined]
    finally:
        data = text.encode()
        while data:
            data = data[os.write(writing, data) :]
        os._exit(code)


def make_group(rank: int, world_size: int, store: dist.Store, limit_seconds: float) -> None:
    """The default process group of a fork. What nobody answers is waited for half a second, not two."""
    postmortem.WAIT_SECONDS = 0.5
    limit = timedelta(seconds=CONNECT_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    dist.barrier()
    assert dist.group.WORLD is not None
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend._set_default_timeout(timedelta(seconds=limit_seconds))
