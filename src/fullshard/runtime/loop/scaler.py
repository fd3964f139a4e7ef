"""Loss scaling for float16: whether a gradient overflowed is known to all ranks before any of them steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fullshard.runtime.collectives import sum_scalars
from fullshard.runtime.dtensors import local_of


class ShardedGradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` whose ranks skip a step together, also for gradients that are not `DTensor`s.

    It costs one all-reduce of one number a step. Gradients may be float16 (a model that is stored so); `unscale_`
    divides them in their own dtype then.

    Args:
        device: Device type of losses and gradients.
        init_scale: First scale.
        backoff_factor: Multiplies the scale after a step with an infinite or NaN gradient.
        growth_factor: Multiplies the scale after `growth_interval` good steps.
        growth_interval: Good steps in a row before the scale grows.
        enabled: False makes all methods do nothing but `optimizer.step()`.
        process_group: Ranks that train one model, replicas included; None and the default are all.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - torch's signature
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self.process_group = process_group

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step unless a gradient on any rank is infinite or NaN. Returns what the optimizer's `step` returns."""
        if not (self._enabled and getattr(optimizer, "_step_supports_amp_scaling", False)):
            return super().step(optimizer, *args, **kwargs)
        # Fused kernels take scale and overflow flag as plain tensors, which torch does not mix with sharded ones.
        kernel: Any = optimizer
        kernel._step_supports_amp_scaling = False
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            kernel._step_supports_amp_scaling = True

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,  # noqa: ARG002 - of torch's signature; float16 is always allowed, as for sharded models
    ) -> dict[torch.device, torch.Tensor]:
        """Multiply gradients by `inv_scale`, on this rank's parts; returns by device whether any rank found an inf."""
        alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        with torch.no_grad():
            for gradient in _gradients(optimizer):
                alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
            total = found_inf.clone()
            for (device, _), gradients in alike.items():
                found = torch.zeros_like(found_inf, device=device)
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inv_scale.to(device))
                total = torch.maximum(total, found.to(total.device))
            group = self.process_group or (dist.group.WORLD if dist.is_initialized() else None)
            if group is not None:
                sum_scalars(total, group, "search for infinite gradients", largest=True)
        found_inf.copy_(total)
        # A rank without any gradient has an answer, too: torch refuses to step where there is none.
        return {device: total.to(device) for device, _ in alike} or {total.device: total}


def _gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """This rank's part of every gradient; of a sparse one its values, each index once."""
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.is_sparse:
                # Values of one index are added before the check: the sum may overflow where they do not.
                parameter.grad = gradient.coalesce()
                gradient = parameter.grad._values()
            found.append(local_of(gradient) if isinstance(gradient, DTensor) else gradient)
    return found
