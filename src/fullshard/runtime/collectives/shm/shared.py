"""Gathers and reductions in memory that the ranks of a host share; between hosts, messages.

[Note: columns]
On H hosts of L ranks each, the first ranks of all hosts form a column, the second ones another, and so on. Each rank
sends its rows to the H - 1 other ranks of its column, not to all, and writes what it receives from them into the full
buffer of its host. Likewise the ranks of a host first add up what they have for its column, and only the sums go
between hosts. So the link carries an L-th of the rows that direct exchange would send (gradients in the dtype of
their sum). On one host a column is one rank, and there are no messages.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from fullshard.errors import CommunicationError
from fullshard.runtime.collectives.base import Call, GatherItem, Pending, ReduceItem
from fullshard.runtime.collectives.direct import Direct, sum_in_order
from fullshard.runtime.collectives.shm.blocks import Block, Blocks
from fullshard.runtime.collectives.shm.hosts import Neighbours
from fullshard.runtime.collectives.shm.words import Words

_ALIGN_BYTES = 64

# A part of a tensor: elements [start, stop).
_Range = tuple[int, int]


class _Gathering:
    """A gather in a block: every rank of the host writes its rows, and those that its column has sent to it."""

    def __init__(self, block: Block, call: Call, column: Pending | None) -> None:
        self._block = block
        self._call = call
        self._column = column
        if column is None:
            block.written(call)

    def wait(self) -> None:
        self.finish()
        self._block.wait(self._call)

    def finish(self) -> None:
        """What other ranks write into the block meanwhile disturbs nobody: it is used again when all have left it."""
        column, self._column = self._column, None
        if column is not None:
            column.wait()
            column.finish()
            self._block.written(self._call)


@dataclass(frozen=True, slots=True)
class _Cells:
    """Where the ranks of a host write what they have for each other, in one block.

    Attributes:
        nbytes: Size of the block.
        outgoing: (item, part of it, offset in the block in bytes) of everything that this rank writes.
        incoming: Per item its parts for this rank, and per rank of the host the offset in the block of what it writes
            of them, one after the other; -1 for this rank itself.
    """

    nbytes: int
    outgoing: tuple[tuple[int, _Range, int], ...]
    incoming: tuple[tuple[tuple[_Range, ...], tuple[int, ...]], ...]


def plan_cells(items: Sequence[ReduceItem], readers: Sequence[Sequence[int]], own: int) -> _Cells:
    """Cells for the exchange of `items` between the ranks of a host.

    Args:
        items: What is reduced.
        readers: Per rank of the host the numbers of the chunks of each item that it adds up.
        own: Which of these ranks this one is.
    """
    end = 0
    outgoing: list[tuple[int, _Range, int]] = []
    incoming: list[tuple[tuple[_Range, ...], tuple[int, ...]]] = []
    for number, item in enumerate(items):
        element_bytes, numel, chunk = item.source.element_size(), item.source.numel(), item.chunk_numel
        parts = [tuple((min(c * chunk, numel), min((c + 1) * chunk, numel)) for c in chunks) for chunks in readers]
        offsets: list[int] = []
        for writer in range(len(readers)):
            for reader, ranges in enumerate(parts):
                if reader == writer:
                    offsets += [-1] if reader == own else []
                    continue
                offsets += [end] if reader == own else []
                for start, stop in ranges:
                    if writer == own and stop > start:
                        outgoing.append((number, (start, stop), end))
                    end += (stop - start) * element_bytes
                end = -(-end // _ALIGN_BYTES) * _ALIGN_BYTES
        incoming.append((parts[own], tuple(offsets)))
    return _Cells(max(end, _ALIGN_BYTES), tuple(outgoing), tuple(incoming))


class _Reducing:
    """A reduction: what this rank has for others is in the block; the sums are made when they are waited for.

    Args:
        items: What is reduced.
        call: The command.
        cells: Where in the block.
        memory: The block, and what it goes back to.
        column: Between hosts, if the sums of the hosts are to be added up.
    """

    def __init__(
        self,
        items: list[ReduceItem],
        call: Call,
        cells: _Cells,
        memory: tuple[Block, Blocks],
        column: Direct | None,
    ) -> None:
        self._items = items
        self._call = call
        self._cells = cells
        self._block, self._blocks = memory
        self._column = column
        self._between: Pending | None = None  # the exchange between hosts, once it has begun
        self._done = False
        targets, parts = self._views()
        with torch.no_grad():
            torch._foreach_copy_(targets, [items[number].source[start:stop] for number, (start, stop) in parts])
        self._block.written(call)

    def advance(self) -> None:
        """Send the sums of this host to the others, if they can be made by now.

        The block stays: ranks of a host return blocks in one order, and when all had written differs between them.
        """
        if not self._done and self._between is None and self._column is not None and self._block.is_written():
            self._between = self._column.reduce(self._sums(), self._call)

    def wait(self) -> None:
        if self._done:
            return
        self._done = True
        if self._between is None:
            sums = self._sums()
            self._between = None if self._column is None else self._column.reduce(sums, self._call)
        self._blocks.give_back(self._block)
        if self._between is not None:
            self._between.wait()
            self._between.finish()

    def finish(self) -> None:
        """What it reads may be freed as soon as it has started; what it writes, it writes in `wait`."""
        if not self._done:
            self._done = True
            self._blocks.give_back(self._block)
            if self._between is not None:
                self._between.finish()

    def _sums(self) -> list[ReduceItem]:
        """Add up what the ranks of this host have written; what is left to do between hosts."""
        self._block.wait(self._call)
        with torch.no_grad():
            return [self._sum(number, item) for number, item in enumerate(self._items)]

    def _views(self) -> tuple[list[torch.Tensor], list[tuple[int, _Range]]]:
        """Tensors in the block that this rank writes, and the parts of items that go there. Made once a block."""
        key = id(self._cells)  # they live as long as the transport, and so do its blocks
        found = self._block.views.get(key)
        if found is None:
            cells = self._cells.outgoing
            dtypes = [item.source.dtype for item in self._items]
            targets = [self._block.tensor(dtypes[n], offset, stop - start) for n, (start, stop), offset in cells]
            found = self._block.views[key] = targets, [(number, part) for number, part, _ in cells]
        return found

    def _sum(self, number: int, item: ReduceItem) -> ReduceItem:
        """Add up this rank's parts of an item, each in rank order; what is left to do with them between hosts."""
        ranges, offsets = self._cells.incoming[number]
        total = sum(stop - start for start, stop in ranges)
        alone = len(ranges) == 1
        out = item.out if alone else item.out.new_empty(total)
        at = 0
        for start, stop in ranges:
            if stop > start:
                parts = [self._part(item.source, (start, stop), offset, at) for offset in offsets]
                sum_in_order(out.narrow(0, at, stop - start), parts)
            at += stop - start
        return item if alone else replace(item, source=out)

    def _part(self, source: torch.Tensor, part: _Range, offset: int, at: int) -> torch.Tensor:
        start, stop = part
        if offset < 0:
            return source[start:stop]
        return self._block.tensor(source.dtype, offset + at * source.element_size(), stop - start)


class _AllReducing:
    """An all-reduce: each rank of the host adds up a part, and writes the sum where all of them read it.

    Args:
        tensor: What is reduced, in place.
        call: The command.
        reducing: The reduction of the parts, under way.
        memory: The block that the sums are made in, and what it goes back to.
        part: The sum of this rank's part, in the block.
        column: Between hosts.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        call: Call,
        reducing: _Reducing,
        memory: tuple[Block, Blocks],
        part: torch.Tensor,
        column: Direct | None,
    ) -> None:
        self._tensor = tensor
        self._call = call
        self._reducing = reducing
        self._block, self._blocks = memory
        self._part = part
        self._column = column
        self._done = False

    def wait(self) -> None:
        if self._done:
            return
        self._done = True
        self._reducing.wait()
        if self._column is not None and self._part.numel():
            pending = self._column.all_reduce(self._part, self._call)
            pending.wait()
            pending.finish()
        self._block.written(self._call)
        self._block.wait(self._call)
        with torch.no_grad():
            self._tensor.copy_(self._block.tensor(self._tensor.dtype, 0, self._tensor.numel()))
        self._blocks.give_back(self._block)

    def finish(self) -> None:
        if not self._done:
            self._done = True
            self._reducing.finish()
            self._blocks.give_back(self._block)


class Shared:
    """Transport through memory that the ranks of a host share.

    Args:
        group: Process group of the ranks that exchange rows.
        neighbours: Those of them that share this host.
        messages: Between all ranks of the group, for what is not in shared memory.
        column: Between the ranks of this rank's column; None on one host.

    Attributes:
        limit: Time limit of waits.
        blocks: The memory. A full buffer that shall be gathered must be in one of its blocks.
        place: This rank's position on its host.
        neighbours: How many ranks the host has.
    """

    def __init__(
        self, group: dist.ProcessGroup, neighbours: Neighbours, messages: Direct, column: Direct | None
    ) -> None:
        self.shared = self
        self.rank = group.rank()
        self.size = group.size()
        self.limit = messages.limit
        self.column = column
        self.place = neighbours.place
        self.neighbours = len(neighbours.ranks)
        names = [messages.global_ranks[rank] for rank in neighbours.ranks]
        self.blocks = Blocks(neighbours, Words(neighbours, names, messages.limit))
        self._messages = messages
        # Per rank of this host the ranks whose rows it adds up, and those that it brings to this host: its column's.
        self._columns = [column_of(neighbours, place) for place in range(self.neighbours)]
        self._singles = [[place] for place in range(self.neighbours)]  # for sums that all ranks of the host share
        self._cells: dict[Hashable, _Cells] = {}
        self._reducing: list[weakref.ref[_Reducing]] = []  # under way between hosts

    def take(self, nbytes: int, call: Call) -> Block | None:
        """A block for a full buffer, see `Blocks.take`.

        Raises:
            CommunicationError: There is no memory on this host, and other hosts cannot know.
        """
        block = self.blocks.take(nbytes, call)
        if block is None and self.column is not None:
            raise CommunicationError(
                f"{call.op} of unit {call.unit!r}: there is no shared memory of {nbytes} bytes on the host of rank "
                f"{dist.get_rank()}; use transport='direct'"
            )
        return block

    def gather(self, items: list[GatherItem], call: Call) -> Pending:
        """See `Transport.gather`. Of items that are in no block: every rank has its own."""
        return self._messages.gather(items, call)

    def gather_in(self, block: Block, items: list[GatherItem], call: Call) -> Pending:
        """Start to fill `block` with the rows of all ranks. This rank has written its own.

        Comes between a reduction and its wait, so reductions that can go on between hosts do so here.

        Args:
            block: Where the items lie, at the same places on every rank.
            items: What is exchanged with other hosts; without them they are not looked at.
            call: The command.
        """
        column = self.column
        self._advance()
        return _Gathering(block, call, None if column is None else column.gather(self._for_column(items), call))

    def _for_column(self, items: list[GatherItem]) -> list[GatherItem]:
        """The same items with the chunks of the column's ranks alone."""
        ranks, made = self._columns[self.place], []
        for item in items:
            chunks = item.chunks(self.size)
            made.append(GatherItem(item.label, item.whole, item.chunk_numel, item.numel, [chunks[r] for r in ranks]))
        return made

    def reduce(self, items: list[ReduceItem], call: Call) -> Pending:
        """See `Transport.reduce`. Sums are made in rank order on each host, then in the order of hosts."""
        cells = self._plan(items, self._columns)
        block = self.take(cells.nbytes, call)
        if block is None:
            return self._messages.reduce(items, call)
        reducing = _Reducing(items, call, cells, (block, self.blocks), self.column)
        if self.column is not None:
            self._advance()
            self._reducing.append(weakref.ref(reducing))
        return reducing

    def _advance(self) -> None:
        for reference in self._reducing:
            reducing = reference()
            if reducing is not None:
                reducing.advance()
        self._reducing = [reference for reference in self._reducing if reference() is not None]

    def all_reduce(self, tensor: torch.Tensor, call: Call) -> Pending:
        """See `Transport.all_reduce`."""
        numel = tensor.numel()
        chunk = -(-numel // self.neighbours)
        item = ReduceItem("all", tensor, chunk, tensor)
        cells = self._plan([item], self._singles)
        blocks = [self.take(nbytes, call) for nbytes in (cells.nbytes, max(1, numel * tensor.element_size()))]
        first, second = blocks
        if first is None or second is None:
            for block in blocks:
                if block is not None:
                    self.blocks.give_back(block)
            return self._messages.all_reduce(tensor, call)
        item.out = second.tensor(tensor.dtype, 0, numel)[self.place * chunk : (self.place + 1) * chunk]
        reducing = _Reducing([item], call, cells, (first, self.blocks), None)
        return _AllReducing(tensor, call, reducing, (second, self.blocks), item.out, self.column)

    def _plan(self, items: list[ReduceItem], readers: list[list[int]]) -> _Cells:
        """Cells for these items, made once for all that are like them."""
        key = (readers is self._singles, *((i.source.dtype, i.source.numel(), i.chunk_numel) for i in items))
        cells = self._cells.get(key)
        if cells is None:
            cells = self._cells[key] = plan_cells(items, readers, self.place)
        return cells


def column_of(neighbours: Neighbours, place: int) -> list[int]:
    """Ranks of the group at one place of every host, in rank order."""
    return sorted(ranks[place] for ranks in neighbours.hosts)
