"""`FSDPModule`: what a sharded module can do beside what its own class does."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from fullshard.core.policy import AfterForward, SchedulePolicy
from fullshard.core.schedule import Event, EventKind
from fullshard.errors import MisuseError
from fullshard.runtime.build import find_engine
from fullshard.runtime.collectives import AllGather, ReduceScatter, check_comm, separate_group
from fullshard.runtime.device import on_stream
from fullshard.runtime.engine import Engine
from fullshard.runtime.failures.debug import debug_by_environment
from fullshard.runtime.hooks import UnitHooks
from fullshard.runtime.unit import Unit
from fullshard.runtime.unshard import UnshardHandle, Unsharding
from fullshard.runtime.values.copying import cannot_be_pickled, deepcopy_module
from fullshard.runtime.values.init import note_materialized
from fullshard.runtime.values.loading import unchanged_if_it_fails

# Where a sharded module carries its `Handle`.
HANDLE = "_fullshard"


class FSDPModule:
    """What `fully_shard` adds to a module. Never constructed by itself."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct the original class: a sharded container builds parts of itself by its own class."""
        original: Any = cls.__mro__[2]
        made = original.__new__(original, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward and the user's hooks on full parameters."""
        hooks: UnitHooks = self.__dict__[HANDLE].hooks
        return hooks.run(cast(nn.Module, self), super().__call__, args, kwargs)  # type: ignore[misc]

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
        handle = Unsharding(engine, unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this unit's full parameters and register the sharded ones. Not recursive.

        Raises:
            MisuseError: Its forward or backward is running.
        """
        unit = unit_of(self)
        if (engine := unit.engine) is not None:
            engine.recover()
            engine.bring_to_rest(unit)

    def reset_iter_state(self) -> None:
        """Give up a step that failed: every unit is sharded, and what it has not reduced is forgotten.

        A step after an exception works without this call, and then keeps gradients that were accumulated before. This
        call drops them where they are not reduced yet (no sync, no all-reduce): start the accumulation anew.

        Raises:
            MisuseError: This is not the root, the sharded module whose forward ran first.
        """
        unit = unit_of(self)
        engine = unit.engine
        if engine is None:
            return
        if unit.index != 0:
            raise MisuseError(
                f"reset_iter_state must be called on the root FSDP module, not on unit {unit.name!r}: it concerns "
                "every unit of the model"
            )
        engine.reset()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, also those that are held until a later backward reduces them."""
        # First: a backward that failed has left full parameters registered, and gradients on those behind them.
        for part in cast(nn.Module, self).modules():
            if isinstance(part, FSDPModule) and (engine := unit_of(part).engine) is not None:
                engine.forget_held(unit_of(part))
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """As of any module; of full tensors every rank takes its part, and if it raises nothing has been changed."""
        with unchanged_if_it_fails(cast(nn.Module, self), state_dict, strict):
            return super().load_state_dict(state_dict, strict, assign)  # type: ignore[misc]

    # Settings

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False accumulates full gradients without communication (`no_sync`); a later True reduces their sum.

        It sets `set_requires_all_reduce` to the same, too.
        """
        self._change(recurse, sync_gradients=requires_gradient_sync, sync_replicas=requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """False keeps gradients reduced over the shard axis only (HSDP); a later True adds replicas up."""
        self._change(recurse, sync_replicas=requires_all_reduce)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """True frees full parameters after forward, False keeps them for backward."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"reshard_after_forward must be a bool here, got {reshard_after_forward!r}; only fully_shard takes an "
                "int, since it makes the smaller groups"
            )
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
        self._root().wishes.is_last_backward = is_last_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by `factor` in place of the number of data-parallel ranks."""
        if not 0 < factor < math.inf:
            raise ValueError(f"the gradient divide factor must be a positive finite number, got {factor}")
        self._change(False, divide_factor=float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Deprecated name of `set_gradient_divide_factor`."""
        warnings.warn("Use `set_gradient_divide_factor` instead", DeprecationWarning, stacklevel=2)
        self.set_gradient_divide_factor(factor)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """True gives parameters that no rank used in a backward a gradient of zeros; by default they get none.

        Ranks may use different parameters of a unit either way: those that did not use one send zeros.
        """
        self._change(recurse, reduce_unused=reduce_scatter_unused_params)

    def set_reduce_scatter_max_input_buffers(
        self,
        max_input_buffers: int,
        *,
        recurse: bool = True,  # noqa: ARG002 - of torch's signature; the limit belongs to the whole engine
    ) -> None:
        """How many units' gradients may be on the wire at once, in the whole engine; more overlap, more memory."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        self._change_schedule(reduces_in_flight=max_input_buffers)

    def set_prefetch_bytes(self, prefetch_bytes: int | None) -> None:
        """Bytes of full parameters that may be gathered ahead of use, in the whole model; the same on every rank.

        0 gathers nothing ahead. None, the default, is one unit of any size, or as many of the next ones as are together
        no larger than the largest unit below the root.
        """
        self._change_schedule(prefetch_bytes=prefetch_bytes)

    def set_prefetch_across_steps(self, enable: bool = True) -> None:
        """True gathers the first units of the next step as soon as optimizers have written them; on every rank alike.

        What is written after that is noticed on any rank, and gathered again. It costs a small message a step, and
        between steps the memory that a beginning forward has. The torch transport begins nothing early.
        """
        unit = self._root()
        unit.wishes.across_steps = enable
        if unit.engine is not None:
            unit.engine.boundary.wanted = enable

    def set_keep_bytes(self, keep_bytes: int) -> None:
        """Bytes of full parameters that units with `reshard_after_forward="auto"` keep from forward to backward.

        A unit that is kept is gathered once a step, not twice. 0 keeps none (ZeRO-3), room for all keeps all (ZeRO-2);
        in between those are kept that leave forward last. The root's own parameters, which are kept in any case, and
        prefetches do not count. It is for the whole model, the same on every rank, and may change between steps.
        """
        if keep_bytes is None:
            raise TypeError("keep_bytes must be a number of bytes, got None; 0 keeps nothing")
        self._change_schedule(keep_bytes=keep_bytes)

    def set_debug(self, debug: bool) -> None:
        """True compares every communicating command over ranks before it runs, and raises where they differ.

        It is for the whole model, on every rank alike, and costs one small message a command and peer. The environment
        variable FULLSHARD_DEBUG=1 does the same without a change of code.
        """
        unit = unit_of(self)
        unit.wishes.debug = debug
        if unit.engine is not None:
            unit.engine.set_debug(debug or debug_by_environment())

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather these units when this one enters forward, in place of the recorded order; an empty list undoes it."""
        self._set_prefetch("forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather these units when this one enters backward, in place of the recorded order; an empty list undoes it."""
        self._set_prefetch("backward_prefetch", modules)

    # Communication

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gather this unit by `comm`: any object with the two methods of `AllGather`. Not recursive."""
        check_comm(comm, "AllGather")
        self._communicate(all_gather=comm)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce this unit's gradients by `comm`: any object with the two methods of `ReduceScatter`. Not recursive.

        It is always asked for `ReduceOp.SUM`; the engine divides.
        """
        check_comm(comm, "ReduceScatter")
        self._communicate(reduce_scatter=comm)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: torch.Stream | None = None) -> None:
        """Call `hook` on this unit's mean gradients over the mesh, before they are bound. Not recursive.

        Args:
            hook: Takes the gradients of one dtype, 1-D with padding, in the dtype of the reduction; it changes them in
                place, for example by an all-reduce over ranks outside of the mesh.
            stream: Run it there; not with a replicate axis of the mesh, and without meaning on a CPU.
        """
        unit = unit_of(self)
        if not callable(hook):
            raise TypeError(f"the all-reduce hook must be callable with one tensor, got {type(hook).__name__}")
        if stream is not None and unit.place.replicate_group is not None:
            raise ValueError("stream cannot be set on a mesh with a replicate axis: its all-reduce has a stream")
        self._refuse_several_meshes("set_all_reduce_hook")
        unit.wishes.after_reduce = hook if stream is None else on_stream(hook, stream)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """True reduces gradients over a process group of their own, so that gathers need not wait for them.

        Every rank of the mesh must call it. It changes nothing with direct exchange, where messages pass each other.
        """
        made: dict[tuple[int, ...], Any] = {}
        for unit in self._units(recurse):
            group, place = unit.place.shard_group, unit.place
            ranks = tuple(dist.get_process_group_ranks(group))
            if enable and ranks not in made:
                made[ranks] = separate_group(place.transport, group, place.device)
            unit.wishes.reduce_group = made[ranks] if enable else None
            if unit.engine is not None:
                unit.engine.relink(unit)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the next forward's gathers wait for `event`, once: for an optimizer that ran on another stream."""
        if self._root().wishes.across_steps:
            raise MisuseError("set_prefetch_across_steps(True) gathers before this event is known: use one of the two")
        self._root().wishes.post_optim_event = event

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Changes nothing: reductions are sums here in any case, and the engine divides."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:  # noqa: ARG002 - of torch's signature
        """Changes nothing: there are no staging buffers, large parameters are exchanged in their final places.

        Raises:
            MisuseError: The unit has a custom all-gather or reduce-scatter, which allocates its own buffers.
        """
        self._refuse_custom("set_allocate_memory_from_process_group_for_comm")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Not supported: full buffers come from the pool. The numbers would be the same, so on NCCL it only warns.

        Raises:
            ValueError: Another backend than NCCL is named, or the mesh is on a CPU.
        """
        self._refuse_custom("set_symm_mem_for_comm")
        device = unit_of(self).place.device.type
        if backend != "NCCL" or device == "cpu":
            raise ValueError(f"symmetric memory needs backend 'NCCL' and its devices, got {backend!r} on {device!r}")
        warnings.warn("symmetric memory is not used by fullshard: gathers run as they did", stacklevel=2)

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Changes nothing: every gather is asynchronous, and its buffers are allocated on the compute stream."""

    # Inside

    def _unit_and_engine(self) -> tuple[Unit, Engine]:
        """The unit, and its engine, made now with this module as root if there is none yet."""
        unit = unit_of(self)
        engine = unit.engine
        return unit, engine or find_engine(cast(nn.Module, self), unit, attribute=HANDLE)

    def _set_prefetch(self, field: str, modules: list[FSDPModule]) -> None:
        for module in modules:
            if not isinstance(module, FSDPModule):
                raise ValueError(f"only sharded modules can be prefetched, got {type(module).__name__}")
        unit = unit_of(self)
        unit.wishes.prefetch[field] = [unit_of(module) for module in modules]
        if not modules:
            del unit.wishes.prefetch[field]
            cleared: dict[str, Any] = {field: None}
            unit.policy = replace(unit.policy, **cleared)
        if unit.engine is not None:
            unit.engine.resolve_prefetch(unit)

    def _change(self, recurse: bool, **changes: Any) -> None:
        for unit in self._units(recurse):
            unit.policy = replace(unit.policy, **changes)
            if unit.engine is not None:
                unit.engine.set_unit_policy(unit, unit.policy)

    def _units(self, recurse: bool) -> list[Unit]:
        modules = cast(nn.Module, self).modules() if recurse else [cast(nn.Module, self)]
        units = {id(unit): unit for module in modules if isinstance(module, FSDPModule) for unit in [unit_of(module)]}
        return list(units.values())

    def _root(self) -> Unit:
        """The root's unit; before the first forward this module's own, in case it is the root."""
        unit = unit_of(self)
        return unit if unit.engine is None else unit.engine.units[0]

    def _change_schedule(self, **changes: Any) -> None:
        unit = unit_of(self)
        SchedulePolicy(**changes)  # raises before anything is changed
        unit.wishes.schedule.update(changes)
        if unit.engine is not None:
            unit.engine.set_schedule(**changes)

    def _communicate(self, **comms: Any) -> None:
        unit = unit_of(self)
        self._refuse_several_meshes("a custom collective")
        unit.wishes = replace(unit.wishes, **comms)
        if unit.engine is not None:
            unit.engine.relink(unit)

    def _refuse_several_meshes(self, what: str) -> None:
        if len({flow.place for flow in unit_of(self).flows}) > 1:
            raise ValueError(f"{what} is for one mesh, but shard_placement_fn put parameters of this unit on several")

    def _refuse_custom(self, method: str) -> None:
        wishes = unit_of(self).wishes
        if wishes.all_gather is not None or wishes.reduce_scatter is not None:
            raise MisuseError(f"{method} cannot be combined with a custom collective, which allocates its own buffers")

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Move, cast or materialize: on the sharded parameters, whose flat shards are then made anew."""
        unit = unit_of(self)
        self.reshard()
        names = [name for name, buffer in cast(nn.Module, self).named_buffers() if buffer.is_meta]
        meta = [member.sharded for member in unit.members if member.sharded.is_meta]
        result = super()._apply(fn, recurse)  # type: ignore[misc]
        unit.reflatten()
        note_materialized(cast(nn.Module, self), names, meta)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """An independent sharded module with the same values, gradients and settings, on the same ranks.

        It gets an engine of its own at its first forward, where all ranks must take part.
        """
        parts = [part for part in cast(nn.Module, self).modules() if isinstance(part, FSDPModule)]
        made = deepcopy_module(cast(nn.Module, self), [unit_of(part) for part in parts], memo)
        unit_of(made).module_ids.add(id(made))
        return made

    def __copy__(self) -> Any:
        """A second object with the same parameters, hooks and unit, as of any module."""
        made: Any = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise cannot_be_pickled(cast(nn.Module, self))


def unit_of(module: Any) -> Unit:
    """The unit of a sharded module."""
    unit: Unit = module.__dict__[HANDLE].unit
    return unit
