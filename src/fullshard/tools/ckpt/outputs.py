"""What the commands write: in full under another name first, so that nothing half-written has the name that counts."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fullshard.core.ckpt.manifest import DTYPE_BYTES
from fullshard.errors import CheckpointError, CheckpointExistsError
from fullshard.runtime.checkpoint.files.writing import Piece
from fullshard.runtime.checkpoint.publish import sync_folder

_STAGING_BYTES = 8 << 20
_WRITTEN = re.compile(r"config\.json|model.*\.safetensors(\.index\.json)?|\.metadata|__\d+_\d+\.distcp")


@contextmanager
def new_path(path: Path, overwrite: bool) -> Iterator[Path]:
    """A hidden path beside `path`, for a file or a folder, which takes its place at the end and goes on errors.

    Raises:
        CheckpointExistsError: There is something, and it is not to be replaced.
        CheckpointError: It cannot be written.
    """
    if (path.exists() or path.is_symlink()) and not overwrite:
        raise CheckpointExistsError(f"{path} exists; name another place, or give --overwrite")
    _refuse_foreign(path)
    new, old = (path.with_name(f".{path.name}.{secrets.token_hex(8)}.{kind}") for kind in ("tmp", "old"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield new
        if path.is_dir() and not path.is_symlink():
            path.rename(old)  # a folder is not replaced in one step
        new.replace(path)
        sync_folder(path.parent)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if old.exists() and not path.exists():
            old.rename(path)
        _remove(new)
        _remove(old)


def _refuse_foreign(path: Path) -> None:
    """No pipe or device is replaced, and a folder only if nothing is in it that these commands did not write."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise CheckpointExistsError(f"{path} is no file or folder, so it is not replaced: name another place")
    if path.is_dir() and not path.is_symlink():
        foreign = sorted(entry.name for entry in path.iterdir() if not _WRITTEN.fullmatch(entry.name))
        if foreign:
            raise CheckpointExistsError(
                f"{path} holds {foreign[0]!r}, which is nothing that is written here, so it is not replaced: name "
                "another place, or remove it yourself"
            )


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


class Output:
    """A new file that bytes and pieces are appended to, through one buffer.

    Attributes:
        file: It, at its end.
    """

    def __init__(self, path: Path) -> None:
        self.file = path.open("xb", buffering=0)
        self._staging = torch.empty(_STAGING_BYTES, dtype=torch.uint8)
        self._view = memoryview(self._staging.numpy().data)

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            os.fsync(self.file.fileno())
        self.file.close()

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        left = memoryview(data)
        while left:
            left = left[self.file.write(left) :]

    def portions(self, piece: Piece) -> Iterator[memoryview]:
        """The bytes of a piece, in portions that are valid until the next one."""
        for offset in range(0, piece.nbytes, _STAGING_BYTES):
            count = min(_STAGING_BYTES, piece.nbytes - offset)
            piece.fill(offset, self._staging[:count])
            yield self._view[:count]


def write_safetensors(path: Path, pieces: Sequence[Piece], metadata: Mapping[str, str]) -> None:
    """One plain safetensors file, for every reader of them."""
    ordered = sorted(pieces, key=lambda piece: -DTYPE_BYTES[piece.dtype])  # so that each begins at a whole element
    members: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for piece in ordered:
        offsets = [end, end + piece.nbytes]
        members[piece.name] = {"dtype": piece.dtype, "shape": list(piece.shape), "data_offsets": offsets}
        end += piece.nbytes
    text = json.dumps(members, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with Output(path) as output:
        output.write(len(text).to_bytes(8, "little") + text)
        for piece in ordered:
            for portion in output.portions(piece):
                output.write(portion)


def write_json(path: Path, value: Any) -> None:
    """A small file."""
    with Output(path) as output:
        output.write((json.dumps(value, indent=2) + "\n").encode())
