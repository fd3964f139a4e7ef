"""The networks of the menagerie in models.py, each odd in one way."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# -- shapes ------------------------------------------------------------------------------------------------------------


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.GELU()]
    return nn.Sequential(*layers[:-1])


class Scaled(nn.Module):
    """A linear layer times a 0-d parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


class OneElement(nn.Module):
    """Parameters of shape (1,) and (1, 1): every rank but the first holds nothing of them."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.tensor([0.5]))
        self.gain = nn.Parameter(torch.tensor([[2.0]]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.shift


class ConvNet(nn.Module):
    """4-d weights, and group norm instead of batch norm, which would make ranks depend on each other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.GELU())
        self.second = nn.Sequential(nn.Conv2d(6, 5, 1), nn.GroupNorm(1, 5))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)).mean(dim=(2, 3)))


# -- structure ---------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """The plain block that the models below are made of."""

    def __init__(self, width: int = 4, hidden: int = 6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """Two blocks as units; the root has parameters of its own, used before, between and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4))
        self.blocks = nn.ModuleList([Residual(), Residual()])
        self.gain = nn.Parameter(torch.ones(4))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.blocks[1](self.blocks[0](x + self.position) * self.gain))


class Tied(nn.Module):
    """The head's weight is the embedding's; no unit but the root owns it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.block = Residual()
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embedding(tokens)))


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions in a buffer that is not saved."""

    rotary: Tensor

    def __init__(self, width: int = 8, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        head_width = width // heads
        self.head_width = head_width
        self.q_proj = nn.Linear(width, heads * head_width, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * head_width, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * head_width, bias=False)
        self.o_proj = nn.Linear(heads * head_width, width, bias=False)
        self.register_buffer("rotary", 10.0 ** -torch.arange(head_width // 2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_width)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (t.transpose(1, 2) for t in (self._rotate(q), self._rotate(k), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def _rotate(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[1], dtype=self.rotary.dtype)[:, None, None] * self.rotary
        left, right = x.chunk(2, dim=-1)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


class Decoder(nn.Module):
    """One Llama layer: RMSNorm, attention, RMSNorm, SwiGLU."""

    def __init__(self, width: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(width, eps=1e-6)
        self.self_attn = Attention(width)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=1e-6)
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([Decoder(), Decoder()])
        self.norm = nn.RMSNorm(8, eps=1e-6)
        self.lm_head = nn.Linear(8, 11, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


# -- control flow ------------------------------------------------------------------------------------------------------


class TwoBranches(nn.Module):
    """A unit of which one branch may stay unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor, second: bool) -> Tensor:
        return self.second(x) if second else self.first(x)


class Conditional(nn.Module):
    """Runs the second branch in every other step (with `second`) or never."""

    def __init__(self) -> None:
        super().__init__()
        self.block = TwoBranches()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, second: bool = False) -> Tensor:
        return self.head(self.block(x, second))


class SkippedUnit(nn.Module):
    """A whole unit that runs in every other step only; all ranks agree on which."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual(), Residual(), Residual()])

    def forward(self, x: Tensor, skip: bool) -> Tensor:
        x = self.blocks[0](x)
        return self.blocks[2](x if skip else self.blocks[1](x))


class SharedBlock(nn.Module):
    """One unit called twice in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Residual()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.block(x)))


class NoGradient(nn.Module):
    """The unit `probe` runs, but nothing of its output reaches the loss with a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = Residual()
        self.block = Residual()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + self.probe(x).detach()


class CheckpointInside(nn.Module):
    """A unit that recomputes its own inside during backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Residual()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class CheckpointOutside(nn.Module):
    """The caller of the units recomputes them: their forward hooks run again inside backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual(), Residual()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


# -- inputs, outputs, parameters that do not train ---------------------------------------------------------------------


class DictOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Residual()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.block(x)
        return {"logits": self.head(hidden), "hidden": [hidden], "count": x.shape[0]}


class TupleBlock(nn.Module):
    """A unit that returns a tuple with None and something that is no tensor in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, None, str]:
        return self.linear(x), None, "cache"


class TupleOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = TupleBlock()

    def forward(self, x: Tensor) -> tuple[Tensor, None, list[Tensor]]:
        y, nothing, _ = self.block(x)
        return y, nothing, [y.sin()]


class ManyInputs(nn.Module):
    """Tensors by position, by keyword, inside a dict, and one that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 5)
        self.right = nn.Linear(3, 5)

    def forward(self, x: Tensor, y: Tensor, *, weights: dict[str, Tensor], mask: Tensor | None = None) -> Tensor:
        total = self.left(x) * weights["left"] + self.right(y) * weights["right"]
        return total if mask is None else total * mask


class WithBuffers(nn.Module):
    """A saved buffer, one that is not saved, and one that forward changes."""

    mean: Tensor
    table: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.block = Residual()
        self.register_buffer("mean", torch.linspace(0, 1, 4))
        self.register_buffer("table", torch.linspace(1, 2, 4), persistent=False)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.block((x - self.mean) * self.table)


def frozen_mixed() -> nn.Module:
    """Frozen and trainable parameters in one unit, and one unit that is all frozen."""
    model = Blocks()
    model.blocks[0].requires_grad_(False)
    model.blocks[1].get_submodule("up").requires_grad_(False)
    model.position.requires_grad_(False)
    return model
