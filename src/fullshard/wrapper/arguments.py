"""The constructor arguments of `FullyShardedDataParallel` that wrappers of submodules inherit, checked once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.core.strategy import ShardingStrategy
from fullshard.runtime.params.meshes import Groups
from fullshard.wrapper.settings import BackwardPrefetch, CPUOffload, MixedPrecision
from fullshard.wrapper.wrap import WrapPolicy, _Policy


@dataclass(frozen=True)
class Arguments:
    """See `FullyShardedDataParallel`. Settings of another library's classes with the same fields are accepted."""

    process_group: Groups | None = None
    sharding_strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    cpu_offload: CPUOffload = field(default_factory=CPUOffload)
    auto_wrap_policy: WrapPolicy | _Policy | None = None
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    mixed_precision: MixedPrecision | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    device_id: int | str | torch.device | None = None
    sync_module_states: bool = False
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    use_orig_params: bool = False
    device_mesh: DeviceMesh | None = None
    transport: str = "auto"

    def __post_init__(self) -> None:
        self._set("sharding_strategy", ShardingStrategy.accept(self.sharding_strategy))
        self._set("cpu_offload", alike("cpu_offload", CPUOffload, self.cpu_offload) or CPUOffload())
        self._set("mixed_precision", alike("mixed_precision", MixedPrecision, self.mixed_precision))
        if isinstance(self.device_id, str):
            self._set("device_id", torch.device(self.device_id))
        if not isinstance(self.device_mesh, DeviceMesh | None):
            raise TypeError(f"device_mesh must be a DeviceMesh or None, got {type(self.device_mesh).__name__}")
        pair = self.process_group if isinstance(self.process_group, tuple) else (self.process_group,)
        if not all(isinstance(each, dist.ProcessGroup | None) for each in pair):
            raise TypeError(f"process_group must be a ProcessGroup, a pair of them or None, got {self.process_group!r}")
        prefetch: Any = self.backward_prefetch
        if prefetch is not None and getattr(prefetch, "name", None) not in BackwardPrefetch.__members__:
            raise TypeError(f"backward_prefetch must be a BackwardPrefetch or None, got {prefetch!r}")
        for name in ("sync_module_states", "forward_prefetch", "limit_all_gathers", "use_orig_params"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {getattr(self, name)!r}")
        for name in ("auto_wrap_policy", "param_init_fn"):
            value = getattr(self, name)
            if value is not None and not callable(value) and not hasattr(value, "_run_policy"):
                raise TypeError(f"{name} must be callable, got {type(value).__name__}")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def replace(self, changes: dict[str, Any]) -> Arguments:
        """The same with some arguments changed, as a policy says for one module.

        Raises:
            ValueError: There is no argument of a name.
        """
        names = {each.name for each in dataclasses.fields(self)}
        unknown = sorted(set(changes) - names)
        if unknown:
            raise ValueError(f"FullyShardedDataParallel has no arguments {unknown}; there are {sorted(names)}")
        return dataclasses.replace(self, **changes)

    @property
    def device_type(self) -> str | None:
        """Type of the device to train on, or None if that follows from the process group."""
        if self.device_mesh is not None:
            return self.device_mesh.device_type
        if self.device_id is None:
            return None
        if isinstance(self.device_id, torch.device):
            return self.device_id.type
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None:
            raise ValueError(
                f"device_id={self.device_id!r} names an accelerator, but there is none; leave it out, or pass "
                "torch.device('cpu')"
            )
        return accelerator.type

    def choose_device(self) -> None:
        """Make the accelerator that `device_id` names the current one."""
        index = self.device_id.index if isinstance(self.device_id, torch.device) else self.device_id
        if not isinstance(index, int) or not torch.accelerator.is_available():
            return
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None and self.device_type == accelerator.type:
            torch.accelerator.set_device_index(index)

    def check_device(self, device: torch.device) -> None:
        """Refuse a `device_id` of another type than the device to train on, and offload from an accelerator."""
        if isinstance(self.device_id, torch.device) and self.device_id.type != device.type:
            raise ValueError(f"device_id is {self.device_id}, but the mesh is on {device.type}")
        if self.cpu_offload.offload_params and device.type != "cpu":
            raise ValueError(
                f"CPUOffload(offload_params=True) on {device.type} is not supported in this version; leave it out "
                "(on a CPU mesh shards are in host memory anyway)"
            )


def alike(name: str, cls: type[Any], value: Any) -> Any:
    """`value` itself, or a `cls` with the fields of an object of another library's class of the same name."""
    if value is None or isinstance(value, cls):
        return value
    if type(value).__name__ != cls.__name__:
        raise TypeError(f"{name} must be a {cls.__name__} or None, got {type(value).__name__}")
    names = [each.name for each in dataclasses.fields(cls)]
    return cls(**{name: getattr(value, name) for name in names if hasattr(value, name)})
