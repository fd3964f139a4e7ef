"""Made the folders deepspeed-*: checkpoints of a tiny model, and what DeepSpeed makes of them.

DeepSpeed is no dependency, and takes minutes to install, so what it wrote is kept here: version 0.19.8, torch 2.13.0 on
the CPU. KIND is the rest of the folder's name; two ranks, three for zero3-groups; STORE is a new file:

    for rank in 0 1; do
        RANK=$rank WORLD_SIZE=2 LOCAL_RANK=$rank DS_ACCELERATOR=cpu python make_deepspeed.py KIND OUT STORE &
    done; wait
    DS_ACCELERATOR=cpu python make_deepspeed.py expected OUT

The second command writes OUT/expected.safetensors with DeepSpeed's own converter, which is what tests compare with; it
does not read the kinds zero0 and bf16. The copies of that converter in OUT are not kept.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

BF16 = {"bf16": {"enabled": True}}  # with float32 masters
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero0": ({"stage": 0}, {}),
    "zero1": ({"stage": 1}, BF16),
    "zero2": ({"stage": 2}, BF16),
    "zero3": ({"stage": 3, "stage3_param_persistence_threshold": 0}, BF16),
    "zero3-groups": ({"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 20}, {}),
    # Float32 gradients make DeepSpeed take another optimizer, which writes other files.
    "bf16": ({"stage": 1}, {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}),
}


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


def make(kind: str, out: Path, store: str) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world_size, init_method=f"file://{store}")
    import deepspeed

    torch.manual_seed(0)
    model = Tiny()
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2)
    zero, more = KINDS[kind]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **more,
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
        make(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
