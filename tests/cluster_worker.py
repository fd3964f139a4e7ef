"""The worker's half of the pool in cluster.py: what happens in the process of one rank."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

# All ranks of a group may take several times its own limit to connect, but not longer than this because of that.
CONNECT_TIMEOUT_SECONDS = 20.0


@dataclass(frozen=True)
class Outcome:
    """What became of one rank in one call."""

    rank: int
    kind: Literal["value", "error", "died", "hung"]
    value: Any = None
    error_types: tuple[str, ...] = ()
    """Names of the exception's class and all its bases, most specific first."""
    text: str = ""
    """The exception's message, or how the rank died."""
    details: str = ""
    """The rank's traceback, or the stacks of a rank that hung."""
    exit_code: int | None = None
    """Exit code of a rank that died (negative: killed by that signal)."""
    retire: bool = False
    """The worker is in an unknown state; the pool replaces it."""

    @property
    def error_type(self) -> str:
        """Name of the exception's class, empty if there was none."""
        return self.error_types[0] if self.error_types else ""

    def headline(self) -> str:
        """One line (the message may be longer) that says what this rank did."""
        if self.kind == "value":
            return f"rank {self.rank}: returned a value"
        if self.kind == "error":
            return f"rank {self.rank}: {self.error_type}: {self.text}"
        return f"rank {self.rank}: {self.kind}: {self.text}"


@dataclass(frozen=True)
class Call:
    """One request to one worker; `function` holds the pickled (function, args)."""

    function: bytes
    rank: int
    world_size: int
    store_path: str
    timeout_seconds: float
    group_timeout_seconds: float
    seed: int
    init_group: bool
    sys_path: tuple[str, ...]


def worker_main(connection: Connection, stacks_path: str, warning_filters: tuple[str, ...]) -> None:
    """Answer calls until the pool closes the pipe."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # Gloo would look the host name up, which a sandbox may not resolve
    _exit_with_parent()
    import torch
    import torch.distributed.tensor.debug

    torch.set_num_threads(1)  # ranks share the cores; also makes the order of sums the same everywhere
    with Path(stacks_path).open("w") as stacks, contextlib.suppress(EOFError, OSError):
        connection.send_bytes(b"ready")
        known_modules = 0
        while True:
            call: Call = pickle.loads(connection.recv_bytes())
            known_modules = _freeze_modules(known_modules)
            faulthandler.dump_traceback_later(call.timeout_seconds, file=stacks)
            outcome = _perform(call, warning_filters)
            faulthandler.cancel_dump_traceback_later()
            connection.send_bytes(_pickled(outcome))


def _exit_with_parent() -> None:
    """End this process when pytest is gone, even if a rank is stuck: nobody else would."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="exit-with-parent", daemon=True).start()


def _perform(call: Call, warning_filters: tuple[str, ...]) -> Outcome:
    try:
        with _clean_state(call.seed), _warnings_as(warning_filters), _no_silent_errors():
            sys.path[:] = call.sys_path
            fn, args = pickle.loads(call.function)
            with _process_group(call):
                value = fn(call.rank, *args)
                # While the group lives: DDP as its last holder waits for Gloo's threads, and these for the GIL.
                gc.collect()
            # Objects of this test must not live into the next, and what their destructors raise belongs to this one.
            del fn, args
            gc.collect()
            # What torch has found out for a mesh it gives to any that looks the same, with the old one's groups.
            sys.modules["torch.distributed.tensor.debug"]._clear_sharding_prop_cache()
    except BaseException as error:  # noqa: BLE001 - SystemExit too: the pool hears of everything
        return _failed(call.rank, error)
    return Outcome(call.rank, "value", value=value)


def _freeze_modules(known_modules: int) -> int:
    """Hide everything that importing made from the garbage collector and return the number of modules.

    The collection after each call then looks at the test's objects only, not at all of torch: 0.3 ms, not 30.
    """
    if known_modules != len(sys.modules):
        gc.collect()
        gc.freeze()
    return len(sys.modules)


class _GroupNotMadeError(RuntimeError):
    """The process group could not be made: a peer died or hung before it came."""


def _failed(rank: int, error: BaseException) -> Outcome:
    types = tuple(cls.__name__ for cls in type(error).__mro__)
    details = "".join(traceback.format_exception(error)) + _locals_of_innermost_frame(error)
    # The traceback's frames hold the test's modules and groups: let go of them before the next call.
    traceback.clear_frames(error.__traceback__)
    # After a failed start the ranks disagree on how many groups there have been, hence on the names of the next.
    retire = isinstance(error, _GroupNotMadeError)
    return Outcome(rank, "error", error_types=types, text=str(error), details=details, retire=retire)


def _locals_of_innermost_frame(error: BaseException) -> str:
    """Plain values and tensor shapes at the point of failure: pytest rewrites asserts in its own process only."""
    if not isinstance(error, AssertionError) or error.__traceback__ is None:
        return ""
    frame = list(traceback.walk_tb(error.__traceback__))[-1][0]
    lines = [f"  {name} = {_describe(value)}" for name, value in frame.f_locals.items() if not name.startswith("__")]
    return "Values where it failed:\n" + "\n".join(lines) + "\n" if lines else ""


def _describe(value: object) -> str:
    if isinstance(value, int | float | str | bytes | bool | None):
        return repr(value)[:200]
    if isinstance(value, list | tuple) and len(value) <= 16:
        return f"{type(value).__name__}({', '.join(_describe(item) for item in value)})"[:200]
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and hasattr(value, "dtype"):
        # Never its elements: the storage of a full parameter may have been freed, and reading it is not safe.
        return f"{type(value).__name__} {tuple(shape)} {value.dtype}"
    return f"<{type(value).__name__}>"


def _pickled(outcome: Outcome) -> bytes:
    # Plain pickle copies tensors; the pickler of multiprocessing would send handles to shared memory instead.
    try:
        return pickle.dumps(outcome)
    except Exception as error:  # noqa: BLE001 - __reduce__ may raise anything
        text = f"rank {outcome.rank} returned a value that cannot be pickled: {error}"
        return pickle.dumps(Outcome(outcome.rank, "error", error_types=("PicklingError",), text=text))


@contextlib.contextmanager
def _process_group(call: Call) -> Iterator[None]:
    """A fresh default group, and no group afterwards even if the function made or destroyed some."""
    import torch.distributed as dist

    try:
        if call.init_group:
            _init_process_group(call)
        else:
            _await_ended_groups()  # such a function may fork, and a fork gets no threads
        yield
    finally:
        if dist.is_initialized():
            _destroy_groups()


_ENDING: list[threading.Thread] = []


def _destroy_groups() -> None:
    """Destroy all groups; each of Gloo's takes 20 ms to end its thread, which it may do beside the next call."""
    import torch.distributed as dist

    groups = list(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()
    _await_ended_groups()
    _ENDING.append(threading.Thread(target=groups.clear, name="end-groups", daemon=True))
    _ENDING[-1].start()


def _await_ended_groups() -> None:
    while _ENDING:
        _ENDING.pop().join()


def _init_process_group(call: Call) -> None:
    import torch
    import torch.distributed as dist

    limit_seconds = call.group_timeout_seconds
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(call.store_path, call.world_size),
            rank=call.rank,
            world_size=call.world_size,
            timeout=timedelta(seconds=max(limit_seconds, min(5 * limit_seconds, CONNECT_TIMEOUT_SECONDS))),
        )
        # Gloo returns on one rank while a peer still connects; a function that ends at once would close too early.
        dist.barrier()
        dist.group.WORLD._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=limit_seconds))
    except RuntimeError as error:
        raise _GroupNotMadeError(str(error)) from error


@contextlib.contextmanager
def _clean_state(seed: int) -> Iterator[None]:
    """Seeds and process-wide settings as in a fresh process, undone afterwards."""
    import torch

    environment, folder, path = dict(os.environ), Path.cwd(), list(sys.path)
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        os.chdir(folder)
        sys.path[:] = path
        if dict(os.environ) != environment:
            os.environ.clear()
            os.environ.update(environment)


@contextlib.contextmanager
def _warnings_as(warning_filters: tuple[str, ...]) -> Iterator[None]:
    """pytest's `filterwarnings`, in this process."""
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for text in warning_filters:
            action, message, category, module = ([part.strip() for part in text.split(":", 3)] + [""] * 3)[:4]
            warnings.filterwarnings(action, message, _warning_class(category), module)  # type: ignore[arg-type]
        yield


def _warning_class(name: str) -> type[Warning]:
    module, _, attribute = name.rpartition(".")
    category: type[Warning] = getattr(importlib.import_module(module or "builtins"), attribute or "Warning")
    return category


@contextlib.contextmanager
def _no_silent_errors() -> Iterator[None]:
    """Errors that Python only prints (in destructors, in threads) fail the call too."""
    found: list[str] = []
    hooks = sys.unraisablehook, threading.excepthook

    def note(unraisable: Any) -> None:
        error = unraisable.exc_value
        where = getattr(unraisable, "object", None) or getattr(unraisable, "thread", None)
        found.append(f"in {where!r}:\n" + "".join(traceback.format_exception(error)))

    sys.unraisablehook = threading.excepthook = note
    try:
        yield
    finally:
        sys.unraisablehook, threading.excepthook = hooks
    if found:
        raise AssertionError("errors that nobody could catch:\n" + "\n".join(found))
