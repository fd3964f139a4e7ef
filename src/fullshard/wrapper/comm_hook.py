"""Communication hooks of `FullyShardedDataParallel`: the user's function in place of the reduction of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class CommHook:
    """A hook in the two forms in which the engine reduces. What the hook leaves is the gradient: usually the mean.

    The engine divides by the number of ranks, so results are multiplied by it; counts of uses, which travel with the
    gradients, become sums again in this way.

    Attributes:
        state: Passed to the hook.
        hook: Called with (state, whole gradients 1-D, shard of them to fill 1-D), or with (state, whole gradients) to
            change in place where nothing is sharded. One call a unit and dtype; the tensors have padding.
        ranks: Data-parallel ranks.
    """

    state: Any
    hook: Callable[..., None]
    ranks: int
    is_hook: bool = True

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See `fullshard.runtime.collectives.ReduceScatter`."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,  # noqa: ARG002 - the hook's state knows its group
        op: Any,  # noqa: ARG002 - what the hook does is its own affair
        async_op: bool = False,  # noqa: ARG002 - a hook is complete when it returns
    ) -> None:
        """Reduce and shard."""
        self.hook(self.state, input_tensor, output_tensor)
        output_tensor.mul_(self.ranks)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Reduce in place."""
        self.hook(self.state, tensor)
        tensor.mul_(self.ranks)
