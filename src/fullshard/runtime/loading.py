"""Loading that changes everything or nothing, and takes no rank's rows for another's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.errors import MisuseError
from fullshard.runtime.dtensors import local_of
from fullshard.runtime.names import plain_name


@contextmanager
def all_or_nothing(module: nn.Module) -> Iterator[None]:
    """If the block raises, parameters and buffers of `module` are the same objects with the same values as before.

    `nn.Module.load_state_dict` writes what fits before it raises for what does not. Memory: a copy of this rank's
    shards and of all buffers while the block runs.
    """
    kept: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]] = [
        (registry, name, tensor, tensor if tensor.is_meta else local_part_of(tensor).clone())
        for part in module.modules()
        for registry in (part._parameters, part._buffers)
        for name, tensor in registry.items()
        if tensor is not None
    ]
    try:
        yield
    except Exception:
        with torch.no_grad():
            for registry, name, tensor, value in kept:
                registry[name] = tensor
                if not tensor.is_meta:
                    local_part_of(tensor).copy_(value)
        raise


def local_part_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor: its part of a `DTensor`, all of another one."""
    return local_of(tensor).detach() if isinstance(tensor, DTensor) else tensor.detach()


def refuse_rows_of_others(state: dict[str, Any], prefix: str) -> None:
    """Find `DTensor`s that another rank has pickled: they hold that rank's rows, and would go where ours belong.

    Raises:
        MisuseError: There is one below `prefix`. Not on the rank that saved it.
    """
    ranks: dict[int, int | None] = {}  # by mesh: those of one file share it
    for key, value in state.items():
        if key.startswith(prefix) and isinstance(value, DTensor):
            mesh = value.device_mesh
            if id(mesh) not in ranks:
                place = mesh.get_coordinate()
                ranks[id(mesh)] = None if place is None else int(mesh.mesh[tuple(place)])
            if ranks[id(mesh)] != dist.get_rank() and not all(p.is_replicate() for p in value.placements):
                raise MisuseError(
                    f"the value of {plain_name(key)!r} holds only the rows of rank {ranks[id(mesh)]}, which saved it, "
                    f"and this is rank {dist.get_rank()}. A sharded state dict in one rank's file is not the whole "
                    "model: save with torch.distributed.checkpoint, or save full tensors (fullshard.full_tensor, "
                    "FULL_STATE_DICT)"
                )
