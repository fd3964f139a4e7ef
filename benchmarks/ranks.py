"""The parent's side of the rank processes: starts them, sends commands, collects replies, ends them."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

REPLY_TIMEOUT_SECONDS = 600.0
_SHOWN_LINES = 15


class RankError(RuntimeError):
    """A rank failed; `reason` is its last line."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"rank {rank} failed:\n{text}")
        lines = [line for line in text.splitlines() if line.strip()]
        self.reason = lines[-1].strip() if lines else "no message"


@dataclass(frozen=True)
class Where:
    """How the processes of one rank are started: a host, which may be a network namespace.

    Attributes:
        prefix: Command before the interpreter's.
        interface: Network interface for Gloo.
    """

    prefix: tuple[str, ...] = ()
    interface: str = "lo"


@dataclass
class _Rank:
    process: subprocess.Popen[bytes]
    orders: BinaryIO
    replies: BinaryIO
    log: Path


class RankGroup:
    """Processes of one engine, one a rank, that sleep on a pipe until they are sent a command.

    Args:
        world_size: How many.
        handler: "module:function" in this folder; called as `function(rank, **options)` once the process group is up,
            it returns what answers commands. Options, commands and replies are what JSON can say.
        options: For the handler.
        python: Interpreter of the environment in which the engine is installed.
        hosts: Where ranks run, in turn; one host by default.
    """

    def __init__(
        self,
        world_size: int,
        handler: str,
        options: dict[str, Any],
        python: str = sys.executable,
        hosts: Sequence[Where] = (Where(),),
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="fullshard-bench-"))
        self._ranks: list[_Rank] = []
        try:
            for rank in range(world_size):
                place = {
                    "rank": rank,
                    "world_size": world_size,
                    "local_rank": rank // len(hosts),
                    "local_world_size": world_size // len(hosts),
                    "store": str(self._folder / "store"),
                    "interface": hosts[rank % len(hosts)].interface,
                    "handler": handler,
                    "options": options,
                }
                self._ranks.append(self._start(rank, [*hosts[rank % len(hosts)].prefix, python]))
                self._order(rank, place)
            self._receive()
        except BaseException:  # also Ctrl-C
            self.close(patience_seconds=0.0)
            raise

    def _start(self, rank: int, command: list[str]) -> _Rank:
        (their_orders, our_orders), (our_replies, their_replies) = os.pipe(), os.pipe()
        log = self._folder / f"rank{rank}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, str(Path(__file__).with_name("rank.py")), str(their_orders), str(their_replies)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(their_orders, their_replies),
                start_new_session=True,  # Ctrl-C is for the parent, which ends them
            )
        os.close(their_orders)
        os.close(their_replies)
        return _Rank(process, os.fdopen(our_orders, "wb", buffering=0), os.fdopen(our_replies, "rb"), log)

    def send(self, command: Any) -> list[Any]:
        """Send every rank the command and return the replies by rank."""
        for rank in range(len(self._ranks)):
            self._order(rank, command)
        return self._receive()

    def close(self, patience_seconds: float = 30.0) -> None:
        """End the processes."""
        for rank in self._ranks:
            rank.orders.close()  # the rank reads the end of the pipe and leaves
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(patience_seconds)
            if rank.process.poll() is None:
                rank.process.kill()
                rank.process.wait()
            rank.replies.close()
        self._ranks.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _order(self, rank: int, command: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # it is dead: its reply, or the lack of one, will say why
            self._ranks[rank].orders.write(json.dumps(command).encode() + b"\n")

    def _receive(self) -> list[Any]:
        """One reply of every rank; the first failure ends the wait, because the others may wait for that rank."""
        replies: dict[int, Any] = {}
        with selectors.DefaultSelector() as selector:
            for number, rank in enumerate(self._ranks):
                selector.register(rank.replies, selectors.EVENT_READ, number)
            while len(replies) < len(self._ranks):
                ready = selector.select(REPLY_TIMEOUT_SECONDS)
                if not ready:
                    missing = sorted(set(range(len(self._ranks))) - set(replies))
                    raise RankError(missing[0], f"no reply within {REPLY_TIMEOUT_SECONDS} seconds")
                for key, _ in ready:
                    replies[key.data] = self._read(key.data)
                    selector.unregister(key.fileobj)
        return [replies[number] for number in range(len(self._ranks))]

    def _read(self, number: int) -> Any:
        line = self._ranks[number].replies.readline()
        if not line:
            tail = self._ranks[number].log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
            raise RankError(number, "\n".join([*tail, "it ended without a reply"]))
        reply = json.loads(line)
        if not reply["ok"]:
            raise RankError(number, reply["value"])
        return reply["value"]
