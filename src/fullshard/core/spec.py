"""What the core knows about a model: names, shapes and places, never tensors."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter as every rank must see it.

    Attributes:
        name: Fully qualified name, relative to the module that was sharded.
        shape: Global (unsharded) shape.
        dtype: Name of the dtype the parameter is stored in, such as "float32".
        itemsize_bytes: Bytes of one element of `dtype`.
        trainable: Whether the parameter required gradients when it was sharded.
        shard_dim: Tensor dimension whose rows are divided over the ranks.
        aliases: Other names of the same parameter (tied weights).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize_bytes: int
    trainable: bool = True
    shard_dim: int = 0
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.shape and not 0 <= self.shard_dim < len(self.shape):
            raise ValueError(
                f"parameter {self.name!r} of shape {self.shape} cannot be sharded on dim {self.shard_dim}: "
                f"choose a dim from 0 to {len(self.shape) - 1}"
            )
        if self.itemsize_bytes < 1:
            raise ValueError(f"parameter {self.name!r}: itemsize_bytes must be positive, got {self.itemsize_bytes}")

    @property
    def replicated(self) -> bool:
        """A 0-d parameter has no rows to divide, so every rank holds it."""
        return not self.shape

    @property
    def rows(self) -> int:
        """Size along the sharded dim; 1 for a 0-d parameter."""
        return self.shape[self.shard_dim] if self.shape else 1

    @property
    def row_numel(self) -> int:
        """Elements in one row."""
        return prod(self.shape[: self.shard_dim]) * prod(self.shape[self.shard_dim + 1 :])

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class World:
    """This rank's place: `rank` of `size` along the shard axis, `replica` of `replicas` along the replicate axis."""

    rank: int
    size: int
    replica: int = 0
    replicas: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank must be in [0, {self.size}), got {self.rank}")
        if not 0 <= self.replica < self.replicas:
            raise ValueError(f"replica must be in [0, {self.replicas}), got {self.replica}")

    @property
    def data_parallel_size(self) -> int:
        """Ranks over which gradients are averaged."""
        return self.size * self.replicas
