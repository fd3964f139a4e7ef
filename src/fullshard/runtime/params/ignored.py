"""Gradients of parameters that no unit has: averaged over the data-parallel ranks on request, else named."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.runtime.collectives import Call, Transport, command_tag
from fullshard.runtime.params.describe import Slot, slots_of

# As of a unit's all-reduce, see `unit.py`.
_ALL_REDUCE = 2
_SHOWN = 5


class IgnoredGradients:
    """Averages the gradients of the plain parameters of a model at the end of every backward that synchronizes.

    A gradient that was averaged before, and added to since, may be averaged again: the part that is equal everywhere
    stays as it is. So accumulation needs no other path.

    Args:
        root: The model, at rest. Its parameters are looked up at every backward: the user may replace or freeze them.
        transports: Sum over these ranks, one after the other.
        ranks: Number of data-parallel ranks.
    """

    def __init__(self, root: nn.Module, transports: list[Transport], ranks: int) -> None:
        self._slots = slots_of(root)
        self._transports = transports
        self._ranks = ranks

    def average(self) -> None:
        """Replace every gradient by its mean over ranks; a rank without one counts as zeros if any other has it."""
        alike: dict[tuple[torch.device, torch.dtype], dict[str, torch.Tensor]] = {}
        for name, parameter in _plain_and_trainable(self._slots):
            wide = parameter.dtype if parameter.element_size() >= torch.float32.itemsize else torch.float32
            alike.setdefault((parameter.device, wide), {})[name] = parameter
        for (device, dtype), parameters in alike.items():
            self._average(parameters, torch.zeros(0, device=device, dtype=dtype))

    @torch.no_grad()
    def _average(self, parameters: dict[str, torch.Tensor], like: torch.Tensor) -> None:
        found = [parameter.grad for parameter in parameters.values()]
        dense = [g if g is None or g.layout is torch.strided else g.to_dense() for g in found]
        parts = [
            like.new_zeros(p.numel()) if g is None else g.reshape(-1).to(like.dtype)
            for g, p in zip(dense, parameters.values(), strict=True)
        ]
        # Like a unit's gradients, they come with one count a parameter of the ranks that have one.
        flat = torch.cat([*parts, like.new_tensor([float(g is not None) for g in dense])])
        for axis, transport in enumerate(self._transports):
            tag = command_tag(f"ignored parameters/{axis}/{like.dtype}", _ALL_REDUCE)
            pending = transport.all_reduce(flat, Call("all-reduce of gradients", "(ignored parameters)", tag))
            pending.wait()
            pending.finish()
        counts = flat[-len(parts) :].tolist()
        means = flat[: -len(parts)].div_(self._ranks).split([part.numel() for part in parts])
        for parameter, gradient, mean, count in zip(parameters.values(), dense, means, counts, strict=True):
            if not count:
                continue
            if gradient is None:
                parameter.grad = mean.to(parameter.dtype).view(parameter.shape).clone()
            else:
                parameter.grad = gradient.copy_(mean.view(parameter.shape))


def warn_of_own_gradients(root: nn.Module, ranks: int) -> None:
    """Name the trainable parameters whose gradients stay each rank's own, so that ranks drift apart."""
    names = [name for name, _ in _plain_and_trainable(slots_of(root))]
    if ranks > 1 and names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        warnings.warn(
            f"parameters {names[:_SHOWN]}{more} are trainable but not sharded (ignored, or added later), so "
            "their gradients are not averaged over ranks and every rank trains its own values. Pass "
            "average_ignored_grads=True to fully_shard of the root to average them, or False if this is intended",
            stacklevel=2,
        )


def _plain_and_trainable(slots: list[tuple[str, Slot]]) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that get a gradient of this rank's own, each once."""
    seen: set[int] = set()
    for name, slot in slots:
        parameter = slot.registry.get(slot.name)
        if parameter is None or id(parameter) in seen or not parameter.requires_grad:
            continue
        seen.add(id(parameter))
        # Any other DTensor has a mesh of its own that says what its gradient is.
        if not isinstance(parameter, DTensor):
            yield name, parameter
