"""What users read from a wrapper: the arguments it was made with, and the ranks and device that followed from them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fullshard.core.strategy import RULES, Axes, ShardingStrategy
from fullshard.runtime.module import unit_of
from fullshard.wrapper.arguments import Arguments
from fullshard.wrapper.settings import BackwardPrefetch, CPUOffload, MixedPrecision


class MadeWith:
    """The part of `FullyShardedDataParallel` that tells how it was made. An inner wrapper tells what is its own."""

    _arguments: Arguments

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """Strategy of this wrapper."""
        return self._arguments.sharding_strategy

    @property
    def backward_prefetch(self) -> BackwardPrefetch | None:
        """As given."""
        return self._arguments.backward_prefetch

    @property
    def forward_prefetch(self) -> bool:
        """As given."""
        return self._arguments.forward_prefetch

    @property
    def limit_all_gathers(self) -> bool:
        """As given."""
        return self._arguments.limit_all_gathers

    @property
    def mixed_precision(self) -> MixedPrecision:
        """Dtypes of this wrapper."""
        return self._arguments.mixed_precision or MixedPrecision()

    @property
    def cpu_offload(self) -> CPUOffload:
        """Where shards live."""
        return self._arguments.cpu_offload

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Ranks that hold the pieces of one parameter; with NO_SHARD all ranks, which hold it whole."""
        place = unit_of(self).place
        if RULES[self.sharding_strategy].axes is Axes.REPLICATE and place.replicate_group is not None:
            return place.replicate_group
        return place.shard_group

    @property
    def rank(self) -> int:
        """This rank in `process_group`."""
        return self.process_group.rank()

    @property
    def world_size(self) -> int:
        """Ranks of `process_group`."""
        return self.process_group.size()

    @property
    def compute_device(self) -> torch.device:
        """Device of parameters and computation."""
        return unit_of(self).place.device
