"""Text files -> two byte arrays on disk (training and held-out), memory-mapped by every rank.

Tokens are bytes. Files are joined by a NUL byte, which text does not contain, so the model sees where a document
ends. A file goes to the held-out part by the hash of its content: the split does not depend on names, order or the
number of files, and copies of one file never land on both sides. Only one file is in memory at a time while building;
afterwards a rank holds only the pages it reads.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from fullshard.train.config import DataConfig
from fullshard.train.errors import DataError

DOCUMENT_END = b"\0"
TRAIN_FILE, VALID_FILE, INDEX_FILE = "train.bin", "valid.bin", "corpus.json"


@dataclass(frozen=True)
class Corpus:
    """Both parts of the text, memory-mapped read-only."""

    train: npt.NDArray[np.uint8]
    valid: npt.NDArray[np.uint8]
    files: int
    fingerprint: str  # sha256 over both parts: a resumed run must read the same text


def find_files(config: DataConfig) -> list[Path]:
    """The text files named by `data.paths`, sorted, each once. A file named directly needs no known suffix."""
    found: dict[Path, None] = {}
    for entry in config.paths:
        found |= dict.fromkeys(_expand(entry, config))
    return list(found)


def build_corpus(config: DataConfig, folder: Path) -> None:
    """Read all files and write the two parts and their index into `folder`; the index is written last."""
    files = find_files(config)
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {TRAIN_FILE: 0, VALID_FILE: 0}
    used = 0
    with (folder / TRAIN_FILE).open("wb") as train, (folder / VALID_FILE).open("wb") as valid:
        for text in _documents(files, config.max_bytes):
            name, out = (VALID_FILE, valid) if _held_out(text, config.validation_fraction) else (TRAIN_FILE, train)
            sizes[name] += out.write(text + DOCUMENT_END)
            used += 1
    if used == 0:
        raise DataError(
            f"the corpus is empty: {_count(files)} found in data.paths = {list(config.paths)}, but no text."
        )
    if not (sizes[TRAIN_FILE] and sizes[VALID_FILE]):
        _split_tail(folder, config.validation_fraction)
    sizes = {name: (folder / name).stat().st_size for name in sizes}
    _check_size(sizes, config)
    index = {"files": used, "bytes": sizes, "sha256": {name: _sha256(folder / name) for name in sizes}}
    temporary = folder / (INDEX_FILE + ".tmp")
    temporary.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    temporary.replace(folder / INDEX_FILE)


def open_corpus(folder: Path) -> Corpus:
    """Map the parts that `build_corpus` wrote."""
    try:
        index = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
        parts = [np.memmap(folder / name, dtype=np.uint8, mode="r") for name in (TRAIN_FILE, VALID_FILE)]
        expected = [index["bytes"][name] for name in (TRAIN_FILE, VALID_FILE)]
        fingerprint = hashlib.sha256("".join(sorted(index["sha256"].values())).encode()).hexdigest()
        files = int(index["files"])
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"the prepared corpus in {folder} cannot be read ({error}). The run folder must be on a file system that "
            f"all ranks share; if it is, delete {folder} and start again."
        ) from None
    if [len(part) for part in parts] != expected:
        raise DataError(
            f"the prepared corpus in {folder} is damaged: expected {expected} bytes, "
            f"found {[len(part) for part in parts]}. Delete the folder and start again."
        )
    return Corpus(train=parts[0], valid=parts[1], files=files, fingerprint=fingerprint)


def _expand(entry: str, config: DataConfig) -> Iterator[Path]:
    root = Path(sysconfig.get_path("stdlib")) if entry == "stdlib" else Path(entry).expanduser()
    if root.is_file():
        yield root
    elif root.is_dir():
        yield from _in_folder(root, config)
    elif glob.has_magic(entry):
        matches = sorted(glob.glob(str(root), recursive=True))  # noqa: PTH207  Path.glob refuses absolute patterns
        if not matches:
            raise DataError(f"data.paths: the pattern {entry!r} matches nothing (searched from {Path.cwd()}).")
        for match in map(Path, matches):
            yield from _in_folder(match, config) if match.is_dir() else [match]
    else:
        raise DataError(f"data.paths: there is no file or folder {entry!r} (searched from {Path.cwd()}).")


def _in_folder(root: Path, config: DataConfig) -> list[Path]:
    skipped = set(config.skip_folders)
    files: list[Path] = []
    others: set[str] = set()
    for folder, subfolders, names in os.walk(root):
        # In place: os.walk then does not descend into what was removed; sorted: the same order on every machine.
        subfolders[:] = sorted(name for name in subfolders if name not in skipped and not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if path.suffix in config.suffixes:
                files.append(path)
            else:
                others.add(path.suffix)
    if not files:
        seen = f" It holds files that end in {', '.join(sorted(others)[:8])}." if others - {""} else ""
        raise DataError(
            f"data.paths: the folder {root} has no file that ends in {', '.join(config.suffixes)}.{seen} "
            f"Set data.suffixes or data.paths."
        )
    return files


def _documents(files: Iterable[Path], max_bytes: int) -> Iterator[bytes]:
    """The non-empty texts in order, cut off after `max_bytes` bytes (0: no limit)."""
    total = 0
    for path in files:
        try:
            text = path.read_bytes()
        except OSError as error:
            raise DataError(f"the text file {path} cannot be read: {error.strerror}.") from None
        if max_bytes:
            text = text[: max_bytes - total]
        total += len(text)
        if text:
            yield text
        if max_bytes and total >= max_bytes:
            return


def _held_out(text: bytes, fraction: float) -> bool:
    draw = int.from_bytes(hashlib.sha256(text).digest()[:8], "big") / 2**64
    return draw < fraction


def _split_tail(folder: Path, fraction: float) -> None:
    """With few files the hash may leave one side empty: then the last part of the text is held out."""
    train, valid = folder / TRAIN_FILE, folder / VALID_FILE
    if train.stat().st_size == 0:
        valid.replace(train)
    keep = int(train.stat().st_size * (1 - fraction))
    with train.open("r+b") as source, valid.open("wb") as target:
        source.seek(keep)
        _copy(source, target)
        source.truncate(keep)


def _copy(source: BinaryIO, target: BinaryIO) -> None:
    while block := source.read(1 << 20):
        target.write(block)


def _check_size(sizes: dict[str, int], config: DataConfig) -> None:
    needed = config.seq_len + 1
    for name, part in ((TRAIN_FILE, "training"), (VALID_FILE, "held-out")):
        if sizes[name] < needed:
            raise DataError(
                f"the {part} part of the corpus has {sizes[name]} bytes, shorter than one window of data.seq_len + 1 = "
                f"{needed} bytes. Add text to data.paths, lower data.seq_len or change data.validation_fraction."
            )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _count(files: list[Path]) -> str:
    return f"{len(files)} file{'' if len(files) == 1 else 's'}"
