"""The engine in ten lines: torchrun --nproc-per-node 2 examples/train_ten_lines.py."""
# ruff: noqa: T201

import torch
import torch.distributed as dist
from torch import nn

from fullshard import clip_grad_norm_, fully_shard

dist.init_process_group("gloo")  # on GPUs: "nccl", and tensors on torch.accelerator.current_accelerator()
torch.manual_seed(0)  # the same weights on every rank
model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)))

for block in model:
    fully_shard(block)  # blocks first: each is gathered just before it is used
fully_shard(model)  # the root last: whatever is left
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after sharding, so it holds the shards

torch.manual_seed(1 + dist.get_rank())  # different data on every rank
for step in range(100):
    batch = torch.randn(64, 256)
    loss = (model(batch) - batch.flip(1)).square().mean()
    loss.backward()
    clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")

dist.destroy_process_group()
