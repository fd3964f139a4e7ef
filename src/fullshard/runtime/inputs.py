"""What a unit does to its inputs: a node of autograd on those that require gradients tells when its backward is over.

[Note: inputs changed in place]
A module sees not the caller's tensor but what the node returns: another tensor with the same memory and the same
version counter. If it writes into that (`x += 1` as its first operation), autograd must learn that the caller's tensor
has changed too; else whatever the caller computes with it later would get a wrong gradient, in silence. So after the
forward the caller's tensor is given the history of what it was changed to. A leaf, or one of several views, is refused
there with torch's own error, as it is in the plain module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fullshard.runtime.tree import TensorMap, cast_floating, is_flat, tensors_in

# Told the gradients of the inputs, None for an input without one.
Gradients = Sequence[torch.Tensor | None]


class Inputs:
    """The inputs of one call of a module, as it gets them.

    Attributes:
        args, kwargs: What to call the module with.
    """

    __slots__ = ("_aliases", "_maps", "_node", "args", "kwargs")

    def __init__(self, args: Any, kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs
        self._maps: list[TensorMap] = []
        self._aliases: list[tuple[torch.Tensor, torch.Tensor, int]] = []  # caller's, module's, version at the start
        self._node: Any = None

    def move(self, device: torch.device) -> None:
        """Move tensors to `device`: a batch may come from the CPU."""
        self._map(partial(torch.Tensor.to, device=device))

    def cast(self, dtype: torch.dtype) -> None:
        """Cast floating point tensors; integers, booleans and complex numbers stay."""
        self._map(partial(cast_floating, dtype))

    def _map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        mapping = TensorMap(fn)
        self.args, self.kwargs = mapping((self.args, self.kwargs))
        self._maps.append(mapping)

    def watch(self, call: Callable[[Gradients], None]) -> bool:
        """Let `call` be called in backward, when the gradients of all inputs are there (if any requires one).

        Returns:
            Whether it will be. Not if a tensor that requires a gradient is where it cannot be replaced.
        """
        flat = is_flat(self.args) and (not self.kwargs or is_flat(self.kwargs.values()))
        found = (*self.args, *self.kwargs.values()) if flat else tensors_in((self.args, self.kwargs))
        tensors = {id(value): value for value in found if isinstance(value, torch.Tensor) and value.requires_grad}
        if not tensors:
            return False
        aliases = _AfterBackward.apply(call, *tensors.values())  # type: ignore[no-untyped-call]
        replaced = dict(zip(tensors, aliases, strict=True))
        if flat:
            self.args = tuple([replaced.get(id(value), value) for value in self.args])
            if self.kwargs:
                self.kwargs = {key: replaced.get(id(value), value) for key, value in self.kwargs.items()}
        elif not self._replace(replaced):
            return False
        self._node = aliases[0].grad_fn
        self._aliases = [(tensors[key], alias, alias._version) for key, alias in replaced.items()]
        return True

    def _replace(self, replaced: dict[int, torch.Tensor]) -> bool:
        """Put other tensors in place of those of these identities, unless one of them cannot be replaced."""
        mapping = TensorMap(lambda tensor: replaced.get(id(tensor), tensor))
        inputs = mapping((self.args, self.kwargs))
        if any(tensor.requires_grad for tensor in tensors_in(mapping.left)):
            return False
        self.args, self.kwargs = inputs
        self._maps.append(mapping)
        return True

    def settle(self) -> None:
        """The module has run: what it did to its inputs in place, it did to the caller's."""
        for mapping in reversed(self._maps):
            mapping.write_back()
        for tensor, alias, version in self._aliases:
            # A new version without a new history was written without gradients: the caller's tensor sees that already.
            now = alias._version
            if now != version and alias.grad_fn is not self._node:
                # What was saved for backward since the write is what the tensor holds now: no newer version.
                _Rebase.apply(tensor, alias)  # type: ignore[no-untyped-call]
                torch._C._autograd._unsafe_set_version_counter((tensor,), (now,))


class _AfterBackward(torch.autograd.Function):
    """Identity on tensors; calls back when their gradients have been computed."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[Gradients], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        # Inputs that got no gradient keep none: zeros in their place would cost memory and change `grad is None`.
        ctx.set_materialize_grads(False)
        # Not the tensors themselves: autograd would make views of them, which the module could not write into.
        return tuple([tensor.detach() for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.call(gradients)
        return (None, *gradients)

    @staticmethod
    def jvp(_ctx: Any, _call: None, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return tuple(None if tangent is None else tangent.clone() for tangent in tangents)


class _Rebase(torch.autograd.Function):
    """Gives `tensor` the history of an alias, which has the same memory."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, _alias: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        ctx.set_materialize_grads(False)
        return tensor

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor | None) -> tuple[None, torch.Tensor | None]:
        return None, gradient
