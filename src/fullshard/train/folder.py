"""The folder of one run: `runs/NAME` with the resolved configuration, the corpus, metrics and checkpoints.

    config.toml       the resolved configuration; `fullshard train runs/NAME/config.toml` runs it again
    corpus/           the prepared text
    metrics.jsonl     one JSON object per step, one per validation
    checkpoint/       see fullshard.train.checkpoint
    profile/          of some steps, with --profile: trace.json, summary.txt, summary.json
    summary.json      what was printed at the end

A new run never writes into the folder of another one: if `runs/NAME` is taken it becomes `runs/NAME-2`, and so on.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from fullshard.train.checkpoint import CHECKPOINT_FOLDER, LATEST_FILE, belongs_to
from fullshard.train.config import Config
from fullshard.train.errors import CheckpointError
from fullshard.train.settings import to_toml

METRICS_FILE, CONFIG_FILE, SUMMARY_FILE, CORPUS_FOLDER = "metrics.jsonl", "config.toml", "summary.json", "corpus"


@dataclass(frozen=True)
class RunFolder:
    """Where a run writes, and whether it continues what is there."""

    path: Path
    resumes: bool

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / CHECKPOINT_FOLDER

    @property
    def corpus(self) -> Path:
        """Folder of the prepared text."""
        return self.path / CORPUS_FOLDER

    def create(self, config: Config) -> None:
        """Make the folder and write the resolved configuration (a resumed run keeps the first one)."""
        self.path.mkdir(parents=True, exist_ok=True)
        if not self.resumes or not (self.path / CONFIG_FILE).exists():
            # The written file starts a run of its own: neither "resume" nor a look at this one must stick to it.
            fresh = replace(
                config,
                run=replace(config.run, name=self.path.name),
                checkpoint=replace(config.checkpoint, resume="no"),
                profile=replace(config.profile, enabled=False),
            )
            (self.path / CONFIG_FILE).write_text(to_toml(fresh), encoding="utf-8")

    def discard(self) -> None:
        """Give the name free again, if the run failed before there was anything to keep (a wrong path, say)."""
        if not (self.resumes or (self.path / METRICS_FILE).exists() or self.checkpoints.exists()):
            shutil.rmtree(self.path, ignore_errors=True)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Keep the summary beside the metrics."""
        (self.path / SUMMARY_FILE).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def choose_folder(config: Config) -> RunFolder:
    """The run folder: the newest one to resume from, or a new one, which is made here and so belongs to this run."""
    base = Path(config.run.folder)
    taken = _numbered(base, config.run.name)
    if config.checkpoint.resume != "no":
        saved = [path for path in taken.values() if (path / CHECKPOINT_FOLDER / LATEST_FILE).exists()]
        # Of runs of one name, one with other settings (an experiment in between) is not what is to go on.
        fitting = [path for path in saved if belongs_to(path / CHECKPOINT_FOLDER, config)] or saved
        if fitting:
            newest = max(fitting, key=lambda path: (path / CHECKPOINT_FOLDER / LATEST_FILE).stat().st_mtime_ns)
            return RunFolder(newest, resumes=True)
        if config.checkpoint.resume == "yes":
            raise CheckpointError(
                f"nothing to resume: no checkpoint under {base / config.run.name}"
                f"{' or its numbered followers' if taken else ' (there is no such folder)'}. Check --run.folder and "
                f"--run.name, or start without --resume (--checkpoint.resume auto starts fresh when there is none)."
            )
    return RunFolder(_make_folder(base, config.run.name, max(taken, default=0) + 1), resumes=False)


def _make_folder(base: Path, name: str, number: int) -> Path:
    """Make NAME-number, or the next one that nobody has."""
    while True:
        path = base / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)  # fails if it exists: of two runs that start at once, one gets it
        except FileExistsError:
            number += 1
        else:
            return path


def _numbered(base: Path, name: str) -> dict[int, Path]:
    """Folders NAME (1), NAME-2 (2), ..."""
    pattern = re.compile(re.escape(name) + r"(?:-(\d+))?")
    found = {}
    for path in base.iterdir() if base.is_dir() else ():
        match = pattern.fullmatch(path.name)
        if match:
            found[int(match[1] or 1)] = path
    return found


class MetricsLog:
    """Appends JSON lines; every line is flushed, so a killed run keeps what it measured."""

    def __init__(self, path: Path, first_step: int) -> None:
        """Open the log of a run that goes on after `first_step` steps; later lines of a lost tail are dropped."""
        self._path = path
        if path.exists():
            kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= first_step]
            # Aside and renamed: a kill in between must not lose what the run has measured.
            aside = path.with_name(path.name + ".tmp")
            aside.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
            aside.replace(path)
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _step_of(line: str) -> float:
    """The step of a metrics line; a line cut short by a kill counts as the far future."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
