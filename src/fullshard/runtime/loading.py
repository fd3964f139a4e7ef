"""Loading that changes everything or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.runtime.dtensors import local_of


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
