"""Sharding strategies: names for what is divided over which ranks, and when full parameters are freed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from fullshard.core.policy import AfterForward, UnitPolicy


class ShardingStrategy(Enum):
    """What is divided over the ranks. All are settings of one engine; docs/strategies.md compares memory and traffic.

    Attributes:
        FULL_SHARD: Parameters, gradients and optimizer state (ZeRO-3).
        SHARD_GRAD_OP: The same between steps, but parameters stay full from forward to backward (ZeRO-2).
        NO_SHARD: Nothing; gradients are averaged (as DistributedDataParallel does).
        HYBRID_SHARD: FULL_SHARD within a group of ranks, replicas of that group.
        _HYBRID_SHARD_ZERO2: SHARD_GRAD_OP within a group of ranks, replicas of that group.
        ZERO1: Optimizer state; parameters stay full until the optimizer has changed them (ZeRO-1).
    """

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()
    ZERO1 = auto()

    @classmethod
    def accept(cls, strategy: object) -> ShardingStrategy:
        """`strategy` itself, FULL_SHARD for None, or the member of the same name of another library's enum."""
        if strategy is None:
            return cls.FULL_SHARD
        if isinstance(strategy, cls):
            return strategy
        if isinstance(strategy, Enum) and type(strategy).__name__ == cls.__name__ and strategy.name in cls.__members__:
            return cls[strategy.name]
        names = ", ".join(name for name in cls.__members__ if not name.startswith("_"))
        raise TypeError(f"sharding_strategy must be a ShardingStrategy ({names}), got {strategy!r}")


class Axes(Enum):
    """Which axes the mesh of a strategy has."""

    SHARD = "shard"  # one axis
    REPLICATE = "replicate"  # (ranks, 1): all replicas of one rank
    HYBRID = "replicate x shard"


@dataclass(frozen=True, slots=True)
class Rules:
    """What a strategy means to the engine.

    Attributes:
        axes: Axes of the mesh.
        after_forward: What becomes of full parameters after forward.
        keep_after_backward: They stay full until parameters change.
    """

    axes: Axes
    after_forward: AfterForward
    keep_after_backward: bool = False

    @property
    def policy(self) -> UnitPolicy:
        """Settings of a unit."""
        return UnitPolicy(self.after_forward, self.keep_after_backward)


RULES: dict[ShardingStrategy, Rules] = {
    ShardingStrategy.FULL_SHARD: Rules(Axes.SHARD, AfterForward.AUTO),
    ShardingStrategy.SHARD_GRAD_OP: Rules(Axes.SHARD, AfterForward.KEEP),
    ShardingStrategy.NO_SHARD: Rules(Axes.REPLICATE, AfterForward.KEEP, keep_after_backward=True),
    ShardingStrategy.HYBRID_SHARD: Rules(Axes.HYBRID, AfterForward.AUTO),
    ShardingStrategy._HYBRID_SHARD_ZERO2: Rules(Axes.HYBRID, AfterForward.KEEP),
    ShardingStrategy.ZERO1: Rules(Axes.SHARD, AfterForward.KEEP, keep_after_backward=True),
}
