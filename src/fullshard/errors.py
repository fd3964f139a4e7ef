"""Every error that fullshard raises on its own account.

FullshardError
 +-- MisuseError            an API was used in a way that would silently train the wrong thing
 |    +-- AlreadyShardedError   the module already has a shard plan
 |    +-- StaleOptimizerError   an optimizer holds parameters from before sharding
 |    +-- UninitializedError    parameters or buffers still hold no values
 +-- RanksDisagreeError     ranks of one group built different models or plans
 +-- CheckpointError        a checkpoint cannot be written or read
 |    +-- CheckpointExistsError     there is one already, and it was not asked to replace it
 |    +-- CheckpointDamagedError    a file is missing, cut short or altered
 |    +-- CheckpointMismatchError   it holds other things than what it is loaded into
 +-- CommunicationError     a collective did not complete
      +-- PeerTimeoutError      peers did not arrive within the time limit
      +-- PeerLostError         a peer closed its connection (it died or left)

Bad arguments raise the built-in `ValueError` and `TypeError`.
"""

from __future__ import annotations

from collections.abc import Sequence


class FullshardError(Exception):
    """Base class of all errors of this package."""


class MisuseError(FullshardError, RuntimeError):
    """An API was called in an order or a state in which it cannot do what was asked."""


class AlreadyShardedError(MisuseError, ValueError):
    """A module was given to `fully_shard` twice."""


class StaleOptimizerError(MisuseError):
    """An optimizer was built before sharding, so its parameters would never train."""


class UninitializedError(MisuseError):
    """Parameters or buffers were materialized from the meta device and never given values."""


class RanksDisagreeError(FullshardError, RuntimeError):
    """Ranks that communicate with each other describe different units or parameters."""


class CommunicationError(FullshardError, RuntimeError):
    """A collective failed; the message names rank, unit, command, parameter and peers.

    Attributes:
        ranks: Who had not taken part in it, as far as this rank can tell: with some backends all the others.
    """

    def __init__(self, message: str = "", ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class PeerTimeoutError(CommunicationError, TimeoutError):
    """Peers did not take part in a command within the time limit."""


class PeerLostError(CommunicationError, ConnectionError):
    """A peer's connection closed while a command was waiting for it."""


class CheckpointError(FullshardError, RuntimeError):
    """A checkpoint cannot be written or read; the message names the file."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """A checkpoint of this step is in place, and `overwrite` was not asked for."""


class CheckpointDamagedError(CheckpointError):
    """A checkpoint is not as it was written: a file is missing, cut short, or altered."""


class CheckpointMismatchError(CheckpointError):
    """What a checkpoint holds is not what it is to be loaded into; nothing was changed."""
