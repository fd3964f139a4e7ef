"""Writes folders that `torch.distributed.checkpoint.load` reads, divided over files as the checkpoint is."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from fullshard.core.ckpt.boxes import Box
from fullshard.runtime.checkpoint.files.folder import Checkpoint
from fullshard.runtime.checkpoint.files.memory import torch_dtype
from fullshard.tools.ckpt.foreign.dcp import METADATA
from fullshard.tools.ckpt.foreign.dcp_state import TorchState, to_torch
from fullshard.tools.ckpt.foreign.torch_out import append_tensor, append_value
from fullshard.tools.ckpt.outputs import Output
from fullshard.tools.ckpt.pieces import Stream
from fullshard.tools.ckpt.sources import OwnTensor

_VERSION = "1.0.0"  # of the form, as torch 2.13 writes it


def write_dcp(folder: Path, checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> list[str]:
    """Write all of a checkpoint.

    Args:
        folder: New.
        checkpoint: It.
        dtype: Of the floating-point tensors of models; None: as they are.

    Returns:
        Notes about what was left out.
    """
    folder.mkdir()
    writer = _Writer(checkpoint, to_torch(checkpoint.manifest, checkpoint.tensor), dtype)
    for rank in range(checkpoint.manifest.world_size):
        writer.write_rank(folder, rank)
    with Output(folder / METADATA) as output:
        output.write(pickle.dumps(writer.metadata()))
    return writer.state.notes


class _Writer:
    def __init__(self, checkpoint: Checkpoint, state: TorchState, dtype: torch.dtype | None) -> None:
        self.state = state
        self._checkpoint, self._dtype = checkpoint, dtype
        self._stream = Stream()
        self._entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}

    def write_rank(self, folder: Path, rank: int) -> None:
        """The file of one rank; that of the first has the values, too."""
        manifest = self._checkpoint.manifest
        name = f"__{rank}_0.distcp"
        with Output(folder / name) as output:
            for path, value in self.state.values.items() if rank == 0 else ():
                begin = output.file.tell()
                length = append_value(output, value)
                self._entries[_joined(path)] = BytesStorageMetadata()
                self._places[MetadataIndex(_joined(path))] = _StorageInfo(name, begin, length)
            for tensor, box in manifest.pieces(rank).items():
                if tensor in self.state.tensors:
                    begin = output.file.tell()
                    source = OwnTensor(self._checkpoint, tensor)
                    piece = self._stream.piece(tensor, source, box, self._written(tensor))
                    length = append_tensor(output, piece)
                    self._place(tensor, box, _StorageInfo(name, begin, length))

    def _written(self, name: str) -> torch.dtype:
        manifest = self._checkpoint.manifest
        stored = torch_dtype(manifest.tensors[name].dtype)
        value = manifest.state.get(name.partition("/")[0])
        is_module = isinstance(value, dict) and value.get("kind") == "module"
        return self._dtype if self._dtype is not None and is_module and stored.is_floating_point else stored

    def _place(self, tensor: str, box: Box, info: _StorageInfo) -> None:
        """Note where a piece is, under all names of its tensor."""
        aliases = (alias for alias, name in self._checkpoint.manifest.aliases.items() if name == tensor)
        for name in (tensor, *aliases):
            if name in self.state.tensors:
                index = MetadataIndex(_joined(self.state.tensors[name]), torch.Size(box.offsets))
                self._places[index] = info

    def metadata(self) -> Metadata:
        """What `.metadata` holds."""
        manifest = self._checkpoint.manifest
        paths: dict[str, Any] = {_joined(path): path for path in (*self.state.tensors.values(), *self.state.values)}
        for name, path in self.state.tensors.items():
            stored = manifest.resolve(name)
            shape = manifest.tensors[stored].shape
            boxes = [box for _, box in manifest.division_of(stored).overlapping(shape, Box.whole(shape))]
            chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]
            properties = TensorProperties(dtype=self._written(stored))
            self._entries[_joined(path)] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
        return Metadata(self._entries, paths, self._places, StorageMeta(), _VERSION)


def _joined(path: tuple[str | int, ...]) -> str:
    return ".".join(map(str, path))
