"""The way of a unit's gradients: from autograd's tensors over the wire into the flat gradient shard."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch

from fullshard.core.layout import Region
from fullshard.errors import MisuseError
from fullshard.runtime.collectives import ReduceItem, sum_scalars
from fullshard.runtime.dtensors import local_of, sharded_like
from fullshard.runtime.params.extensions import Buffers
from fullshard.runtime.params.gathers import in_rank_order
from fullshard.runtime.params.place import Links, Place
from fullshard.runtime.params.reduction import PackedMessage, Plan, Sum, make_plan

# Read of every parameter several times a step.
_VERSION = attrgetter("_version")
_REQUIRES_GRAD = attrgetter("requires_grad")


@dataclass(slots=True)
class _Backward:
    """What a backward has done to the gradients of a flow.

    Attributes:
        began: It has begun a reduction.
        bound: It has bound gradients.
        added: It has added to gradients of an earlier one.
    """

    began: bool = False
    bound: bool = False
    added: bool = False


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
        self._sum: Sum | None = None
        self._partial: Sum | None = None  # sum over the shard axis that replicas have not been added to
        self._plan = self._plan_for(tuple(map(_REQUIRES_GRAD, sharded)))
        self._nothing = buffers.shard.new_empty(0)
        self._locals = [local_of(parameter) for parameter in sharded]
        self._gathered_versions: list[int] = []
        self._packed: PackedMessage | None = None
        self._backward = _Backward()

    @property
    def place(self) -> Place:
        """The ranks."""
        return self.buffers.place

    @property
    def is_trainable(self) -> bool:
        """Whether any parameter requires gradients now."""
        return any(map(_REQUIRES_GRAD, self.sharded))

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
        return list(map(_VERSION, self.sharded))

    def take_flags(self) -> None:
        """Full parameters require gradients where the sharded ones do."""
        if list(map(_REQUIRES_GRAD, self.sharded)) != list(map(_REQUIRES_GRAD, self.buffers.full)):
            for sharded, full in zip(self.sharded, self.buffers.full, strict=True):
                full.requires_grad_(sharded.requires_grad)

    def plan(self) -> Plan:
        """The plan for the parameters that are trainable now; flags may change between steps."""
        trainable = tuple(map(_REQUIRES_GRAD, self.sharded))
        if trainable != self._plan.trainable:
            self._plan = self._plan_for(trainable)
        return self._plan

    def _plan_for(self, trainable: tuple[bool, ...]) -> Plan:
        return make_plan(self.buffers.layout, self.buffers.world.rank, trainable, self.sum_dtype.itemsize)

    @property
    def began(self) -> bool:
        """Whether this backward has begun a reduction."""
        return self._backward.began

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

    def begin(self, divide: tuple[float, float]) -> list[ReduceItem]:
        """Take the full gradients and return what has to be summed over the shard axis.

        Args:
            divide: By what to divide before and after the sum, which makes it the mean.
        """
        self._backward.began = True
        plan, (before, after) = self.plan(), divide
        if not plan.numel:
            return []
        dtype = self._wire_dtype()
        taken = [self._take(i, dtype) if on else None for i, on in enumerate(plan.trainable)]
        if before != 1.0:
            taken = [None if gradient is None else gradient / before for gradient in taken]
        shard = self.buffers.shard
        received = shard.new_empty(plan.width, dtype=self.sum_dtype)
        flat = shard.new_empty(plan.numel + len(taken), dtype=self.sum_dtype) if plan.large else received
        items = [self._large_item(region, taken[region.index], flat) for region in plan.large]
        if self._packed is None or self._packed.plan is not plan:
            self._packed = PackedMessage(plan, self.buffers.layout.size, shard.device, self.sum_dtype)
        items.append(ReduceItem("small parameters", self._packed.fill(taken), plan.width, received))
        complete = [gradient is None for gradient in taken] == [not on for on in plan.trainable]
        self._sum = Sum(plan, flat, received, after, complete, [item.source for item in items])
        self._holding = False
        return items

    def end(self) -> None:
        """The sum over the shard axis is complete."""
        done, self._sum = self._sum, None
        if done is None:
            return
        self._has_left(done)
        plan = done.plan
        done.complete_flat()
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
            self._partial.divide_after = done.divide_after

    def _has_left(self, done: Sum) -> None:
        """Nothing of a reduction is on the wire any more: give up what was sent."""
        done.sources.clear()
        if self._packed is not None:
            self._packed.drain()

    def partial(self) -> torch.Tensor | None:
        """The sum over the shard axis, 1-D, which is to be summed over replicas in place."""
        return None if self._partial is None else self._partial.flat

    def bind(self, then: Callable[[torch.Tensor], None] | None = None, unused_too: bool = False) -> None:
        """The sum is complete: make it the mean, in the stored dtype, and the `.grad` of the sharded parameters.

        Args:
            then: The user's function on the mean, 1-D in the dtype of the sum, which it may change in place.
            unused_too: Parameters that no rank used get zeros.
        """
        done, self._partial = self._partial, None
        if done is None:
            return
        plan = done.plan
        flat, used = self._mean(done, then)
        self._backward.bound = True
        here = [parameter.grad is not None for parameter in self.sharded]
        self._backward.added |= True in here
        for region in plan.regions:
            if self.sharded[region.index]._backward_hooks and used[region.index]:
                self._run_tensor_hooks(region, flat)
        existing = self.flat() if True in here and plan == self.plan() else None
        if existing is not None:
            existing.add_(flat[: plan.numel])
        for region in plan.regions:
            if used[region.index] or unused_too:
                if existing is None:
                    self._bind_one(region, flat)
                if self.sharded[region.index]._post_accumulate_grad_hooks:
                    _run_gradient_hooks(self.sharded[region.index])

    def _mean(self, done: Sum, then: Callable[[torch.Tensor], None] | None) -> tuple[torch.Tensor, list[bool]]:
        """Flat mean gradients in the stored dtype, and which parameters any rank has used."""
        flat, used = done.flat, done.used()
        done.divide()
        if then is not None:
            gradients = flat[: done.plan.numel]
            then(gradients)
            used = self._with_uses_elsewhere(used, done.plan, gradients)
        return flat if flat.dtype == self.buffers.shard.dtype else flat.to(self.buffers.shard.dtype), used

    def _with_uses_elsewhere(self, used: list[bool], plan: Plan, flat: torch.Tensor) -> list[bool]:
        """`used`, and what only ranks used that the user's function alone sums over: they are not in the counts.

        Their gradients are seen by not being zero. The ranks of the shard axis agree on it: rows that are zero on one
        of them need not be on another, and a parameter without a gradient on one rank would be left out of its step.
        """
        if all(used[region.index] for region in plan.regions):
            return used  # on every rank: who had all gradients has sent counts of all
        found = torch.zeros(len(used), device=flat.device)
        for region in plan.regions:
            found[region.index] = self.buffers.local(region, flat).any()
        sum_scalars(found, self.place.shard_group, "agreement on unused parameters", largest=True)
        return [here or there for here, there in zip(used, (found > 0).tolist(), strict=True)]

    def begin_backward(self) -> None:
        """A backward begins: what it does to gradients can be told from what was there."""
        self._backward = _Backward(added=self._holding or self._partial is not None)

    def undo_backward(self) -> bool:
        """The backward failed: take back what it did. Returns whether that could not be done without loss."""
        self.drop()
        if self._backward.bound and not self._backward.added:
            self.clear()
        return self._backward.added

    def clear(self) -> None:
        """Remove the gradients of the sharded parameters."""
        for parameter in self.sharded:
            parameter.grad = None

    def drop(self) -> None:
        """Forget everything that is under way, after its messages have ended."""
        if self._sum is not None:
            self._has_left(self._sum)
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
        for region in plan.regions:
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

    def _take(self, i: int, dtype: torch.dtype) -> torch.Tensor | None:
        """The full gradient of parameter i in `dtype`, contiguous, with its rows rank after rank, or None."""
        full = self.buffers.full[i]
        gradient = full.grad
        if gradient is not None:
            full.grad = None
            if gradient.requires_grad:  # of backward(create_graph=True)
                gradient = gradient.detach()
            if i in self.buffers.dressed:
                gradient = self._plain(i, gradient)
        held = self._held.pop(i, None) if self._held else None
        if held is not None:
            gradient = held if gradient is None else held.add_(gradient)
        if gradient is None:
            return None
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        if self.buffers.specs[i].shard_dim:
            gradient = in_rank_order(gradient, self.buffers.specs[i], self.buffers.layout.size)
        if gradient.dtype != dtype:
            gradient = gradient.to(dtype)
        return gradient.contiguous()

    def _plain(self, i: int, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of parameter i as a plain tensor of this rank's part of it."""
        return self.buffers.dresses[i].plain_gradient(gradient) if i in self.buffers.dressed else gradient

    def _wire_dtype(self) -> torch.dtype:
        """Dtype of gradients on the wire, the same on every rank whether or not it has the gradient.

        Narrow types travel as they are and are widened on arrival; accumulated or wide ones in the dtype of the sum.
        """
        computed = self.buffers.full[0].dtype
        return computed if computed.itemsize < self.sum_dtype.itemsize and not self._holding else self.sum_dtype

    def _large_item(self, region: Region, gradient: torch.Tensor | None, flat: torch.Tensor) -> ReduceItem:
        if gradient is None:  # what a rank sends for a parameter that it did not use
            gradient = self.buffers.shard.new_zeros(region.rows * region.row_numel, dtype=self._wire_dtype())
        world = self.buffers.world
        out = flat.narrow(0, region.shard_offset, region.rank_numel(world.size, world.rank))
        return ReduceItem(self.buffers.specs[region.index].name, gradient.view(-1), region.chunk_numel, out)


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
