"""A checkpoint that lies in a folder: its manifest, and any part of any tensor."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import torch

from fullshard.core.ckpt.boxes import Box
from fullshard.core.ckpt.manifest import DTYPE_BYTES, Manifest, ManifestError, TensorEntry, file_name
from fullshard.errors import CheckpointDamagedError, CheckpointError
from fullshard.runtime.checkpoint.collector import no_collection
from fullshard.runtime.checkpoint.files.checks import checksum
from fullshard.runtime.checkpoint.files.memory import torch_dtype
from fullshard.runtime.checkpoint.files.reading import PORTION_BYTES, Portion, TensorFile, open_regular
from fullshard.runtime.checkpoint.files.stretches import ReadAhead, Stretch, stretches

MANIFEST_FILE = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 30
_OPEN_FILES = 16  # more than are read ahead from
_TRAILER = re.compile(rb', "checksum": "([0-9a-f]{16})"\}\n')
_TRAILER_BYTES = len(', "checksum": "0123456789abcdef"}\n')

_Take = Callable[[torch.Tensor], None]
_Wanted = tuple[str, Box, Box, torch.Tensor]  # name, piece that is in a file, which part is wanted of all, where to


@no_collection()
def manifest_bytes(manifest: Manifest) -> bytes:
    """The content of a manifest's file: JSON whose last member is a checksum of what stands before it."""
    body = manifest.to_text().encode()[:-1]
    return body + f', "checksum": "{checksum(body):016x}"}}\n'.encode()


@no_collection()
def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint that may come from anyone.

    Raises:
        CheckpointDamagedError: There is none, or it is damaged.
        CheckpointError: It cannot be read.
    """
    path = folder / MANIFEST_FILE
    file, nbytes = open_regular(path)
    with os.fdopen(file, "rb") as opened:
        if nbytes > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"{path} has {nbytes} bytes, more than any real manifest")
        data = opened.read(nbytes)
    found = _TRAILER.fullmatch(data[-_TRAILER_BYTES:])
    if found is None:
        raise CheckpointDamagedError(f"{path} does not end with its checksum: it is cut short, or no manifest")
    if int(found[1], 16) != checksum(memoryview(data)[:-_TRAILER_BYTES]):
        raise CheckpointDamagedError(f"{path} is damaged: its content does not fit its checksum")
    try:
        return Manifest.from_text(data)
    except ManifestError as error:
        raise CheckpointDamagedError(f"{path}: {error}") from None


@dataclass(frozen=True, slots=True)
class Examined:
    """What verifying every byte of a file, or of all files, has found.

    Attributes:
        problems: What is damaged, sentence by sentence; empty if nothing is.
        nbytes: Bytes of tensors that were read and are as they were written.
    """

    problems: list[str]
    nbytes: int


class Checkpoint:
    """A checkpoint in a folder. Nothing is read but what is asked for, through a few buffers.

    Args:
        path: The folder itself may be reached by a link; nothing in it may be one.
        verify: Compare what is read with its checksums.
        manifest: If it has been read already.

    Raises:
        CheckpointDamagedError: It has no manifest, or one that is damaged.
    """

    def __init__(self, path: Path, verify: bool = True, manifest: Manifest | None = None) -> None:
        self.path = path
        self.manifest = manifest or read_manifest(path)
        self._verify = verify
        self._direct = False
        self._ahead = ReadAhead()
        self._files: OrderedDict[int, TensorFile] = OrderedDict()  # the latest ones; there may be thousands

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        while self._files:
            self._files.popitem()[1].close()

    def bypass_cache(self) -> None:
        """What is read from now on is read once: filling the cache of the system with it takes time and memory."""
        self.close()
        self._direct = True

    def is_replaced(self) -> bool:
        """Whether the folder is gone, or holds another checkpoint by now."""
        try:
            return read_manifest(self.path) != self.manifest
        except CheckpointError:
            return True

    def entry(self, name: str) -> TensorEntry:
        """Shape and dtype of a tensor, by any of its names."""
        return self.manifest.tensors[self.manifest.resolve(name)]

    def tensor(self, name: str) -> torch.Tensor:
        """All of a tensor, on the CPU.

        Raises:
            CheckpointError: There is no memory for it: it may be large, or the manifest may only say so.
            CheckpointDamagedError: See `read`.
        """
        entry = self.entry(name)
        try:
            made = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype))
        except RuntimeError as error:
            raise CheckpointError(f"{self.path}: no memory for tensor {name!r} of {entry.nbytes} bytes") from error
        self.read(name, Box.whole(entry.shape), made)
        return made

    def read(self, name: str, box: Box, out: torch.Tensor) -> None:
        """Read part of a tensor, wherever its rows are.

        Args:
            name: Of the tensor.
            box: Which part.
            out: Tensor of shape `box.sizes`, of any dtype and on any device.

        Raises:
            CheckpointDamagedError: A file is missing, or is not as it was written.
        """
        self.read_all([(name, box, out)])

    def read_all(self, wanted: Iterable[tuple[str, Box, torch.Tensor]]) -> None:
        """Read parts of many tensors, see `read`: file by file, each from front to back. Quicker than one by one."""
        by_rank: dict[int, list[_Wanted]] = {}
        for alias, box, out in wanted:
            name = self.manifest.resolve(alias)
            shape = self.manifest.tensors[name].shape
            for rank, piece in self.manifest.division_of(name).overlapping(shape, box):
                by_rank.setdefault(rank, []).append((name, piece, box, out))
        with closing(self._ahead.run(self._stretches(by_rank))) as fetched:
            for stretch in fetched:
                for portion, take in stretch.portions:
                    take(stretch.data(portion))

    def _stretches(self, by_rank: dict[int, list[_Wanted]]) -> Iterator[Stretch[_Take]]:
        """What to read of each file, and how it comes to its places."""
        for rank in sorted(by_rank):
            file = self._open(rank)
            yield from stretches(file, (each for wanted in by_rank.pop(rank) for each in self._portions(file, wanted)))

    def _portions(self, file: TensorFile, wanted: _Wanted) -> Iterator[tuple[Portion, _Take]]:
        name, piece, box, out = wanted
        wrong = self._wrong_span(file, name, piece)
        if wrong:
            raise CheckpointDamagedError(wrong)
        part = piece.overlap(box)
        assert part is not None
        yield from _copies(file, name, piece, part, out[part.within(box)] if box.sizes else out)

    def check_file(self, rank: int) -> None:
        """Verify every byte of one rank's file, and that it holds what the manifest says.

        Raises:
            CheckpointDamagedError: It is not as it was written.
        """
        found = self.examine(rank)
        if found.problems:
            raise CheckpointDamagedError(found.problems[0])

    def examine(self, rank: int) -> Examined:
        """The same, to the end: damage does not end it.

        Raises:
            CheckpointError: The file cannot be opened, or not even its header is as it was written.
        """
        file = self._open(rank)
        pieces = self.manifest.pieces(rank)
        problems, good = [], 0
        extra = sorted(file.spans.keys() - pieces.keys())
        if extra:
            problems.append(f"{file.path} holds {', '.join(extra[:5])}, of which the manifest says nothing")
        portions: list[tuple[Portion, Box]] = []
        for name, piece in pieces.items():
            wrong = self._wrong_span(file, name, piece)
            if wrong:
                problems.append(wrong)
            else:
                portions += [(portion, piece) for portion in _whole(file, name)]
        with closing(self._ahead.run(stretches(file, portions))) as fetched:
            for stretch in fetched:
                for portion, piece in stretch.portions:
                    try:
                        good += stretch.data(portion).nbytes
                    except CheckpointDamagedError as error:
                        problems.append(f"{error} (the piece is {piece} of the tensor)")
        return Examined(problems, good)

    def _open(self, rank: int) -> TensorFile:
        file = self._files.pop(rank, None)
        if file is None:
            while len(self._files) >= _OPEN_FILES:
                self._files.popitem(last=False)[1].close()
            file = TensorFile(self.path / file_name(rank), self.manifest.files[rank], self._verify, self._direct)
        self._files[rank] = file
        return file

    def _wrong_span(self, file: TensorFile, name: str, piece: Box) -> str:
        """What is wrong with the entry of a file that shall be a piece of a tensor; nothing if it is that."""
        dtype = self.manifest.tensors[name].dtype
        span = file.spans.get(name)
        if span is not None and span.shape == piece.sizes and span.dtype == dtype:
            return ""
        found = "nothing" if span is None else f"{span.dtype} {list(span.shape)}"
        return f"{file.path}: expected {dtype} {list(piece.sizes)} of tensor {name!r}, found {found}"


def _whole(file: TensorFile, name: str) -> Iterator[Portion]:
    """All of what a file holds of a tensor."""
    nbytes = file.spans[name].nbytes
    for start in range(0, nbytes, PORTION_BYTES):
        yield file.portion(name, start, min(start + PORTION_BYTES, nbytes))


def _copies(file: TensorFile, name: str, piece: Box, part: Box, out: torch.Tensor) -> Iterator[tuple[Portion, _Take]]:
    """How `part` of the `piece` that is in a file comes to `out`, a view of the shape of `part`.

    Rows of the file are read whole, where they are not too long, and what is not wanted of them is left out.
    """
    itemsize = DTYPE_BYTES[file.spans[name].dtype]

    def take(data: torch.Tensor, rows: Box, inner: Box) -> None:
        out[rows.within(part)].copy_(data.view(inner.sizes)[rows.within(inner)])

    for begin, rows, inner in _runs(piece, part, PORTION_BYTES // itemsize):
        stop = begin + prod(inner.sizes)
        yield file.portion(name, begin * itemsize, stop * itemsize), partial(take, rows=rows, inner=inner)


def _runs(piece: Box, part: Box, limit: int) -> Iterator[tuple[int, Box, Box]]:
    """Consecutive elements of `piece` that together hold `part`: (first element, what of `part`, box of the run).

    Each run has at most `limit` elements.
    """
    dims = len(piece.sizes)
    strides = [prod(piece.sizes[dim + 1 :]) for dim in range(dims)]

    def descend(run: Box, wanted: Box, begin: int, dim: int) -> Iterator[tuple[int, Box, Box]]:
        # `run` has one index in each dimension before `dim`, and all from there on.
        if dim == dims:
            yield begin, wanted, run
            return
        start = wanted.offsets[dim] - run.offsets[dim]
        stop = start + wanted.sizes[dim]
        step = max(limit // max(strides[dim], 1), 1)
        deeper = strides[dim] > limit
        for first in range(start, stop, step):
            last = min(first + step, stop)
            rows = run.narrowed(dim, first, last)
            some = wanted.narrowed(dim, first - start, last - start)
            if deeper:
                yield from descend(rows, some, begin + first * strides[dim], dim + 1)
            else:
                yield begin + first * strides[dim], some, rows

    yield from descend(piece, part, 0, 0)
