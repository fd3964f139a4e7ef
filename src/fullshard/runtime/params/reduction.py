"""What one reduction of a unit and dtype consists of: its plan, the packed message of small gradients, the sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from fullshard.core.layout import FlatLayout, Region, align


@dataclass(frozen=True, slots=True)
class Plan:
    """What follows from which parameters are trainable; made anew only when that changes.

    Attributes:
        trainable: Per parameter.
        numel: Elements of the flat gradient shard.
        packed_numel: Elements of it that come with the packed message.
        gaps: Ranges of it behind the packed message that hold no gradient.
        large: Trainable regions with a message of their own.
        regions: All trainable regions: those in the packed message, then the large ones.
        width: Elements a rank receives with the packed message: small gradients, room, one usage count a parameter.
        pieces: Elements of the parts that the message is divided into, the counts last; together `width`.
        even: (parameter, part) of the small regions whose rows divide evenly over the ranks.
        uneven: (region, part) of the other small ones.
    """

    trainable: tuple[bool, ...]
    numel: int
    packed_numel: int
    gaps: tuple[tuple[int, int], ...]
    large: tuple[Region, ...]
    regions: tuple[Region, ...]
    width: int
    pieces: tuple[int, ...]
    even: tuple[tuple[int, int], ...]
    uneven: tuple[tuple[Region, int], ...]


def make_plan(layout: FlatLayout, rank: int, trainable: tuple[bool, ...], sum_itemsize_bytes: int) -> Plan:
    """The plan for a layout.

    Args:
        layout: Of the unit's parameters of one dtype.
        rank: This rank.
        trainable: Per parameter.
        sum_itemsize_bytes: Of the dtype in which gradients are summed.
    """
    numel = layout.gradient_numel(trainable)
    packed_numel = min(layout.packed_numel, numel)
    on = tuple(region for region in layout.regions if trainable[region.index])
    width = align(packed_numel + len(trainable), sum_itemsize_bytes)
    pieces: list[int] = []
    even: list[tuple[int, int]] = []
    uneven: list[tuple[Region, int]] = []
    end = 0
    for region in on:
        if not region.packed:
            continue
        if region.shard_offset > end:
            pieces.append(region.shard_offset - end)
        if not region.replicated and region.rows == region.chunk * layout.size:
            even.append((region.index, len(pieces)))
        else:
            uneven.append((region, len(pieces)))
        pieces.append(region.chunk_numel)
        end = region.shard_offset + region.chunk_numel
    pieces += [len(trainable)] if width == end + len(trainable) else [width - len(trainable) - end, len(trainable)]
    return Plan(
        trainable,
        numel,
        packed_numel,
        tuple((max(start, packed_numel), stop) for start, stop in layout.gaps(rank, trainable) if stop > packed_numel),
        tuple(region for region in on if not region.packed),
        on,
        width,
        tuple(pieces),
        tuple(even),
        tuple(uneven),
    )


class PackedMessage:
    """The packed message, shape [size, plan.width]: each rank's rows of small gradients, then how many are there.

    All views of it are made once, and one kernel fills it. Its memory comes and goes with a reduction.

    Args:
        plan: What it consists of.
        size: Ranks.
        device: Of the gradients.
        dtype: In which gradients are summed.
    """

    def __init__(self, plan: Plan, size: int, device: torch.device, dtype: torch.dtype) -> None:
        self.plan = plan
        self._size = size
        self._nbytes = size * plan.width * dtype.itemsize
        self._storage = torch.UntypedStorage(self._nbytes, device=device)
        rows = torch.empty(0, dtype=dtype, device=device).set_(self._storage, 0, (size, plan.width), (plan.width, 1))
        self.flat = rows.view(-1)
        self._parts = list(rows.split_with_sizes(plan.pieces, 1))
        # What no gradient covers must be zeros, since sums of it end up in the flat gradient shard. One element each.
        zero, one = rows.new_zeros(1), rows.new_ones(1)
        self._without = [zero.expand_as(part) for part in self._parts[:-1]] + [one.expand_as(self._parts[-1])]

    def fill(self, taken: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Put gradients into it.

        Args:
            taken: Per parameter its gradient, contiguous, rank after rank; None if there is none.

        Returns:
            The message, 1-D.
        """
        if not self._storage.nbytes():
            self._storage.resize_(self._nbytes)
        sources = self._without.copy()
        for index, part in self.plan.even:
            gradient = taken[index]
            if gradient is not None and gradient.numel():
                sources[part] = gradient.view(self._size, -1)
        torch._foreach_copy_(self._parts, sources)
        for region, part in self.plan.uneven:
            gradient = taken[region.index]
            if gradient is not None and gradient.numel():
                _put_uneven(region, gradient.view(-1), self._parts[part])
        if None in [None if gradient is None else True for gradient in taken]:  # else an accelerator needs no copy
            counts = self._parts[-1]
            counts.copy_(counts.new_tensor([0.0 if gradient is None else 1.0 for gradient in taken]).expand_as(counts))
        return self.flat

    def drain(self) -> None:
        """It has left: take its memory away."""
        self._storage.resize_(0)


def _put_uneven(region: Region, gradient: torch.Tensor, target: torch.Tensor) -> None:
    """A gradient, 1-D, whose rows do not divide evenly, into its part of the message, shape [size, chunk_numel]."""
    if region.replicated:
        target.copy_(gradient)
        return
    whole_chunks = gradient.numel() // region.chunk_numel if region.chunk_numel else 0
    split = whole_chunks * region.chunk_numel
    target[:whole_chunks].copy_(gradient[:split].view(whole_chunks, -1))
    if split < gradient.numel():
        target[whole_chunks, : gradient.numel() - split].copy_(gradient[split:])


@dataclass(slots=True)
class Sum:
    """A sum over the shard axis, under way or done.

    Attributes:
        plan: By which it was begun; flags may change before it is complete.
        flat: Shape [gradient_numel + room + one usage count per parameter], in the dtype of the sum.
        received: What the packed message brings: this rank's small gradients, room, the usage counts. It is `flat`
            itself if all gradients are small.
        divide_after: Makes the sum the mean.
        complete: Every parameter had a gradient here, so the counts need not be read (reading stalls an accelerator).
        sources: Tensors on the wire, kept until they have left.
    """

    plan: Plan
    flat: torch.Tensor
    received: torch.Tensor
    divide_after: float
    complete: bool
    sources: list[torch.Tensor]

    def complete_flat(self) -> None:
        """All messages are in: put what came packed into the flat sum, and zeros where nothing comes."""
        plan, flat, counts = self.plan, self.flat, len(self.plan.trainable)
        for start, stop in plan.gaps:
            flat[start:stop].zero_()
        if self.received is not flat:
            flat[: plan.packed_numel].copy_(self.received[: plan.packed_numel])
            flat[plan.numel :].copy_(self.received[-counts:])

    def used(self) -> list[bool]:
        """Per parameter whether any rank had a gradient; before `divide`."""
        counts = len(self.plan.trainable)
        return [True] * counts if self.complete else (self.flat[-counts:] > 0.5).tolist()

    def divide(self) -> None:
        """Make the sum the mean."""
        if self.divide_after != 1.0:
            self.flat.div_(_divisor(self.divide_after, self.flat.dtype))


@cache
def _divisor(factor: float, dtype: torch.dtype) -> torch.Tensor:
    """A factor as a tensor: to make one of a number, as `div_` does, costs more than to divide a small tensor."""
    return torch.tensor(factor, dtype=torch.promote_types(dtype, torch.float32), device="cpu")  # not rounded to 16 bits
