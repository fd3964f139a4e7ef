"""Transport by the user's own all-gather and reduce-scatter, which take one flat buffer a command."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fullshard.errors import MisuseError
from fullshard.runtime.collectives.base import Call, GatherItem, Pending, ReduceItem, Transport, time_limit, translate
from fullshard.runtime.collectives.native import Started
from fullshard.runtime.device import GATHER, REDUCE, HostStreams, Streams

# Elements at the end of a reduce-scatter that tell a sum from a mean; as many keep 16-bit buffers aligned.
_PROBE_NUMEL = 8


class _Comm(ABC):
    """What the user's collectives have in common."""

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for one buffer of `size` (a sequence of one number), which may be the same one again and again."""


class AllGather(_Comm):
    """The user's all-gather, for `FSDPModule.set_custom_all_gather`. Any object with these two methods will do."""

    @abstractmethod
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Fill `output_tensor`, shape [size * n], with every rank's `input_tensor`, shape [n], in rank order.

        `input_tensor` is this rank's part of `output_tensor`. With `async_op` it may return work to wait for.
        """


class ReduceScatter(_Comm):
    """The user's reduce-scatter, for `FSDPModule.set_custom_reduce_scatter`. See `AllGather`."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Put the sum over ranks of chunk r of `input_tensor`, shape [size * n], into rank r's `output_tensor`.

        `op` is always `ReduceOp.SUM`: the engine divides.
        """


def check_comm(comm: Any, interface: str) -> None:
    """Raise `TypeError` if `comm` lacks a method of `interface`, "AllGather" or "ReduceScatter"."""
    if not callable(comm) or not callable(getattr(comm, "allocate", None)):
        raise TypeError(
            f"expected an object with the methods of fullshard.{interface}: allocate(size, *, dtype, device) and "
            f"__call__; got {type(comm).__name__}"
        )


class Custom:
    """Packs the items of a command into one buffer for the user's collective, and takes the result apart.

    Args:
        base: Transport for what the user has not replaced.
        group: Process group of the ranks.
        device: Device of the tensors.
        streams: Streams on which collectives run beside the computation.
        comms: The user's all-gather and reduce-scatter, each or None.
    """

    def __init__(
        self,
        base: Transport,
        group: dist.ProcessGroup,
        device: torch.device,
        streams: Streams,
        comms: tuple[AllGather | None, ReduceScatter | None],
    ) -> None:
        self.shared = base.shared if comms[0] is None else None
        self.rank = base.rank
        self.size = base.size
        self.global_ranks = dist.get_process_group_ranks(group)
        self.streams = streams
        self.limit = time_limit(group._get_backend(device))
        self._base = base
        self._group = group
        self._all_gather, self._reduce_scatter = comms
        # A communication hook (see `register_comm_hook`) may make of the gradients what it likes.
        self._checked = getattr(comms[1], "is_hook", False)

    def gather(self, items: list[GatherItem], call: Call) -> Pending:
        """See `Transport.gather`."""
        comm = self._all_gather
        if comm is None or not items or self.size == 1:
            return self._base.gather(items, call)
        widths = [item.chunk_numel for item in items]
        whole = self._allocate(comm, sum(widths) * self.size, items[0].whole)
        rows = whole.view(self.size, -1)
        mine = rows[self.rank]
        for item, part in zip(items, mine.split(widths), strict=True):
            part.copy_(item.whole.view(self.size, -1)[self.rank])

        def take_apart() -> None:
            for item, part in zip(items, rows.split(widths, dim=1), strict=True):
                item.whole.view(self.size, -1).copy_(part)

        # On an accelerator the side stream makes it asynchronous; on CPU only the returned work can.
        later = isinstance(self.streams, HostStreams)
        arguments = {"output_tensor": whole, "input_tensor": mine, "group": self._group, "async_op": later}
        return self._start(GATHER, Started(self, call, take_apart), comm, arguments)

    def reduce(self, items: list[ReduceItem], call: Call) -> Pending:
        """See `Transport.reduce`. The order of summation is the user's."""
        comm = self._reduce_scatter
        if comm is None or not items or self.size == 1:
            return self._base.reduce(items, call)
        widths = [*(item.chunk_numel for item in items), _PROBE_NUMEL]
        total = self._allocate(comm, sum(widths) * self.size, items[0].out)
        result = self._allocate(comm, sum(widths), items[0].out)
        *parts, probe = total.view(self.size, -1).split(widths, dim=1)
        for item, part in zip(items, parts, strict=True):
            _put_rows(part, item.source)
        probe.fill_(1.0)

        def take_apart() -> None:
            *sums, probe = result.split(widths)
            self._check_sum(comm, probe)
            for item, part in zip(items, sums, strict=True):
                item.out.copy_(part[: item.out.numel()])

        op = dist.ReduceOp.SUM
        arguments = {"output_tensor": result, "input_tensor": total, "group": self._group, "op": op}
        return self._start(REDUCE, Started(self, call, take_apart), comm, arguments)

    def all_reduce(self, tensor: torch.Tensor, call: Call) -> Pending:
        """See `Transport.all_reduce`."""
        return self._base.all_reduce(tensor, call)

    def _start(self, stream: str, started: Started, comm: Any, arguments: dict[str, Any]) -> Started:
        """Call the user's collective on a side stream, by keyword as the interface names its arguments."""
        started.keep += [arguments["output_tensor"], arguments["input_tensor"]]
        try:
            with self.streams.side(stream):
                work = comm(**arguments)
                started.event = self.streams.mark()
        except RuntimeError as error:
            where = f"{type(comm).__name__} on rank {dist.get_rank()} with ranks {self.global_ranks}"
            raise translate(error, started.call, where, self.limit.total_seconds()) from error
        if work is not None:
            started.works.append(("all parameters of the unit", _UserWork(work)))
        return started

    def _allocate(self, comm: Any, numel: int, like: torch.Tensor) -> torch.Tensor:
        buffer = comm.allocate((numel,), dtype=like.dtype, device=like.device)
        if not isinstance(buffer, torch.Tensor) or buffer.shape != (numel,) or buffer.dtype != like.dtype:
            found = f"shape {tuple(buffer.shape)}, {buffer.dtype}" if isinstance(buffer, torch.Tensor) else repr(buffer)
            raise ValueError(
                f"{type(comm).__name__}.allocate must return a tensor of shape ({numel},), {like.dtype}; got {found}"
            )
        return buffer

    def _check_sum(self, comm: Any, probe: torch.Tensor) -> None:
        """Every rank sent ones at the end of the buffer. To read the sum stalls an accelerator, so only once."""
        if self._checked:
            return
        self._checked = True
        if abs(float(probe[0]) - self.size) > 0.01 * self.size:
            raise MisuseError(
                f"{type(comm).__name__} was asked for ReduceOp.SUM over {self.size} ranks, but ones came back as "
                f"{float(probe[0]):g}: gradients would be scaled wrongly. Reduce with the `op` that the call passes; "
                "the engine divides by the number of ranks itself"
            )


class CustomAllReduce:
    """All-reduces by the user's function, which is complete when it returns.

    Args:
        base: Transport for everything else.
        hook: Takes a 1-D tensor and changes it in place.
    """

    def __init__(self, base: Transport, hook: Callable[[torch.Tensor], None]) -> None:
        self.shared = base.shared
        self.rank = base.rank
        self.size = base.size
        self.gather = base.gather
        self.reduce = base.reduce
        self._hook = hook

    def all_reduce(self, tensor: torch.Tensor, _call: Call) -> Pending:
        """See `Transport.all_reduce`."""
        self._hook(tensor)
        return _Done()


class _Done:
    def wait(self) -> None:
        """It is complete."""

    def finish(self) -> None:
        """It is complete."""


class _UserWork:
    """What a user's collective returned; a class of the user's may know no time limit."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, limit: timedelta) -> None:
        """Wait, at most for `limit` if it is work of torch's own."""
        if type(self._work) is dist.Work:
            self._work.wait(limit)
        else:
            self._work.wait()


def _put_rows(rows: torch.Tensor, source: torch.Tensor) -> None:
    """Write a 1-D tensor into rows of equal length, row by row, and zeros behind its end."""
    whole, rest = divmod(source.numel(), max(1, rows.shape[1]))
    rows[:whole].copy_(source[: whole * rows.shape[1]].view(whole, -1))
    if whole < len(rows):
        rows[whole:].zero_()
        rows[whole, :rest].copy_(source[source.numel() - rest :])
