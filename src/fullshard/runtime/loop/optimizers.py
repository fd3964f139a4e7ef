"""What optimizers must know of sharded parameters: which of them cannot work on shards, and groups of one kind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from fullshard.errors import MisuseError, StaleOptimizerError
from fullshard.runtime.dtensors import StridedShard
from fullshard.runtime.loop.flat import FlatOptimizer
from fullshard.runtime.registry import REGISTRY

# Optimizers whose update torch cannot compute on DTensors: it raises in the middle of the first step.
_NOT_ON_SHARDS = {
    torch.optim.Adafactor: "takes roots of norms in place, which torch cannot do on sharded tensors. Use AdamW, or "
    "leave these parameters unsharded (ignored_params)",
    torch.optim.Rprop: "writes by index, which torch cannot do on sharded tensors. Use Adam or SGD",
}
_NO_FUSED = (torch.optim.SGD, torch.optim.Adagrad)


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what would train nothing, in silence, or fail in the middle of a step. Looks once at each optimizer.

    Raises:
        StaleOptimizerError: It holds parameters from before sharding.
        MisuseError: It cannot update sharded parameters.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if REGISTRY.checked_optimizers.get(optimizer) == len(parameters):
        return
    _refuse_stale(optimizer, parameters)
    flat = isinstance(optimizer, FlatOptimizer)  # its kernels get plain tensors, and its kind was checked
    if not flat and any(REGISTRY.owner(parameter) is not None for parameter in parameters):
        _refuse_unsuited(optimizer, parameters)
        for group in optimizer.param_groups:
            _refuse_mixed(optimizer, group)
    REGISTRY.checked_optimizers[optimizer] = len(parameters)


def _refuse_stale(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
    for parameter in parameters:
        found = REGISTRY.unit_that_replaced(parameter)
        if found is not None:
            raise StaleOptimizerError(
                f"this {type(optimizer).__name__} was built before fully_shard: it holds the unsharded parameter "
                f"{found[1]!r}, which the model no longer uses, so training would change nothing. "
                "Build the optimizer after sharding, from model.parameters()."
            )
        lent = REGISTRY.unit_that_lent(parameter)
        if lent is not None:
            raise StaleOptimizerError(
                f"this {type(optimizer).__name__} was built inside full_parameters or summon_full_params: it holds the "
                f"full parameter {lent[1]!r} that was shown there, which the model no longer uses, so training would "
                "change nothing. Build the optimizer outside of the context, from model.parameters(); to train a full "
                "parameter by itself, make one of its own: nn.Parameter(parameter.detach().clone())"
            )
    shown = {id(full) for unit in list(REGISTRY.hooks) for flow in unit.flows for full in flow.buffers.full}
    if any(id(parameter) in shown for parameter in parameters):
        raise StaleOptimizerError(
            f"this {type(optimizer).__name__} was built while a forward or backward ran, or after Ctrl-C in one: it "
            "holds full parameters that are there for the computation only, so training would change nothing. Build it "
            "between steps; after Ctrl-C, call reset_iter_state() of the model before"
        )


def _refuse_unsuited(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
    kind: Any = type(optimizer)  # exactly: a subclass may have been written for shards
    if kind in _NOT_ON_SHARDS:
        raise MisuseError(f"torch.optim.{kind.__name__} cannot update sharded parameters: it {_NOT_ON_SHARDS[kind]}.")
    if kind is torch.optim.Muon:
        small = next((p for p in parameters if p.requires_grad and _has_ranks_without_rows(p)), None)
        if small is not None:
            raise MisuseError(
                "torch.optim.Muon cannot update a sharded matrix with fewer rows than ranks, such as one of shape "
                f"{tuple(small.shape)}: torch changes the placement of so small a tensor in the middle of its step. "
                "Give it to AdamW, or leave it unsharded (ignored_params)."
            )
    if kind is torch.optim.LBFGS and (uneven := next((p for p in parameters if _cannot_flatten(p)), None)) is not None:
        raise MisuseError(
            "torch.optim.LBFGS cannot update sharded parameters that do not divide evenly over the ranks, or whose "
            f"sharded dim has size 1, such as one of shape {tuple(uneven.shape)}: it makes one vector of all "
            "gradients. Use sizes that divide, or another optimizer."
        )


def _ranks_by_dim(parameter: torch.Tensor) -> dict[int, int]:
    """Sharded dim -> how many ranks divide it, over all axes of the mesh. The same on every rank."""
    ranks: dict[int, int] = {}
    if isinstance(parameter, DTensor):
        for place, size in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
            if isinstance(place, Shard | StridedShard):
                ranks[place.dim] = ranks.get(place.dim, 1) * size
    return ranks


def _has_ranks_without_rows(parameter: torch.Tensor) -> bool:
    return any(parameter.shape[dim] < ranks for dim, ranks in _ranks_by_dim(parameter).items())


def _cannot_flatten(parameter: torch.Tensor) -> bool:
    # torch takes a dim of size 1 out when it flattens, and refuses if that is the sharded one, also on one rank.
    return any(
        parameter.shape[dim] % ranks or (parameter.shape[dim] == 1 and parameter.dim() > 1)
        for dim, ranks in _ranks_by_dim(parameter).items()
    )


def _refuse_mixed(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    name = type(optimizer).__name__
    if group.get("fused") and type(optimizer) in _NO_FUSED:
        raise MisuseError(
            f"torch has no fused {name} for sharded parameters; make it with foreach=True in place of fused=True"
        )
    sharded = sum(isinstance(parameter, DTensor) for parameter in group["params"])
    if 0 < sharded < len(group["params"]) and (group.get("fused") or group.get("foreach")):
        raise MisuseError(
            f"a parameter group of this {name} mixes {sharded} sharded parameters with "
            f"{len(group['params']) - sharded} plain ones (ignored by fully_shard), which foreach and fused kernels "
            "cannot update together. Give each kind its own group: "
            f"torch.optim.{name}(fullshard.split_param_groups(model.parameters()), ...)"
        )


def split_param_groups(params: Iterable[torch.Tensor] | Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups of one kind each, sharded or plain, for optimizers with `foreach=True` or `fused=True`.

    Args:
        params: What an optimizer takes: parameters, or groups of them with their settings.

    Returns:
        The same groups with the same settings, in order; one that holds both kinds becomes two.
    """
    items: list[Any] = list(params)
    groups = items if items and isinstance(items[0], dict) else [{"params": items}]
    made = []
    for group in groups:
        kinds: dict[bool, list[torch.Tensor]] = {}
        for parameter in group["params"]:
            kinds.setdefault(isinstance(parameter, DTensor), []).append(parameter)
        made += [{**group, "params": parameters} for parameters in kinds.values()]
    return made
