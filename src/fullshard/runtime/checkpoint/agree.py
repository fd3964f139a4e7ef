"""Ranks that save or load together: each does its part, and all go on or all raise the same error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from fullshard import errors
from fullshard.errors import CheckpointError, MisuseError
from fullshard.runtime.collectives import Call, Messages, limit_of, messages_of
from fullshard.runtime.failures.postmortem import explained_between

T = TypeVar("T")

# Errors that other ranks raise as what they are; anything else is a CheckpointError there.
_SHARED = {
    kind.__name__: kind
    for kind in (
        ValueError,
        TypeError,
        MisuseError,
        errors.CheckpointError,
        errors.CheckpointExistsError,
        errors.CheckpointDamagedError,
        errors.CheckpointMismatchError,
    )
}


@dataclass(frozen=True, slots=True)
class _Failure:
    kind: str
    text: str


@dataclass(frozen=True)
class Ranks:
    """This rank's place among those that save or load together.

    Attributes:
        members: Their global ranks; the file of each has the number of its place here.
        rank: This rank's place.
    """

    members: tuple[int, ...] = (0,)
    rank: int = 0
    messages: Messages | None = None
    limit: timedelta = timedelta()

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Ranks:
        """Ranks of a group, None: of all, or this process alone where no group was made.

        The first call for some ranks connects them, so all of them must make it.

        Raises:
            ValueError: This rank is not in the group.
            CommunicationError: The others have not called it within the time limit of the group.
        """
        if not dist.is_initialized():
            return cls()
        found = group or dist.group.WORLD
        if found is None or dist.get_rank(found) < 0:
            raise ValueError("this rank is not in the group that saves or loads; only its members may call this")
        members = tuple(dist.get_process_group_ranks(found))
        if len(members) == 1:
            return cls(members)
        limit, doing = limit_of(found), "connect to save or load a checkpoint"
        with explained_between(members, doing):
            messages = messages_of(members, Call(doing, "", 0), limit)
        return cls(members, members.index(dist.get_rank()), messages, limit)

    @property
    def size(self) -> int:
        """How many they are."""
        return len(self.members)

    def exchange(self, value: T, what: str) -> list[T]:
        """What each rank passed, in their order.

        Raises:
            CommunicationError: A rank did not take part within the time limit of the group.
            MisuseError: A rank does something else; on all ranks.
        """
        if self.messages is None:
            return [value]
        what = f"{what} of a checkpoint"
        with explained_between(self.members, what):
            told = self.messages.exchange((what, value), Call(what, "", 0), self.limit)
        for rank, (doing, _) in enumerate(told):
            if doing != told[0][0]:
                raise MisuseError(
                    f"ranks {self.members[0]} and {self.members[rank]} do not call the same: {told[0][0]}, and "
                    f"{doing}. All ranks must save and load in the same order"
                )
        return [each for _, each in told]

    def on_all(self, action: Callable[[], T], what: str) -> list[T]:
        """Run `action` on every rank. All get all results, or raise the error of the first rank that has one."""
        result: T | None = None
        caught: Exception | None = None
        try:
            result = action()
        except Exception as error:  # noqa: BLE001  whatever it is: a rank that left here would strand the others
            caught = error
        outcomes = self.exchange((result, caught and _failure(caught)), what)
        failed = [rank for rank, (_, failure) in enumerate(outcomes) if failure is not None]
        if failed:
            raise self._error(outcomes[failed[0]][1], failed) from caught  # type: ignore[arg-type]
        return [value for value, _ in outcomes]  # type: ignore[misc]

    def on_first(self, action: Callable[[], T], what: str) -> T:
        """Run `action` on the first rank; all get its result, or raise its error."""
        return self.on_all(lambda: action() if self.rank == 0 else None, what)[0]  # type: ignore[return-value]

    def _error(self, failure: _Failure, failed: list[int]) -> Exception:
        kind = _SHARED.get(failure.kind, CheckpointError)
        if self.size == 1 or len(failed) == self.size:
            return kind(failure.text)
        where = ", ".join(str(self.members[rank]) for rank in failed[:8]) + (", ..." if len(failed) > 8 else "")
        return kind(f"rank {where}: {failure.text}")


def _failure(error: Exception) -> _Failure:
    name = type(error).__name__
    return _Failure(name, str(error) if name in _SHARED else f"{name}: {error}")
