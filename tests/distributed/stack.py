"""A small model whose order and failures a test chooses, and what tests ask of it."""

from __future__ import annotations

import torch
from torch import nn

from fullshard import fully_shard
from fullshard.runtime.engine import Engine


class Stack(nn.Module):
    """Blocks whose order, and failures, a test chooses."""

    def __init__(self, count: int = 4, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.order = list(range(count))
        self.fail_at: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.order:
            if i == self.fail_at:
                raise ValueError(f"bad batch in block {i}")
            x = self.blocks[i](x).relu()
        return x


class Explosive(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(_ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(_ctx: object, _gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("bad backward")


def make_stack(count: int = 4, width: int = 8, **options: object) -> Stack:
    torch.manual_seed(0)
    model = Stack(count, width)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def engine_of(model: nn.Module) -> Engine:
    engine: Engine = model.__dict__["_fullshard"].unit.engine
    return engine


def batch(rank: int, step: int = 0, width: int = 8) -> torch.Tensor:
    return torch.randn(3, width, generator=torch.Generator().manual_seed(10 * step + rank))
