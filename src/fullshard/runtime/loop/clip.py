"""Clipping: one norm a flat gradient shard and one reduction of a few numbers."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from math import inf

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.runtime.collectives import sum_scalars
from fullshard.runtime.dtensors import local_of
from fullshard.runtime.failures.nonfinite import describe_nonfinite
from fullshard.runtime.failures.postmortem import explained
from fullshard.runtime.loop.in_backward import refuse_clipping
from fullshard.runtime.params.gradients import GradientFlow
from fullshard.runtime.registry import REGISTRY
from fullshard.runtime.unit import Unit


def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,  # noqa: ARG001 - of torch's signature; flat shards need no grouping of tensors
) -> torch.Tensor:
    """Scale gradients so that their global norm is at most `max_norm`, as `torch.nn.utils.clip_grad_norm_`.

    Every rank of the data-parallel mesh must call it for the same parameters; every rank gets the same result.
    Parameters that no unit owns (ignored ones) may be among them, which torch's function refuses; they count with this
    rank's gradient, which is taken to be the same on all ranks.

    Args:
        parameters: A model, or parameters of one or more models.
        max_norm: Largest norm allowed.
        norm_type: Order p of the norm; `float("inf")` for the largest absolute value.
        error_if_nonfinite: Raise if the norm is infinite or NaN, before any gradient is changed.
        foreach: Accepted and not used.

    Returns:
        The norm before clipping: 0-d tensor, float32 (float64 if any trainable parameter is float64), on the device of
        the gradients.

    Raises:
        ValueError: `max_norm` is negative or NaN, or `norm_type` is not positive.
        RuntimeError: The norm is not finite and `error_if_nonfinite` is set.
    """
    max_norm, norm_type = float(max_norm), float(norm_type)
    if not max_norm >= 0:  # NaN would make every gradient NaN
        raise ValueError(f"max_norm must be at least 0, got {max_norm}")
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive (2.0, or float('inf') for the largest value), got {norm_type}")
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    wanted = {id(p): p for p in ([parameters] if isinstance(parameters, torch.Tensor) else parameters)}
    flows, plain = _owners(wanted)
    found = [(flow, _pieces(flow, wanted)) for flow in flows]
    with explained(wanted.values()):
        total = _total_norm(found, wanted, plain, norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        which = describe_nonfinite(flows, wanted)
        raise RuntimeError(
            f"the gradient norm of order {norm_type} is {total.item()}, so the gradients cannot be clipped; "
            f"look for the first loss that is not finite, or skip this step. {which}".rstrip()
        )
    coefficient = (max_norm / (total + 1e-6)).clamp(max=1.0)
    if coefficient.device.type == "cpu" and float(coefficient) == 1.0:
        return total  # a pass over all gradients that would change nothing; elsewhere asking would cost more
    for piece in [*(piece for _, pieces in found for piece in pieces), *plain]:
        # A DTensor that no unit owns, of a mesh of its own, is scaled on its local part.
        local = local_of(piece) if isinstance(piece, DTensor) else piece
        local.mul_(coefficient.to(piece.dtype))
    return total


def _owners(wanted: dict[int, torch.Tensor]) -> tuple[list[GradientFlow], list[torch.Tensor]]:
    """Flows of the units that own some of the parameters, in order; gradients of parameters that no unit owns."""
    units: dict[int, Unit] = {}
    plain = []
    for parameter in wanted.values():
        unit = REGISTRY.owner(parameter)
        if unit is not None:
            units.setdefault(id(unit), unit)
        elif parameter.grad is not None:
            plain.append(parameter.grad)
    refuse_clipping(list(units.values()))
    return [flow for unit in units.values() for flow in unit.flows], plain


def _pieces(flow: GradientFlow, wanted: Container[int]) -> list[torch.Tensor]:
    """Local gradients of one flow: the flat gradient shard where it is whole, else one tensor a parameter."""
    # Between trainable parameters of a flat shard, frozen ones have ranges that no gradient says anything about.
    if all(parameter.requires_grad and id(parameter) in wanted for parameter in flow.sharded):
        flat = flow.flat()
        if flat is not None:
            return [flat]
    return [local_of(p.grad) for p in flow.sharded if p.grad is not None and id(p) in wanted]


# A few norms to be summed over some groups, one after the other: gradients of parameters whose different parts lie
# on the ranks of these groups.
_Sums = dict[tuple[int, ...], tuple[list[dist.ProcessGroup], list[torch.Tensor]]]


def _total_norm(
    found: list[tuple[GradientFlow, list[torch.Tensor]]],
    wanted: dict[int, torch.Tensor],
    plain: list[torch.Tensor],
    norm_type: float,
) -> torch.Tensor:
    """The global norm, 0-d. Each mesh's axes add up their own parts of parameters; replicas hold equal sums."""
    # Of the parameters: of which there are gradients may differ between ranks, and they sum in one dtype.
    is_wide = any(p.dtype == torch.float64 and p.requires_grad for p in wanted.values())
    dtype = torch.float64 if is_wide else torch.float32
    device = found[0][0].place.device if found else next((g.device for g in plain), torch.device("cpu"))
    sums: _Sums = {}
    for flow, pieces in found:
        for groups, gradients in _parts(flow, pieces, wanted):
            norms = [_norm(gradient, norm_type, dtype) for gradient in gradients]
            sums.setdefault(tuple(id(group) for group in groups), (groups, []))[1].extend(norms)
    total = _power([_norm(gradient, norm_type, dtype) for gradient in plain], norm_type, dtype, device)
    for groups, norms in sums.values():
        part = _power(norms, norm_type, dtype, device)
        for group in groups:
            sum_scalars(part, group, "sum of norms", largest=norm_type == inf)
        total = torch.maximum(total, part) if norm_type == inf else total + part
    return total if norm_type == inf else total ** (1.0 / norm_type)


def _parts(
    flow: GradientFlow, pieces: list[torch.Tensor], wanted: Container[int]
) -> Iterator[tuple[list[dist.ProcessGroup], list[torch.Tensor]]]:
    """Local gradients of one flow (its `pieces`, or one by one) and the groups on whose ranks the other parts are.

    Every group of the flow comes, with or without gradients here, so that all ranks sum the same.
    """
    group, dresses = flow.place.shard_group, flow.buffers.dresses
    if not flow.buffers.dressed and not any(spec.replicated for spec in flow.buffers.specs):
        yield [group], pieces
        return
    for parameter, spec, dress in zip(flow.sharded, flow.buffers.specs, dresses, strict=True):
        # What every rank of the shard axis holds whole, the first one counts.
        counted_here = id(parameter) in wanted and (not spec.replicated or flow.buffers.world.rank == 0)
        gradients = [local_of(parameter.grad)] if parameter.grad is not None and counted_here else []
        yield [group, *dress.sharding_groups()], gradients


def _norm(tensor: torch.Tensor, norm_type: float, dtype: torch.dtype) -> torch.Tensor:
    if not tensor.numel():
        return torch.zeros((), dtype=dtype, device=tensor.device)
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, norm_type, dtype=dtype)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _power(norms: list[torch.Tensor], norm_type: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The norm of some norms to the power of its order (itself for the infinite norm), so that ranks add theirs up."""
    if not norms:
        return torch.zeros((), dtype=dtype, device=device)
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return norm if norm_type == inf else norm**norm_type
