"""What whole steps are measured on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Subject:
    """A language model for measuring whole steps.

    Attributes:
        title: For tables.
        build: Makes the model with the same weights each time; it turns tokens into logits.
        block: Class of the modules that are sharded one by one.
        vocabulary: Number of different tokens.
        positions: Tokens of a sequence; every rank has one sequence a step.
    """

    title: str
    build: Callable[[], nn.Module]
    block: type[nn.Module]
    vocabulary: int
    positions: int
