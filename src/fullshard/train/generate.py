"""A short text from the model while it is sharded."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def generate(model: nn.Module, prompt: bytes, count: int, temperature: float, seed: int) -> bytes:
    """`prompt` and `count` more bytes. All ranks must call it alike: each forward gathers the parameters together."""
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    tokens = list(prompt)
    model.eval()
    for _ in range(count):
        logits = model(torch.tensor([tokens], device=device))[0, -1, :256].float().cpu()
        tokens.append(_pick(logits, temperature, generator))
    model.train()
    return bytes(tokens)


def _pick(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    weights = torch.softmax(logits / temperature, dim=-1)
    return int(torch.multinomial(weights, 1, generator=generator))
