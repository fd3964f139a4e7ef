"""Clipping: one norm a flat gradient shard and one reduction of a few numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf

import torch
import torch.distributed as dist
from torch import nn

from fullshard.runtime.collectives import sum_scalars
from fullshard.runtime.dtensors import local_of
from fullshard.runtime.gradients import GradientFlow
from fullshard.runtime.registry import REGISTRY
from fullshard.runtime.unit import Unit


def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale the gradients of `model` so that their global norm is at most `max_norm`.

    Every rank of the data-parallel mesh must call it; every rank gets the same result. Parameters that no unit owns
    (ignored ones) count with this rank's gradient, which is taken to be the same on all ranks.

    Args:
        model: A module with sharded parameters in it.
        max_norm: Largest norm allowed.
        norm_type: Order p of the norm; `float("inf")` for the largest absolute value.
        error_if_nonfinite: Raise if the norm is infinite or NaN, before any gradient is changed.

    Returns:
        The norm before clipping: 0-d tensor, float32 (float64 if any gradient is float64), on the gradients' device.

    Raises:
        ValueError: `max_norm` is negative or `norm_type` is not positive.
        RuntimeError: The norm is not finite and `error_if_nonfinite` is set.
    """
    max_norm, norm_type = float(max_norm), float(norm_type)
    if max_norm < 0:
        raise ValueError(f"max_norm must be at least 0, got {max_norm}")
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive (2.0, or float('inf') for the largest value), got {norm_type}")
    units, plain = _owners(model)
    pieces = [piece for unit in units for flow in unit.flows for piece in _pieces(flow)]
    gradients = [p.grad for p in plain if p.grad is not None]
    total = _total_norm(units, gradients, norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the gradient norm of order {norm_type} is {total.item()}, so the gradients cannot be clipped; "
            "look for the first loss that is not finite, or skip this step"
        )
    coefficient = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for piece in [*pieces, *gradients]:
        piece.mul_(coefficient.to(piece.dtype))
    return total


def _owners(model: nn.Module) -> tuple[list[Unit], list[nn.Parameter]]:
    """Units that own parameters of `model`, in order, and parameters that no unit owns."""
    units: dict[int, Unit] = {}
    plain = []
    for parameter in model.parameters():
        unit = REGISTRY.owner(parameter)
        if unit is None:
            plain.append(parameter)
        else:
            units.setdefault(id(unit), unit)
    return list(units.values()), plain


def _pieces(flow: GradientFlow) -> list[torch.Tensor]:
    """Local gradients of one flow: the flat gradient shard, or one tensor a parameter if the user replaced some."""
    flat = flow.flat()
    if flat is not None:
        return [flat]
    return [local_of(parameter.grad) for parameter in flow.sharded if parameter.grad is not None]


# A few numbers to be summed over some groups, one after the other: gradients of parameters whose different parts lie
# on the ranks of these groups.
_Sums = dict[tuple[int, ...], tuple[list[dist.ProcessGroup], list[torch.Tensor]]]


def _total_norm(units: list[Unit], plain: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The global norm, 0-d. Each mesh's axes add up their own parts of parameters; replicas hold equal sums."""
    pieces = [*plain, *(piece for unit in units for flow in unit.flows for piece in _pieces(flow))]
    dtype = _norm_dtype(pieces)
    device = units[0].place.device if units else torch.device("cpu")
    sums: _Sums = {}
    for unit in units:
        for flow in unit.flows:
            for groups, gradients in _parts(flow):
                powers = [_power(gradient, norm_type, dtype) for gradient in gradients]
                sums.setdefault(tuple(id(group) for group in groups), (groups, []))[1].extend(powers)
    total = _combine((_power(gradient, norm_type, dtype) for gradient in plain), norm_type, dtype, device)
    for groups, powers in sums.values():
        part = _combine(powers, norm_type, dtype, device)
        for group in groups:
            sum_scalars(part, group, largest=norm_type == inf)
        total = torch.maximum(total, part) if norm_type == inf else total + part
    return total if norm_type == inf else total ** (1.0 / norm_type)


def _parts(flow: GradientFlow) -> Iterator[tuple[list[dist.ProcessGroup], list[torch.Tensor]]]:
    """Local gradients of one flow, with the groups on whose ranks the other parts of their parameters are.

    Every group of the flow comes, with or without gradients here, so that all ranks sum the same.
    """
    group, dresses = flow.place.shard_group, flow.buffers.dresses
    if all(dress.is_plain for dress in dresses) and not any(spec.replicated for spec in flow.buffers.specs):
        yield [group], _pieces(flow)
        return
    for parameter, spec, dress in zip(flow.sharded, flow.buffers.specs, dresses, strict=True):
        # What every rank of the shard axis holds whole, the first one counts.
        counted_here = not spec.replicated or flow.buffers.world.rank == 0
        gradients = [local_of(parameter.grad)] if parameter.grad is not None and counted_here else []
        yield [group, *dress.sharding_groups()], gradients


def _norm_dtype(tensors: list[torch.Tensor]) -> torch.dtype:
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def _power(tensor: torch.Tensor, norm_type: float, dtype: torch.dtype) -> torch.Tensor:
    """The norm to the power of its order (itself for the infinite norm), so that pieces add up."""
    if not tensor.numel():
        return torch.zeros((), dtype=dtype, device=tensor.device)
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, norm_type, dtype=dtype)
    return norm if norm_type == inf else norm**norm_type


def _combine(
    powers: Iterable[torch.Tensor], norm_type: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    total = torch.zeros((), dtype=dtype, device=device)
    for power in powers:
        total = torch.maximum(total, power) if norm_type == inf else total + power
    return total
