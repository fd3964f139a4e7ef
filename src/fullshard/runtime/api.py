"""`fully_shard` and `FSDPModule`: the public face of the engine."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fullshard.core.policy import AfterForward, after_forward
from fullshard.core.schedule import Event, EventKind
from fullshard.errors import AlreadyShardedError, MisuseError
from fullshard.runtime.build import build_unit, find_engine, make_place
from fullshard.runtime.dtensors import local_of
from fullshard.runtime.engine import Engine
from fullshard.runtime.hooks import OPTIMIZER_HOOKS, UnitHooks
from fullshard.runtime.policy import MixedPrecisionPolicy, OffloadPolicy
from fullshard.runtime.registry import REGISTRY
from fullshard.runtime.unit import Unit

# A module, or a list of modules that form one unit; what goes in comes out.
_Modules = TypeVar("_Modules", bound=nn.Module | Sequence[nn.Module])
_HANDLE = "_fullshard"


def fully_shard(  # noqa: PLR0913 - torch's signature
    module: _Modules,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    transport: str = "auto",
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
            consecutive ranks, so that the gather of backward stays within them.
        shard_placement_fn: For each parameter the `Shard(dim)` to use, or None for dim 0.
        mp_policy: Dtypes to compute, reduce and return in.
        offload_policy: Where shards live.
        ignored_params: Parameters to leave as they are: not sharded, not moved, gradients not reduced.
        transport: "direct" (send and receive), "torch" (the backend's collectives), or "auto": direct on Gloo.

    Returns:
        The module (or list), now also an instance of `FSDPModule`. Its parameters are `DTensor`s.

    Raises:
        TypeError, ValueError: An argument does not fit; the message says which and what would.
        AlreadyShardedError: The module was sharded before.
    """
    modules = _validate_modules(module)
    precision = MixedPrecisionPolicy.accept(mp_policy)
    place = make_place(mesh, transport, reshard_after_forward)
    OffloadPolicy.check(offload_policy, place.device)
    after = after_forward(reshard_after_forward, place.world.size)
    unit = build_unit(modules, place, precision, after, (shard_placement_fn, set(ignored_params or ())))
    hooks = UnitHooks(unit, modules, functools.partial(find_engine, attribute=_HANDLE))
    OPTIMIZER_HOOKS.ensure()
    handle = _Handle(unit, hooks, _call_site())
    for each in modules:
        each.__dict__[_HANDLE] = handle
        original: Any = type(each)
        each.__class__ = sharded_class(original)
    return module


@dataclass(frozen=True, slots=True)
class _Handle:
    """What a sharded module carries: its unit, its hooks, and where it was sharded."""

    unit: Unit
    hooks: UnitHooks
    site: str


def _validate_modules(module: object) -> list[nn.Module]:
    modules: list[Any] = list(module) if isinstance(module, list | tuple) else [module]
    if not modules:
        raise ValueError("fully_shard got an empty list; pass a module or the modules of one unit")
    for each in modules:
        if not isinstance(each, nn.Module):
            raise TypeError(f"fully_shard takes an nn.Module or a list of them, got {type(each).__name__}")
        if isinstance(each, FSDPModule):
            raise AlreadyShardedError(
                f"this {type(each).__name__} is already sharded (at {each.__dict__[_HANDLE].site}); "
                "call fully_shard once a module, blocks first and the root last"
            )
        if isinstance(each, nn.ModuleList | nn.ModuleDict):
            raise ValueError(
                f"fully_shard cannot wrap a {type(each).__name__}: it has no forward, so it would never be gathered. "
                "Call it on each of its modules."
            )
    for each in modules:
        if any(other is not each and each in other.modules() for other in modules):
            raise ValueError("fully_shard got a list in which one module contains another; list only the outer one")
    return modules


def _call_site() -> str:
    """File and line of the user's call."""
    frame = sys._getframe(2)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@functools.cache
def sharded_class(original: Any) -> type[nn.Module]:
    """The subclass of `original` and `FSDPModule` that sharded modules get."""
    return type(f"FSDP{original.__name__}", (FSDPModule, original), {"__module__": original.__module__})


class UnshardHandle:
    """Waits for an `unshard(async_op=True)`."""

    def __init__(self, engine: Engine, unit: Unit) -> None:
        self._engine = engine
        self._unit = unit

    def wait(self) -> None:
        """Wait for the full parameters and register them. Forward waits by itself."""
        self._engine.on(Event(EventKind.SETTLE, self._unit.index))


class FSDPModule:
    """What `fully_shard` adds to a module. Never constructed by itself."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct the original class: a sharded container builds parts of itself by its own class."""
        original: Any = cls.__mro__[2]
        made = original.__new__(original)
        made.__init__(*args, **kwargs)
        return made

    # Parameters

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's unit and register its full parameters. Not recursive.

        Args:
            async_op: Only start; the handle's `wait`, or the module's forward, waits.

        Returns:
            The handle if `async_op` is set.
        """
        unit, engine = self._unit_and_engine()
        engine.before_forward()
        engine.on(Event(EventKind.UNSHARD, unit.index))
        handle = UnshardHandle(engine, unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this unit's full parameters and register the sharded ones. Not recursive.

        Raises:
            MisuseError: Its forward or backward is running.
        """
        unit = _unit(self)
        engine = unit.engine
        if engine is not None:
            engine.recover()
            engine.on(Event(EventKind.RESHARD, unit.index))

    def reset_iter_state(self) -> None:
        """Bring every unit back to sharded now. A step after an exception does so by itself."""
        engine = _unit(self).engine
        if engine is not None:
            engine.abort()

    # Settings

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False accumulates full gradients without communication (`no_sync`); a later True reduces their sum."""
        self._change(recurse, sync_gradients=requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """False keeps gradients reduced over the shard axis only (HSDP); a later True adds replicas up."""
        self._change(recurse, sync_replicas=requires_all_reduce)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """True frees full parameters after forward, False keeps them for backward."""
        if not isinstance(reshard_after_forward, bool):
            raise TypeError(f"reshard_after_forward must be a bool here, got {reshard_after_forward!r}")
        self._change(recurse, after_forward=AfterForward.FREE if reshard_after_forward else AfterForward.KEEP)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """False keeps full parameters after backward: the next microbatch needs no gather.

        They must be resharded before parameters change; `optimizer.step()` of a torch optimizer sees to that.
        """
        self._change(recurse, keep_after_backward=not reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False if backward does not read this unit's parameters, as for an embedding."""
        self._change(False, unshard_in_backward=unshard_in_backward)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """False lets reductions go on after this backward; the next one, or True, waits for them."""
        _, engine = self._unit_and_engine()
        engine.is_last_backward = is_last_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by `factor` in place of the number of data-parallel ranks."""
        if not factor > 0:
            raise ValueError(f"the gradient divide factor must be positive, got {factor}")
        self._change(False, divide_factor=float(factor))

    def set_reduce_scatter_max_input_buffers(
        self,
        max_input_buffers: int,
        *,
        recurse: bool = True,  # noqa: ARG002 - of torch's signature; the limit belongs to the whole engine
    ) -> None:
        """How many units' gradients may be on the wire at once, in the whole engine; more overlap, more memory."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        _, engine = self._unit_and_engine()
        engine.set_schedule(reduces_in_flight=max_input_buffers)

    def set_prefetch_bytes(self, prefetch_bytes: int | None) -> None:
        """Bytes of full parameters that may be gathered ahead of use; None: one unit, 0: none."""
        _, engine = self._unit_and_engine()
        engine.set_schedule(prefetch_bytes=prefetch_bytes)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather these units when this one enters forward, in place of the recorded order."""
        self._set_prefetch("forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather these units when this one enters backward, in place of the recorded order."""
        self._set_prefetch("backward_prefetch", modules)

    # Inside

    def _unit_and_engine(self) -> tuple[Unit, Engine]:
        """The unit, and its engine, made now with this module as root if there is none yet."""
        unit = _unit(self)
        engine = unit.engine
        return unit, engine or find_engine(cast(nn.Module, self), unit, attribute=_HANDLE)

    def _set_prefetch(self, field: str, modules: list[FSDPModule]) -> None:
        for module in modules:
            if not isinstance(module, FSDPModule):
                raise TypeError(f"only sharded modules can be prefetched, got {type(module).__name__}")
        unit = _unit(self)
        unit.prefetch[field] = [_unit(module) for module in modules]
        if unit.engine is not None:
            unit.engine.resolve_prefetch(unit)

    def _change(self, recurse: bool, **changes: Any) -> None:
        modules = cast(nn.Module, self).modules() if recurse else [cast(nn.Module, self)]
        for module in modules:
            if isinstance(module, FSDPModule):
                unit = _unit(module)
                unit.policy = replace(unit.policy, **changes)
                if unit.engine is not None:
                    unit.engine.set_unit_policy(unit, unit.policy)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Move, cast or materialize: on the sharded parameters, whose flat shards are then made anew."""
        unit = _unit(self)
        self.reshard()
        names = [name for name, buffer in cast(nn.Module, self).named_buffers() if buffer.is_meta]
        meta = [member.sharded for member in unit.members if member.sharded.is_meta]
        result = super()._apply(fn, recurse)  # type: ignore[misc]
        unit.reflatten()
        note_unfilled(dict(cast(nn.Module, self).named_buffers()), names)
        mark_unfilled(meta)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise MisuseError(
            "a sharded module cannot be deep-copied yet: copy the model before fully_shard, or build a second one and "
            "load this one's state dict"
        )


def note_unfilled(buffers: dict[str, torch.Tensor], names: list[str]) -> None:
    """Buffers of these names were on the meta device: remember those that have memory now, but no values."""
    for name in names:
        if not buffers[name].is_meta:
            REGISTRY.unfilled[buffers[name]] = buffers[name]._version


def mark_unfilled(parameters: list[nn.Parameter]) -> None:
    """Parameters that were on the meta device and have memory now: NaN tells them from initialized ones."""
    with torch.no_grad():
        for parameter in parameters:
            local = local_of(parameter)
            if not local.is_meta and local.is_floating_point():
                local.fill_(torch.nan)
                REGISTRY.marked.add(id(parameter))


def _unit(module: Any) -> Unit:
    unit: Unit = module.__dict__[_HANDLE].unit
    return unit


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let another method than `forward` gather and free the module's unit.

    Args:
        module: A sharded module; others are left alone.
        method_name: A method of it, such as "generate" or "encode".
    """
    if not isinstance(module, FSDPModule):
        return
    if not callable(getattr(module, method_name, None)):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r}")
    original = getattr(type(module), method_name)
    reference = weakref.ref(module)

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        target = reference()
        assert target is not None
        hooks: UnitHooks = target.__dict__[_HANDLE].hooks
        return hooks.run(target, functools.partial(original, target), args, kwargs)

    module.__dict__[method_name] = method
