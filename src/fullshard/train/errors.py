"""What can go wrong in the trainer, each with the exit code the command line returns for it.

TrainError            1  anything below, and what has no better class
├── ConfigError       2  the configuration or the command line is wrong
├── DataError         1  the corpus cannot be read or is too small
├── FolderInUseError  1  another process is writing into the run folder
├── RankFailedError        1  a rank died or raised; the others were ended
└── DivergedError     4  the loss or the gradient norm is no longer a finite number

Every other error of the package (`fullshard.errors`), such as that of a checkpoint that cannot be written, is 1.
"""

from __future__ import annotations

from fullshard.errors import FullshardError


class TrainError(FullshardError):
    """Base of every error the trainer raises on purpose; its text is meant for the user."""

    exit_code: int = 1


class ConfigError(TrainError):
    """The configuration file, a `--section.key` override or their combination is wrong."""

    exit_code = 2


class DataError(TrainError):
    """The corpus cannot be found, read, or is too small for the configured windows."""


class FolderInUseError(TrainError):
    """A run folder belongs to a process that is still running."""


class RankFailedError(TrainError):
    """A rank ended badly; carries the exit code of the rank that failed first."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class DivergedError(TrainError):
    """The loss or the gradient norm became NaN or infinite."""

    exit_code = 4
