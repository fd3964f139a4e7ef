"""Folders of `torch.distributed.checkpoint`, read without its own reader.

`.metadata` is a pickle: shapes, dtypes, the chunks of each tensor, and for each chunk the file and the range of bytes
in which it lies, an archive of `torch.save` of its own. torch's reader unpickles that file, so whoever wrote a folder
can run what they like in whoever opens it. Here the pickle is data (`pickles.py`), and what it says is checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fullshard.core.ckpt.boxes import Box
from fullshard.errors import CheckpointDamagedError, CheckpointError
from fullshard.tools.ckpt.foreign.pickles import Made, Maker, as_dict, as_record, read_pickle
from fullshard.tools.ckpt.foreign.stored import Folder, StoredTensor, plain_name
from fullshard.tools.ckpt.foreign.torch_files import DTYPES, Range, dtype_of, read_archive

METADATA = ".metadata"
_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_RECORDS = frozenset(
    (
        *(
            f"{_METADATA_MODULE}.{name}"
            for name in (
                *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
                *("TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
            )
        ),
        *(  # names that earlier versions of torch used
            f"torch.distributed._shard.sharded_tensor.metadata.{name}"
            for name in ("TensorProperties", "MEM_FORMAT_ENCODING")
        ),
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.serialization._get_layout",
        *(f"pathlib.{name}" for name in ("PosixPath", "PurePosixPath", "WindowsPath")),
        *(f"pathlib._local.{name}" for name in ("PosixPath", "PurePosixPath", "WindowsPath")),
    )
)
Path_ = tuple[str | int, ...]


@dataclass(frozen=True)
class Chunked:
    """A tensor in chunks, each a range of bytes of a file; opened when it is read."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[tuple[Box, Range], ...]

    def read(self, box: Box, out: torch.Tensor, buffer: torch.Tensor) -> None:
        """Copy part of the tensor to `out`, of shape `box.sizes`, through `buffer`."""
        for chunk, where in self.chunks:
            part = chunk.overlap(box)
            if part is None:
                continue
            inside = Box(tuple(a - b for a, b in zip(part.offsets, chunk.offsets, strict=True)), part.sizes)
            self._stored(chunk, where).read(inside, out[part.within(box)], buffer)

    def _stored(self, chunk: Box, where: Range) -> StoredTensor:
        found = read_archive(where)
        if not isinstance(found, StoredTensor) or found.shape != chunk.sizes or found.dtype != self.dtype:
            raise CheckpointDamagedError(f"{where}: expected {self.dtype} {list(chunk.sizes)} of {self.name!r}")
        return found


@dataclass(frozen=True)
class DcpFolder:
    """What is in a folder.

    Attributes:
        folder: Its files.
        tensors: By name as torch has it ("model.blocks.0.weight").
        values: Where other values are, by such a name.
        paths: Keys that lead to each name in the state dict that was saved; ("model", "blocks.0.weight").
    """

    folder: Folder
    tensors: Mapping[str, Chunked]
    values: Mapping[str, Range]
    paths: Mapping[str, Path_]

    def value(self, name: str) -> Any:
        """A value that is no tensor: plain data, with a `StoredTensor` or a record for what is none."""
        return read_archive(self.values[name])


def open_dcp(path: Path) -> DcpFolder:
    """Open a folder of `torch.distributed.checkpoint`.

    Raises:
        UnsafePickleError: Its metadata are no metadata.
        CheckpointDamagedError: They are damaged, or files are cut short.
    """
    folder = Folder(path)
    if not (path / METADATA).exists():
        raise CheckpointDamagedError(f"{path} has no file {METADATA}: it is no complete torch.distributed.checkpoint")
    data = folder.bytes(METADATA, 0, folder.size(METADATA))
    try:
        members = _members(read_pickle(data, _known, _no_persistent, str(path / METADATA)), "Metadata")
        places = dict(_places(folder, members["storage_data"]))
        described = members["state_dict_metadata"]
        tensors = {
            name: _tensor(name, _members(entry, "TensorStorageMetadata"), places)
            for name, entry in described.items()
            if not _is_bytes(entry)
        }
        values = {name: places[name, None] for name, entry in described.items() if _is_bytes(entry)}
        paths = {name: _path(name, members.get("planner_data")) for name in described}
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise CheckpointDamagedError(f"{path / METADATA} is not as torch writes it ({what})") from None
    return DcpFolder(folder, tensors, values, paths)


def _known(name: str) -> Maker | None:
    if name == "torch.Size":
        return lambda args: tuple(args[0])
    if name == "collections.OrderedDict":
        return as_dict
    return as_record(name) if name in _RECORDS or name in DTYPES else None


def _no_persistent(_: tuple[Any, ...]) -> Any:
    raise TypeError("it has a persistent id")


def _members(value: Any, kind: str) -> dict[str, Any]:
    if not isinstance(value, Made) or value.name.rpartition(".")[2] != kind or not isinstance(value.state, dict):
        raise TypeError(f"expected a {kind}")
    return value.state


def _is_bytes(value: Any) -> bool:
    return isinstance(value, Made) and value.name.endswith(".BytesStorageMetadata")


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(type(size) is int and 0 <= size < 2**62 for size in value):
        raise TypeError("expected sizes")
    return value


def _places(folder: Folder, storage: Any) -> Iterator[tuple[tuple[str, tuple[int, ...] | None], Range]]:
    """((name, offsets of a chunk, or None for a value that is no tensor), where it lies)."""
    for index, info in storage.items():
        key, place = _members(index, "MetadataIndex"), _members(info, "_StorageInfo")
        name, file, start, length = key["fqn"], place["relative_path"], place["offset"], place["length"]
        if place.get("transform_descriptors"):
            raise CheckpointError(f"{folder.path}: {name!r} is stored transformed (compressed), which is not read here")
        plain_name(file, str(folder.path / METADATA))
        if type(start) is not int or type(length) is not int or not 0 <= start <= start + length <= folder.size(file):
            raise CheckpointDamagedError(f"{folder.path / file} has no bytes {start} to {start} + {length} of {name!r}")
        offsets = key.get("offset")
        yield (name, None if offsets is None else _sizes(offsets)), Range(folder, file, start, length)


def _tensor(
    name: str, members: Mapping[str, Any], places: Mapping[tuple[str, tuple[int, ...] | None], Range]
) -> Chunked:
    shape = _sizes(members["size"])
    properties = members["properties"]
    state = properties.state if isinstance(properties, Made) else None
    dtype = dtype_of(state[0] if isinstance(state, tuple) else _members(properties, "TensorProperties")["dtype"])
    chunks = []
    for entry in members["chunks"]:
        chunk = _members(entry, "ChunkStorageMetadata")
        box = Box(_sizes(chunk["offsets"]), _sizes(chunk["sizes"]))
        if box.numel:
            chunks.append((box, places[name, box.offsets]))
    _check_tiling(name, shape, [box for box, _ in chunks])
    return Chunked(name, shape, dtype, tuple(chunks))


def _check_tiling(name: str, shape: tuple[int, ...], boxes: list[Box]) -> None:
    """Each element is in exactly one chunk."""
    whole = Box.whole(shape)
    inside = all(len(box.offsets) == len(box.sizes) == len(shape) and box.overlap(whole) == box for box in boxes)
    if not inside or sum(box.numel for box in boxes) != whole.numel or _overlap(boxes):
        raise CheckpointDamagedError(f"the chunks of {name!r} are not together its shape {list(shape)[:8]}")


def _overlap(boxes: list[Box]) -> bool:
    """Whether any two boxes share an element. Along the dimension that is cut most, few can meet."""
    if len(boxes) < 2 or not boxes[0].sizes:
        return len(boxes) > 1
    most = max(range(len(boxes[0].sizes)), key=lambda dim: len({box.offsets[dim] for box in boxes}))
    active: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offsets[most]):
        active = [other for other in active if other.offsets[most] + other.sizes[most] > box.offsets[most]]
        if any(other.overlap(box) is not None for other in active):
            return True
        active.append(box)
    return False


def _path(name: str, planner: Any) -> Path_:
    found = planner.get(name) if isinstance(planner, dict) else None
    if isinstance(found, tuple) and found and all(type(key) in (str, int) for key in found):
        return found
    return (name,)
