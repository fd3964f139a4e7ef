"""The way of a unit's gradients: from autograd's tensors over the wire into the flat gradient shard."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fullshard.core.layout import FlatLayout, Region, align
from fullshard.errors import MisuseError
from fullshard.runtime.collectives import ReduceItem, sum_scalars
from fullshard.runtime.dtensors import local_of, sharded_like
from fullshard.runtime.params.extensions import Buffers
from fullshard.runtime.params.gathers import in_rank_order
from fullshard.runtime.params.place import Links, Place


@dataclass(frozen=True, slots=True)
class _Plan:
    """What follows from which parameters are trainable; made anew only when that changes.

    Attributes:
        trainable: Per parameter.
        numel: Elements of the flat gradient shard.
        packed_numel: Elements of it that come with the packed message.
        gaps: Ranges of it that hold no gradient.
        large: Trainable regions with a message of their own.
        small: Trainable regions in the packed message.
    """

    trainable: tuple[bool, ...]
    numel: int
    packed_numel: int
    gaps: tuple[tuple[int, int], ...]
    large: tuple[Region, ...]
    small: tuple[Region, ...]


@dataclass(slots=True)
class _Sum:
    """A sum over the shard axis, under way or done.

    Attributes:
        plan: By which it was begun; flags may change before it is complete.
        flat: Shape [gradient_numel + one usage count per parameter], in the dtype of the sum.
        bucket: What the packed message brings: this rank's small gradients, then the usage counts.
        complete: Every parameter had a gradient here, so the counts need not be read (reading stalls an accelerator).
        sources: Tensors on the wire, kept until they have left.
    """

    plan: _Plan
    flat: torch.Tensor
    bucket: torch.Tensor
    complete: bool
    sources: list[torch.Tensor]


def _plan(layout: FlatLayout, rank: int, trainable: tuple[bool, ...]) -> _Plan:
    numel = layout.gradient_numel(trainable)
    regions = [region for region in layout.regions if trainable[region.index]]
    return _Plan(
        trainable,
        numel,
        min(layout.packed_numel, numel),
        tuple(layout.gaps(rank, trainable)),
        tuple(region for region in regions if not region.packed),
        tuple(region for region in regions if region.packed),
    )


class GradientFlow:
    """Gradients of the parameters of one `FlatBuffers`.

    Gradients of large parameters leave straight from the tensors that autograd made. Small ones share one bucket, which
    also carries one count a parameter: how many ranks had a gradient. A parameter that no rank used keeps `grad` as it
    was; one that some ranks used gets the mean with zeros for the others. So the message layout never depends on
    which branch a rank took.

    Args:
        buffers: Parameters and their layout.
        sharded: Sharded parameters, in the order of `buffers.specs`.
        sum_dtype: Dtype in which gradients are summed over ranks.
    """

    def __init__(self, buffers: Buffers, sharded: list[torch.nn.Parameter], sum_dtype: torch.dtype) -> None:
        self.buffers = buffers
        self.links: Links  # the engine sets it when it starts
        self.sharded = sharded
        self.sum_dtype = sum_dtype
        self._held: dict[int, torch.Tensor] = {}  # full gradients that wait for a synchronizing backward
        self._holding = False  # `hold` was called since the last reduction, on every rank alike
        self._sum: _Sum | None = None
        self._partial: _Sum | None = None  # sum over the shard axis that replicas have not been added to
        self._plan = _plan(buffers.layout, buffers.world.rank, tuple(p.requires_grad for p in sharded))
        self._nothing = buffers.shard.new_empty(0)
        self._locals = [local_of(parameter) for parameter in sharded]
        self._gathered_versions: list[int] = []
        self.began = False  # this backward has begun a reduction
        self._touched = False  # this backward has bound gradients
        self._added = False  # this backward has added to gradients of an earlier one

    @property
    def place(self) -> Place:
        """The ranks."""
        return self.buffers.place

    def is_intact(self) -> bool:
        """Whether the sharded parameters still have the local tensors that view the flat shard."""
        return all(local_of(p) is local for p, local in zip(self.sharded, self._locals, strict=True))

    def note_gathered(self) -> None:
        """The full buffer is being filled from the shards as they are now."""
        self._gathered_versions = self._versions()

    def is_stale(self) -> bool:
        """Whether a shard was written since then. A write to a DTensor raises its own counter, not its storage's."""
        return self._versions() != self._gathered_versions

    def _versions(self) -> list[int]:
        return [parameter._version for parameter in self.sharded]

    def plan(self) -> _Plan:
        """The plan for the parameters that are trainable now; flags may change between steps."""
        trainable = tuple(parameter.requires_grad for parameter in self.sharded)
        if trainable != self._plan.trainable:
            self._plan = _plan(self.buffers.layout, self.buffers.world.rank, trainable)
        return self._plan

    def has_full(self) -> bool:
        """Whether full gradients wait to be reduced."""
        return bool(self._held) or any(full.grad is not None for full in self.buffers.full)

    def copy_held(self, other: GradientFlow) -> None:
        """Copy what `other`, a flow of the parameters that ours are copies of, accumulated without communication."""
        partial = other._partial
        if partial is not None:
            self._partial = replace(partial, flat=partial.flat.clone())
        self._held = {i: gradient.clone() for i, gradient in other._held.items()}
        self._holding = other._holding

    def hold(self) -> None:
        """Keep full gradients without communication, in the dtype of the sum so that additions lose nothing."""
        self._holding = True
        for i, full in enumerate(self.buffers.full):
            if full.grad is None:
                continue
            gradient = self._plain(i, full.grad.detach())
            full.grad = None
            if i in self._held:
                self._held[i].add_(gradient)
            else:
                self._held[i] = gradient.to(self.sum_dtype)

    def begin(self, divide_before: float) -> list[ReduceItem]:
        """Take the full gradients and return what has to be summed over the shard axis."""
        self.began = True
        plan = self.plan()
        if not plan.numel:
            return []
        taken = [self._take(i) if on else None for i, on in enumerate(plan.trainable)]
        if divide_before != 1.0:
            taken = [None if g is None else g / divide_before for g in taken]
        flat = self.buffers.shard.new_empty(plan.numel + len(taken), dtype=self.sum_dtype)
        items = [self._large_item(region, taken, flat) for region in plan.large]
        bucket = self._fill_bucket(taken, plan)
        result = bucket.new_empty(bucket.shape[1])
        items.append(ReduceItem("small parameters", bucket.view(-1), bucket.shape[1], result))
        complete = all(g is not None for g, on in zip(taken, plan.trainable, strict=True) if on)
        self._sum = _Sum(plan, flat, result, complete, [item.source for item in items])
        self._holding = False
        return items

    def end(self) -> None:
        """The sum over the shard axis is complete."""
        done, self._sum = self._sum, None
        if done is None:
            return
        done.sources.clear()
        plan = done.plan
        for start, stop in plan.gaps:
            done.flat[start:stop].zero_()
        done.flat[: plan.packed_numel].copy_(done.bucket[: plan.packed_numel])
        done.flat[plan.numel :].copy_(done.bucket[-len(self.sharded) :])
        if self._partial is None:
            self._partial = done
        else:
            if self._partial.plan != plan:
                raise MisuseError(
                    "which parameters require gradients changed while gradients were accumulated without an all-reduce "
                    "over replicas; call set_requires_all_reduce(True) for the backward before the change"
                )
            self._partial.flat.add_(done.flat)
            self._partial.complete &= done.complete

    def partial(self) -> torch.Tensor | None:
        """The sum over the shard axis, 1-D, which is to be summed over replicas in place."""
        return None if self._partial is None else self._partial.flat

    def bind(
        self, divide_after: float, then: Callable[[torch.Tensor], None] | None = None, unused_too: bool = False
    ) -> None:
        """The sum is complete: make it the mean, in the stored dtype, and the `.grad` of the sharded parameters.

        Args:
            divide_after: Makes the sum the mean.
            then: The user's function on the mean, 1-D in the dtype of the sum, which it may change in place.
            unused_too: Parameters that no rank used get zeros.
        """
        done, self._partial = self._partial, None
        if done is None:
            return
        counts = len(self.sharded)
        used = [True] * counts if done.complete else (done.flat[-counts:] > 0.5).tolist()
        flat = done.flat[:-counts]
        if divide_after != 1.0:
            flat.div_(divide_after)
        if then is not None:
            then(flat)
            used = self._with_uses_elsewhere(used, done.plan, flat)
        flat = flat.to(self.buffers.shard.dtype)
        self._touched = True
        self._added |= any(parameter.grad is not None for parameter in self.sharded)
        for region in (*done.plan.small, *done.plan.large):
            if self.sharded[region.index]._backward_hooks and used[region.index]:
                self._run_tensor_hooks(region, flat)
        existing = self.flat()
        existing = existing if done.plan == self.plan() else None
        if existing is not None:
            existing.add_(flat)
        for region in (*done.plan.small, *done.plan.large):
            if used[region.index] or unused_too:
                if existing is None:
                    self._bind_one(region, flat)
                _run_gradient_hooks(self.sharded[region.index])

    def _with_uses_elsewhere(self, used: list[bool], plan: _Plan, flat: torch.Tensor) -> list[bool]:
        """`used`, and what only ranks used that the user's function alone sums over: they are not in the counts.

        Their gradients are seen by not being zero. The ranks of the shard axis agree on it: rows that are zero on one
        of them need not be on another, and a parameter without a gradient on one rank would be left out of its step.
        """
        regions = (*plan.small, *plan.large)
        if all(used[region.index] for region in regions):
            return used  # on every rank: who had all gradients has sent counts of all
        found = torch.zeros(len(used), device=flat.device)
        for region in regions:
            found[region.index] = self.buffers.local(region, flat).any()
        sum_scalars(found, self.place.shard_group, "agreement on unused parameters", largest=True)
        return [here or there for here, there in zip(used, (found > 0).tolist(), strict=True)]

    def begin_backward(self) -> None:
        """A backward begins: what it does to gradients can be told from what was there."""
        self.began = False
        self._touched = False
        self._added = self._holding or self._partial is not None

    def undo_backward(self) -> bool:
        """The backward failed: take back what it did. Returns whether that could not be done without loss."""
        self.drop()
        if self._touched and not self._added:
            self.clear()
        return self._added

    def clear(self) -> None:
        """Remove the gradients of the sharded parameters."""
        for parameter in self.sharded:
            parameter.grad = None

    def drop(self) -> None:
        """Forget everything that is under way, after its messages have ended."""
        self._sum = self._partial = None
        self._held.clear()
        self._holding = False
        for full in self.buffers.full:
            full.grad = None

    def flat(self) -> torch.Tensor | None:
        """The flat gradient shard, 1-D, if every trainable parameter's `.grad` still is its part of one; else None.

        It is found through the gradients, not kept: so `zero_grad` frees it, and a gradient that the user removed or
        replaced is never mistaken for ours.
        """
        plan = self.plan()
        base: torch.Tensor | None = None
        for region in (*plan.small, *plan.large):
            gradient = self.sharded[region.index].grad
            if gradient is None:
                return None
            local = local_of(gradient)
            base = local._base if base is None else base
            if base is None or local._base is not base or local.storage_offset() != region.shard_offset:
                return None
        return None if base is None or base.dim() != 1 or base.numel() < plan.numel else base[: plan.numel]

    def _run_tensor_hooks(self, region: Region, flat: torch.Tensor) -> None:
        """Call what the user registered by `register_hook` on a sharded parameter: it may replace the new gradient."""
        parameter = self.sharded[region.index]
        local = self.buffers.local(region, flat)
        gradient = sharded_like(parameter, local)
        hooks: dict[int, Any] = parameter._backward_hooks  # type: ignore[assignment]
        for hook in tuple(hooks.values()):
            result = hook(gradient)
            gradient = gradient if result is None else result
        if local_of(gradient) is not local:
            local.copy_(local_of(gradient))

    def _bind_one(self, region: Region, flat: torch.Tensor) -> None:
        parameter = self.sharded[region.index]
        local = self.buffers.local(region, flat)
        if parameter.grad is None:
            parameter.grad = sharded_like(parameter, local, self._nothing)
        else:
            local_of(parameter.grad).add_(local)

    def _take(self, i: int) -> torch.Tensor | None:
        """The full gradient of parameter i, 1-D with its rows in order, or None."""
        full = self.buffers.full[i]
        gradient, full.grad = full.grad, None
        if gradient is not None:
            gradient = self._plain(i, gradient.detach())
        held = self._held.pop(i, None)
        if held is not None:
            gradient = held if gradient is None else held.add_(gradient)
        if gradient is None:
            return None
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        flat = in_rank_order(gradient, self.buffers.specs[i], self.buffers.layout.size)
        return flat.to(self._wire_dtype())

    def _plain(self, i: int, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of parameter i as a plain tensor of this rank's part of it."""
        return self.buffers.dresses[i].plain_gradient(gradient) if i in self.buffers.dressed else gradient

    def _wire_dtype(self) -> torch.dtype:
        """Dtype of gradients on the wire, the same on every rank whether or not it has the gradient.

        Narrow types travel as they are and are widened on arrival; accumulated or wide ones in the dtype of the sum.
        """
        computed = self.buffers.full[0].dtype
        return computed if computed.itemsize < self.sum_dtype.itemsize and not self._holding else self.sum_dtype

    def _large_item(self, region: Region, taken: list[torch.Tensor | None], flat: torch.Tensor) -> ReduceItem:
        source = taken[region.index]
        if source is None:
            source = self._zeros(region)
        out = flat.narrow(0, region.shard_offset, region.rank_numel(self.buffers.world.size, self.buffers.world.rank))
        return ReduceItem(self.buffers.specs[region.index].name, source, region.chunk_numel, out)

    def _zeros(self, region: Region) -> torch.Tensor:
        """What a rank sends for a parameter it did not use."""
        return self.buffers.shard.new_zeros(region.rows * region.row_numel, dtype=self._wire_dtype())

    def _fill_bucket(self, taken: list[torch.Tensor | None], plan: _Plan) -> torch.Tensor:
        """The packed message, shape [size, small gradients + counts], in the dtype of the sum."""
        width = align(plan.packed_numel + len(taken), self.sum_dtype.itemsize)
        bucket = self.buffers.shard.new_zeros(self.buffers.layout.size, width, dtype=self.sum_dtype)
        for region in plan.small:
            gradient = taken[region.index]
            if gradient is None or not gradient.numel():
                continue
            target = bucket.narrow(1, region.shard_offset, region.chunk_numel)
            if region.replicated:
                target.copy_(gradient)
                continue
            whole_chunks = gradient.numel() // region.chunk_numel if region.chunk_numel else 0
            split = whole_chunks * region.chunk_numel
            target[:whole_chunks].copy_(gradient[:split].view(whole_chunks, -1))
            if split < gradient.numel():
                target[whole_chunks, : gradient.numel() - split].copy_(gradient[split:])
        counts = bucket[:, width - len(taken) :]
        if all(gradient is not None for gradient in taken):
            counts.fill_(1.0)  # the usual case costs an accelerator no copy from the host
        else:
            counts.copy_(bucket.new_tensor([0.0 if g is None else 1.0 for g in taken]).expand_as(counts))
        return bucket


def _run_gradient_hooks(parameter: torch.nn.Parameter) -> None:
    """Call what the user registered by `register_post_accumulate_grad_hook` on a sharded parameter."""
    hooks: dict[int, Any] | None = parameter._post_accumulate_grad_hooks
    for hook in tuple((hooks or {}).values()):
        hook(parameter)


def warn_dropped() -> None:
    """Say that gradients were lost with a failed backward."""
    warnings.warn(
        "a backward failed after it had added to gradients accumulated before; all gradients were dropped. "
        "Restart the accumulation from its first microbatch.",
        stacklevel=2,
    )
