"""The header of a safetensors file: which bytes are which tensor.

Eight bytes tell the length of a JSON object {name: {"dtype", "shape", "data_offsets"}}; the data follow. The library
`safetensors` reads files as a whole or maps them; here ranges are read and written, so the header is handled here.
Files that it writes are read here, and the other way round (tests/single/test_checkpoint_files.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from fullshard.core.ckpt.manifest import DTYPE_BYTES, ManifestError, strict_json
from fullshard.runtime.checkpoint.files.checks import TABLE

PAGE_BYTES = 4096  # direct I/O moves whole pages
MAX_HEADER_BYTES = 100_000_000  # the limit of the library
_LENGTH_BYTES = 8
_METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class Span:
    """A tensor in a file: bytes [start, stop) of it."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.stop - self.start


def lay_out(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, dict[str, Span]]:
    """Header and places for (name, dtype, shape), in the order of the file; data begin at a whole page.

    There are no gaps, so order is what aligns: first all that fill whole units of 16 bytes, then the rest, those with
    large elements first. Each tensor begins at a multiple of its element's size. The table of checksums comes last.
    """
    sizes = [prod(shape) * DTYPE_BYTES[dtype] for _, dtype, shape in tensors]
    odd = [bool(size % 16) for size in sizes]

    def place(i: int) -> tuple[bool, bool, int]:
        name, dtype, _ = tensors[i]
        return name == TABLE, odd[i], -DTYPE_BYTES[dtype] if odd[i] else 0

    order = sorted(range(len(tensors)), key=place)
    members: dict[str, Any] = {}
    end = 0
    for i in order:
        name, dtype, shape = tensors[i]
        members[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + sizes[i]]}
        end += sizes[i]
    text = json.dumps(members, separators=(",", ":")).encode()
    length = -(-(len(text) + _LENGTH_BYTES) // PAGE_BYTES) * PAGE_BYTES - _LENGTH_BYTES
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"a header for {len(tensors)} tensors has {length} bytes, more than safetensors allows")
    data = length + _LENGTH_BYTES
    spans = {
        name: Span(m["dtype"], tuple(m["shape"]), *(data + offset for offset in m["data_offsets"]))
        for name, m in members.items()
    }
    return length.to_bytes(_LENGTH_BYTES, "little") + text.ljust(length), spans


def header_bytes(first: bytes, file_bytes: int) -> int:
    """Bytes of a header with its length, from the first bytes of a file.

    Raises:
        ManifestError: It would not fit the file, or is larger than any real one.
    """
    if len(first) < _LENGTH_BYTES:
        raise ManifestError(f"the file has {file_bytes} bytes, too few for a safetensors header")
    length = int.from_bytes(first[:_LENGTH_BYTES], "little")
    if length > min(MAX_HEADER_BYTES, file_bytes - _LENGTH_BYTES):
        raise ManifestError(f"its header claims {length} bytes, but the file has {file_bytes}")
    return _LENGTH_BYTES + length


def parse(header: bytes, file_bytes: int) -> dict[str, Span]:
    """Tensors of a file, in the order of their data.

    Raises:
        ManifestError: The header is damaged: not JSON, or ranges that overlap, leave gaps, or do not fit shapes.
    """
    members = strict_json(header[_LENGTH_BYTES:].rstrip(b" \0"))
    if not isinstance(members, dict):
        raise ManifestError("its header is not a JSON object")
    members.pop(_METADATA, None)
    spans = {name: _span(name, member, len(header)) for name, member in members.items()}
    ordered = dict(sorted(spans.items(), key=lambda item: (item[1].start, item[1].stop)))
    end = len(header)
    for name, span in ordered.items():
        if span.start != end:
            raise ManifestError(f"the bytes of {name!r} begin at {span.start}, but those before it end at {end}")
        end = span.stop
    if end != file_bytes:
        raise ManifestError(f"its tensors end at byte {end}, but the file has {file_bytes}")
    return ordered


def _span(name: str, member: Any, data: int) -> Span:
    if isinstance(member, dict) and isinstance(member.get("dtype"), str) and member["dtype"] in DTYPE_BYTES:
        dtype, shape, offsets = member["dtype"], _sizes(member.get("shape")), _sizes(member.get("data_offsets"))
        if shape is not None and offsets is not None and len(offsets) == 2:
            span = Span(dtype, shape, data + offsets[0], data + offsets[1])
            if prod(shape) * DTYPE_BYTES[dtype] == span.nbytes:
                return span
    raise ManifestError(f"its header describes {name!r} as {str(member)[:100]}, which is not possible")


def _sizes(values: Any) -> tuple[int, ...] | None:
    """A list of sizes, or None if it is something else."""
    fits = isinstance(values, list) and all(type(value) is int and 0 <= value < 2**62 for value in values)
    return tuple(values) if fits else None
