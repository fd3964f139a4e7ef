"""Two hosts on one machine: network namespaces joined by a cable of a given speed. Needs root and `ip` and `tc`."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from ranks import Where

_PREFIX = "fullshard"
_BURST_SECONDS = 0.004  # one tick of a kernel with 250 Hz: a smaller bucket could not be refilled in time


def missing_reason() -> str | None:
    """Why there can be no namespaces here, or None."""
    absent = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if absent:
        return f"needs {', '.join(absent)} (Debian: iproute2, util-linux)"
    return None if os.geteuid() == 0 else "needs root, to make network namespaces: run it with sudo"


@contextmanager
def two_hosts(gbit: float) -> Iterator[list[Where]]:
    """Two namespaces that see only each other, over a veth pair that each end shapes to `gbit` Gbit/s.

    They are removed when the block is left, also by Ctrl-C. What a killed run left behind goes first.
    """
    _remove_stale()
    names = [f"{_PREFIX}-{os.getpid()}-{number}" for number in range(2)]
    made: list[str] = []
    try:
        for name in names:
            made.append(name)  # first: a signal may come right after the command
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        ends = ["cable0", "cable1"]
        _run("ip", "-n", names[0], "link", "add", ends[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
        for number, (name, end) in enumerate(zip(names, ends, strict=True)):
            _run("ip", "-n", name, "address", "add", f"10.77.0.{number + 1}/24", "dev", end)
            _run("ip", "-n", name, "link", "set", end, "up")
            burst_bytes = round(gbit * 1e9 / 8 * _BURST_SECONDS)
            shape = ["rate", f"{round(gbit * 1000)}mbit", "burst", f"{burst_bytes}b", "latency", "50ms"]
            _run("tc", "-n", name, "qdisc", "add", "dev", end, "root", "tbf", *shape)
        yield [Where(_enter(name), end) for name, end in zip(names, ends, strict=True)]
    finally:
        for name in made:
            _remove(name)


def _enter(name: str) -> tuple[str, ...]:
    """Command that runs what follows in a namespace, under a host name of its own."""
    script = 'hostname "$0"; exec "$@"'
    return ("ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", script, name)


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def _remove(name: str) -> None:
    """The cable goes with either end."""
    subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _remove_stale() -> None:
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    for line in listed.splitlines():
        name = line.split()[0] if line.split() else ""
        prefix, _, rest = name.partition("-")
        process = rest.partition("-")[0]
        if prefix == _PREFIX and process.isdigit() and not os.path.exists(f"/proc/{process}"):  # noqa: PTH110
            _remove(name)
