"""What loading is going to do: which part of which tensor is read where to, and what does not fit. Nothing changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard.core.ckpt.boxes import Box
from fullshard.core.ckpt.manifest import Manifest, TensorEntry
from fullshard.runtime.checkpoint.files.memory import torch_dtype
from fullshard.runtime.checkpoint.state.rows import Rows
from fullshard.runtime.checkpoint.state.values import decode
from fullshard.runtime.dtensors import local_of, sharded_like

Read = tuple[str, Box, torch.Tensor]


@dataclass(slots=True)
class Plan:
    """See the module.

    Attributes:
        manifest: Of the checkpoint.
        rank: This rank.
        world_size: Ranks that load.
        reads: (name of a tensor, which part, where to): `out` has the shape of the part, any dtype and device.
        finishers: What is to be done in this order when everything has been read.
        problems: What does not fit, whatever is strict.
        missing: Names that are wanted and not in the checkpoint.
        unexpected: Names in the checkpoint that nobody wants.
        skipped: Keys of the checkpoint that are not loaded.
        strict: Names among `missing` and `unexpected` that are not allowed to be.
        converted: Name -> from which dtype to which.
    """

    manifest: Manifest
    rank: int
    world_size: int
    reads: list[Read] = field(default_factory=list)
    finishers: list[Callable[[], None]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    strict: set[str] = field(default_factory=set)
    converted: dict[str, str] = field(default_factory=dict)
    rows: Rows = field(default_factory=Rows)

    def entry(self, name: str) -> TensorEntry | None:
        """What the checkpoint has under any name of a tensor."""
        return self.manifest.tensors.get(self.manifest.resolve(name))

    def read(self, name: str, tensor: torch.Tensor) -> None:
        """Fill this rank's part of `tensor` from the checkpoint, or note why that cannot be."""
        entry = self.entry(name)
        assert entry is not None, "whoever asks has looked"
        found = torch_dtype(entry.dtype)
        if entry.shape != tuple(tensor.shape):
            self.problems.append(f"{name} has shape {entry.shape} in the checkpoint, expected {tuple(tensor.shape)}")
        elif tensor.is_meta:
            self.problems.append(f"{name} is on the meta device: call fullshard.materialize(model) or to_empty() first")
        elif found != tensor.dtype and not (found.is_floating_point and tensor.dtype.is_floating_point):
            self.problems.append(f"{name} is {found} in the checkpoint, expected {tensor.dtype}")
        else:
            try:
                self.reads.append((name, *self.rows.wanted(tensor, name)))
            except ValueError as error:
                self.problems.append(str(error))
            if found != tensor.dtype:
                self.converted[name] = f"{found} -> {tensor.dtype}"

    def miss(self, names: list[str], strict: bool) -> None:
        """These are wanted, and the checkpoint does not have them."""
        self.missing += names
        self.strict.update(names if strict else ())

    def leave(self, names: list[str], strict: bool) -> None:
        """The checkpoint has these, and nobody wants them."""
        self.unexpected += names
        self.strict.update(names if strict else ())

    def decode(self, value: Any, key: str, like: Mapping[str, torch.Tensor] | None = None) -> Any:
        """A value whose tensors are filled when everything is read; `None` after a problem.

        Args:
            value: JSON of the checkpoint, which may come from anyone.
            key: Whose value it is; its tensors are called KEY/..., or KEY@RANK/... where each rank has its own.
            like: By name, how each tensor is placed in the object that the value is for; whole on the CPU otherwise.
        """
        made: dict[str, torch.Tensor] = {}

        def get(name: str) -> torch.Tensor:
            entry = self.entry(name)
            if entry is None or name.partition("/")[0].partition("@")[0] != key:
                raise ValueError(f"it refers to the tensor {name[:80]!r}, which is not among those of {key}")
            if name not in made:
                made[name] = _blank(entry, (like or {}).get(name))
                self.read(name, made[name])
            return made[name]

        try:
            return decode(value, key, get)
        except ValueError as error:
            self.problems.append(str(error))
            return None

    def decode_dict(self, value: Any, key: str) -> dict[Any, Any]:
        """The same for what must be a dict; an empty one after a problem."""
        made = self.decode(value, key)
        if not isinstance(made, dict):
            self.problems.append(f"the value of {key} in the checkpoint is damaged: expected a dict in it")
            return {}
        return made


def _blank(entry: TensorEntry, like: torch.Tensor | None) -> torch.Tensor:
    dtype = torch_dtype(entry.dtype)
    if isinstance(like, DTensor) and tuple(like.shape) == entry.shape:
        return blank_like(like, dtype)
    return torch.empty(entry.shape, dtype=dtype)


def blank_like(like: DTensor, dtype: torch.dtype) -> torch.Tensor:
    """A DTensor placed like another one, with memory for this rank's part and no values."""
    own = local_of(like)
    device = like.device_mesh.device_type if own.is_meta else own.device
    return sharded_like(like, torch.empty(own.shape, dtype=dtype, device=device))
