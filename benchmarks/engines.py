"""What is compared: one small adapter an engine, from a plain model to a model whose backward leaves mean gradients."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from llama import Llama, LlamaBlock, LlamaShape


@dataclass(frozen=True)
class Workload:
    """One training job; every rank has its own batch."""

    name: str
    shape: LlamaShape
    batch: int
    positions: int
    world_size: int = 2
    learning_rate: float = 1e-4


WORKLOADS: dict[str, Workload] = {
    "a": Workload("a", LlamaShape(width=512, blocks=8, hidden=1408), batch=1, positions=128),
    "b": Workload("b", LlamaShape(width=1024, blocks=6, hidden=2816), batch=1, positions=256),
    # Small enough to try the scripts themselves.
    "tiny": Workload("tiny", LlamaShape(width=64, blocks=2, hidden=128), batch=1, positions=16),
}


def _plain(model: nn.Module) -> nn.Module:
    return model


def _ddp(model: nn.Module) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model)


def _fsdp1(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({LlamaBlock}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


def _fsdp2(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return _shard_blocks_then_root(model, fully_shard)


def _fullshard(model: nn.Module) -> nn.Module:
    from fullshard import fully_shard

    return _shard_blocks_then_root(model, fully_shard)


def _shard_blocks_then_root(model: nn.Module, fully_shard: Callable[..., object]) -> nn.Module:
    for module in model.modules():
        if isinstance(module, LlamaBlock):
            fully_shard(module)
    fully_shard(model)
    return model


ENGINES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": _plain,
    "ddp": _ddp,
    "fsdp1": _fsdp1,
    "fsdp2": _fsdp2,
    "fullshard": _fullshard,
}


def missing_reason(engine: str) -> str | None:
    """Why this engine cannot run here, or None."""
    if engine == "fullshard":
        if importlib.util.find_spec("fullshard") is None:
            return "package fullshard is not installed"
        if not hasattr(importlib.import_module("fullshard"), "fully_shard"):
            return "fullshard has no fully_shard yet"
    return None


def world_size_of(engine: str, workload: Workload) -> int:
    """The plain model is one process; it shows what computing alone costs."""
    return 1 if engine == "plain" else workload.world_size


class Training:
    """One rank's model, optimizer and data."""

    def __init__(self, engine: str, workload: Workload, rank: int) -> None:
        torch.manual_seed(0)  # the same weights on every rank and for every engine
        self.model = ENGINES[engine](Llama(workload.shape))
        # After sharding: an optimizer made before would hold the unsharded parameters.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=workload.learning_rate, fused=True)
        self._workload = workload
        self._generator = torch.Generator().manual_seed(rank + 1)

    def step(self) -> float:
        """One optimizer step; returns this rank's loss in nats."""
        tokens, targets = self._batch()
        loss = self.model(tokens, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()  # to None: an engine that waits for its turn keeps no gradients
        return float(loss.item())

    def _batch(self) -> tuple[Tensor, Tensor]:
        size = (self._workload.batch, self._workload.positions + 1)
        tokens = torch.randint(self._workload.shape.vocabulary, size, generator=self._generator)
        return tokens[:, :-1], tokens[:, 1:]
