"""A pipeline stage that reduces the gradients of its sharded module once a step.

`torch.distributed.pipelining` runs one backward a microbatch. Its own stage knows how to accumulate for torch's FSDP
only; with a module of this package it gives the right gradients, but reduces them in every microbatch.
"""

from __future__ import annotations

from typing import Any

import torch.distributed.pipelining

from fullshard.runtime.module import FSDPModule


class PipelineStage(torch.distributed.pipelining.PipelineStage):
    """`torch.distributed.pipelining.PipelineStage` for a module that is sharded, or not.

    Gradients are accumulated without communication, and parameters stay full from the first backward of a step on; the
    backward of the last microbatch reduces and frees. For schedules that run a backward in one piece (GPipe, 1F1B,
    interleaved 1F1B). Those that split it into inputs and weights (zero bubble) are refused: they need parameters
    outside of the backward that gathers them.
    """

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[torch.Tensor | None, ...], list[dict[str, Any]] | None]:
        """Run the backward of one microbatch; the schedule says which is the last one of the step."""
        if isinstance(self.submod, FSDPModule):
            if backward_type != "full":
                raise NotImplementedError(
                    f"the schedule runs the {backward_type!r} part of a backward by itself, which a sharded stage "
                    "cannot: use ScheduleGPipe, Schedule1F1B or ScheduleInterleaved1F1B"
                )
            self.submod.set_requires_gradient_sync(last_backward)
            self.submod.set_reshard_after_backward(last_backward)
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
