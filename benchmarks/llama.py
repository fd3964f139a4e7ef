"""A decoder-only Llama in plain torch, the model of the benchmarks: nothing of any engine is in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of the model; all are numbers of elements."""

    width: int
    blocks: int
    hidden: int
    vocabulary: int = 256
    heads: int = 8
    positions: int = 512


class RotaryAttention(nn.Module):
    """Causal self-attention with rotary positions."""

    cos: Tensor  # [positions, head_width / 2]
    sin: Tensor  # [positions, head_width / 2]

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        self.q_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.o_proj = nn.Linear(shape.width, shape.width, bias=False)
        frequency = 10000.0 ** (-torch.arange(0, self.head_width, 2) / self.head_width)
        angle = torch.arange(shape.positions)[:, None] * frequency
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, positions, width] -> the same."""
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_width)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (t.transpose(1, 2) for t in (self._rotate(q), self._rotate(k), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def _rotate(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        cos, sin = (table[: x.shape[1], None].to(x.dtype) for table in (self.cos, self.sin))
        return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


class LlamaBlock(nn.Module):
    """One decoder layer: the unit that is sharded."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.width, eps=1e-6)
        self.self_attn = RotaryAttention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, eps=1e-6)
        self.gate_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down_proj = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, positions, width] -> the same."""
        x = x + self.self_attn(self.input_layernorm(x))
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class Llama(nn.Module):
    """Tokens and targets in, mean cross-entropy out."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList([LlamaBlock(shape) for _ in range(shape.blocks)])
        self.norm = nn.RMSNorm(shape.width, eps=1e-6)
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """[batch, positions] twice -> scalar loss in nats."""
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1), targets.flatten())
