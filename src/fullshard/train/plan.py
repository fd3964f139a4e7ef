"""What a run would be, from its configuration alone: `fullshard train --dry-run`."""

from __future__ import annotations

from typing import Any

import torch

from fullshard.train.config import Config
from fullshard.train.llama import LlamaForCausalLM


def describe_run(config: Config, ranks: int) -> dict[str, Any]:
    """Sizes of model, step and state; nothing is allocated and no text is read."""
    replicas, shards = config.parallel.mesh_shape(ranks)
    with torch.device("meta"):
        parameters = list(LlamaForCausalLM(config.model).parameters())
    count = sum(parameter.numel() for parameter in parameters)
    # The first rank's rows are ceil(rows / shards): no rank holds more.
    largest = sum(-(-p.shape[0] // shards) * (p.numel() // p.shape[0]) for p in parameters)
    sequences = config.train.step_windows(ranks)
    per_parameter = 4 + 4 + 8  # fp32 parameter, gradient, two AdamW moments
    return {
        "parameters": count,
        "ranks": ranks,
        "replicas": replicas,
        "shards": shards,
        "bytes_per_rank": largest * per_parameter,
        "bytes_per_rank_of_ddp": count * per_parameter,
        "tokens_per_step": sequences * config.data.seq_len,
        "steps": config.train.steps,
        "tokens": sequences * config.data.seq_len * config.train.steps,
    }
