"""The few places where the inside of a DTensor is touched."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor: the tensor itself, not a new alias as `to_local` makes."""
    inside: Any = tensor
    local: torch.Tensor = inside._local_tensor
    return local


def set_local(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Put another tensor of the same shape behind a DTensor, which stays the same object."""
    inside: Any = tensor
    inside._local_tensor = local


def sharded_like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A DTensor with the mesh, placements and global shape of `parameter` around `local`."""
    inside: Any = parameter
    return DTensor(local, inside._spec, requires_grad=False)
