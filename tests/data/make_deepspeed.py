"""Made the folders deepspeed-zero1, -zero2 and -zero3: checkpoints of a tiny model, and what DeepSpeed makes of them.

DeepSpeed is no dependency, and takes minutes to install, so what it wrote is kept here: version 0.19.8, torch 2.13.0 on
the CPU, two ranks, bfloat16 with float32 masters. Run it for each stage on two ranks (STORE is a new file):

    for rank in 0 1; do
        RANK=$rank WORLD_SIZE=2 LOCAL_RANK=$rank DS_ACCELERATOR=cpu python make_deepspeed.py STAGE OUT STORE &
    done; wait
    DS_ACCELERATOR=cpu python make_deepspeed.py expected OUT

The second command writes OUT/expected.safetensors with DeepSpeed's own converter, which is what tests compare with. The
copies of that converter in OUT are not kept.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn


class Norm(nn.Module):
    """A parameter of odd size and two buffers, one of which is not floating point."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))
        self.register_buffer("mean", torch.linspace(-1, 1, size))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return (hidden - self.mean.to(hidden.dtype)) * self.scale


class Tiny(nn.Module):
    """A tied head, a frozen layer, buffers, and sizes that two ranks cannot halve."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.frozen = nn.Linear(6, 5)
        self.norm = Norm(5)
        self.back = nn.Linear(5, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.frozen(self.embed(tokens)))
        return self.head(self.back(hidden).tanh()).float().logsumexp(-1).mean()


def make(stage: int, out: Path, store: str) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{store}")
    import deepspeed

    torch.manual_seed(0)
    model = Tiny()
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": True},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2):
        loss = engine(torch.randint(11, (8,), generator=generator))
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(str(out), tag="global_step2")


def convert(out: Path) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from safetensors.torch import save_file

    state = get_fp32_state_dict_from_zero_checkpoint(str(out))
    save_file({name: tensor.contiguous().clone() for name, tensor in state.items()}, out / "expected.safetensors")


if __name__ == "__main__":
    if sys.argv[1] == "expected":
        convert(Path(sys.argv[2]))
    else:
        make(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
