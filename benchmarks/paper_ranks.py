"""What planning costs for many tensors on many ranks: no tensor, no file and no other rank is needed for it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from _common import Spread
from fullshard.core.ckpt.boxes import Box, Division
from fullshard.core.ckpt.manifest import FileEntry, Manifest, TensorEntry, file_name
from fullshard.runtime.checkpoint.collector import no_collection

WORLD_SIZE = 1024
LOADED_BY = 768  # ranks that load it, whose boxes do not coincide with those of the files
_SHAPES = ((4096, 4096), (11008, 4096), (4096,), (1000, 64))  # the last has fewer rows than there are ranks


def plan_on_paper(tensors: int, rounds: int) -> dict[str, Any]:
    """Seconds of the thread's processor time of each part of planning a save on rank 0 and a load on one rank."""
    turns = [_plan_once(tensors) for _ in range(rounds)]
    seconds = {what: asdict(Spread.of([turn[what] for turn in turns])) for what in turns[0]}
    return {"tensors": tensors, "world_size": WORLD_SIZE, "loaded_by": LOADED_BY, "seconds": seconds}


def _plan_once(tensors: int) -> dict[str, float]:
    seconds: dict[str, float] = {}

    def timed(what: str, act: Callable[[], Any]) -> Any:
        started = time.thread_time()
        with no_collection():  # as saving and loading do
            made = act()
        seconds[what] = time.thread_time() - started
        return made

    read = timed("manifest from text", functools.partial(Manifest.from_text, _save(tensors, timed)))
    timed("reads of one rank", lambda: _reads(read, _division(LOADED_BY), 7))
    seconds["all"] = sum(seconds.values())
    return seconds


def _save(tensors: int, timed: Callable[[str, Callable[[], Any]], Any]) -> str:
    entries = timed("entries", lambda: _entries(tensors))
    manifest = Manifest(1, WORLD_SIZE, (_division(WORLD_SIZE),), entries, {}, _files())
    timed("pieces of one rank", lambda: manifest.pieces(5))
    return timed("manifest to text", manifest.to_text)


def _division(world_size: int) -> Division:
    """Rows over one axis of ranks."""
    return Division((world_size,), tuple(range(world_size)), ((0, 0),))


def _entries(tensors: int) -> dict[str, TensorEntry]:
    return {
        f"model/layers.{number // 10}.part{number % 10}.weight": TensorEntry(_SHAPES[number % len(_SHAPES)], "F32", 0)
        for number in range(tensors)
    }


def _files() -> tuple[FileEntry, ...]:
    return tuple(FileEntry(file_name(rank), 1 << 40, "0" * 16) for rank in range(WORLD_SIZE))


def _reads(manifest: Manifest, division: Division, rank: int) -> list[tuple[str, Box]]:
    """(tensor, part of it) of everything that one rank reads; where each lies is found out on the way."""
    boxes = ((name, division.box(entry.shape, rank)) for name, entry in manifest.tensors.items())
    reads = [(name, box) for name, box in boxes if box is not None]
    for name, box in reads:
        for _, piece in manifest.division_of(name).overlapping(manifest.tensors[name].shape, box):
            piece.overlap(box)
    return reads
