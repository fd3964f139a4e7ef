"""What every kind of checkpoint looks like to the commands: tensors by name, of which any part can be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

import torch

from fullshard.core.ckpt.boxes import Box
from fullshard.runtime.checkpoint.files.folder import Checkpoint
from fullshard.runtime.checkpoint.files.memory import torch_dtype


class Readable(Protocol):
    """A tensor that lies in files."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """As it is stored."""

    def read(self, box: Box, out: torch.Tensor, buffer: torch.Tensor) -> None:
        """Copy part of it to `out`, of shape `box.sizes` and any dtype, through `buffer`, uint8 [any]."""


@dataclass
class Source:
    """A checkpoint of any kind.

    Attributes:
        tensors: By name.
        aliases: Other name of a tensor -> its name.
        values: JSON values of each key of the state.
        step: Optimizer steps done, where the format tells.
        notes: What was left out, and why: sentences for the user.
    """

    tensors: dict[str, Readable]
    aliases: dict[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0
    notes: list[str] = field(default_factory=list)
    on_close: Callable[[], None] = lambda: None

    def __enter__(self) -> Source:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.on_close()


@dataclass(frozen=True, slots=True)
class OwnTensor:
    """A tensor of a checkpoint in our format."""

    checkpoint: Checkpoint
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Readable`."""
        return self.checkpoint.entry(self.name).shape

    @property
    def dtype(self) -> torch.dtype:
        """See `Readable`."""
        return torch_dtype(self.checkpoint.entry(self.name).dtype)

    def read(self, box: Box, out: torch.Tensor, buffer: torch.Tensor) -> None:  # noqa: ARG002  it has its own buffer
        """See `Readable`; what is read is verified."""
        self.checkpoint.read(self.name, box, out)


@dataclass(frozen=True, slots=True)
class Cast:
    """A tensor whose numbers are read as another dtype."""

    tensor: Readable
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Readable, dtype: torch.dtype | None) -> Readable:
        """A floating-point tensor as `dtype`; any other, or without one, as it is."""
        return cls(tensor, dtype) if dtype is not None and tensor.dtype.is_floating_point else tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Readable`."""
        return self.tensor.shape

    def read(self, box: Box, out: torch.Tensor, buffer: torch.Tensor) -> None:
        """See `Readable`."""
        self.tensor.read(box, out, buffer)
