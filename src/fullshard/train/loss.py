"""The loss of one optimizer step: the mean over ALL valid tokens of all ranks and micro batches.

A mean of means would weigh a token by the rank and micro batch it happens to land in. Here every micro batch adds
the SUM of its token losses, divided once by the number of valid tokens of the whole window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from fullshard import FSDPModule
from fullshard.train.windows import IGNORED_LABEL, Batch


def token_loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross entropy of the valid tokens, in nats, float32; zero (not NaN) when there are none."""
    return functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )


def valid_tokens(batches: Sequence[Batch]) -> int:
    """Labels that count."""
    return sum(int((batch.labels != IGNORED_LABEL).sum()) for batch in batches)


def backward_window(
    model: nn.Module, batches: Sequence[Batch], global_tokens: int, ranks: int, sync: Literal["every", "last"]
) -> float:
    """Forward and backward of this rank's micro batches; returns the sum of their token losses.

    Afterwards the gradients are those of `sum of all losses / global_tokens`. The engine averages over `ranks`, hence
    the factor. With sync "every" each micro batch is reduced at once and only shards accumulate; with "last" whole
    gradients are kept until the last one: fewer messages, more memory.
    """
    scale = ranks / max(1, global_tokens)
    total = 0.0
    for number, batch in enumerate(batches):
        last = number == len(batches) - 1
        if isinstance(model, FSDPModule):
            model.set_is_last_backward(last)
            model.set_requires_gradient_sync(last or sync == "every")
        loss = token_loss_sum(model(batch.tokens), batch.labels)
        (loss * scale).backward()
        total += float(loss.detach())
    return total


@torch.no_grad()
def evaluate(model: nn.Module, batches: Sequence[Batch]) -> tuple[float, int]:
    """(sum of token losses, valid tokens) of this rank's batches; all ranks must call it with equally many."""
    model.eval()
    total, tokens = 0.0, 0
    for batch in batches:
        total += float(token_loss_sum(model(batch.tokens), batch.labels))
        tokens += valid_tokens([batch])
    model.train()
    return total, tokens
