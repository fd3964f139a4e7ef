"""Short messages between ranks when the process group has failed: by the store that the job was started with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Thread
from typing import Any

import torch.distributed as dist

_KEY = "fullshard/post-mortem"
_POLL_SECONDS = 0.05


def post(text: str, at_once: bool = False) -> Thread | None:
    """Leave `text` for other ranks that may fail; an empty one takes it back.

    Returns:
        The thread that does it. With `at_once` it is done here: an interpreter that ends starts no threads.
    """
    store = _store()
    if store is None:
        return None
    if not at_once:
        return _start(lambda: store.set(f"{_KEY}/{dist.get_rank()}", text))
    with suppress(Exception):
        store.set(f"{_KEY}/{dist.get_rank()}", text)
    return None


def exchange_posts(text: str, ranks: Sequence[int], seconds: float) -> dict[int, str]:
    """Post `text` and read what other ranks have posted, or post within `seconds`.

    It ends about then even if the store is gone or does not answer: then only this rank's own text is known.
    """
    rank, store = dist.get_rank(), _store()
    found = {rank: text}
    if store is None:
        return found
    missing = [other for other in ranks if other != rank]
    deadline = time.monotonic() + seconds

    def talk() -> None:
        store.set(f"{_KEY}/{rank}", text)
        while missing and time.monotonic() < deadline:
            for other in list(missing):
                if store.check([f"{_KEY}/{other}"]) and (theirs := store.get(f"{_KEY}/{other}").decode()):
                    found[other] = theirs
                    missing.remove(other)
            time.sleep(_POLL_SECONDS)  # the store's own wait would tell nothing if one of them never comes

    _start(talk).join(seconds + 1.0)
    return dict(found)


def _store() -> Any:
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


def _start(act: Callable[[], object]) -> Thread:
    """Run `act` in a thread: a store without its server would block far longer than anybody wants to wait."""

    def run() -> None:
        with suppress(Exception):  # it comes after an error that must be seen
            act()

    thread = Thread(target=run, name="fullshard post-mortem", daemon=True)
    thread.start()
    return thread
