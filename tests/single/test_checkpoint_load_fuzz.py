"""Whole checkpoints from anyone, loaded into a model, an optimizer and everything else: loaded, or a `CheckpointError`.

B115. The manifest is changed anywhere, above all in the values of the state, and its checksum made to fit again.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from fullshard import checkpoint
from fullshard.errors import CheckpointError
from fullshard.runtime.checkpoint.files.folder import MANIFEST_FILE
from single.test_checkpoint_fuzz import CHANGES, WATCH, Files, Sound, change, changed, document_of, paths, put, sealed


def make_state() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW([{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}])
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        "scaler": torch.amp.GradScaler("cpu"),
        "rng": checkpoint.RandomState(),
        "own": checkpoint.per_rank({"a": torch.ones(2), "b": [1, None, 2.5]}),
        "position": {"epoch": 1, "index": [1, 2]},
    }


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Files:
    path = checkpoint.save(tmp_path_factory.mktemp("sound"), make_state(), 1)
    return Sound((file.name, file.read_bytes()) for file in path.iterdir())


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("fuzz") / "step-1"
    folder.mkdir()
    return folder, make_state()


def try_loading(folder: Path, state: dict[str, Any], files: Files) -> None:
    put(folder, files)
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with WATCH.looking() as opened:
            checkpoint.load(folder, state)
    except CheckpointError:
        pass
    finally:
        torch.set_rng_state(generators[0])
        random.setstate(generators[1])
        np.random.set_state(generators[2])  # noqa: NPY002
    assert {str(Path(name).parent) for name in opened} <= {str(folder)}


@settings(max_examples=150, deadline=None)
@given(CHANGES)
def test_any_manifest_is_loaded_or_refused(
    sound: Files, target: tuple[Path, dict[str, Any]], changes: list[tuple[int, str, Any]]
) -> None:
    try_loading(*target, {**sound, MANIFEST_FILE: sealed(changed(document_of(sound), changes))})


@settings(max_examples=250, deadline=None)
@given(CHANGES)
def test_any_values_of_the_state_are_loaded_or_refused(
    sound: Files, target: tuple[Path, dict[str, Any]], changes: list[tuple[int, str, Any]]
) -> None:
    document = document_of(sound)
    for number, how, odd in changes:
        for member in ("state", "rank_state"):
            places = list(paths(document[member]))
            if places:
                change(document[member], places[number % len(places)], how, odd)
    try_loading(*target, {**sound, MANIFEST_FILE: sealed(json.dumps(document))})
