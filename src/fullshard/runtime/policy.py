"""Public policies that name torch dtypes: precision and offload."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """Dtypes of one unit; None keeps what is there.

    Attributes:
        param_dtype: Floating parameters are gathered and computed with in this dtype; shards keep their own.
        reduce_dtype: Gradients are summed over ranks in this dtype; default is the dtype they were computed in.
        output_dtype: Floating outputs of the module are cast to this dtype.
        cast_forward_inputs: Floating inputs of the module are cast to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is None:
                continue
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"MixedPrecisionPolicy.{name} must be a torch.dtype or None, got {dtype!r}")
            if not dtype.is_floating_point:
                raise ValueError(f"MixedPrecisionPolicy.{name} must be a floating dtype, got {dtype}")

    @classmethod
    def accept(cls, policy: object) -> MixedPrecisionPolicy:
        """`policy` itself, or a copy of another library's policy object with the same fields."""
        if isinstance(policy, cls):
            return policy
        names = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
        if not all(hasattr(policy, name) for name in names):
            raise TypeError(f"mp_policy must be a MixedPrecisionPolicy, got {type(policy).__name__}")
        return cls(*(getattr(policy, name) for name in names))

    def compute_dtype(self, stored: torch.dtype) -> torch.dtype:
        """Dtype in which a parameter stored as `stored` is gathered; integers are never cast."""
        if self.param_dtype is None or not stored.is_floating_point:
            return stored
        return self.param_dtype

    def sum_dtype(self, stored: torch.dtype) -> torch.dtype:
        """Dtype in which gradients of a parameter stored as `stored` are summed over ranks."""
        return self.reduce_dtype or self.compute_dtype(stored)


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    """No offload: shards live on the device that computes."""

    @staticmethod
    def check(policy: object, device: torch.device) -> None:
        """Refuse what this version cannot do, and what is no offload policy."""
        if not type(policy).__name__.endswith("OffloadPolicy"):
            raise TypeError(f"offload_policy must be an OffloadPolicy, got {type(policy).__name__}")
        if hasattr(policy, "pin_memory") and device.type != "cpu":
            raise ValueError(
                f"CPUOffloadPolicy on {device.type} is not supported in this version; pass OffloadPolicy() "
                "(on a CPU mesh shards are in host memory anyway)"
            )


@dataclass(frozen=True, slots=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, gradients and optimizer state live in host memory. On a CPU mesh that is so anyway.

    Attributes:
        pin_memory: Page-lock the host memory; needs an accelerator.
    """

    pin_memory: bool = True
