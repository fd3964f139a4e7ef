"""The names of `torch.distributed.fsdp._fully_shard._fsdp_api`."""

from fullshard.runtime.collectives import AllGather, ReduceScatter
from fullshard.runtime.params.place import DataParallelMeshDims
from fullshard.runtime.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReduceScatter",
]
