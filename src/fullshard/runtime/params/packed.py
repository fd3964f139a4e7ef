"""What one reduction of a unit and dtype consists of, planned once; the packed message of its small gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
        is_dense: Gradients and counts leave no gaps in the message.
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
    is_dense: bool


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
    is_dense = not uneven and len(pieces) == len(even) and width == end + len(trainable)
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
        is_dense,
    )


def packed_message(
    plan: Plan, taken: Sequence[torch.Tensor | None], size: int, like: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The packed message, shape [size, plan.width]: each rank's rows of small gradients, then how many are there.

    Args:
        plan: What it consists of.
        taken: Per parameter its gradient, contiguous, rank after rank; None if there is none.
        size: Ranks.
        like: On the device of the gradients.
        dtype: In which gradients are summed.
    """
    lacking = [gradient is None for gradient in taken]
    # What no gradient covers must be zeros: sums of it end up in the flat gradient shard.
    make = like.new_empty if plan.is_dense and True not in lacking else like.new_zeros
    message = make((size, plan.width), dtype=dtype)
    parts = message.split_with_sizes(plan.pieces, 1)
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for index, part in plan.even:
        gradient = taken[index]
        if gradient is not None and gradient.numel():
            targets.append(parts[part])
            sources.append(gradient.view(size, -1))
    if targets:
        torch._foreach_copy_(targets, sources)
    for region, part in plan.uneven:
        gradient = taken[region.index]
        if gradient is not None and gradient.numel():
            _put_uneven(region, gradient.view(-1), parts[part])
    counts = parts[-1]
    if True not in lacking:
        counts.fill_(1.0)  # the usual case costs an accelerator no copy from the host
    else:
        counts.copy_(message.new_tensor([0.0 if none else 1.0 for none in lacking]).expand_as(counts))
    return message


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
