"""Where numbers that are not finite came from: the ranks whose loss, or whose rows of a parameter, have them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from fullshard.train.checkpoint import local_part
from fullshard.train.world import World


def explain_divergence(model: nn.Module, world: World, loss_sums: Sequence[float]) -> str:
    """One sentence, the same on every rank, about a step whose loss or gradient norm is not finite."""
    broken = dict(enumerate(world.gather_values(_first_broken(model))))
    holders = {rank: name for rank, name in broken.items() if name is not None}
    if holders:
        # Every rank computes with every row, so the losses say nothing about where it began.
        found = "; ".join(f"of {name} in the rows of rank {rank}" for rank, name in holders.items())
        return f"Values {found} are not finite: an earlier step, or what was loaded, has broken them."
    ranks = [rank for rank, loss in enumerate(loss_sums) if not math.isfinite(loss)]
    if not ranks:
        return "The loss is finite on every rank, all parameters are: the gradients overflowed in backward."
    names = ", ".join(map(str, ranks))
    return f"The loss is not finite on rank{'s' if len(ranks) > 1 else ''} {names} of {world.size}."


@torch.no_grad()
def _first_broken(model: nn.Module) -> str | None:
    """Name of the first parameter of which this rank holds a value that is NaN or infinite."""
    for name, parameter in model.named_parameters():
        if not bool(local_part(parameter).isfinite().all()):
            return name
    return None
