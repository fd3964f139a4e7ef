"""Direct exchange: each rank sends rows to each peer, which receives them in place.

It is for Gloo, whose all-gather and reduce-scatter go through temporaries and take about three times as long; a backend
whose sends block the stream they run on would need them grouped. Gradients travel in the dtype they were
made in and are summed on arrival, in rank order, in the dtype of the result: 16-bit traffic with 32-bit sums, and sums
that are the same bit for bit in every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fullshard.errors import CommunicationError
from fullshard.runtime.collectives.base import Call, GatherItem, Pending, ReduceItem, rank_chunks, time_limit, translate
from fullshard.runtime.device import BufferPool

# Messages of one command are told apart by the low bits of the tag.
ITEM_BITS = 10
_ALIGN_BYTES = 64


@dataclass(slots=True)
class Message:
    """One parameter's rows to and from every peer; entry r is for rank r, this rank's own is left out."""

    label: str
    outgoing: list[torch.Tensor]
    incoming: list[torch.Tensor | None]


class Exchange:
    """The sends and receives of one command, and the waits for them.

    Args:
        transport: Whose backend and limits to use.
        call: The command, for tags and messages.
    """

    def __init__(self, transport: Direct, call: Call) -> None:
        self._transport = transport
        self._call = call
        self._receives: list[tuple[int, str, Any]] = []  # (peer, label, work), in the order of waiting
        self._sends: list[tuple[int, str, Any]] = []

    def start(self, messages: list[Message]) -> None:
        """Start every message to and from every peer.

        All receives come first: a peer that finds its message expected sends it at once, from the thread that computes,
        without a round trip through both ranks' network threads, which wait for a core while all of them compute.
        """
        try:
            for number, message in enumerate(messages):
                self._post(number, message)
            for number, message in enumerate(messages):
                self._send(number, message)
        except RuntimeError as error:
            raise self._failure(error, peer=None, label=messages[0].label) from error

    def _post(self, number: int, message: Message) -> None:
        transport, tag = self._transport, self._tag(number)
        for step in range(1, transport.size):
            peer = (transport.rank - step) % transport.size
            target = message.incoming[peer]
            if target is not None and target.numel():
                self._receives.append((peer, message.label, transport.backend.recv([target], peer, tag)))

    def _send(self, number: int, message: Message) -> None:
        transport, tag = self._transport, self._tag(number)
        for step in range(1, transport.size):
            # Peers differ per rank, so that not everybody talks to rank 0 first.
            peer = (transport.rank + step) % transport.size
            if message.outgoing[peer].numel():
                self._sends.append((peer, message.label, transport.backend.send([message.outgoing[peer]], peer, tag)))

    def _tag(self, number: int) -> int:
        return (self._call.tag << ITEM_BITS) | (number & ((1 << ITEM_BITS) - 1))

    def receive(self, count: int) -> None:
        """Wait for the next `count` receives."""
        for _ in range(count):
            self._complete(self._receives)

    @property
    def receives_left(self) -> int:
        """Receives that were not waited for yet."""
        return len(self._receives)

    def finish(self) -> None:
        """Wait for everything: no tensor of this exchange is read or written by it any more."""
        while self._receives:
            self._complete(self._receives)
        while self._sends:
            self._complete(self._sends)

    def _complete(self, queue: list[tuple[int, str, Any]]) -> None:
        peer, label, work = queue.pop(0)
        try:
            work.wait(self._transport.limit)
        except RuntimeError as error:
            raise self._failure(error, peer, label) from error

    def _failure(self, error: RuntimeError, peer: int | None, label: str) -> CommunicationError:
        transport = self._transport
        missing = {p for p, _, work in self._receives if not work.is_completed()}
        if peer is not None:
            missing.add(peer)
        # One failed message fails them all: they must not be waited for again, each for a full time limit.
        self._receives.clear()
        self._sends.clear()
        # After an earlier failure gloo calls everything completed: then all peers are who it waited for.
        peers = missing or set(range(transport.size)) - {transport.rank}
        ranks = [transport.global_ranks[p] for p in sorted(peers)]
        where = f"rank {transport.global_ranks[transport.rank]} waited for rank(s) {ranks}"
        return translate(error, self._call, f"{where} (parameter {label!r})", transport.limit.total_seconds(), ranks)


class _Gathering:
    """A gather: results are valid once the receives are in; the buffer is free once the sends are out, too."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def wait(self) -> None:
        self._exchange.receive(self._exchange.receives_left)

    def finish(self) -> None:
        self._exchange.finish()


class _Reducing:
    """A reduce: sums are made when it is waited for, item by item in the order in which they arrive."""

    def __init__(self, exchange: Exchange, sums: list[tuple[torch.Tensor, list[torch.Tensor]]], staging: Any) -> None:
        self._exchange = exchange
        self._sums = sums  # (result, contributions in rank order)
        self._release = staging
        self._done = False

    def wait(self) -> None:
        if self._done:
            return
        for out, parts in self._sums:
            if not out.numel():
                continue
            self._exchange.receive(len(parts) - 1)
            sum_in_order(out, parts)
        self.finish()

    def finish(self) -> None:
        if not self._done:
            self._done = True
            self._exchange.finish()
            self._sums.clear()
            self._release()


class _AllReducing:
    """An all-reduce: a reduce of chunks, then a gather of them."""

    def __init__(self, transport: Direct, tensor: torch.Tensor, call: Call) -> None:
        chunk = -(-tensor.numel() // transport.size)
        start = min(transport.rank * chunk, tensor.numel())
        self._mine = tensor[start : min(start + chunk, tensor.numel())]
        self._sum = torch.empty_like(self._mine)
        self._transport, self._call = transport, call
        self._item = GatherItem("all", tensor, chunk, tensor.numel())
        self._reducing = transport.reduce([ReduceItem("all", tensor, chunk, self._sum)], call)
        self._done = False

    def wait(self) -> None:
        if self._done:
            return
        self._reducing.wait()
        self._mine.copy_(self._sum)
        self._done = True
        gathering = self._transport.gather([self._item], Call(self._call.op, self._call.unit, self._call.tag + 1))
        gathering.wait()
        gathering.finish()

    def finish(self) -> None:
        if not self._done:
            self._done = True
            self._reducing.finish()


class Direct:
    """Transport by point-to-point messages.

    Args:
        group: Process group of the ranks that exchange rows.
        device: Device of the tensors.
        pool: Memory for what peers send before it is summed.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, pool: BufferPool) -> None:
        self.shared = None
        self.rank = group.rank()
        self.size = group.size()
        self.global_ranks = dist.get_process_group_ranks(group)
        self.backend: Any = group._get_backend(device)
        self.limit = time_limit(self.backend)
        self._pool = pool

    def gather(self, items: list[GatherItem], call: Call) -> Pending:
        """See `Transport.gather`."""
        exchange = Exchange(self, call)
        messages = []
        for item in items:
            chunks = item.chunks(self.size)
            messages.append(Message(item.label, [chunks[self.rank]] * self.size, list(chunks)))
        exchange.start(messages)
        return _Gathering(exchange)

    def reduce(self, items: list[ReduceItem], call: Call) -> Pending:
        """See `Transport.reduce`. The sum is made in rank order in the dtype of `out`."""
        exchange = Exchange(self, call)
        sums: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        staging = torch.UntypedStorage(0, device=items[0].source.device) if items else torch.UntypedStorage(0)
        needed = [self._staging_bytes(item) for item in items]
        if sum(needed):
            self._pool.fill(staging, sum(needed))
        offset_bytes = 0
        messages = []
        for item, item_bytes in zip(items, needed, strict=True):
            ranges = rank_chunks(item.source, item.chunk_numel, item.source.numel(), self.size)
            incoming = self._incoming(item, staging, offset_bytes)
            offset_bytes += item_bytes
            messages.append(Message(item.label, ranges, incoming))
            parts = [ranges[r] if part is None else part for r, part in enumerate(incoming)]
            sums.append((item.out, parts))
        exchange.start(messages)
        return _Reducing(exchange, sums, lambda: self._pool.drain(staging) if staging.nbytes() else None)

    def all_reduce(self, tensor: torch.Tensor, call: Call) -> Pending:
        """See `Transport.all_reduce`."""
        return _AllReducing(self, tensor, call)

    def _first_peer(self, item: ReduceItem) -> int | None:
        """The peer whose rows are received straight into the result: the first in rank order, if dtypes allow it."""
        if self.size == 1 or item.source.dtype != item.out.dtype:
            return None
        return 1 if self.rank == 0 else 0

    def _staging_bytes(self, item: ReduceItem) -> int:
        """Memory for what peers send of one item."""
        staged = self.size - 1 - (self._first_peer(item) is not None)
        return _aligned(item.out.numel() * item.source.element_size()) * staged

    def _incoming(
        self, item: ReduceItem, staging: torch.UntypedStorage, offset_bytes: int
    ) -> list[torch.Tensor | None]:
        """Where each peer's rows are received; None for this rank itself."""
        first = self._first_peer(item)
        element_bytes = item.source.element_size()
        numel = item.out.numel()
        incoming: list[torch.Tensor | None] = []
        for rank in range(self.size):
            if rank in (self.rank, first) or not numel:
                incoming.append(None if rank == self.rank else item.out)
                continue
            part = torch.empty(0, dtype=item.source.dtype, device=item.source.device)
            part.set_(staging, offset_bytes // element_bytes, (numel,), (1,))
            offset_bytes += _aligned(numel * element_bytes)
            incoming.append(part)
        return incoming


def sum_in_order(out: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """Write the sum of `parts`, taken from first to last in the dtype of `out`, into `out`.

    One of the first two parts may be `out` itself: the sum of two does not depend on their order.
    """
    first, *rest = parts
    if rest and first.dtype == rest[0].dtype == out.dtype:
        torch.add(first, rest[0], out=out)  # one pass over memory, where a copy and an addition are two
        rest = rest[1:]
    else:
        out.copy_(first)
    for part in rest:
        out.add_(part)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
