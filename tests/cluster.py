"""A pool of worker processes that lives as long as the pytest session.

Starting a process costs seconds (``import torch``), a call into one that runs costs milliseconds. So each rank is one
process, started when a test first needs it, and a test sends it a module-level function:

    def check_sum(rank: int, scale: float) -> float:
        value = torch.tensor([rank * scale])
        torch.distributed.all_reduce(value)
        return value.item()

    def test_sum(cluster: Cluster) -> None:
        assert cluster.run(check_sum, 2.0, world_size=2) == [2.0, 2.0]

For every call the workers make a fresh default process group (Gloo, file store, loopback), set the same seed on every
rank, treat warnings as pytest does, run the function and tear the group down. A rank that dies or hangs is reported and
replaced; the other ranks' results still arrive. The worker's half is cluster_worker.py.
"""

from __future__ import annotations

import multiprocessing
import pickle
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, TypedDict, Unpack

from cluster_worker import Call, Outcome, worker_main

MAX_WORLD_SIZE = 8
START_TIMEOUT_SECONDS = 120.0  # eight interpreters importing torch at once on two busy cores
HANG_GRACE_SECONDS = 1.0  # a hung worker writes its stack at the deadline; the pool reads it this much later
DEFAULT_TIMEOUT_SECONDS = 60.0
DEFAULT_GROUP_TIMEOUT_SECONDS = 20.0


class CallOptions(TypedDict, total=False):
    """Keyword options of `Cluster.run` and `Cluster.run_outcomes`."""

    world_size: int
    """Number of ranks, 1 to 8. Default 2."""
    timeout: float
    """Seconds until a rank that has not answered counts as hung and is killed. Default 60."""
    group_timeout: float
    """Time limit of the process group in seconds. Default 20, and never more than half of ``timeout``."""
    seed: int
    """Seed of torch, random and numpy, the same on every rank. Default 0."""
    init_group: bool
    """False leaves making a process group to the function. Default True."""


class RankError(AssertionError):
    """At least one rank did not do what the test expected."""

    def __init__(self, title: str, outcomes: Sequence[Outcome]) -> None:
        lines = [title, *("  " + outcome.headline() for outcome in outcomes)]
        for outcome in outcomes:
            if outcome.details:
                lines += ["", f"---- rank {outcome.rank} ----", outcome.details.rstrip()]
        super().__init__("\n".join(lines))
        self.outcomes = tuple(outcomes)


@dataclass
class _Worker:
    process: SpawnProcess
    connection: Connection
    stacks_path: Path
    ready: bool = False

    def kill(self) -> int | None:
        """End this worker (by its own process id) and return its exit code."""
        self.process.kill()
        return self.reap()

    def reap(self) -> int | None:
        self.process.join()
        exit_code = self.process.exitcode
        self.connection.close()
        self.process.close()
        return exit_code


class Cluster:
    """The pool. Rank r of every call runs in worker r."""

    def __init__(self, warning_filters: Sequence[str] = ("error",)) -> None:
        self._warning_filters = tuple(warning_filters)
        self._context = multiprocessing.get_context("spawn")
        self._folder = Path(tempfile.mkdtemp(prefix="fullshard-cluster-"))
        self._workers: dict[int, _Worker] = {}
        self._calls = 0

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        expect: type[BaseException] | None = None,
        match: str | None = None,
        **options: Unpack[CallOptions],
    ) -> list[Any]:
        """Run ``fn(rank, *args)`` on every rank and return the results by rank.

        With ``expect`` every rank must raise that exception (a subclass is fine too) with a message in which the
        regular expression ``match`` is found; then the messages are returned by rank.
        """
        __tracebackhide__ = True
        outcomes = self.run_outcomes(fn, *args, **options)
        name = getattr(fn, "__name__", str(fn))
        if expect is None:
            if any(outcome.kind != "value" for outcome in outcomes):
                raise RankError(f"{name} failed:", outcomes)
            return [outcome.value for outcome in outcomes]
        for outcome in outcomes:
            if expect.__name__ not in outcome.error_types:
                raise RankError(
                    f"{name}: expected {expect.__name__} on every rank, not so on rank {outcome.rank}:", outcomes
                )
            if match is not None and re.search(match, outcome.text) is None:
                raise RankError(f"{name}: the message on rank {outcome.rank} does not match {match!r}:", outcomes)
        return [outcome.text for outcome in outcomes]

    def run_outcomes(self, fn: Callable[..., Any], *args: Any, **options: Unpack[CallOptions]) -> list[Outcome]:
        """Run ``fn(rank, *args)`` on every rank and return what became of each, whatever it was."""
        calls = self._make_calls(pickle.dumps((fn, args)), options)
        self._ensure_workers(len(calls))
        try:
            return self._exchange(calls)
        except BaseException:
            # pytest-timeout or Ctrl-C interrupted the wait: nobody knows what these workers are doing, and an answer
            # that arrives late would be taken for the answer to the next call.
            for rank in range(len(calls)):
                self._drop(rank)
            raise

    def process_ids(self) -> dict[int, int | None]:
        """Process id of each running worker by rank."""
        return {rank: worker.process.pid for rank, worker in self._workers.items()}

    def close(self) -> None:
        """End all workers and remove the files of the pool."""
        for rank in list(self._workers):
            self._drop(rank)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _make_calls(self, function: bytes, options: CallOptions) -> list[Call]:
        unknown = set(options) - set(CallOptions.__annotations__)
        if unknown:
            raise TypeError(f"unknown options {sorted(unknown)}; there are {sorted(CallOptions.__annotations__)}")
        world_size = options.get("world_size", 2)
        if not 1 <= world_size <= MAX_WORLD_SIZE:
            raise ValueError(f"world_size must be between 1 and {MAX_WORLD_SIZE}, found {world_size}")
        timeout_seconds = options.get("timeout", DEFAULT_TIMEOUT_SECONDS)
        self._calls += 1
        return [
            Call(
                function=function,
                rank=rank,
                world_size=world_size,
                store_path=str(self._folder / f"store-{self._calls}"),
                timeout_seconds=timeout_seconds,
                group_timeout_seconds=options.get(
                    "group_timeout", min(DEFAULT_GROUP_TIMEOUT_SECONDS, timeout_seconds / 2)
                ),
                seed=options.get("seed", 0),
                init_group=options.get("init_group", True),
                sys_path=tuple(sys.path),
            )
            for rank in range(world_size)
        ]

    def _ensure_workers(self, world_size: int) -> None:
        """Start the missing workers, all at once, and wait until each can take a call."""
        for rank in range(world_size):
            worker = self._workers.get(rank)
            if worker is not None and not worker.process.is_alive():
                self._drop(rank)
            if rank not in self._workers:
                self._workers[rank] = self._start(rank)
        for rank in range(world_size):
            worker = self._workers[rank]
            if worker.ready:
                continue
            if not worker.connection.poll(START_TIMEOUT_SECONDS):
                self._drop(rank)
                raise RuntimeError(f"worker {rank} did not start within {START_TIMEOUT_SECONDS} seconds")
            worker.connection.recv_bytes()  # EOFError if it died while starting; its traceback is on stderr
            worker.ready = True

    def _start(self, rank: int) -> _Worker:
        ours, theirs = self._context.Pipe()
        stacks_path = self._folder / f"stacks-{rank}"
        process = self._context.Process(
            target=worker_main,
            args=(theirs, str(stacks_path), self._warning_filters),
            name=f"fullshard-rank-{rank}",
            daemon=True,
        )
        process.start()
        theirs.close()  # or the end of the worker would never close the pipe
        return _Worker(process, ours, stacks_path)

    def _exchange(self, calls: Sequence[Call]) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        for call in calls:
            try:
                self._workers[call.rank].connection.send_bytes(pickle.dumps(call))
            except OSError:
                outcomes[call.rank] = self._died(call.rank)
        deadline = time.monotonic() + calls[0].timeout_seconds + HANG_GRACE_SECONDS
        while pending := {call.rank for call in calls} - set(outcomes):
            rank_of = {self._workers[rank].connection: rank for rank in pending}
            answered = wait(list(rank_of), timeout=max(0.0, deadline - time.monotonic()))
            for connection in answered:
                rank = rank_of[connection]  # type: ignore[index]
                outcomes[rank] = self._receive(rank)
            if not answered:
                outcomes.update({rank: self._hung(rank, calls[0].timeout_seconds) for rank in sorted(pending)})
        return [outcomes[call.rank] for call in calls]

    def _receive(self, rank: int) -> Outcome:
        try:
            data = self._workers[rank].connection.recv_bytes()
        except (EOFError, OSError):
            return self._died(rank)
        outcome: Outcome = pickle.loads(data)
        if outcome.retire:
            self._drop(rank)
        return outcome

    def _died(self, rank: int) -> Outcome:
        exit_code = self._workers.pop(rank).reap()
        return Outcome(rank, "died", text=f"the process ended with exit code {exit_code}", exit_code=exit_code)

    def _hung(self, rank: int, timeout_seconds: float) -> Outcome:
        worker = self._workers[rank]
        stacks = worker.stacks_path.read_text() if worker.stacks_path.exists() else ""
        self._drop(rank)
        return Outcome(rank, "hung", text=f"no answer within {timeout_seconds} seconds", details=stacks)

    def _drop(self, rank: int) -> None:
        worker = self._workers.pop(rank, None)
        if worker is not None:
            worker.kill()
