"""The few places where the inside of DTensors and meshes is touched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = [
    "StridedShard",
    "concatenate",
    "contiguous_stride",
    "finished",
    "local_of",
    "part_of_full",
    "set_local",
    "sharded_by_rows",
    "sharded_like",
    "wrap",
]


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
    # Not by the class's call: it goes on to an `__init__` that does nothing, behind a switch of the compiler.
    made = DTensor.__new__(DTensor, local if nothing is None else nothing, inside._spec, requires_grad=False)
    if nothing is not None:
        set_local(made, local)
    return made


def wrap(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: torch.Size,
    stride: tuple[int, ...],
) -> torch.Tensor:
    """A DTensor around `local` itself, without communication or autograd; `shape` and `stride` are the global ones."""
    spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, local.dtype))
    return DTensor(local, spec, requires_grad=False)


def concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """One mesh with the dims of several slices of the same mesh, in that order; makes no process groups."""
    made: DeviceMesh = DeviceMesh._concatenate(list(meshes))
    return made


def finished(tensor: torch.Tensor) -> torch.Tensor:
    """The result of a functional collective that may still run."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, in elements."""
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def part_of_full(parameter: Any, full: torch.Tensor) -> torch.Tensor:
    """This rank's part of a full tensor of the global shape of the DTensor `parameter`, as a view.

    Dims are split as `torch.chunk` does: by the mesh axes in their order, except that strided shards, which split what
    another axis has split already (data parallel over tensor parallel), come last.
    """
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None, "the rank is not in the mesh of its parameter"
    sharded = [(axis, kind) for axis, kind in enumerate(parameter.placements) if not kind.is_replicate()]
    for axis, kind in sorted(sharded, key=lambda item: isinstance(item[1], StridedShard)):
        dim = _sharded_dim(kind)
        rows = -(-full.shape[dim] // parameter.device_mesh.size(axis))
        start = min(rows * coordinate[axis], full.shape[dim])
        full = full.narrow(dim, start, min(rows, full.shape[dim] - start))
    return full


def _sharded_dim(placement: Placement) -> int:
    if not isinstance(placement, Shard | StridedShard):
        raise ValueError(f"a full tensor cannot be split by the placement {placement}; expected shards and replicas")
    return placement.dim


def sharded_by_rows(parameter: Any, full: torch.Tensor) -> torch.Tensor:
    """A full tensor as a DTensor placed like the DTensor `parameter`; its local part is a view of `full`."""
    local = part_of_full(parameter, full.detach())
    return wrap(local, parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride())
