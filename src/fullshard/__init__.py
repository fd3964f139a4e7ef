"""fullshard: Fully Sharded Data Parallel training for PyTorch.

Shard each block, then the root, then make the optimizer:

    >>> from fullshard import fully_shard
    >>> for block in model.layers:
    ...     fully_shard(block)
    >>> fully_shard(model)
    >>> optimizer = torch.optim.AdamW(model.parameters())
"""

from fullshard import optim
from fullshard.runtime.api import fully_shard, register_fsdp_forward_method, share_comm_ctx
from fullshard.runtime.collectives import AllGather, ReduceScatter
from fullshard.runtime.loop.clip import clip_grad_norm_
from fullshard.runtime.loop.even import any_rank, even_batches
from fullshard.runtime.loop.optimizers import split_param_groups
from fullshard.runtime.loop.scaler import ShardedGradScaler
from fullshard.runtime.module import FSDPModule
from fullshard.runtime.params.place import DataParallelMeshDims, FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from fullshard.runtime.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fullshard.runtime.profile import Profile, profile
from fullshard.runtime.unshard import UnshardHandle
from fullshard.runtime.values.init import materialize
from fullshard.runtime.whole.summon import full_parameters, use_parameters
from fullshard.runtime.whole.tensors import full_tensor
from fullshard.wrapper.settings import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fullshard.wrapper.wrapper import FullyShardedDataParallel

FSDP = FullyShardedDataParallel

__version__ = "0.1.0"

__all__ = [
    "FSDP",
    "AllGather",
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPMeshInfo",
    "FSDPModule",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "HSDPMeshInfo",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "Profile",
    "ReduceScatter",
    "ShardPlacementResult",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "UnshardHandle",
    "any_rank",
    "clip_grad_norm_",
    "even_batches",
    "full_parameters",
    "full_tensor",
    "fully_shard",
    "materialize",
    "optim",
    "profile",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "split_param_groups",
    "use_parameters",
]
