"""What is trained: the jobs that every engine is given alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from llama import Llama, LlamaBlock, LlamaShape


@dataclass(frozen=True)
class Workload:
    """One training job; every rank has its own batches.

    Attributes:
        title: What a reader must know about it.
        engines: Who is measured unless the command line says otherwise.
        batch: Sequences a rank and microbatch.
        positions: Tokens a sequence.
        microbatches: Backwards before each optimizer step.
        hold: With several microbatches, leave gradients whole until the last (`no_sync`) in place of reducing each.
        compute_dtype: Parameters are computed with in this dtype; the optimizer's are float32 always.
        link_gbit: The two ranks are on two hosts joined by a link of this speed; 0: one host.
    """

    name: str
    title: str
    shape: LlamaShape
    engines: tuple[str, ...]
    batch: int = 1
    positions: int = 128
    world_size: int = 2
    microbatches: int = 1
    hold: bool = False
    compute_dtype: str = "float32"
    link_gbit: float = 0.0
    learning_rate: float = 1e-4

    @property
    def dtype(self) -> torch.dtype:
        """`compute_dtype` as torch's."""
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.compute_dtype]


_26M = LlamaShape(width=512, blocks=8, hidden=1408)
_78M = LlamaShape(width=1024, blocks=6, hidden=2816)
_308M = LlamaShape(width=1024, blocks=24, hidden=2816)

_TORCH = ("fsdp2", "fsdp1", "ddp")
_ZERO = ("zero1", "zero2", "zero3", "megatron")
_OURS = ("fullshard-direct", "fullshard-shm", "fullshard-flat")
_EVERYBODY = ("plain", "compute", *_TORCH, *_ZERO, *_OURS)
_NEAREST = ("compute", "fsdp2", "ddp", "zero3", *_OURS)

_ALL = (
    Workload("a", "Llama 26 M, 1 x 128 tokens", _26M, _EVERYBODY),
    Workload("b", "Llama 78 M, 1 x 256 tokens", _78M, ("plain", "compute", *_TORCH, "zero3", *_OURS), positions=256),
    # Of this size two engines fit into 24 GiB at once, DDP hardly alone.
    Workload("c", "24 blocks of d 1024 (308 M), 1 x 64 tokens", _308M, ("fsdp2", "zero3", *_OURS), positions=64),
    Workload("d", "b in bfloat16, float32 master", _78M, _NEAREST, positions=256, compute_dtype="bfloat16"),
    Workload("e", "a, 4 microbatches, each reduced", _26M, (*_NEAREST, "zero2"), microbatches=4),
    Workload("e-hold", "a, 4 microbatches, the last reduced", _26M, (*_TORCH, *_OURS), microbatches=4, hold=True),
    Workload("h", "a on four ranks", _26M, _NEAREST, world_size=4),
    Workload("i1", "b, two hosts, 1 Gbit/s", _78M, (*_NEAREST[:4], "fullshard-direct"), positions=256, link_gbit=1.0),
    Workload("i4", "b, two hosts, 4 Gbit/s", _78M, (*_NEAREST[:4], "fullshard-direct"), positions=256, link_gbit=4.0),
    # Small enough to try the scripts themselves.
    Workload("tiny", "too small to say anything", LlamaShape(64, 2, 128), _EVERYBODY, positions=16),
)
WORKLOADS: dict[str, Workload] = {workload.name: workload for workload in _ALL}


@dataclass(frozen=True)
class Sizes:
    """Numbers of parameters of a model."""

    all: int
    block: int


def sizes(workload: Workload) -> Sizes:
    """Count without allocating anything."""
    with torch.device("meta"):
        model = Llama(workload.shape)
    block = next(module for module in model.modules() if isinstance(module, LlamaBlock))
    return Sizes(_numel(model), _numel(block))


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def ideal_peak_bytes(workload: Workload, activation_bytes: int) -> int:
    """The least a rank can peak at with ZeRO-3 and one unit gathered ahead.

    Parameter and the two moments of AdamW in float32, 1/N of each; two blocks' parameters and one block's gradients in
    the dtype of computation; and activations, which are measured: what the plain model's forward adds. 1/N of the
    gradients comes as the activations go, so the larger of the two counts, but both where earlier microbatches have
    left gradients.
    """
    count = sizes(workload)
    states, gradients = (nbytes * count.all // workload.world_size for nbytes in (12, 4))
    units = 3 * count.block * workload.dtype.itemsize
    if workload.microbatches > 1:
        return states + units + gradients + activation_bytes
    return states + units + max(gradients, activation_bytes)
