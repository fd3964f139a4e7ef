"""A profile of some steps of a run: `fullshard train --profile`."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

from torch import nn

from fullshard import Profile, profile
from fullshard.train.config import ProfileConfig
from fullshard.train.progress import ProgressView
from fullshard.train.world import World

PROFILE_FOLDER, TRACE_FILE, TEXT_FILE, NUMBERS_FILE = "profile", "trace.json", "summary.txt", "summary.json"


class StepProfile:
    """Opens a profile after the first steps of a session, and closes it after those it is of. Off, it does nothing.

    Attributes:
        found: The profile, when it is closed and has enough steps.
    """

    def __init__(self, config: ProfileConfig, model: nn.Module, world: World, run_folder: Path) -> None:
        self.found: Profile | None = None
        self._config = config
        self._model = model
        self._world = world
        self._folder = run_folder / PROFILE_FOLDER
        self._open: Profile | None = None
        self._closing = ExitStack()
        self._steps = 0  # done in this session

    def range(self, name: str) -> AbstractContextManager[None]:
        """A part of the step that is not the model's computation."""
        return nullcontext() if self._open is None else self._open.range(name)

    def begin_step(self) -> None:
        """A step begins."""
        if self._config.enabled and self._steps == self._config.start:
            self._open = self._closing.enter_context(profile(self._model))

    def end_step(self, view: ProgressView) -> None:
        """A step is over."""
        self._steps += 1
        if self._open is not None:
            self._open.step()
            if self._steps == self._config.start + self._config.steps:
                self.close(view)

    def close(self, view: ProgressView) -> None:
        """Write what was found; the run may have ended before there was enough. Every rank must call it."""
        self._closing.close()
        closed, self._open = self._open, None
        if closed is not None and closed.complete:
            self.found = closed
            view.note(self._world.on_first(self._write))
        elif self._config.enabled and self.found is None:
            first, last = self._config.start + 1, self._config.start + self._config.steps
            view.note(f"no profile: it is of steps {first} to {last} of a session, and this one had {self._steps}")

    def _write(self) -> str:
        """Write the files, and return what to tell. A full disk is no error: a run does not end for want of them."""
        assert self.found is not None
        trace = self._folder / TRACE_FILE
        try:
            self._folder.mkdir(exist_ok=True)
            self.found.write_trace(trace)
            summary = self.found.summary()
            (self._folder / TEXT_FILE).write_text(f"{summary}\n", encoding="utf-8")
            (self._folder / NUMBERS_FILE).write_text(json.dumps(summary.as_dict(), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            return f"the profile cannot be written to {self._folder}: {error.strerror}. The summary comes at the end"
        return f"wrote {trace}; open it in https://ui.perfetto.dev"
