"""A decoder-only Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Parameter names and shapes are those of Hugging Face's `LlamaForCausalLM`, and the block class is called
`LlamaDecoderLayer`, so weights, wrap policies and tools move over unchanged. Every module that owns parameters or
buffers has `reset_parameters()`, so the model can also be built on the meta device and filled after sharding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fullshard.train.config import ModelConfig


class Linear(nn.Linear):
    """A bias-free linear map whose weight starts normal with the standard deviation `std`."""

    def __init__(self, in_features: int, out_features: int, std: float) -> None:
        self.std = std  # before super(): its constructor calls reset_parameters()
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Draw the weight from the default generator."""
        nn.init.normal_(self.weight, mean=0.0, std=self.std)


class Embedding(nn.Embedding):
    """A token table that starts normal with the standard deviation `std`."""

    def __init__(self, num_embeddings: int, embedding_dim: int, std: float) -> None:
        self.std = std
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        """Draw the table from the default generator."""
        nn.init.normal_(self.weight, mean=0.0, std=self.std)


class LlamaRMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 whatever the input is."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.eps = eps
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Every scale is one."""
        nn.init.ones_(self.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """Same shape and dtype as `hidden`."""
        if hidden.dtype == torch.float32:
            return functional.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        wide = functional.rms_norm(hidden.float(), self.weight.shape, None, self.eps)
        return self.weight * wide.to(hidden.dtype)


class LlamaRotaryEmbedding(nn.Module):
    """Cosines and sines of the positions; the frequencies are a buffer that is never saved."""

    inv_freq: Tensor  # [head_dim / 2], float32

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self.head_dim, self.theta = head_dim, theta
        self.register_buffer("inv_freq", torch.empty(head_dim // 2, dtype=torch.float32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Compute the frequencies again: `to_empty()` leaves a buffer with garbage."""
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=self.inv_freq.device) / self.head_dim
        with torch.no_grad():
            self.inv_freq.copy_(self.theta**-exponent)

    @torch.no_grad()
    def forward(self, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [length, head_dim]: float32 angles, rounded once to `dtype`."""
        positions = torch.arange(length, dtype=torch.float32, device=self.inv_freq.device)
        angles = torch.outer(positions, self.inv_freq).repeat(1, 2)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to [batch, heads, length, head_dim] in the half-split layout of Hugging Face."""
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-second, first), dim=-1) * sin


class LlamaAttention(nn.Module):
    """Causal self-attention where groups of query heads share one key/value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.groups = config.num_attention_heads // config.num_key_value_heads
        query, key = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        std = config.initializer_range
        self.q_proj = Linear(config.hidden_size, query, std)
        self.k_proj = Linear(config.hidden_size, key, std)
        self.v_proj = Linear(config.hidden_size, key, std)
        self.o_proj = Linear(query, config.hidden_size, std)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, length, hidden] in and out."""
        batch, length, _ = hidden.shape
        query, key, value = (
            projection(hidden).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        if self.groups > 1:
            key, value = (states.repeat_interleave(self.groups, dim=1) for states in (key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class LlamaMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner, std = config.hidden_size, config.intermediate_size, config.initializer_range
        self.gate_proj = Linear(hidden, inner, std)
        self.up_proj = Linear(hidden, inner, std)
        self.down_proj = Linear(inner, hidden, std)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden] in and out."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


class LlamaDecoderLayer(nn.Module):
    """One block: norm, attention, residual, norm, MLP, residual. This is the unit of sharding."""

    def __init__(self, config: ModelConfig, recompute: bool = False) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.recompute = recompute

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, length, hidden] in and out; with `recompute` only the input is kept for backward."""
        # Inside the layer, not around it: the layer's own hooks then see one forward and one backward, and the
        # recomputation finds the parameters already gathered by the pre-backward hook.
        if self.recompute and torch.is_grad_enabled():
            out: Tensor = checkpoint(self._block, hidden, cos, sin, use_reentrant=False)
            return out
        return self._block(hidden, cos, sin)

    def _block(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class LlamaModel(nn.Module):
    """Embedding, blocks and the final norm."""

    def __init__(self, config: ModelConfig, recompute: bool = False) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, config.initializer_range)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, recompute) for _ in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config.head_dim, config.rope_theta)

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states [batch, length, hidden] of tokens [batch, length]."""
        hidden: Tensor = self.embed_tokens(tokens)
        cos, sin = self.rotary_emb(tokens.shape[1], hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin)
        normed: Tensor = self.norm(hidden)
        return normed


class LlamaForCausalLM(nn.Module):
    """The language model: logits of the next token at every position."""

    def __init__(self, config: ModelConfig, recompute: bool = False) -> None:
        super().__init__()
        self.model = LlamaModel(config, recompute)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, config.initializer_range)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, length, vocab] of tokens [batch, length]."""
        logits: Tensor = self.lm_head(self.model(tokens))
        return logits


def build_llama(config: ModelConfig, seed: int, recompute: bool = False) -> LlamaForCausalLM:
    """The model with weights that depend on `seed` alone: the same on every rank, whatever ran before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config, recompute)


def parameter_count(config: ModelConfig) -> int:
    """Number of parameters, tied ones once, without allocating any."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    return sum(parameter.numel() for parameter in model.parameters())
