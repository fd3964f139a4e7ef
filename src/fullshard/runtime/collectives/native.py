"""Transport by the collectives of torch.distributed, for any backend: NCCL on its own streams, Gloo in its threads.

Large parameters are gathered each straight into its final place (this rank's chunk is sent from that place, too), small
ones in one packed bucket; on NCCL all of them form one coalesced launch.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions
from torch.distributed.distributed_c10d import _coalescing_manager

from fullshard.runtime.collectives.base import Call, GatherItem, Pending, ReduceItem, time_limit, translate
from fullshard.runtime.device import GATHER, REDUCE, HostStreams, Streams

_T = TypeVar("_T")


class Waiter(Protocol):
    """What a wait needs to know of its transport."""

    limit: timedelta
    global_ranks: list[int]
    streams: Streams


class Started:
    """Works of one command; on an accelerator the event after them."""

    def __init__(self, transport: Waiter, call: Call, then: Callable[[], None] | None = None) -> None:
        self._transport = transport
        self.call = call
        self._then = then
        self.works: list[tuple[str, Any]] = []  # (parameter, work)
        # Tensors made for this command: an accelerator may still work on them until its event is joined.
        self.keep: list[torch.Tensor] = []
        self.event: torch.Event | None = None
        self._done = False

    def wait(self) -> None:
        """See `Pending.wait`."""
        if self._done:
            return
        self._done = True
        transport = self._transport
        for label, work in self.works:
            try:
                # On an accelerator this orders streams; on CPU it blocks, at most for the limit.
                work.wait(transport.limit)
            except RuntimeError as error:
                # A collective of the backend does not tell which of its ranks is missing.
                ranks, limit_seconds = transport.global_ranks, transport.limit.total_seconds()
                where = f"rank {dist.get_rank()} waited for ranks {ranks} (parameter {label!r})"
                raise translate(error, self.call, where, limit_seconds, ranks) from error
        transport.streams.join(self.event)
        self.keep.clear()
        if self._then is not None:
            self._then()

    def finish(self) -> None:
        """See `Pending.finish`."""
        self._then = None
        self.wait()


class Native:
    """Transport on `torch.distributed` collectives.

    Args:
        group: Process group of the ranks that exchange rows.
        device: Device of the tensors.
        streams: Streams on which collectives run beside the computation.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, streams: Streams) -> None:
        self.shared = None
        self.rank = group.rank()
        self.size = group.size()
        self.global_ranks = dist.get_process_group_ranks(group)
        self.streams = streams
        self._group: Any = group
        self._device = device
        self.limit = time_limit(group._get_backend(device))
        # Gloo refuses to coalesce.
        self._coalesces = not isinstance(streams, HostStreams)
        self._gather_options, self._reduce_options = AllgatherOptions(), ReduceScatterOptions()
        self._gather_options.asyncOp = self._reduce_options.asyncOp = True

    def gather(self, items: list[GatherItem], call: Call) -> Pending:
        """See `Transport.gather`."""
        started = Started(self, call)
        if items:
            self._launch(GATHER, started, self._gathers, items)
        return started

    def _gathers(self, started: Started, items: list[GatherItem]) -> None:
        for item in items:
            started.works.append((item.label, self._all_gather(item.whole, item.own(self.rank))))

    def reduce(self, items: list[ReduceItem], call: Call) -> Pending:
        """See `Transport.reduce`. The order of summation is the backend's."""
        outs: list[tuple[torch.Tensor, torch.Tensor]] = []
        pairs = [(item.label, self._padded(item), self._result(item, outs)) for item in items]

        def copy_out() -> None:
            for out, received in outs:
                out.copy_(received[: out.numel()])

        started = Started(self, call, copy_out if outs else None)
        for _, source, result in pairs:
            started.keep += (source, result)
        self._launch(REDUCE, started, self._reductions, pairs)
        return started

    def _reductions(self, started: Started, pairs: list[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
        for label, source, result in pairs:
            started.works.append((label, self._reduce_scatter(result, source)))

    # The function of torch collects what is coalesced, and knows complex numbers. Where neither matters the method of
    # the group that it ends in does, without a layer that logs and checks.

    def _all_gather(self, whole: torch.Tensor, own: torch.Tensor) -> Any:
        if self._coalesces or whole.is_complex():
            return dist.all_gather_single(whole, own, self._group, async_op=True)
        return self._group.all_gather_single(whole, own, self._gather_options)

    def _reduce_scatter(self, result: torch.Tensor, source: torch.Tensor) -> Any:
        if self._coalesces or source.is_complex():
            return dist.reduce_scatter_single(result, source, group=self._group, async_op=True)
        return self._group.reduce_scatter_single(result, source, self._reduce_options)

    def all_reduce(self, tensor: torch.Tensor, call: Call) -> Pending:
        """See `Transport.all_reduce`."""
        started = Started(self, call)
        self._launch(REDUCE, started, self._all_reduction, tensor)
        return started

    def _all_reduction(self, started: Started, tensor: torch.Tensor) -> None:
        started.works.append(("all", dist.all_reduce(tensor, group=self._group, async_op=True)))

    def _launch(self, stream: str, started: Started, issue: Callable[[Started, _T], None], what: _T) -> None:
        """Issue on a side stream, coalesced into one launch where the backend can."""
        if not self._coalesces:
            issue(started, what)  # on a CPU there is no other stream
            return
        with self.streams.side(stream):
            with _coalescing_manager(self._group, self._device, async_ops=True) as manager:
                issue(started, what)
            # Orders the side stream after the launch; the event below is what the compute stream will join.
            manager.wait()
            started.works.clear()
            started.event = self.streams.mark()

    def _padded(self, item: ReduceItem) -> torch.Tensor:
        """The source in the dtype of the sum, padded to equal chunks; itself where it already is both."""
        numel = item.chunk_numel * self.size
        if item.source.numel() == numel:
            return item.source if item.source.dtype == item.out.dtype else item.source.to(item.out.dtype)
        padded = item.source.new_zeros(numel, dtype=item.out.dtype)
        padded[: item.source.numel()].copy_(item.source)
        return padded

    def _result(self, item: ReduceItem, outs: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Where the backend writes a chunk: `out` itself, or a full chunk to copy from if `out` is a short one."""
        if item.out.numel() == item.chunk_numel:
            return item.out
        received = item.out.new_empty(item.chunk_numel)
        outs.append((item.out, received))
        return received
