"""The names of `torch.distributed.fsdp._fully_shard._fsdp_common` that `shard_placement_fn` needs."""

from fullshard.runtime.params.place import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult

__all__ = ["FSDPMeshInfo", "HSDPMeshInfo", "ShardPlacementResult"]
