"""Values for a module before it is sharded: memory and initialization for what is on the meta device, buffer dtypes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from fullshard.errors import UninitializedError
from fullshard.runtime.module import FSDPModule
from fullshard.runtime.values.sync import raise_alike
from fullshard.wrapper.places import LeftAlone, Ties


def own_parts(module: nn.Module, ignored: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """`module` and the submodules that no wrapper inside of it has, without ignored ones: by name, outer first."""
    seen = {*ignored}
    if module in seen:
        return {}
    seen.add(module)
    parts = {"": module}
    waiting = deque([("", module)])
    while waiting:
        prefix, part = waiting.popleft()
        for name, child in part.named_children():
            if child not in seen and not isinstance(child, FSDPModule):
                seen.add(child)
                label = f"{prefix}.{name}" if prefix else name
                parts[label] = child
                waiting.append((label, child))
    return parts


def fill_alike(
    module: nn.Module,
    left: LeftAlone,
    init_fn: Callable[[nn.Module], None] | None,
    device: torch.device,
    sources: Sequence[dist.ProcessGroup],
) -> None:
    """As `fill`, before values come from the first rank, which alone needs them: what it raises, every rank raises.

    Args:
        module: As of `fill`.
        left: As of `fill`.
        init_fn: As of `fill`.
        device: As of `fill`.
        sources: Groups over which the first rank's values will be broadcast.
    """
    error: ValueError | UninitializedError | None = None
    try:
        fill(module, left, init_fn, device, values_follow=any(group.rank() for group in sources))
    except (ValueError, UninitializedError) as problem:
        error = problem
    raise_alike(error, sources)


def fill(
    module: nn.Module,
    left: LeftAlone,
    init_fn: Callable[[nn.Module], None] | None,
    device: torch.device,
    values_follow: bool = False,
) -> None:
    """Give the parameters and buffers of a module that are on the meta device memory and values.

    Args:
        module: About to be wrapped; wrapped modules inside of it are left out.
        left: What it does not shard.
        init_fn: Called with every module that is not wrapped yet, outer ones first; default calls `reset_parameters` of
            each module that holds something on the meta device.
        device: Device of the memory, without `init_fn`.
        values_follow: Values come later from another rank: only memory is needed.

    Raises:
        ValueError: A module has no `reset_parameters` and there is no `init_fn`.
        UninitializedError: `init_fn` left something on the meta device.
    """
    parts = own_parts(module, left.modules)
    empty = {name: part for name, part in parts.items() if any(tensor.is_meta for tensor in _state(part))}
    if not empty:
        return
    ties = Ties(module)
    if init_fn is not None:
        for part in parts.values():
            init_fn(part)
    else:
        _fill_by_reset(empty, device, values_follow)
    ties.restore()
    missing = [
        f"{prefix}.{name}".lstrip(".")
        for prefix, part in parts.items()
        for name, tensor in [*part._parameters.items(), *part._buffers.items()]
        if tensor is not None and tensor.is_meta and id(tensor) not in left.tensors()
    ]
    if missing:
        raise UninitializedError(
            f"param_init_fn left {missing[:5]} on the meta device; it is called with one module at a time and "
            "must give what that module itself holds memory (module.to_empty(device=..., recurse=False)) and values"
        )


def _state(part: nn.Module) -> list[torch.Tensor]:
    """What a module itself holds."""
    return [*part.parameters(recurse=False), *part.buffers(recurse=False)]


def _fill_by_reset(empty: dict[str, nn.Module], device: torch.device, values_follow: bool) -> None:
    cannot = [name or "(root)" for name, part in empty.items() if not hasattr(part, "reset_parameters")]
    if cannot and not values_follow:
        raise ValueError(
            f"modules {cannot[:5]} hold parameters or buffers on the meta device but have no reset_parameters method; "
            "pass param_init_fn to say how to initialize them"
        )
    with torch.no_grad():
        for part in empty.values():
            part.to_empty(device=device, recurse=False)
            if not values_follow:
                part.reset_parameters()  # type: ignore[operator]


def cast_buffers(module: nn.Module, dtype: torch.dtype | None, left: LeftAlone) -> dict[str, torch.dtype]:
    """Cast the floating buffers of a module, but for those of wrapped modules inside of it, in place.

    Integer buffers (counters) are never cast.

    Returns:
        Name -> original dtype of each that was cast.
    """
    original: dict[str, torch.dtype] = {}
    if dtype is None:
        return original
    for prefix, part in own_parts(module, left.modules).items():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype:
                original[f"{prefix}.{name}" if prefix else name] = buffer.dtype
                buffer.data = buffer.data.to(dtype)
    return original
