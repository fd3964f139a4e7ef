"""The class `FullyShardedDataParallel`: a module that wraps another one and makes it a unit of the engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.core.policy import AfterForward
from fullshard.core.strategy import RULES, Axes, ShardingStrategy
from fullshard.errors import AlreadyShardedError, MisuseError
from fullshard.runtime.api import call_site
from fullshard.runtime.attach import attach
from fullshard.runtime.build import build_unit
from fullshard.runtime.loop.clip import clip_grad_norm_
from fullshard.runtime.module import HANDLE, FSDPModule, unit_of
from fullshard.runtime.params.meshes import Groups, strategy_mesh, warn_if_not_hybrid
from fullshard.runtime.params.place import Place, make_place
from fullshard.runtime.policy import MixedPrecisionPolicy
from fullshard.runtime.registry import REGISTRY
from fullshard.runtime.tree import cast_floating, map_tensors, tensors_in
from fullshard.runtime.values.sync import broadcast_module_states
from fullshard.runtime.whole.summon import full_parameters
from fullshard.wrapper.arguments import Arguments
from fullshard.wrapper.auto_wrap import auto_wrap
from fullshard.wrapper.comm_hook import CommHook
from fullshard.wrapper.filling import cast_buffers, fill, fill_alike
from fullshard.wrapper.made_with import MadeWith
from fullshard.wrapper.optim_state import OptimizerStates
from fullshard.wrapper.places import LeftAlone, ignored_in
from fullshard.wrapper.settings import BackwardPrefetch, CPUOffload, MixedPrecision
from fullshard.wrapper.wrap import WrapPolicy, _Policy


class FullyShardedDataParallel(FSDPModule, OptimizerStates, MadeWith):
    """Wraps a module, shards its parameters over the data-parallel ranks, and calls it like the module itself.

    Parameters are those of the wrapped module that no wrapper inside of it has; they become `DTensor`s under their own
    names. docs/fsdp-class.md says what each argument does here.

    Args:
        module: Module to wrap. Its submodules may be wrapped before (inner ones first), or by `auto_wrap_policy`.
        process_group: Ranks to shard over, default all; for hybrid strategies a pair (shard group, replicate group).
        sharding_strategy: See `ShardingStrategy`; default FULL_SHARD.
        cpu_offload: Shards live in host memory; on a CPU mesh they do so anyway.
        auto_wrap_policy: Which submodules to wrap too, see the module `fullshard.wrap`.
        backward_prefetch: Accepted; the engine gathers one unit ahead, see `set_prefetch_bytes`.
        mixed_precision: Dtypes to compute and reduce in.
        ignored_modules: Modules whose parameters and buffers stay as they are: neither sharded, moved nor averaged.
        param_init_fn: Called with each module that is not wrapped yet if any of them holds something on the meta
            device; default calls `reset_parameters` of those that do.
        device_id: Device to train on; an accelerator becomes the current one.
        sync_module_states: Start from rank 0's parameters and buffers.
        forward_prefetch: Accepted; see `backward_prefetch`.
        limit_all_gathers: Accepted; the engine always bounds what is gathered ahead.
        use_orig_params: Accepted; parameters always keep their names, shapes and flags.
        ignored_states: Parameters, or modules, to ignore.
        device_mesh: Ranks as a mesh: 1-D, or 2-D (replicate x shard) for hybrid strategies.
        transport: As of `fully_shard`.
        average_ignored_grads: As of `fully_shard`.

    Raises:
        TypeError, ValueError: An argument does not fit; the message says which and what would.
        AlreadyShardedError: The module is sharded already.
    """

    _ignored: LeftAlone  # what the user said to ignore in here, for the wrappers around it

    def __init__(  # noqa: PLR0913, PLR0917 - torch's signature
        self,
        module: nn.Module,
        process_group: Groups | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: WrapPolicy | _Policy | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | str | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
        *,
        transport: str = "auto",
        average_ignored_grads: bool | None = None,
    ) -> None:
        super().__init__()
        arguments = Arguments(
            process_group,
            ShardingStrategy.accept(sharding_strategy),
            cpu_offload or CPUOffload(),
            auto_wrap_policy,
            backward_prefetch,
            mixed_precision,
            param_init_fn,
            device_id,
            sync_module_states,
            forward_prefetch,
            limit_all_gathers,
            use_orig_params,
            device_mesh,
            transport,
        )
        _check_module(module)
        site = call_site(depth=2)
        place = _place(arguments)
        warn_if_not_hybrid(arguments.sharding_strategy, place.mesh, stacklevel=2)
        ignored = ignored_in(module, ignored_modules, ignored_states)
        for inner in self.fsdp_modules(module):
            ignored |= inner._ignored
        if auto_wrap_policy is not None:
            auto_wrap(module, arguments, ignored, partial(self._wrap_inside, site))
        self._ignored = ignored
        self._wrap(module, arguments, place, ignored, site)
        unit_of(self).wishes.average_ignored = average_ignored_grads

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """An ordinary object, unlike the modules that `fully_shard` has given another class."""
        return object.__new__(cls)

    @classmethod
    def _wrap_inside(
        cls, site: str, module: nn.Module, arguments: Arguments, left: LeftAlone, full_precision: bool
    ) -> FullyShardedDataParallel:
        """The wrapper of a module that an auto-wrap policy chose."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._ignored = LeftAlone()
        made._wrap(module, arguments, _place(arguments), left, site)
        made._full_precision = full_precision
        return made

    def _wrap(self, module: nn.Module, arguments: Arguments, place: Place, left: LeftAlone, site: str) -> None:
        """Give `module` values, and make it a unit."""
        self._arguments = replace(arguments, auto_wrap_policy=None, param_init_fn=None)
        self._full_precision = False  # computes in the stored dtype, whatever the precision around it
        self._is_nested = False
        self._shielded = False  # an outer wrapper is filling what it wraps: hands off what is in here
        inner = self.fsdp_modules(module)
        for each in inner:
            each._is_nested = each._shielded = True
        sources = [g for g in (place.replicate_group, place.shard_group) if g is not None]
        if arguments.sync_module_states:
            fill_alike(module, left, arguments.param_init_fn, place.device, sources)
        else:
            fill(module, left, arguments.param_init_fn, place.device)
        for each in inner:
            each._shielded = False
        if arguments.sync_module_states:
            synced = {id(b) for each in inner if each._arguments.sync_module_states for b in each.buffers()}
            broadcast_module_states(module, sources, place.device, left.tensors() | synced)
        mixed = arguments.mixed_precision or MixedPrecision()
        self._buffer_dtypes = cast_buffers(module, mixed.buffer_dtype, left)
        self.stand_for(module)
        rules = RULES[arguments.sharding_strategy]
        precision = MixedPrecisionPolicy.accept(mixed.policy())
        unit = build_unit([self], place, precision, rules.policy, (None, left.parameters()))
        attach([self], unit, site)

    # As the wrapped module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module."""
        mixed = self._arguments.mixed_precision
        if self._full_precision:
            return self._forward_in_full_precision(args, kwargs)
        dtype = mixed.param_dtype if mixed is not None and mixed.cast_root_forward_inputs else None
        if dtype is not None and unit_of(self).index == 0:  # which one is the root is known when it is called
            args, kwargs = map_tensors(partial(cast_floating, dtype), (args, kwargs))
        return self._fsdp_wrapped_module(*args, **kwargs)

    def _forward_in_full_precision(self, args: Any, kwargs: Any) -> Any:
        """Cast inputs up to the stored dtype, and outputs back to what the inputs were."""
        stored = [p.dtype for p in self.parameters() if p.is_floating_point()]
        given = [tensor.dtype for tensor in tensors_in((args, kwargs)) if tensor.is_floating_point()]
        dtype = stored[0] if stored else torch.float32
        args, kwargs = map_tensors(partial(cast_floating, dtype), (args, kwargs))
        output = self._fsdp_wrapped_module(*args, **kwargs)
        return map_tensors(partial(cast_floating, given[0]), output) if given else output

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        return self if self._shielded else super()._apply(fn, recurse)

    # State dicts

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of the wrapped module, see `StateDicts.state_dict`; buffers have their original dtypes."""
        made = super().state_dict(*args, **kwargs)
        prefix = args[1] if len(args) > 1 else kwargs.get("prefix", "")
        for name, dtype in self._buffer_dtypes.items():
            if (value := made.get(prefix + name)) is not None:
                made[prefix + name] = value.to(dtype)
        return made

    # Wrappers in a model

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """The wrappers in `module` (it may be one itself), outer ones first.

        Args:
            module: Any module.
            root_only: Leave out those inside of another one.
        """
        found = [each for each in module.modules() if isinstance(each, FullyShardedDataParallel)]
        if root_only:
            inside = {part for each in found for part in each.modules() if part is not each}
            found = [each for each in found if each not in inside]
        return found

    def check_is_root(self) -> bool:
        """Whether no other wrapper contains this one."""
        return not self._is_nested

    @property
    def _is_root(self) -> bool:
        return self.check_is_root()

    def _require_root(self, method: str) -> None:
        if self._is_nested:
            raise MisuseError(f"{method} of a wrapper inside another one was called; call it on the outermost wrapper")
        unit = unit_of(self)
        if unit.engine is not None:
            unit.engine.recover()
            if unit.engine.in_backward or unit.engine.scheduler.in_use():
                raise MisuseError(f"{method} was called while a forward or backward runs; call it between steps")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward accumulates full gradients without communication; the first backward after it reduces all.

        Units that keep full parameters from forward to backward (SHARD_GRAD_OP) keep them from one microbatch to the
        next, too: whole gradients are held anyway, and no gather is needed.

        Raises:
            MisuseError: This is not the outermost wrapper, or it is running.
        """
        self._require_root("no_sync")
        inner = [each for each in self.modules() if isinstance(each, FSDPModule)]  # also those of `fully_shard`
        before = [unit_of(each).policy for each in inner]
        self.set_requires_gradient_sync(False)
        for each, policy in zip(inner, before, strict=True):
            if policy.after_forward is AfterForward.KEEP:
                each.set_reshard_after_backward(False, recurse=False)
        try:
            yield
        finally:
            for each, policy in zip(inner, before, strict=True):
                each._change(
                    False,
                    sync_gradients=policy.sync_gradients,
                    sync_replicas=policy.sync_replicas,
                    keep_after_backward=policy.keep_after_backward,
                )

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float | str = 2.0) -> torch.Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`. All ranks must call it.

        Args:
            max_norm: Largest norm allowed.
            norm_type: Order of the norm; `inf` for the largest absolute value.

        Returns:
            The norm before clipping, 0-d, float32 (float64 if any gradient is float64).

        Raises:
            MisuseError: This is not the outermost wrapper, or it is running.
        """
        self._require_root("clip_grad_norm_")
        return clip_grad_norm_(self, max_norm, float(norm_type))

    def register_comm_hook(self, state: object, hook: Callable[..., None]) -> None:
        """Reduce the gradients of all units by a function, such as those of torch's `default_hooks`, once.

        Args:
            state: Passed to the hook.
            hook: See `CommHook`: with two arguments for NO_SHARD, with three for sharding strategies.

        Raises:
            MisuseError: This is not the outermost wrapper, it is running, or it has a hook.
            ValueError: A strategy is hybrid, or the hook is not callable.
        """
        self._require_root("register_comm_hook")
        if not callable(hook):
            raise ValueError(f"the communication hook must be callable, got {type(hook).__name__}")
        inner = self.fsdp_modules(self)
        for each in inner:
            if RULES[each.sharding_strategy].axes is Axes.HYBRID:
                raise ValueError(
                    f"a communication hook cannot be used with {each.sharding_strategy.name}, which reduces twice; "
                    "set_all_reduce_hook is called with what has been reduced"
                )
            if unit_of(each).wishes.reduce_scatter is not None or unit_of(each).wishes.all_reduce is not None:
                raise MisuseError("a communication hook, or a custom reduce-scatter, is registered already")
        for each in inner:
            comm = CommHook(state, hook, unit_of(each).place.world.data_parallel_size)
            if RULES[each.sharding_strategy].axes is Axes.REPLICATE:
                each._communicate(all_reduce=comm.all_reduce)
            else:
                each.set_custom_reduce_scatter(comm)  # type: ignore[arg-type]

    # Full parameters between steps

    summon_full_params = staticmethod(full_parameters)

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call `fn` with every submodule and with this one, while its unit's parameters are full; edits are kept.

        All ranks must call it, and `fn` must do the same on each.
        """
        with full_parameters(self, recurse=False):
            return super().apply(fn)


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"FullyShardedDataParallel wraps an nn.Module, got {type(module).__name__}")
    if isinstance(module, FSDPModule):
        raise AlreadyShardedError(
            f"this {type(module).__name__} is already sharded (at {module.__dict__[HANDLE].site}); wrap a module once, "
            "inner modules first"
        )
    unowned = any(REGISTRY.owner(parameter) is None for parameter in module.parameters())
    # Of the object: a compiled module has its forward there.
    if getattr(module.forward, "__func__", None) is nn.Module.forward and unowned:
        warnings.warn(
            f"this {type(module).__name__} has no forward, so its parameters are sharded but never gathered for "
            "computing; wrap each of its modules",
            stacklevel=3,
        )


def _place(arguments: Arguments) -> Place:
    arguments.choose_device()  # first: making a mesh looks at the current device
    mesh = strategy_mesh(
        arguments.sharding_strategy, arguments.process_group, arguments.device_mesh, arguments.device_type
    )
    place = make_place(mesh, arguments.transport, None)
    arguments.check_device(place.device)
    return place
