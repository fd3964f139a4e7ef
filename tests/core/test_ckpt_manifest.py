"""Manifests that cannot be true are refused before anything is made of them; tests/single has the fuzzing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fullshard.core.ckpt.boxes import Division
from fullshard.core.ckpt.manifest import FileEntry, Manifest, ManifestError, TensorEntry, file_name, strict_json


def document() -> dict[str, Any]:
    files = tuple(FileEntry(file_name(rank), 100, "0" * 16) for rank in range(2))
    tensors = {"model/w": TensorEntry((8, 4), "F32", 0)}
    manifest = Manifest(1, 2, (Division((2,), (0, 1), ((0, 0),)),), tensors, {"model/v": "model/w"}, files, {}, ())
    found: dict[str, Any] = json.loads(manifest.to_text())
    return found


def test_a_manifest_is_read_as_it_was_written() -> None:
    text = json.dumps(document())
    assert json.loads(Manifest.from_text(text).to_text()) == document()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("tensors", "model/w", "shape"), [8, 40], "at most the 200 bytes of the files"),
        (("files", 0, "name"), "../rank-00000.safetensors", "files.0..name: expected 'rank-00000.safetensors'"),
        (("aliases", "model/v"), "model/x", "another name of a tensor"),
        (("aliases", "model/w"), "model/w", "another name of a tensor"),
        (("divisions", 0, "ranks"), [0, 2], "ranks below the world size 2"),
        (("tensors", "model/w", "division"), 1, "a number below 1"),
        (("rank_state",), [{}], "no entry or 2"),
        (("version",), 2, "newer than 1"),
    ],
)
def test_what_cannot_be_true_is_named(path: tuple[Any, ...], value: Any, message: str) -> None:
    changed = document()
    inside: Any = changed
    for step in path[:-1]:
        inside = inside[step]
    inside[path[-1]] = value
    with pytest.raises(ManifestError, match=message):
        Manifest.from_text(json.dumps(changed))


def test_a_repeated_member_is_found_at_once() -> None:
    """Among many members, of which the last is the same as the one before: to count each takes longer than any test."""
    members = [f'"{number}": 0' for number in range(100_000)]
    with pytest.raises(ManifestError, match="'99999' appears twice"):
        strict_json("{" + ", ".join([*members, members[-1]]) + "}")
