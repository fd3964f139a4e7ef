"""`fully_shard`: turns a module into a unit of the engine."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.distributed.device_mesh import DeviceMesh

from fullshard.core.policy import UnitPolicy, after_forward
from fullshard.core.strategy import RULES, ShardingStrategy
from fullshard.errors import AlreadyShardedError
from fullshard.runtime.attach import attach, sharded_class
from fullshard.runtime.build import build_unit
from fullshard.runtime.device import make_streams
from fullshard.runtime.hooks import UnitHooks
from fullshard.runtime.module import HANDLE, FSDPModule, unit_of
from fullshard.runtime.params.describe import PlacementFn
from fullshard.runtime.params.meshes import strategy_mesh, warn_if_not_hybrid
from fullshard.runtime.params.place import DataParallelMeshDims, make_place
from fullshard.runtime.policy import MixedPrecisionPolicy, OffloadPolicy
from fullshard.runtime.values.copying import ModuleMethod

# A module, or a list of modules that form one unit; what goes in comes out.
_Modules = TypeVar("_Modules", bound=nn.Module | Sequence[nn.Module])


def fully_shard(  # noqa: PLR0913 - torch's signature
    module: _Modules,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | Literal["auto"] | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    transport: str = "auto",
    sharding_strategy: ShardingStrategy | None = None,
    average_ignored_grads: bool | None = None,
) -> _Modules:
    """Shard the parameters of a module over the data-parallel ranks, in place.

    Call it bottom-up: first on each block, then on the root. Each call makes one unit of all parameters in the module
    that no earlier call has taken; a unit is gathered before its module's forward, freed after it, gathered again in
    backward, and its gradients are reduced and sharded.

    Args:
        module: The module, or modules that form one unit.
        mesh: 1-D mesh of the ranks to shard over, or 2-D mesh (replicate x shard) for HSDP. Default: all ranks.
        reshard_after_forward: True frees the full parameters after forward; False keeps them for backward; None is
            False for the root while a backward follows and True otherwise; an int n keeps a shard over groups of n
            consecutive ranks, so that the gather of backward stays within them (1 is False, all ranks is True); "auto"
            keeps as many units as fit the bytes that `set_keep_bytes` gives the model.
        shard_placement_fn: For each parameter the `Shard(dim)` to use, None for dim 0, or a `ShardPlacementResult` for
            other ranks than those of `mesh` (experts).
        mp_policy: Dtypes to compute, reduce and return in.
        offload_policy: Where shards live.
        ignored_params: Parameters to leave as they are: not sharded, not moved, gradients not reduced.
        dp_mesh_dims: Which dims of `mesh` are data-parallel, if all parameters are `DTensor`s on the whole `mesh`.
        transport: "shm" (memory that CPU ranks of one host share; messages between hosts), "direct" (messages),
            "torch" (the backend's collectives), or "auto": on Gloo "shm" if ranks share a host, else "direct". With
            "shm" a model must not write to its parameters in forward: other ranks compute with the same memory. That
            is refused, unless it writes through `.data`, which nothing notices.
        sharding_strategy: A name for mesh axes and `reshard_after_forward` together, and more (NO_SHARD, ZERO1); see
            `ShardingStrategy`. Not together with `reshard_after_forward`.
        average_ignored_grads: Of the root: True averages the gradients of parameters that are not sharded (ignored, or
            added later) over the data-parallel ranks at the end of backward; False leaves them each rank's own, and so
            does None, with a warning that names them.

    Returns:
        The module (or list), now also an instance of `FSDPModule`. Its parameters are `DTensor`s.

    Raises:
        TypeError, ValueError: An argument does not fit; the message says which and what would.
        AlreadyShardedError: The module was sharded before.
    """
    modules = _validate_modules(module)
    ignored = _validate_ignored(ignored_params)
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise TypeError(f"shard_placement_fn must be callable, got {type(shard_placement_fn).__name__}")
    if not isinstance(average_ignored_grads, bool | None):
        raise TypeError(f"average_ignored_grads must be a bool or None, got {average_ignored_grads!r}")
    precision = MixedPrecisionPolicy.accept(mp_policy)
    policy = None
    if sharding_strategy is not None:
        mesh, policy = _by_strategy(sharding_strategy, mesh, reshard_after_forward)
    place = make_place(mesh, transport, reshard_after_forward, dp_mesh_dims)
    OffloadPolicy.check(offload_policy, place.device)
    policy = policy or UnitPolicy(after_forward(reshard_after_forward, place.world.size))
    unit = build_unit(modules, place, precision, policy, (shard_placement_fn, ignored))
    unit.wishes.average_ignored = average_ignored_grads
    attach(modules, unit, call_site(depth=2))
    for each in modules:
        original: Any = type(each)
        # Past a __setattr__ of the user's class.
        object.__setattr__(each, "__class__", sharded_class(original))
        _tell_torch(each)
    return module


def _tell_torch(module: nn.Module) -> None:
    """Enter the module where torch's `replicate` looks for parts of a model that are sharded, to leave them alone."""
    module.__dict__.setdefault(REGISTRY_KEY, {})[fully_shard.__name__] = RegistryItem()


def _by_strategy(
    strategy: ShardingStrategy, mesh: DeviceMesh | None, reshard_after_forward: bool | int | Literal["auto"] | None
) -> tuple[DeviceMesh, UnitPolicy]:
    """Mesh and settings of a unit that is sharded by a strategy."""
    strategy = ShardingStrategy.accept(strategy)
    if reshard_after_forward is not None:
        raise ValueError(
            f"sharding_strategy={strategy.name} already says when full parameters are freed; leave out "
            f"reshard_after_forward={reshard_after_forward}"
        )
    made = strategy_mesh(strategy, None, mesh)
    warn_if_not_hybrid(strategy, made, stacklevel=3)
    return made, RULES[strategy].policy


def _validate_ignored(ignored: object) -> set[nn.Parameter]:
    """Names or modules would be taken for parameters that are not in the model, and all of it would be sharded."""
    if ignored is None:
        return set()
    if isinstance(ignored, torch.Tensor | str) or not isinstance(ignored, Iterable):
        raise TypeError(f"ignored_params must be a set of parameters, got {type(ignored).__name__}")
    parameters = set(ignored)
    wrong = sorted({type(each).__name__ for each in parameters if not isinstance(each, torch.Tensor)})
    if wrong:
        raise TypeError(f"ignored_params must hold parameters only, got {wrong}; of a module pass its parameters()")
    return parameters


def _validate_modules(module: object) -> list[nn.Module]:
    modules: list[Any] = list(module) if isinstance(module, list | tuple) else [module]
    if not modules:
        raise ValueError("fully_shard got an empty list; pass a module or the modules of one unit")
    for each in modules:
        if not isinstance(each, nn.Module):
            raise TypeError(f"fully_shard takes an nn.Module or a list of them, got {type(each).__name__}")
        if isinstance(each, FSDPModule):
            raise AlreadyShardedError(
                f"this {type(each).__name__} is already sharded (at {each.__dict__[HANDLE].site}); "
                "call fully_shard once a module, blocks first and the root last"
            )
        if isinstance(each, nn.ModuleList | nn.ModuleDict):
            raise ValueError(
                f"fully_shard cannot wrap a {type(each).__name__}: it has no forward, so it would never be gathered. "
                "Call it on each of its modules."
            )
    if len({id(each) for each in modules}) < len(modules):
        raise ValueError("fully_shard got a list that holds a module twice; list each once")
    for each in modules:
        if any(other is not each and each in other.modules() for other in modules):
            raise ValueError("fully_shard got a list in which one module contains another; list only the outer one")
    return modules


def call_site(depth: int) -> str:
    """File and line of the user's call, `depth` frames up."""
    frame = sys._getframe(depth)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let another method than `forward` gather and free the module's unit.

    Args:
        module: A sharded module; others are left alone.
        method_name: A method of it, such as "generate" or "encode".

    Raises:
        ValueError: The module has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    if not callable(getattr(module, method_name, None)):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r}")
    original: Any = getattr(module, method_name)
    bound = getattr(original, "__self__", None) is module
    if bound:  # the bound method would be a cycle from the module to itself
        original = original.__func__

    def gathered(target: Any, *args: Any, **kwargs: Any) -> Any:
        hooks: UnitHooks = target.__dict__[HANDLE].hooks
        return hooks.run(target, functools.partial(original, target) if bound else original, args, kwargs)

    module.__dict__[method_name] = ModuleMethod(module, gathered, original)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several roots (the stages of a pipeline) communicate on the same streams.

    Separate streams would divide the caching allocator's memory. On a CPU there are no streams to share.

    Raises:
        ValueError: Something in the list is not sharded.
    """
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"share_comm_ctx expects sharded modules, got {type(module).__name__}")
    units = [unit_of(module) for module in modules]
    streams = None
    for unit in units:
        streams = streams or (unit.engine.streams if unit.engine is not None else unit.wishes.streams)
    for unit in units:
        streams = unit.wishes.streams = streams or make_streams(unit.place.device)
        if unit.engine is not None and unit.engine.streams is not streams:
            unit.engine.share_streams(streams)
