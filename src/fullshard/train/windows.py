"""Windows of tokens: which rank reads what at which step, as arithmetic on one position.

The training stream is endless: epoch after epoch, each a permutation of the windows drawn from (seed, epoch). The
position is the number of windows all ranks together have consumed. A step takes the next `step_windows` of them, in
micro batches of `ranks * batch_size`, `batch_size` for each rank in rank order. Where the last micro batch has places
left they are filled with windows whose labels do not count. So every rank has the same number of batches, one integer
restores the place exactly, and the windows of a step do not depend on the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fullshard.train.errors import DataError

IGNORED_LABEL = -100  # a label that does not count, as in torch's cross entropy


@dataclass(frozen=True)
class Batch:
    """Token ids and the ids that follow them, both int64 [windows, length]."""

    tokens: Tensor
    labels: Tensor


@dataclass(frozen=True)
class TrainStream:
    """The endless, shuffled stream of training windows, as one of `ranks` ranks sees it."""

    text: npt.NDArray[np.uint8]
    length: int
    batch_size: int  # windows of a micro batch on each rank
    rank: int
    ranks: int
    seed: int
    step_windows: int  # of all ranks and micro batches

    def __post_init__(self) -> None:
        # Not of the whole step: with gradient accumulation a step may be longer than an epoch of a small text.
        needed = min(self.step_windows, self.batch_size * self.ranks)
        if self.windows < needed:
            raise DataError(
                f"the training text has {self.windows} windows of {self.length} bytes, but one micro batch of all "
                f"ranks takes {needed}. Add text, or lower train.micro_batch_size, data.seq_len or the number of ranks."
            )

    @property
    def windows(self) -> int:
        """Windows in an epoch: one fewer than fit, so that their start can shift from epoch to epoch."""
        return max(1, (len(self.text) - 1) // self.length - 1)

    @property
    def micro_batches(self) -> int:
        """Micro batches of a step, the same number on every rank."""
        return -(-self.step_windows // (self.batch_size * self.ranks))

    def indices(self, position: int) -> list[list[int]]:
        """Start bytes of this rank's windows that count in the step at `position`, for each micro batch."""
        end = position + self.step_windows
        stride = self.batch_size * self.ranks
        firsts = range(position + self.rank * self.batch_size, position + self.micro_batches * stride, stride)
        return [[self._start(number) for number in range(first, min(first + self.batch_size, end))] for first in firsts]

    def step(self, position: int) -> list[Batch]:
        """This rank's micro batches of the step at `position`."""
        return [filled_up(self.text, starts, self.batch_size, self.length) for starts in self.indices(position)]

    def next_position(self, position: int) -> int:
        """The position after one step of all ranks."""
        return position + self.step_windows

    def _start(self, number: int) -> int:
        epoch, place = divmod(number, self.windows)
        order, shift = epoch_order(self.windows, self._slack(), self.seed, epoch)
        return shift + int(order[place]) * self.length

    def _slack(self) -> int:
        return min(self.length - 1, len(self.text) - 1 - self.windows * self.length)


@lru_cache(maxsize=2)  # pure; two, because a micro batch may straddle two epochs
def epoch_order(windows: int, slack: int, seed: int, epoch: int) -> tuple[npt.NDArray[np.int64], int]:
    """The permutation of an epoch and the byte (0 to `slack`) its windows are shifted by."""
    generator = np.random.Generator(np.random.PCG64([seed, epoch]))
    return generator.permutation(windows), int(generator.integers(0, slack + 1))


@dataclass(frozen=True)
class ValidationWindows:
    """A fixed, evenly spaced choice of at most `limit` held-out windows, split over the ranks.

    Every rank runs the same number of batches: where the windows do not fill the last one, it is padded with windows
    whose labels do not count.
    """

    text: npt.NDArray[np.uint8]
    length: int
    batch_size: int
    rank: int
    ranks: int
    limit: int

    @property
    def count(self) -> int:
        """Windows that are evaluated; independent of the number of ranks, so losses can be compared."""
        return min(self.limit, (len(self.text) - 1) // self.length)

    def batches(self) -> list[Batch]:
        """This rank's batches, the same number on every rank."""
        fitting = (len(self.text) - 1) // self.length
        chosen = [int(index) * self.length for index in np.linspace(0, fitting - 1, self.count)]
        per_step = self.batch_size * self.ranks
        steps = -(-self.count // per_step)
        result = []
        for step in range(steps):
            first = step * per_step + self.rank * self.batch_size
            own = chosen[first : first + self.batch_size]
            result.append(filled_up(self.text, own, self.batch_size, self.length))
        return result


def filled_up(text: npt.NDArray[np.uint8], starts: list[int], count: int, length: int) -> Batch:
    """A batch of `count` windows: those that begin at `starts`, and others whose labels do not count."""
    batch = cut_windows(text, starts + [0] * (count - len(starts)), length)
    batch.labels[len(starts) :] = IGNORED_LABEL
    return batch


def cut_windows(text: npt.NDArray[np.uint8], starts: list[int], length: int) -> Batch:
    """The windows that begin at `starts`, as tokens and next tokens."""
    rows = np.stack([text[start : start + length + 1] for start in starts]).astype(np.int64)
    ids = torch.from_numpy(rows)
    # clone, not contiguous(): for a single window that would be a view, and marking labels would change tokens.
    return Batch(tokens=ids[:, :-1].clone(), labels=ids[:, 1:].clone())
