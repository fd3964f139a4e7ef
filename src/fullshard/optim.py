"""Optimizers for sharded models: any of torch works on sharded parameters, `flat` makes elementwise ones fast."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fullshard.errors import MisuseError
from fullshard.runtime.loop.elementwise import is_known, require_elementwise
from fullshard.runtime.loop.flat import FlatOptimizer, flat_class
from fullshard.runtime.loop.in_backward import InBackwardOptimizer

__all__ = ["flat"]


def flat(
    kind: Any,
    params: nn.Module | Iterable[Any],
    *,
    elementwise: bool = False,
    in_backward: bool = False,
    **options: Any,
) -> torch.optim.Optimizer:
    """An optimizer of class `kind` that updates flat shards: one tensor for each unit and parameter group.

        optimizer = fullshard.optim.flat(torch.optim.AdamW, model, lr=3e-4, fused=True)

    It gives the numbers of `kind(params, **options)`, and its parameter groups, state and state dicts are those of
    that: one entry a parameter, so a checkpoint of the one form loads into the other. It costs less, because kernels
    run over few large plain tensors.

    Args:
        kind: An elementwise optimizer: Adam, AdamW, SGD, Adagrad and others of torch. A class that is not torch's is
            tried out on a few numbers.
        params: A sharded model, or what `kind` takes: parameters, or groups of them with their settings.
        elementwise: Take the caller's word that `kind` computes each element from that element alone.
        in_backward: Update each unit inside of backward, as soon as its gradients are reduced, and free them: there are
            gradients of a few units at any time. `step` then has nothing left to do but what schedulers and hooks
            expect of it. Every backward that reduces gradients is a step, so gradients are accumulated with
            `set_requires_gradient_sync(False)` only, and nothing can look at all of them: no clipping by their norm, no
            loss scaling.
        **options: Of `kind`.

    Raises:
        MisuseError: `kind` is not elementwise, or cannot run in backward.
        TypeError: `kind` is not an optimizer class.
        ValueError: `differentiable=True`, for which parameters would have to be part of a graph.
    """
    if not (inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)):
        raise TypeError(f"expected an optimizer class such as torch.optim.AdamW, got {kind!r}")
    if issubclass(kind, FlatOptimizer):
        raise TypeError(f"{kind.__name__} already is flat; pass the class that it was made of")
    if options.get("differentiable"):
        raise ValueError("differentiable=True cannot be had on flat shards: sharded parameters are in no graph")
    if not elementwise:
        require_elementwise(kind, options)
    if in_backward and not (elementwise or is_known(kind)):
        raise MisuseError(
            f"in_backward=True calls the step of {kind.__name__} once for each unit. If all that it remembers is in "
            "the state of the parameters (no counter in a parameter group), pass elementwise=True"
        )
    maker: Any = flat_class(kind, InBackwardOptimizer if in_backward else FlatOptimizer)  # type: ignore[arg-type]
    made: FlatOptimizer = maker(params.parameters() if isinstance(params, nn.Module) else params, **options)
    if isinstance(made, InBackwardOptimizer):
        made.attach()
    return made
