"""Finds gradients that are infinite or NaN, and says which and on which rank."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch.distributed.tensor import DTensor

from fullshard.runtime.collectives import exchange
from fullshard.runtime.dtensors import local_of
from fullshard.runtime.params.gradients import GradientFlow
from fullshard.runtime.registry import REGISTRY
from fullshard.runtime.unit import Unit


def first_nonfinite(unit: Unit) -> str:
    """Name of the first parameter of `unit` whose full gradient on this rank, not reduced yet, is not finite; or ""."""
    for flow in unit.flows:
        for spec, full in zip(flow.buffers.specs, flow.buffers.full, strict=True):
            if full.grad is not None and _has_nonfinite(full.grad):
                return spec.name
    return ""


def describe_nonfinite(flows: Sequence[GradientFlow], wanted: Container[int]) -> str:
    """Which gradients are not finite after the reduction, in words, the same on every rank of each mesh.

    Every rank of these calls it, and knows that there is one. It communicates, so it is for errors only.

    Args:
        flows: Whose gradients to look at, in the same order on every rank.
        wanted: Identities of the parameters that count.
    """
    names: list[str] = []
    began = ""
    for place in dict.fromkeys(flow.place for flow in flows):
        mine, mine_began = _named([flow for flow in flows if flow.place == place], wanted)
        for group in (place.shard_group, place.replicate_group):
            if group is None:
                continue
            told = exchange((mine, mine_began), group, "gradients that are not finite")
            mine = list(dict.fromkeys(name for theirs, _ in told for name in theirs))
            mine_began = next((theirs for _, theirs in told if theirs), "")
        names += mine
        began = began or mine_began
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    where = f"It began with {began}" if began else "FULLSHARD_DEBUG=1 tells on which rank it begins"
    return f"Not finite: the gradients of {', '.join(names[:3])}{more}. {where}"


def _named(flows: list[GradientFlow], wanted: Container[int]) -> tuple[list[str], str]:
    """(parameters whose gradients are not finite on this rank, what debug mode knows about the first)."""
    names, began = [], ""
    for flow in flows:
        for spec, parameter in zip(flow.buffers.specs, flow.sharded, strict=True):
            unit = REGISTRY.owner(parameter)
            if unit is not None and unit.engine is not None:
                began = began or unit.engine.story.nonfinite
            if parameter.grad is not None and id(parameter) in wanted and _has_nonfinite(parameter.grad):
                prefix = f"{unit.name}." if unit is not None and unit.name else ""
                names.append(repr(prefix + spec.name))
    return names, began


def _has_nonfinite(gradient: torch.Tensor) -> bool:
    local = local_of(gradient) if isinstance(gradient, DTensor) else gradient
    if local.layout is not torch.strided:
        local = local.coalesce().values()
    return not bool(torch.isfinite(local).all())
