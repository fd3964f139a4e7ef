"""AdamW and its learning rate."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from fullshard.optim import flat
from fullshard.train.config import OptimConfig


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW on the flat shards; weight decay on matrices only, fused where the device has it."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    options: dict[str, Any] = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps}
    try:
        return flat(torch.optim.AdamW, groups, **options, fused=True)
    except RuntimeError:  # torch names the devices it has a fused kernel for only by refusing the others
        return flat(torch.optim.AdamW, groups, **options)


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """The rate of step `step` (from 0): linear warm-up, then a cosine to `min_lr_ratio`; it depends on nothing else."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    span = max(1, steps - 1 - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    floor = config.lr * config.min_lr_ratio
    return floor + (config.lr - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` in every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
