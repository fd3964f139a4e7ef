"""The engines of torch that whole steps are compared with. The only file of the package that knows any of them."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def shard_with_fsdp2(model: nn.Module, block: type[nn.Module]) -> nn.Module:
    """Each block, then the root."""
    for module in model.modules():
        if isinstance(module, block):
            fully_shard(module)
    fully_shard(model)
    return model


def replicate_with_ddp(model: nn.Module, device: torch.device) -> nn.Module:
    """The whole model on every rank."""
    return DistributedDataParallel(model, device_ids=None if device.type == "cpu" else [device])
