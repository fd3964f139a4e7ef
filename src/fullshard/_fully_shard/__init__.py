"""The names of `torch.distributed.fsdp._fully_shard`, for programs that import from there."""

from fullshard.runtime.api import fully_shard, register_fsdp_forward_method, share_comm_ctx
from fullshard.runtime.module import FSDPModule
from fullshard.runtime.params.place import DataParallelMeshDims
from fullshard.runtime.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fullshard.runtime.unshard import UnshardHandle

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
