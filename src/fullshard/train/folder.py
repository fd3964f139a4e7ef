"""The folder of one run: `runs/NAME` with the resolved configuration, the corpus, metrics and checkpoints.

    config.toml       the resolved configuration; `fullshard train runs/NAME/config.toml` runs it again
    corpus/           the prepared text
    metrics.jsonl     one JSON object per step, one per validation
    checkpoint/       see fullshard.train.checkpoint
    profile/          of some steps, with --profile: trace.json, summary.txt, summary.json
    summary.json      what was printed at the end
    .lock             held by the run that writes here

A new run never writes into the folder of another one: if `runs/NAME` is taken it becomes `runs/NAME-2`, and so on.
With `checkpoint.resume = "auto"` one that was cut short before it could save anything is begun again in its folder: so
a launcher that restarts its ranks comes back to the same folder whenever they died.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from fullshard.checkpoint import CheckpointError, latest
from fullshard.train.checkpoint import CHECKPOINT_FOLDER, changed_settings, refuse_earlier_form
from fullshard.train.config import Config
from fullshard.train.errors import ConfigError
from fullshard.train.lock import LOCK_FILE, RunLock
from fullshard.train.settings import load_settings, to_dict, to_toml

METRICS_FILE, CONFIG_FILE, SUMMARY_FILE, CORPUS_FOLDER = "metrics.jsonl", "config.toml", "summary.json", "corpus"
TEMPORARY = ".tmp"


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
            replace_text(self.path / CONFIG_FILE, to_toml(fresh))

    def discard(self) -> None:
        """Give the name free again, if the run failed before there was anything to keep (a wrong path, say)."""
        if not (self.resumes or (self.path / METRICS_FILE).exists() or self.checkpoints.exists()):
            shutil.rmtree(self.path, ignore_errors=True)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Keep the summary beside the metrics."""
        replace_text(self.path / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")


def choose_folder(config: Config, lock: RunLock) -> RunFolder:
    """The run folder, with its lock taken: the newest one to go on in, or a new one, which is made here."""
    base = Path(config.run.folder)
    taken = _numbered(base, config.run.name)
    if config.checkpoint.resume != "no":
        found = {path: latest(path / CHECKPOINT_FOLDER) for path in taken.values()}
        saved = {path: newest.stat().st_mtime_ns for path, newest in found.items() if newest is not None}
        # Of runs of one name, one with other settings (an experiment in between) is not what is to go on.
        fitting = [path for path in saved if _belongs_to(path, config)] or list(saved)
        if fitting:
            newest = max(fitting, key=saved.__getitem__)
            lock.require(newest)
            return RunFolder(newest, resumes=True)
        for path in taken.values():
            refuse_earlier_form(path / CHECKPOINT_FOLDER)
            if any((path / CHECKPOINT_FOLDER).glob("step-*")):  # a run must not begin anew over what it has lost
                raise CheckpointError(
                    f"none of the checkpoints in {path / CHECKPOINT_FOLDER} can be used: `fullshard ckpt ls` says why. "
                    "Move that folder away to begin again."
                )
        if config.checkpoint.resume == "yes":
            raise CheckpointError(
                f"nothing to resume: no checkpoint under {base / config.run.name}"
                f"{' or its numbered followers' if taken else ' (there is no such folder)'}. Check --run.folder and "
                f"--run.name, or start without --resume (--checkpoint.resume auto starts fresh when there is none)."
            )
        cut_short = [number for number, path in taken.items() if _begun_by(path, config)]
        if cut_short:
            last = taken[max(cut_short)]
            lock.require(last)
            # Its holder may have saved, and ended, since it was looked at.
            return RunFolder(last, resumes=latest(last / CHECKPOINT_FOLDER) is not None)
    return RunFolder(_make_folder(base, config.run.name, max(taken, default=0) + 1, lock), resumes=False)


def _make_folder(base: Path, name: str, number: int, lock: RunLock) -> Path:
    """Make NAME-number, or the next one that nobody has, and take its lock."""
    while True:
        path = base / (name if number == 1 else f"{name}-{number}")
        number += 1
        try:
            path.mkdir(parents=True)  # fails if it exists: of two runs that start at once, one gets it
        except FileExistsError:
            continue
        if lock.take(path):  # else somebody took it for one whose run was cut short
            return path


def _begun_by(path: Path, config: Config) -> bool:
    """Whether a run with these settings began here and was cut short before it had saved anything."""
    entries = {entry.name for entry in path.iterdir()} if path.is_dir() else {SUMMARY_FILE}
    if not entries - {LOCK_FILE, CONFIG_FILE + TEMPORARY}:
        return True  # cut short before it had written what it is
    begun = _settings_of(path)
    if SUMMARY_FILE in entries or begun is None:
        return False
    return all(begun[section] == to_dict(config)[section] for section in ("model", "data", "train", "optim"))


def _belongs_to(path: Path, config: Config) -> bool:
    """Whether a folder is of a run with this model, data and seed; True if it cannot be read: loading says why."""
    begun = _settings_of(path)
    return begun is None or not changed_settings(begun, config)[0]


def _settings_of(path: Path) -> Mapping[str, Any] | None:
    """The settings that a run began with, if they can be read."""
    try:
        return to_dict(load_settings(path / CONFIG_FILE).config)
    except ConfigError:
        return None


def replace_text(path: Path, text: str) -> None:
    """Write a file that is there as a whole or not at all, whenever this process is killed."""
    aside = path.with_name(path.name + TEMPORARY)
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


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
            replace_text(path, "".join(line + "\n" for line in kept))
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
