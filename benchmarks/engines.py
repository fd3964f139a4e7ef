"""What is compared: one small adapter an engine, from a plain model to a job whose backward leaves mean gradients.

Runs in the rank processes, those of the peers' own environment too: imports only torch and what an adapter needs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llama import Llama, LlamaBlock
from workloads import Workload, sizes


class Job:
    """A model under one engine: how it computes, accumulates and updates."""

    def __init__(self, model: nn.Module, workload: Workload, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.model = model
        self.workload = workload
        # After sharding: an optimizer made before would hold the unsharded parameters.
        self.optimizer = optimizer or adamw(model.parameters(), workload)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Forward of one microbatch: a scalar in nats."""
        return self.model(tokens, targets)

    def held(self) -> AbstractContextManager[Any]:
        """Around a microbatch after which gradients stay whole."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Backward of one microbatch."""
        (loss / self.workload.microbatches).backward()

    def update(self) -> None:
        """The optimizer's step; afterwards there are no gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()  # to None: an engine that waits for its turn keeps no gradients


def adamw(parameters: Any, workload: Workload) -> torch.optim.Optimizer:
    """The optimizer of every engine."""
    return torch.optim.AdamW(parameters, lr=workload.learning_rate, fused=True)


class PlainJob(Job):
    """The unsharded model in one process: what computing alone costs."""

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Forward; a lower dtype by autocast, as without an engine."""
        with torch.autocast("cpu", self.workload.dtype, enabled=self.workload.dtype != torch.float32):
            return super().loss(tokens, targets)


class ComputeJob(Job):
    """Plain models that compute at once on as many cores, none waiting for another: each updates its share only.

    In a lower dtype the model has that dtype, and the share a float32 master: no cast is made twice.
    """

    def __init__(self, model: nn.Module, workload: Workload) -> None:
        self._shares: list[tuple[nn.Parameter, Tensor, nn.Parameter]] = []
        for parameter in model.to(workload.dtype).parameters():
            rows = parameter.detach().flatten()[: -(-parameter.numel() // workload.world_size)]
            self._shares.append((parameter, rows, nn.Parameter(rows.float())))
        super().__init__(model, workload, adamw([master for _, _, master in self._shares], workload))

    def update(self) -> None:
        """AdamW on the first 1/N of every parameter."""
        for parameter, rows, master in self._shares:
            master.grad = parameter.grad.flatten()[: rows.numel()].float()
        super().update()
        self.model.zero_grad()
        for _, rows, master in self._shares:
            if rows.dtype != master.dtype:
                rows.copy_(master.detach())


class DdpJob(PlainJob):
    """torch's DistributedDataParallel: every rank holds everything."""

    def __init__(self, model: nn.Module, workload: Workload) -> None:
        from torch.nn.parallel import DistributedDataParallel

        super().__init__(DistributedDataParallel(model), workload)

    def held(self) -> AbstractContextManager[Any]:
        """Always: its gradients are whole anyway, so nobody reduces them more than once."""
        return self.model.no_sync()


class Fsdp1Job(Job):
    """torch's class FullyShardedDataParallel."""

    def __init__(self, model: nn.Module, workload: Workload) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        lower = workload.dtype != torch.float32
        sharded = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({LlamaBlock}),
            device_id=torch.device("cpu"),
            mixed_precision=MixedPrecision(workload.dtype, torch.float32) if lower else None,
            use_orig_params=True,
        )
        super().__init__(sharded, workload)

    def held(self) -> AbstractContextManager[Any]:
        """By `no_sync` where the workload asks for it."""
        return self.model.no_sync() if self.workload.hold else nullcontext()


class FullyShardJob(Job):
    """Engines with the interface of `fully_shard`: blocks, then the root."""

    def __init__(
        self, model: nn.Module, workload: Workload, shard: Callable[..., Any], policy: Any, optimizer: Any = adamw
    ) -> None:
        options = {"mp_policy": policy(workload.dtype, torch.float32)} if workload.dtype != torch.float32 else {}
        for module in model.modules():
            if isinstance(module, LlamaBlock):
                shard(module, **options)
        shard(model, **options)
        super().__init__(model, workload, optimizer(model.parameters(), workload))

    @contextlib.contextmanager
    def held(self) -> Any:
        """Without gradient synchronization where the workload asks for it."""
        if not self.workload.hold:
            yield
            return
        self.model.set_requires_gradient_sync(False)
        yield
        self.model.set_requires_gradient_sync(True)


def fsdp2_job(model: nn.Module, workload: Workload) -> Job:
    """FSDP2: torch's `fully_shard`."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    return FullyShardJob(model, workload, fully_shard, MixedPrecisionPolicy)


def fullshard_job(transport: str, flat: bool = False) -> Callable[[nn.Module, Workload], Job]:
    """Ours, over one transport; `flat`: with the optimizer on flat shards."""

    def make(model: nn.Module, workload: Workload) -> Job:
        from fullshard import MixedPrecisionPolicy, fully_shard, optim

        def shard(module: nn.Module, **options: Any) -> None:
            fully_shard(module, transport=transport, **options)

        def flat_adamw(parameters: Any, workload: Workload) -> torch.optim.Optimizer:
            return optim.flat(torch.optim.AdamW, parameters, lr=workload.learning_rate, fused=True)

        return FullyShardJob(model, workload, shard, MixedPrecisionPolicy, flat_adamw if flat else adamw)

    return make


class DeepSpeedJob(Job):
    """DeepSpeed's ZeRO, which accumulates, scales and updates by itself."""

    def __init__(self, model: nn.Module, workload: Workload, stage: int) -> None:
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        block = sizes(workload).block
        config = {
            "train_micro_batch_size_per_gpu": workload.batch,
            "gradient_accumulation_steps": workload.microbatches,
            "zero_optimization": {
                "stage": stage,
                # A block, as for the others. The defaults, 500 million elements, are buffers of 2 GB at any model.
                **dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size"), block),
                "stage3_prefetch_bucket_size": block,
            },
            "bf16": {"enabled": workload.dtype == torch.bfloat16},
            "zero_allow_untested_optimizer": True,  # torch's AdamW, as for the others
            "zero_force_ds_cpu_optimizer": False,
        }
        engine, _, _, _ = deepspeed.initialize(
            model=model, optimizer=adamw(model.parameters(), workload), config=config, dist_init_required=False
        )
        super().__init__(engine, workload, engine.optimizer)

    def backward(self, loss: Tensor) -> None:
        """Backward of one microbatch; divides by their number itself."""
        self.model.backward(loss)
        if not self.model.is_gradient_accumulation_boundary():
            self.model.step()

    def update(self) -> None:
        """The update at the end of the microbatches."""
        self.model.step()


def deepspeed_job(stage: int) -> Callable[[nn.Module, Workload], Job]:
    """DeepSpeed at one ZeRO stage."""
    return lambda model, workload: DeepSpeedJob(model, workload, stage)


def megatron_job(model: nn.Module, workload: Workload) -> Job:
    """NVIDIA's Megatron-FSDP, ZeRO-3."""
    from megatron_fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (workload.world_size,), mesh_dim_names=("dp",))
    sharded, optimizer = fully_shard(
        model,
        adamw(model.parameters(), workload),
        fsdp_unit_modules=[LlamaBlock],
        device_mesh=mesh,
        dp_shard_dim="dp",
        device=torch.device("cpu"),
    )
    return Job(sharded, workload, optimizer)


@dataclass(frozen=True)
class Engine:
    """One line of the tables.

    Attributes:
        make: From the model to the job, in a rank process.
        title: Its name in tables.
        peer: It lives in the peers' environment (`peers.py`), not in the project's.
        whole: Bytes a parameter and rank that are not sharded, of the 16 of training with AdamW; buckets come on top.
        alone: Ranks do not train together, so its loss is another.
    """

    make: Callable[[nn.Module, Workload], Job]
    title: str
    peer: bool = False
    whole: int = 0
    alone: bool = False


ENGINES: dict[str, Engine] = {
    "plain": Engine(PlainJob, "plain, 1 process", whole=16, alone=True),
    "compute": Engine(ComputeJob, "compute alone", whole=8, alone=True),
    "ddp": Engine(DdpJob, "DDP", whole=20),
    "fsdp1": Engine(Fsdp1Job, "FSDP1"),
    "fsdp2": Engine(fsdp2_job, "FSDP2"),
    "zero1": Engine(deepspeed_job(1), "DeepSpeed ZeRO-1", peer=True, whole=8),
    "zero2": Engine(deepspeed_job(2), "DeepSpeed ZeRO-2", peer=True, whole=8),
    "zero3": Engine(deepspeed_job(3), "DeepSpeed ZeRO-3", peer=True),
    "megatron": Engine(megatron_job, "Megatron-FSDP", peer=True),
    "fullshard": Engine(fullshard_job("auto"), "fullshard as it comes"),
    "fullshard-direct": Engine(fullshard_job("direct"), "fullshard direct"),
    "fullshard-shm": Engine(fullshard_job("shm"), "fullshard shared memory"),
    "fullshard-flat": Engine(fullshard_job("auto", flat=True), "fullshard, flat optimizer"),
}


def world_size_of(engine: str, workload: Workload) -> int:
    """The plain model is one process."""
    return 1 if engine == "plain" else workload.world_size


class Training:
    """One rank's job and data."""

    def __init__(self, engine: str, workload: Workload, rank: int) -> None:
        torch.manual_seed(0)  # the same weights on every rank and for every engine
        self.job = ENGINES[engine].make(Llama(workload.shape), workload)
        self._workload = workload
        self._generator = torch.Generator().manual_seed(rank + 1)

    @property
    def model(self) -> nn.Module:
        """As the engine left it."""
        return self.job.model

    def step(self) -> float:
        """One optimizer step; returns this rank's mean loss in nats."""
        total, last = 0.0, self._workload.microbatches - 1
        for number in range(self._workload.microbatches):
            with self.job.held() if number < last else nullcontext():
                loss = self.job.loss(*self.batch())
                self.job.backward(loss)
            total += float(loss.detach())
        self.job.update()
        return total / (last + 1)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Tokens and the next ones: [batch, positions] int64 each."""
        size = (self._workload.batch, self._workload.positions + 1)
        tokens = torch.randint(self._workload.shape.vocabulary, size, generator=self._generator)
        return tokens[:, :-1], tokens[:, 1:]
