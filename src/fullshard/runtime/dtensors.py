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


def sharded_like(parameter: torch.Tensor, local: torch.Tensor, nothing: torch.Tensor | None = None) -> torch.Tensor:
    """A DTensor with the mesh, placements and global shape of `parameter` around `local`.

    Args:
        parameter: Whose place on the mesh it shall have.
        local: This rank's part.
        nothing: Empty tensor of the dtype and device of `local`, to be given if `local` is a view at an offset. A
            DTensor shows the offset of the local tensor that it is made around, but no memory; torch's `copy.deepcopy`
            takes it for a tensor with memory then, and fails. Made around nothing, it shows no offset.
    """
    inside: Any = parameter
    made = DTensor(local if nothing is None else nothing, inside._spec, requires_grad=False)
    if nothing is not None:
        set_local(made, local)
    return made
