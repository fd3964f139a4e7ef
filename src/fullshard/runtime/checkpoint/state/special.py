"""What a user puts around or beside the objects of a state, to say how they are to be saved."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import sha256
from typing import Any

import torch
from torch import nn


class RandomState:
    """The state of this rank's random generators: torch's of the CPU and of the accelerator, Python's, numpy's.

    As a value of a checkpoint's state it is saved for each rank, and loaded last. Loaded by more ranks than have saved
    it, each further rank gets a seed that follows from the state of rank 0 and its own number; the same in every run.
    numpy's (the one of `numpy.random`, not generators that a program made) is saved if numpy has been imported.
    """

    def state_dict(self) -> dict[str, Any]:
        """States by the name of the generator; tensors, and a few numbers."""
        version, words, gauss = random.getstate()
        state: dict[str, Any] = {
            "cpu": torch.get_rng_state(),
            "python": (version, torch.tensor(words, dtype=torch.int64), gauss),
        }
        device = _accelerator()
        if device is not None:
            state["accelerator"] = torch.get_device_module(device).get_rng_state()
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            state["numpy"] = numpy.random.get_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the generators for which there is a state; an accelerator's is left alone where there is none."""
        torch.set_rng_state(state["cpu"].cpu())
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
        device = _accelerator()
        if device is not None and "accelerator" in state:
            torch.get_device_module(device).set_rng_state(state["accelerator"].cpu())
        if "numpy" in state:
            _numpy_random().set_state(state["numpy"])

    def seed_from(self, state: dict[str, Any], rank: int) -> None:
        """Seed all generators by what another rank saved and the number of this one."""
        digest = sha256(state["cpu"].cpu().numpy().tobytes() + rank.to_bytes(8, "little")).digest()
        seed = int.from_bytes(digest[:8], "little") >> 1  # torch takes 63 bits on every device
        torch.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            _numpy_random().seed(seed % 2**32)


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def _numpy_random() -> Any:
    import numpy.random  # only where a checkpoint has its state

    return numpy.random


@dataclass(frozen=True, slots=True)
class PerRank:
    """See `per_rank`."""

    object: Any


def per_rank(object: Any) -> PerRank:  # noqa: A002 - the word for it
    """Say that a value or an object with `state_dict` is different on every rank, and save each rank's.

    Loaded by another number of ranks, an object gets nothing unless it has a method
    `load_state_dicts(states: list, rank: int, world_size: int)`, which is given all ranks' states and takes what is for
    it; otherwise that is an error, or, with `strict=False`, left out and listed in `Loaded.skipped`.

    Args:
        object: What to save, such as a data loader.
    """
    return PerRank(object)


@dataclass(frozen=True, slots=True)
class Only:
    """See `only`."""

    object: Any
    patterns: tuple[str, ...]

    def takes(self, name: str) -> bool:
        """Whether a name is meant."""
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)


def only(object: Any, *patterns: str) -> Only:  # noqa: A002 - the word for it
    """Save or load only a part of a module or an optimizer, such as adapters: `only(model, "*lora_*")`.

    Args:
        object: A module, or an optimizer, whose parameters are then meant.
        *patterns: Names of the plain model's parameters and buffers, in the manner of file names (`*`, `?`, `[ab]`).

    Raises:
        TypeError: It is neither.
        ValueError: There is no pattern.
    """
    if not isinstance(object, nn.Module | torch.optim.Optimizer):
        raise TypeError(f"only(...) takes a module or an optimizer, got {type(object).__name__}")
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError('only(...) needs patterns of names, such as only(model, "*lora_*")')
    return Only(object, patterns)
