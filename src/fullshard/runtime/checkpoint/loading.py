"""Loading: each rank reads the rows it needs, from whatever files they are in."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fullshard.core.ckpt.manifest import DTYPE_BYTES, Manifest
from fullshard.errors import CheckpointDamagedError, CheckpointError
from fullshard.runtime.checkpoint.agree import Ranks
from fullshard.runtime.checkpoint.collector import no_collection
from fullshard.runtime.checkpoint.files.folder import Checkpoint
from fullshard.runtime.checkpoint.publish import find
from fullshard.runtime.checkpoint.state.load import Targets, refuse_unexpected, targets

_REPLACED = "{} was replaced or removed while it was loaded, and tensors may be half loaded: load again"
_LOG = logging.getLogger("fullshard")
Strict = bool | Mapping[str, bool]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was loaded.

    Attributes:
        path: The checkpoint.
        step: Optimizer steps done.
        world_size: Ranks that saved it.
        values: JSON values of the state, by key.
        missing: Names that the state has and the checkpoint has not; empty if strict.
        unexpected: The reverse: what no rank wants.
        skipped: Keys that were not asked for, and of per-rank state that was saved by another number of ranks.
    """

    path: Path
    step: int
    world_size: int
    values: Mapping[str, Any]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    skipped: tuple[str, ...]


def load_state(ranks: Ranks, path: Path, state: Mapping[str, Any], strict: Strict, verify: bool) -> Loaded:
    """Load `state` from a checkpoint, or from the newest one in a folder; see `fullshard.checkpoint.load`."""
    folder = ranks.on_first(lambda: find(path), "find")
    with ExitStack() as stack:
        found: list[tuple[Checkpoint, Targets]] = []

        @no_collection()
        def prepare() -> tuple[tuple[str, ...], tuple[str, ...], bytes]:
            checkpoint = stack.enter_context(Checkpoint(folder, verify))
            found.append((checkpoint, targets(state, checkpoint.manifest, ranks.rank, ranks.size, strict)))
            return found[0][1].refused, found[0][1].unexpected, checkpoint.manifest.digest()

        # Every rank has checked everything before any of them changes a tensor. What one stage of a pipeline does not
        # want is another's.
        refused, unexpected, digests = zip(*ranks.on_all(prepare, "compare"), strict=True)
        if len(set(digests)) > 1:
            raise CheckpointError(_REPLACED.format(folder))
        refuse_unexpected(refused)
        by_all = set(unexpected[0]).intersection(*unexpected[1:])
        checkpoint, wanted = found[0]
        if not _reads_overlap(checkpoint.manifest, wanted, ranks.size):
            checkpoint.bypass_cache()
        ranks.on_all(lambda: _read(checkpoint, wanted), "read")
        ranks.on_all(wanted.finish, "finish")
    manifest = checkpoint.manifest
    _LOG.info("loaded %s from %s, which %d ranks saved", ", ".join(state), folder, manifest.world_size)
    not_wanted = tuple(name for name in wanted.unexpected if name in by_all)
    return Loaded(folder, manifest.step, manifest.world_size, wanted.values, wanted.missing, not_wanted, wanted.skipped)


def _reads_overlap(manifest: Manifest, wanted: Targets, world_size: int) -> bool:
    """Whether several ranks read the same bytes, as replicas do: the second on a host finds them in the cache."""
    wanted_bytes = sum(
        box.numel * DTYPE_BYTES[manifest.tensors[manifest.resolve(n)].dtype] for n, box, _ in wanted.reads
    )
    return wanted_bytes * world_size > 1.5 * manifest.nbytes


@torch.no_grad()
def _read(checkpoint: Checkpoint, wanted: Targets) -> None:
    try:
        checkpoint.read_all(wanted.reads)
    except CheckpointDamagedError as error:
        if checkpoint.is_replaced():
            raise CheckpointError(_REPLACED.format(checkpoint.path)) from error
        raise
