"""Training that goes on where it was, at any number of ranks: torchrun --nproc-per-node 2 examples/train_and_resume.py.

Stop it at any moment and start it again.
"""
# ruff: noqa: T201

import sys

import torch
import torch.distributed as dist
from torch import nn

from fullshard import checkpoint, fully_shard


def main(root: str, steps: int) -> list[float]:
    """Train from the newest checkpoint in `root` on; returns this rank's losses."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2)))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())  # different data on every rank
    state = {"model": model, "optimizer": optimizer, "random": checkpoint.RandomState()}
    found = [checkpoint.latest(root)]
    dist.broadcast_object_list(found)  # one rank decides: all must load, or none
    first = checkpoint.load(found[0], state).step if found[0] else 0
    losses, pending = [], None
    for step in range(first + 1, steps + 1):
        batch = torch.randn(16, 64)
        loss = (model(batch) - batch.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 0 or step == steps:
            # Copied during the next step. Whoever goes on from an earlier step meets the later ones again.
            pending = checkpoint.overlapped_save(root, state, step, keep=2, overwrite=True)
    if pending is not None:
        pending.result()  # the last one must be on the disk before the process group goes
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: {main(sys.argv[1] if len(sys.argv) > 1 else 'runs/resume', 50)[-3:]}")
    dist.destroy_process_group()
