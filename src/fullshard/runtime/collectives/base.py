"""The protocol of every transport: gather and reduce rows between ranks, asynchronously, with bounded waits."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from fullshard.errors import CommunicationError, PeerLostError, PeerTimeoutError

if TYPE_CHECKING:
    from fullshard.runtime.collectives.shm.blocks import Block
    from fullshard.runtime.collectives.shm.shared import Shared


@dataclass(slots=True)
class GatherItem:
    """One contiguous 1-D tensor that every rank holds a chunk of and wants whole.

    Attributes:
        label: Parameter name, for messages.
        whole: Shape [size * chunk_numel], or [numel] where the transport moves exact chunks. The caller has put this
            rank's chunk in its place.
        chunk_numel: Elements of a full chunk; rank r's chunk begins at r * chunk_numel.
        numel: Elements that carry data; what lies beyond is padding and need not be moved.
    """

    label: str
    whole: torch.Tensor
    chunk_numel: int
    numel: int
    _chunks: list[torch.Tensor] = field(default_factory=list)
    _own: torch.Tensor | None = None

    def own(self, rank: int) -> torch.Tensor:
        """The chunk of this rank with its padding. Made once, as `chunks` are."""
        if self._own is None:
            self._own = self.whole.narrow(0, rank * self.chunk_numel, self.chunk_numel)
        return self._own

    def chunks(self, size: int) -> list[torch.Tensor]:
        """The data of each of `size` ranks. Made once: items of full buffers live as long as those."""
        if not self._chunks:
            self._chunks = rank_chunks(self.whole, self.chunk_numel, self.numel, size)
        return self._chunks


@dataclass(slots=True)
class ReduceItem:
    """One contiguous 1-D tensor on every rank, whose sum over ranks is wanted in chunks.

    Attributes:
        label: Parameter name, for messages.
        source: Shape [numel], on the wire in its own dtype. It may be freed or written once the wait has returned.
        chunk_numel: Elements of a full chunk.
        out: Shape [this rank's elements]; its dtype is the one the sum is made in. Its old contents are lost.
    """

    label: str
    source: torch.Tensor
    chunk_numel: int
    out: torch.Tensor


@dataclass(frozen=True, slots=True)
class Call:
    """Names one collective in messages and on the wire.

    Attributes:
        op: Command, such as "gather".
        unit: Unit name; "" if it is for no unit.
        tag: Number that is the same on every rank and differs between commands and units.
    """

    op: str
    unit: str
    tag: int


# What may be the matter with a rank that others wait for.
EXPLAIN_LATE = (
    "The peer is stopped, slower than the limit, or took another way through the model (a skipped module, another "
    "number of batches, a call on one rank only). Look at that rank's last error first."
)

# A tag has 31 bits: the name's here, then the command's, then those of the messages within it (`direct.ITEM_BITS`).
OP_BITS = 3
_NAME_BITS = 18


def command_tag(name: str, code: int) -> int:
    """The same number on every rank, without a counter that could drift; other names or codes have other numbers."""
    return ((zlib.crc32(name.encode()) & ((1 << _NAME_BITS) - 1)) << OP_BITS) | code


class Pending(Protocol):
    """A collective that was started."""

    def wait(self) -> None:
        """Make the results valid for the current stream. Raises `CommunicationError` after the time limit.

        A second call finds it done.
        """

    def finish(self) -> None:
        """Make everything that the collective reads or writes free for reuse, without needing the results."""


class Transport(Protocol):
    """Moves rows between the `size` ranks of one group; `rank` is this one's."""

    rank: int
    size: int

    @property
    def shared(self) -> Shared | None:
        """The same transport, if full buffers can be in memory that several ranks share."""

    def gather(self, items: list[GatherItem], call: Call) -> Pending:
        """Start to fill every item's `whole` from all ranks."""

    def reduce(self, items: list[ReduceItem], call: Call) -> Pending:
        """Start to sum every item over ranks into its `out`, in rank order where the transport can choose."""

    def all_reduce(self, tensor: torch.Tensor, call: Call) -> Pending:
        """Start to replace a contiguous 1-D tensor by its sum over ranks, bit-equal on all of them."""


def start_gather(transport: Transport, items: list[GatherItem], call: Call, block: Block | None) -> Pending:
    """Start a gather of items that lie in `block`, or if it is None in memory of this rank alone."""
    shared = transport.shared
    if shared is None or block is None:
        return transport.gather(items, call)
    return shared.gather_in(block, items, call)


def time_limit(backend: Any) -> timedelta:
    """Time limit of waits on a group's backend: its own or the default group's, whichever is shorter.

    The groups of a mesh are made with torch's default of half an hour, whatever the user gave `init_process_group`.
    """
    limits = [own_limit(backend)]
    if dist.is_initialized():
        default = dist.group.WORLD
        limits += [own_limit(default._get_backend(device)) for device in default._device_types] if default else []
    return min((limit for limit in limits if limit is not None), default=timedelta(minutes=10))


def own_limit(backend: Any) -> timedelta | None:
    """The limit that a group was made with."""
    limit = getattr(getattr(backend, "options", None), "_timeout", None)
    return limit if isinstance(limit, timedelta) else None


def wait_for_ranks(work: Any, group: dist.ProcessGroup, device: torch.device, call: Call, detail: str = "") -> None:
    """Wait for a collective that is no command of a unit, at most for the time limit.

    Args:
        work: The collective.
        group: Its ranks.
        device: Of its tensors.
        call: Names it in messages.
        detail: What else to say, in brackets.

    Raises:
        CommunicationError: A rank did not take part within the time limit.
    """
    limit = time_limit(group._get_backend(device))
    try:
        work.wait(limit)
    except RuntimeError as error:
        ranks = dist.get_process_group_ranks(group)
        where = f"rank {dist.get_rank()} waited for ranks {ranks}" + (f" ({detail})" if detail else "")
        raise translate(error, call, where, limit.total_seconds(), ranks) from error


def rank_chunks(tensor: torch.Tensor, chunk_numel: int, numel: int, size: int) -> list[torch.Tensor]:
    """Views of the first `numel` elements of a 1-D tensor, one a rank; late ones short or empty."""
    return [tensor[min(r * chunk_numel, numel) : min((r + 1) * chunk_numel, numel)] for r in range(size)]


def translate(
    error: Exception, call: Call, where: str, limit_seconds: float, ranks: Sequence[int] = ()
) -> CommunicationError:
    """The error of this package for a backend's error.

    Args:
        error: What the backend raised.
        call: The command it was for.
        where: Who waited for whom, such as "rank 0 waited for rank 1 (parameter 'w')".
        limit_seconds: Time limit of the wait.
        ranks: Who may be missing; this rank itself does not count.
    """
    others = [rank for rank in ranks if rank != dist.get_rank()]
    text = f"{call.op} of unit {call.unit!r}: {where}" if call.unit else f"{call.op}: {where}"
    lowered = str(error).lower()
    if "timed out" in lowered or "timeout" in lowered:
        return PeerTimeoutError(f"{text}: nothing arrived within {limit_seconds:g} s. {EXPLAIN_LATE}", others)
    if any(sign in lowered for sign in ("connection closed", "reset by peer", "broken pipe", "connection refused")):
        return PeerLostError(
            f"{text}: the connection is closed, that process has ended. Look at its error first.", others
        )
    return CommunicationError(f"{text}: {error}", others)
