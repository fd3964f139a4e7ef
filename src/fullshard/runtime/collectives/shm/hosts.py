"""Which ranks of a group share this host, and the first memory between them."""

from __future__ import annotations

import mmap
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from fullshard.runtime.collectives.once import exchange, exchange_flags

# Counters are written with plain stores and read with plain loads. These processors let nobody see two stores of one
# core in another order than the one they were made in; on others that takes instructions that Python does not have.
# (Stores past the caches are no exception here: between a kernel's and that of a counter Python takes its global lock
# again, by an instruction that waits for them. A Python without that lock would need another way.)
_ORDERED_PROCESSORS = ("x86_64", "AMD64")

_NAME = "fullshard-"

# Of the counters of one rank, see `words`.
AREA_BYTES = 128 * 1024


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Ranks of a group that share this host.

    Attributes:
        hosts: Ranks of the group by host, each in their order; hosts in the order of their first ranks.
        own: Which of `hosts` is this one.
        place: Position of this rank among the ranks of its host.
        processes: Process ids of these ranks.
        control: Memory that they share, `AREA_BYTES` a rank, zero at first.
    """

    hosts: tuple[tuple[int, ...], ...]
    own: int
    place: int
    processes: tuple[int, ...]
    control: mmap.mmap

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the group on this host."""
        return self.hosts[self.own]


@dataclass(frozen=True, slots=True)
class _Card:
    """What a rank tells the others; an empty host means that it cannot share memory."""

    host: str
    process: int
    descriptor: int


def meet(group: dist.ProcessGroup) -> Neighbours | str:
    """Find the ranks of `group` that share this host. Every rank of the group calls it.

    Returns:
        The neighbours; or, the same on every rank, why there is no shared memory between them. It is "" if no two ranks
        share a host: then nothing is wrong.
    """
    host = host_identity()
    descriptor = reserve("control", AREA_BYTES * group.size()) if host else -1
    if descriptor < 0:
        host = ""
    try:
        cards = exchange(_Card(host, os.getpid(), descriptor), group, "who shares a host")
        reason = _obstacle([card.host for card in cards])
        if reason is not None:
            return reason
        return _open_control(cards, group)
    finally:
        if descriptor >= 0:
            os.close(descriptor)  # every other rank has opened or given up: see the second exchange


def host_identity() -> str:
    """The same on two ranks if and only if they can reach each other's memory; "" where that is not known.

    It is the running kernel, and the namespaces of processes and of the network: ranks in containers of their own
    are taken for ranks on different hosts, as is what a network namespace stands for in a test.
    """
    if sys.platform != "linux" or platform.machine() not in _ORDERED_PROCESSORS or not hasattr(os, "pidfd_open"):
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [Path(f"/proc/self/ns/{kind}").stat().st_ino for kind in ("pid", "net")]
    except OSError:
        return ""
    return f"{boot} {spaces} {os.getuid()}"


def _obstacle(hosts: list[str]) -> str | None:
    """Why these ranks cannot share memory; "" if they are all alone, None if they can."""
    if not all(hosts):
        return f"it takes Linux with /proc on x86-64, and leave to make memory: not so on ranks {_without(hosts)}"
    sizes = {hosts.count(host) for host in hosts}
    if sizes == {1}:
        return ""
    if len(sizes) > 1:
        return f"the hosts do not have equally many ranks of the group ({sorted(sizes)})"
    return None


def _without(hosts: list[str]) -> list[int]:
    return [rank for rank, host in enumerate(hosts) if not host]


def _open_control(cards: list[_Card], group: dist.ProcessGroup) -> Neighbours | str:
    by_host: dict[str, list[int]] = {}
    for rank, card in enumerate(cards):
        by_host.setdefault(card.host, []).append(rank)
    hosts = tuple(tuple(ranks) for ranks in by_host.values())
    own = next(i for i, ranks in enumerate(hosts) if group.rank() in ranks)
    first = cards[hosts[own][0]]
    control = open_memory(first.process, first.descriptor, AREA_BYTES * group.size())
    opened = [row[0] for row in exchange_flags([control is not None], group, "who shares a host")]
    if control is None or not all(opened):
        return f"ranks {[rank for rank, ok in enumerate(opened) if not ok]} may not open the files of their neighbours"
    place = hosts[own].index(group.rank())
    return Neighbours(hosts, own, place, tuple(cards[rank].process for rank in hosts[own]), control)


def reserve(purpose: str, nbytes: int) -> int:
    """A file of `nbytes` of memory without a name, all of which is there; -1 if there is not as much, or no leave."""
    try:
        descriptor = os.memfd_create(_NAME + purpose)
    except OSError:
        return -1
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError:
        os.close(descriptor)
        return -1
    return descriptor


def open_memory(process: int, descriptor: int, nbytes: int) -> mmap.mmap | None:
    """Memory that another process, or this one, has reserved; None if that is not allowed."""
    try:
        opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR)
    except OSError:
        return None
    try:
        # The number may be another file's by now: its process gave up, or has ended and this is a new one.
        is_ours = Path(f"/proc/self/fd/{opened}").readlink().name.startswith(f"memfd:{_NAME}")
        return mmap.mmap(opened, nbytes) if is_ours and os.fstat(opened).st_size == nbytes else None
    except (OSError, ValueError):
        return None
    finally:
        os.close(opened)
