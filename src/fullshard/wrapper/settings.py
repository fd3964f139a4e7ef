"""Settings of `FullyShardedDataParallel` as users write them; each is checked where it is made."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fullshard.core.strategy import ShardingStrategy
from fullshard.runtime.policy import MixedPrecisionPolicy

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
]


class BackwardPrefetch(Enum):
    """When backward gathers the next unit.

    Attributes:
        BACKWARD_PRE: Before the current unit computes its gradients: more overlap. The engine always does this.
        BACKWARD_POST: After it. Accepted; the engine gathers ahead within its byte budget, which bounds memory as well
            (`set_prefetch_bytes(0)` turns gathering ahead off).
    """

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


@dataclass
class MixedPrecision:
    """Dtypes of one unit; None keeps what is there.

    Attributes:
        param_dtype: Floating parameters are gathered and computed with in this dtype; shards keep their own.
        reduce_dtype: Gradients are summed over ranks in this dtype; default `param_dtype`.
        buffer_dtype: Floating buffers are cast to this dtype for computing; a state dict keeps the original dtype.
        keep_low_precision_grads: Accepted with a warning: gradients have the dtype of their parameter.
        cast_forward_inputs: Floating inputs of the unit's forward are cast to `param_dtype`.
        cast_root_forward_inputs: The same for the root only.
        _module_classes_to_ignore: Modules of these classes keep full precision: with an auto-wrap policy each becomes
            a unit without mixed precision, its inputs are cast up, its outputs back.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (_BatchNorm,)

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                kind = ValueError if isinstance(dtype, torch.dtype) else TypeError
                raise kind(f"MixedPrecision.{name} must be a floating torch.dtype or None, got {dtype!r}")
        if self.keep_low_precision_grads:
            warnings.warn(
                "keep_low_precision_grads=True has no effect: optimizers get gradients in the dtype of their parameter",
                stacklevel=3,
            )

    def policy(self) -> MixedPrecisionPolicy:
        """The part of it that the engine carries out."""
        reduce_dtype = self.reduce_dtype or self.param_dtype
        return MixedPrecisionPolicy(self.param_dtype, reduce_dtype, None, self.cast_forward_inputs)


@dataclass
class CPUOffload:
    """Where shards live.

    Attributes:
        offload_params: Parameters, gradients and optimizer state in host memory. On a CPU mesh they are there anyway.
    """

    offload_params: bool = False


class StateDictType(Enum):
    """What the values of a state dict are.

    Attributes:
        FULL_STATE_DICT: Whole tensors, as of the unwrapped module.
        LOCAL_STATE_DICT: As SHARDED_STATE_DICT: views of this rank's rows without a copy, for files of each rank.
        SHARDED_STATE_DICT: `DTensor`s, for `torch.distributed.checkpoint`.
    """

    FULL_STATE_DICT = auto()
    LOCAL_STATE_DICT = auto()
    SHARDED_STATE_DICT = auto()


@dataclass
class StateDictConfig:
    """Base of the configurations of model state dicts.

    Attributes:
        offload_to_cpu: Values are copied to host memory.
    """

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """For `FULL_STATE_DICT`.

    Attributes:
        rank0_only: Only rank 0 gets values, other ranks an empty dict.
    """

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """For `LOCAL_STATE_DICT`; values are `DTensor`s, too."""


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """For `SHARDED_STATE_DICT`; values are always `DTensor`s, whatever `_use_dtensor` says."""

    _use_dtensor: bool = False


@dataclass
class OptimStateDictConfig:
    """Base of the configurations of optimizer state dicts.

    Attributes:
        offload_to_cpu: Values are copied to host memory.
    """

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """For `FULL_STATE_DICT`.

    Attributes:
        rank0_only: Only rank 0 gets values, other ranks an empty dict.
    """

    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """For `LOCAL_STATE_DICT`; values are `DTensor`s, too."""

    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """For `SHARDED_STATE_DICT`; values are always `DTensor`s, whatever `_use_dtensor` says."""

    _use_dtensor: bool = False


@dataclass
class StateDictSettings:
    """Type and configurations of the state dicts of a module and its optimizer."""

    state_dict_type: StateDictType = StateDictType.FULL_STATE_DICT
    state_dict_config: StateDictConfig = field(default_factory=FullStateDictConfig)
    optim_state_dict_config: OptimStateDictConfig = field(default_factory=FullOptimStateDictConfig)


class OptimStateKeyType(Enum):
    """What the keys of an optimizer state dict are.

    Attributes:
        PARAM_NAME: Fully qualified parameter names.
        PARAM_ID: Numbers in the order of the optimizer's parameter groups.
    """

    PARAM_NAME = auto()
    PARAM_ID = auto()
