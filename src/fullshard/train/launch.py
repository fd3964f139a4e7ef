"""Starting the ranks of one host with torch's elastic launcher, and telling what became of them."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil  # type: ignore[import-untyped]
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fullshard.errors import CommunicationError
from fullshard.train.config import Config
from fullshard.train.errors import RankFailedError
from fullshard.train.rendezvous import LOOPBACK, use_loopback_rendezvous
from fullshard.train.stop import passing_on

# Exit codes that a rank chooses on purpose; every other one is a failure (1).
STOPPED_CODES = (75, 128 + signal.SIGINT, 128 + signal.SIGTERM)
MEANINGFUL_CODES = (2, 4, *STOPPED_CODES)
_SHARED_ERRORS = (
    *("TrainError", "ConfigError", "DataError", "FolderInUseError", "DivergedError"),
    *("CheckpointError", "CheckpointDamagedError", "CheckpointExistsError", "CheckpointMismatchError"),
)
_LOST_PEER_SIGNS = (
    "CommunicationError",
    "PeerLostError",
    "PeerTimeoutError",
    "Connection closed by peer",
    "Connection reset",
    "Broken pipe",
)


def launch(config: Config, arguments: Callable[[Path], Sequence[str]], saves: bool = True) -> int:
    """Run `python ARGUMENTS` as `parallel.nproc` ranks of this host and return the exit code of the whole.

    `saves` says whether they write checkpoints, from which a user could go on. `arguments` gets the file in which
    rank 0 leaves its exit code: when the launcher itself is told to stop, the ranks save and end by themselves, and
    this is how it learns that they did.
    """
    # The launcher's own log repeats, less clearly, what is reported below.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="fullshard-") as folder:
        status = Path(folder) / "status.json"
        try:
            with passing_on(_send_to_ranks):
                elastic_launch(_launch_config(config), sys.executable)(*arguments(status))
        except ChildFailedError as error:
            return _explain(error, saves)
        except SignalException as caught:
            return _after_signal(status, caught.sigval, saves)
    return 0


def _launch_config(config: Config) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=config.parallel.nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend=use_loopback_rendezvous(),
        rdzv_endpoint=LOOPBACK,
        local_addr=LOOPBACK,  # never the host's name: it may not resolve, or resolve to a dead interface
        rdzv_configs={"timeout": int(config.runtime.timeout_seconds)},
        max_restarts=0,
        monitor_interval=0.1,
        shutdown_timeout=int(config.runtime.grace_seconds),
    )


def _send_to_ranks(number: int) -> None:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(number)


def _explain(error: ChildFailedError, saves: bool) -> int:
    rank, failure = min(error.failures.items(), key=_blame)
    if failure.exitcode in STOPPED_CODES:
        return failure.exitcode
    code = failure.exitcode if failure.exitcode in MEANINGFUL_CODES else 1
    raise RankFailedError(describe_failure(rank, failure, saves), code) from None


def _blame(item: tuple[int, ProcessFailure]) -> tuple[int, int, int]:
    """Order of suspicion: a rank killed by a signal, then a rank with an error of its own, then mere victims."""
    rank, failure = item
    if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
        return 0, 0, rank
    message = _message(failure)
    victim = failure.exitcode == -signal.SIGTERM or _says_lost_peer(message)
    return (2 if victim else 1), int(failure.timestamp), rank


def lost_peer(error: BaseException) -> BaseException | None:
    """The error, or the one behind it, that says another rank is gone: then the cause is to be found over there."""
    current: BaseException | None = error
    while current is not None:
        if isinstance(current, CommunicationError) or _says_lost_peer(str(current)):
            return current
        current = current.__cause__ or current.__context__
    return None


def _says_lost_peer(message: str) -> bool:
    return any(sign in message for sign in _LOST_PEER_SIGNS)


def describe_failure(rank: int, failure: ProcessFailure, saves: bool = True) -> str:
    """What happened to a rank, for people."""
    if failure.exitcode < 0:
        hint = " (out of memory?)" if failure.exitcode == -signal.SIGKILL else ""
        advice = " Continue from the last checkpoint with --resume." if saves else ""
        killer = f"{failure.signal_name()}{hint}"
        return f"rank {rank} (pid {failure.pid}) was killed by {killer}; the other ranks were ended.{advice}"
    message = _message(failure)
    kind, _, text = message.partition(": ")
    if kind in _SHARED_ERRORS:  # every rank raised the same: which one is of no interest
        return text
    return f"rank {rank}: {message}" if message else f"rank {rank} ended with exit code {failure.exitcode}."


def _message(failure: ProcessFailure) -> str:
    """The text a rank left behind, if any."""
    content = failure.error_file_data.get("message")
    if isinstance(content, dict):
        return str(content.get("message", ""))
    return ""


def _after_signal(status: Path, number: int, saves: bool) -> int:
    try:
        return int(json.loads(status.read_text(encoding="utf-8"))["exit_code"])
    except (OSError, ValueError, KeyError):
        name = signal.Signals(number).name
        left = " before the ranks could save; nothing newer than the last checkpoint is kept" if saves else ""
        raise RankFailedError(f"stopped by {name}{left}.", 128 + number) from None
