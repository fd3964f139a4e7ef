"""Small objects between ranks, on connections of their own: beside the training, from any thread, in its own time."""

from __future__ import annotations

import atexit
import hashlib
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from fullshard.errors import CommunicationError
from fullshard.runtime.collectives.base import Call, own_limit, translate
from fullshard.runtime.collectives.once import packed, unpacked

_Value = TypeVar("_Value")

# Connections are made once for a set of ranks, and go with the job's process group.
_MADE: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Messages | None]] = weakref.WeakKeyDictionary()
# Its threads must have ended before the interpreter is torn down, or they end the process by SIGABRT.
atexit.register(_MADE.clear)


_SIZE_BYTES = 8
_INSIDE_BYTES = 1016  # of what is small, which most is: it takes one round, not two


class Messages:
    """Connections between some ranks of the job, all of which make this object.

    They are Gloo's, whatever the training uses: it waits without using a device, and sees at once that a peer has died.
    They are no process group of torch's: the names of those depend on how many a rank has made before, which need not
    be the same on all of these.

    Args:
        ranks: Global ranks; this one is among them.
        call: Names what they connect for, in messages.
        limit: How long to wait for others.

    Raises:
        CommunicationError: A rank has not made this object within the limit.
    """

    def __init__(self, ranks: Sequence[int], call: Call, limit: timedelta) -> None:
        self._ranks = list(ranks)
        name = hashlib.blake2b(repr(self._ranks).encode(), digest_size=8).hexdigest()
        store = PrefixStore(f"fullshard/messages/{name}", dist.distributed_c10d._get_default_store())
        place, count = self._ranks.index(dist.get_rank()), len(self._ranks)
        keys = [f"here/{number}" for number in range(count)]
        missing: list[int] = []
        try:
            store.set(keys[place], "")
            try:
                # Gloo would try to reach a rank that has given up for five times as long as it may.
                store.wait(keys, limit)
            except RuntimeError:
                missing = [rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]
                raise
            self._backend: Any = dist.ProcessGroupGloo(store, place, count, limit)
        except RuntimeError as error:
            where = f"rank {dist.get_rank()} waited for ranks {missing or self._ranks}"
            raise translate(error, call, where, limit.total_seconds(), missing or ranks) from error
        # From now on each wait has a limit of its own; this one is only not to end before any of them.
        self._backend._set_default_timeout(timedelta(days=7))
        self._failed = False

    def exchange(self, value: _Value, call: Call, limit: timedelta) -> list[_Value]:
        """Every rank's picklable `value`, in the order of the ranks.

        Args:
            value: This rank's.
            call: Names it in messages.
            limit: How long to wait for others.

        Raises:
            CommunicationError: A rank is gone, or did not take part within the limit.
        """
        data = packed(value)
        size, inside = data.numel(), min(data.numel(), _INSIDE_BYTES)
        letter = torch.zeros(_SIZE_BYTES + _INSIDE_BYTES, dtype=torch.uint8)
        letter[:_SIZE_BYTES].view(torch.int64)[0] = size
        letter[_SIZE_BYTES : _SIZE_BYTES + inside] = data[:inside]
        letters = self._gather(letter, call, limit)
        sizes = [int(each[:_SIZE_BYTES].view(torch.int64)[0]) for each in letters]
        rest = max(sizes) - _INSIDE_BYTES
        if rest > 0:
            padded = torch.zeros(rest, dtype=torch.uint8)
            padded[: size - inside] = data[inside:]
            rests = self._gather(padded, call, limit)
            letters = [torch.cat(pair) for pair in zip(letters, rests, strict=True)]
        rows = zip(letters, sizes, strict=True)
        return [unpacked(row[_SIZE_BYTES : _SIZE_BYTES + size]) for row, size in rows]

    def _gather(self, tensor: torch.Tensor, call: Call, limit: timedelta) -> list[torch.Tensor]:
        if self._failed:  # what is late may still come, and would be taken for the answer to something else
            raise CommunicationError(f"{call.op}: these ranks have failed to exchange messages before; restart the job")
        rows = [torch.empty_like(tensor) for _ in self._ranks]
        try:
            self._backend.allgather([rows], [tensor]).wait(limit)
        except RuntimeError as error:
            self._failed = True
            where = f"rank {dist.get_rank()} waited for ranks {self._ranks}"
            raise translate(error, call, where, limit.total_seconds(), self._ranks) from error
        return rows


def messages_of(ranks: tuple[int, ...], call: Call, limit: timedelta) -> Messages:
    """Connections between these ranks, which all call this the first time. See `Messages`."""
    made = _MADE.setdefault(dist.group.WORLD, {})
    if ranks not in made:
        made[ranks] = None  # until they are connected; others may have met half of it, so once is all
        made[ranks] = Messages(ranks, call, limit)
    found = made[ranks]
    if found is None:
        raise CommunicationError(f"{call.op}: these ranks have failed to connect before; restart the job")
    return found


def limit_of(group: dist.ProcessGroup) -> timedelta:
    """The time limit that a group was made with, the longest if it has one for each device."""
    limits = [own_limit(group._get_backend(device)) for device in group._device_types]
    return max((limit for limit in limits if limit is not None), default=timedelta(minutes=30))
