"""`fullshard ckpt ls`, `inspect` and `verify`: what there is, and whether it is as it was written."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fullshard.core.ckpt.boxes import Box, Division
from fullshard.core.ckpt.manifest import Manifest, file_name
from fullshard.errors import CheckpointError
from fullshard.runtime.checkpoint.files.folder import MANIFEST_FILE, Checkpoint, Examined, read_manifest
from fullshard.runtime.checkpoint.publish import leftovers, named_step, steps

_SHOWN_RANKS = 4


def byte_text(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


# -- ls


def list_root(root: Path) -> dict[str, Any]:
    """The checkpoints in a folder, and what jobs have left there.

    Raises:
        CheckpointError: There is no such folder, or it is a checkpoint itself.
    """
    if not root.is_dir():
        raise CheckpointError(f"there is no folder {root}")
    if (root / MANIFEST_FILE).exists():
        raise CheckpointError(f"{root} is a checkpoint itself: use `fullshard ckpt inspect`, or name the folder above")
    found = []
    for step, path in sorted(steps(root).items()):
        row: dict[str, Any] = {"step": step, "path": str(path), "complete": True}
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            row.update(complete=False, problem=str(error))
        else:
            row.update(bytes=sum(file.nbytes for file in manifest.files), world_size=manifest.world_size)
        found.append(row)
    complete = [row["step"] for row in found if row["complete"]]
    named = named_step(root)
    newest = named if named in complete else max(complete, default=None)
    left = [{"path": str(path), "in_use": used} for path, used in leftovers(root)]
    return {"root": str(root), "latest": newest, "checkpoints": found, "leftovers": left}


def show_root(listing: dict[str, Any]) -> str:
    """The same as text."""
    lines = []
    for row in listing["checkpoints"]:
        mark = "  <- latest" if row["step"] == listing["latest"] else ""
        if row["complete"]:
            what = f"{byte_text(row['bytes']):>10}  {row['world_size']} rank{'' if row['world_size'] == 1 else 's'}"
        else:
            what = f"NOT COMPLETE: {row['problem']}"
        lines.append(f"step {row['step']:<10} {what}{mark}")
    words = {True: "being written", False: "left by an interrupted job"}
    lines += [f"{Path(row['path']).name}: {words[row['in_use']]}" for row in listing["leftovers"]]
    return "\n".join(lines or [f"no checkpoints in {listing['root']}"])


# -- inspect


def describe(path: Path) -> dict[str, Any]:
    """Everything that the manifest of a checkpoint says."""
    manifest = read_manifest(path)
    return {
        "path": str(path),
        "step": manifest.step,
        "world_size": manifest.world_size,
        "files": [{"name": file.name, "bytes": file.nbytes} for file in manifest.files],
        "divisions": [_division(division) for division in manifest.divisions],
        "tensors": {
            name: {
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "division": entry.division,
                "ranges": [
                    {"rank": rank, "offsets": list(box.offsets), "sizes": list(box.sizes)}
                    for rank, box in _boxes(manifest, name)
                ],
            }
            for name, entry in manifest.tensors.items()
        },
        "aliases": dict(manifest.aliases),
        "state": dict(manifest.state),
        "rank_state": [dict(values) for values in manifest.rank_state],
    }


def _division(division: Division) -> dict[str, Any]:
    splits = [list(split) for split in division.splits]
    return {"mesh": list(division.mesh), "ranks": list(division.ranks), "splits": splits}


def _boxes(manifest: Manifest, name: str) -> list[tuple[int, Box]]:
    shape = manifest.tensors[name].shape
    return manifest.division_of(name).overlapping(shape, Box.whole(shape))


def show_checkpoint(path: Path, with_tensors: bool) -> str:
    """The same as text, shortened."""
    manifest = read_manifest(path)
    keys = Counter(name.partition("/")[0] for name in manifest.tensors)
    dtypes: Counter[str] = Counter()
    for entry in manifest.tensors.values():
        dtypes[entry.dtype] += entry.nbytes
    rows = [
        ("checkpoint", str(path)),
        ("step", str(manifest.step)),
        ("ranks", str(manifest.world_size)),
        ("tensors", f"{len(manifest.tensors)}, {byte_text(manifest.nbytes)}"),
        ("files", byte_text(sum(file.nbytes for file in manifest.files))),
        ("dtypes", ", ".join(f"{dtype} {byte_text(count)}" for dtype, count in dtypes.most_common())),
        *(("key", f"{key}: {count} tensors") for key, count in keys.items()),
        *(("state", f"{key}: {_short(value)}") for key, value in manifest.state.items()),
        *(("per rank", key) for key in sorted({key for values in manifest.rank_state for key in values})),
        *(("tied", f"{alias} = {name}") for alias, name in manifest.aliases.items()),
        *(("division", f"{number}: {_words(d)}") for number, d in enumerate(manifest.divisions)),
    ]
    lines = [f"{name:<12}{text}" for name, text in rows]
    if with_tensors:
        lines += _tensor_lines(manifest)
    return "\n".join(lines)


def _tensor_lines(manifest: Manifest) -> Iterator[str]:
    for name, entry in manifest.tensors.items():
        boxes = _boxes(manifest, name)
        ranges = ", ".join(f"rank {rank} {box}" for rank, box in boxes[:_SHOWN_RANKS])
        more = f", and {len(boxes) - _SHOWN_RANKS} more" if len(boxes) > _SHOWN_RANKS else ""
        yield f"{name}  {entry.dtype} {list(entry.shape)}  {ranges}{more}"


def _words(division: Division) -> str:
    if not division.splits:
        return f"whole in the file of rank {division.ranks[0]}"
    cuts = ", then ".join(f"dim {dim} over {division.mesh[axis]}" for dim, axis in division.splits)
    shape = "x".join(map(str, division.mesh))
    return f"{cuts} ranks (mesh {shape}, ranks {division.ranks[0]} to {division.ranks[-1]})"


def _short(value: Any) -> str:
    """What the JSON value of a key is."""
    kind = value.get("kind") if isinstance(value, dict) else None
    if kind == "optimizer" and isinstance(value.get("groups"), list):
        count = len(value["groups"])
        return f"optimizer, {count} group{'' if count == 1 else 's'}"
    if kind == "module":
        return "module"
    text = json.dumps(value.get("value") if kind in ("object", "value") else value)
    return text if len(text) <= 100 else text[:100] + " ..."


# -- verify


def verify(path: Path) -> Examined:
    """Read every byte of a checkpoint and compare it with its checksums. Goes on after damage, to name all of it."""
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return Examined([str(error)], 0)
    problems: list[str] = []
    good = 0
    with Checkpoint(path, manifest=manifest) as checkpoint:
        for rank in range(manifest.world_size):
            try:
                found = checkpoint.examine(rank)
            except CheckpointError as error:
                problems.append(str(error))
            else:
                problems += found.problems
                good += found.nbytes
    known = {MANIFEST_FILE, *(file_name(rank) for rank in range(manifest.world_size))}
    problems += [f"{place} is no part of the checkpoint" for place in sorted(path.iterdir()) if place.name not in known]
    return Examined(problems, good)
