"""The only file that registers hooks. Each hook turns into one event; what follows is the Scheduler's decision."""

from __future__ import annotations

import copy
import sys
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._C import _current_graph_task_id
from torch.autograd import Variable
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fullshard.core.lifecycle import State
from fullshard.core.schedule import Event, EventKind
from fullshard.errors import MisuseError
from fullshard.runtime.engine import Engine
from fullshard.runtime.failures.explain import explain_mixed
from fullshard.runtime.graphs import refuse_transforms
from fullshard.runtime.inputs import Gradients, Inputs
from fullshard.runtime.loop.flat import FlatOptimizer
from fullshard.runtime.loop.optimizers import check_optimizer
from fullshard.runtime.names import hide_compiled, show_compiled
from fullshard.runtime.params.registered import Shown
from fullshard.runtime.registry import REGISTRY
from fullshard.runtime.tree import cast_floating, map_tensors, tensors_in
from fullshard.runtime.unit import Unit
from fullshard.runtime.values.fresh_state import undo_allocating_step
from fullshard.runtime.values.loading import holders_of, refuse_rows_of_others, take_rows

# Makes (or finds) the engine of a module and its unit.
FindEngine = Callable[[nn.Module, Unit], Engine]


class UnitHooks:
    """Hooks of one unit on the modules that make it up.

    Args:
        unit: Whose events these are.
        modules: One module, or several that form one group.
        find_engine: Called at the start of every forward; makes the engine at the first.
    """

    def __init__(self, unit: Unit, modules: list[nn.Module], find_engine: FindEngine) -> None:
        self._unit = unit
        self._find_engine = find_engine
        self.engine: Engine | None = None
        self._group_size = len(modules)
        self._ran: set[int] = set()  # modules of the group that have run in this round
        self._pending = 0  # calls in this round whose backward is not over
        REGISTRY.hooks[unit] = weakref.ref(self)
        self._second_order = -1  # the latest graph task that went through a graph of the unit's own backward
        for module in modules:
            module.register_state_dict_pre_hook(self.pre_state_dict)
            module.register_state_dict_post_hook(partial(self.post_state_dict))
            module.register_load_state_dict_pre_hook(self.pre_load)
            module.register_load_state_dict_post_hook(self.post_load)
        for module in holders_of(unit, modules):
            module.register_load_state_dict_pre_hook(take_rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> UnitHooks:
        """Hooks of the copied unit; the copied modules' dicts of hooks come to refer to them."""
        made = copy.copy(self)
        memo[id(self)] = made
        made._unit = copy.deepcopy(self._unit, memo)
        made.engine, made._ran, made._pending = None, set(), 0
        REGISTRY.hooks[made._unit] = weakref.ref(made)
        return made

    # Forward

    def run(self, module: nn.Module, method: Callable[..., Any], args: Any, kwargs: Any, outside: bool = False) -> Any:
        """Call a method of the module with the unit's events around it.

        `FSDPModule.__call__` comes here, not hooks of the module: hooks of the user then see full parameters whenever
        they were registered, and `torch.compile` finds nothing of ours in what it traces.
        """
        if self._unit.registration.shown is Shown.SUMMONED:
            # The parameters are there, in the dtype they are stored in.
            return self.refuse_backward(method(*args, **kwargs))
        inputs = Inputs(args, kwargs)
        try:
            self.enter(module, inputs, outside)
            output = method(*inputs.args, **inputs.kwargs)
            return self.leave(module, inputs, output, outside)
        except Exception:
            self.fail()
            raise

    def use(self, module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function that uses the unit's parameters outside of its forward."""
        return self.run(module, function, args, kwargs, outside=True)

    def enter(self, module: nn.Module, inputs: Inputs, outside: bool) -> None:
        """The unit's parameters are about to be used, by its forward or (`outside`) by something that is not in it.

        Gather; cast inputs; arrange to hear of the end of backward.
        """
        unit = self._unit
        refuse_transforms(module)
        engine = unit.engine
        if engine is None or engine.unproven:
            engine = self._find_engine(module, unit)
        self.engine = engine
        engine.before_forward()
        inside_backward = _autograd_runs()
        if not outside and not inside_backward and engine.scheduler.runs(unit.index):
            self._bury_dead_forward(module, engine)
        if unit.index == 0:
            engine.before_root_forward()
        device = unit.place.device
        if device.type != "cpu" and not engine.scheduler.any_in_use():  # a forward begins that is in no other one
            inputs.move(device)
        if unit.precision.param_dtype is not None and unit.precision.cast_forward_inputs:
            inputs.cast(unit.precision.param_dtype)
        state = engine.scheduler.states[unit.index]
        if state.has_full_buffer and not state.in_use and unit.is_stale:
            engine.on(Event(EventKind.RESHARD, unit.index))
        # To the Scheduler a use outside the forward is what a recomputation is: no part of the order of units, and what
        # comes next for the unit, its backward, is due.
        engine.on(Event(EventKind.PRE_FORWARD, unit.index, inside_backward=outside or inside_backward))
        # Not when recomputing, and not in a nested call of the same unit: its backward is over with the outermost one.
        if not state.in_use and torch.is_grad_enabled() and inputs.watch(self.post_backward):
            self._pending = self._pending + 1 if self._ran else 1

    def _bury_dead_forward(self, module: nn.Module, engine: Engine) -> None:
        """A forward that ended by what is no `Exception` (Ctrl-C) told nobody: let its unit go before the next one."""
        if _is_running(module):
            return
        if self._unit.index == 0:
            engine.abort()
        else:
            engine.forward_failed(self._unit, inside_backward=False)

    def leave(self, module: nn.Module, inputs: Inputs, output: Any, outside: bool) -> Any:
        """Free; cast outputs; arrange to hear of the start of backward."""
        unit, engine = self._unit, self.engine
        assert engine is not None
        inputs.settle()
        output = map_tensors(self._own, output)
        recomputing = engine.scheduler.states[unit.index] is State.BACKWARD
        will_backward = not recomputing and torch.is_grad_enabled() and self._watch_outputs(output)
        event = Event(
            EventKind.POST_FORWARD,
            unit.index,
            will_backward=will_backward,
            more=not outside and self._others_to_run(module),
            inside_backward=outside or _autograd_runs(),
        )
        engine.on(event)
        return output

    def _own(self, output: torch.Tensor) -> torch.Tensor:
        """An output in the dtype of the policy, and in memory that stays: parameters, and views of them, are copied."""
        dtype = self._unit.precision.output_dtype
        if dtype is not None:
            output = cast_floating(dtype, output)
        source = output._base if output._is_view() else output
        assert source is not None
        # Parameters are leaves. Asked first, it spares nearly every output the slower question of its class.
        ours = source.is_leaf and isinstance(source, nn.Parameter)
        ours = ours and any(source is full for flow in self._unit.flows for full in flow.buffers.full)
        return output.clone() if ours else output

    def fail(self) -> None:
        """The forward raised."""
        self._ran.clear()
        if self.engine is not None:
            states = self.engine.scheduler.states
            explain_mixed(sys.exc_info()[1], [unit for unit in self.engine.units if not states[unit.index].in_use])
            self.engine.forward_failed(self._unit, _autograd_runs())

    def refuse_backward(self, output: Any) -> Any:
        """The parameters of this forward are the user's for a while: gradients would go to them and be lost."""
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self.summoned_backward)
        return output

    def summoned_backward(self, gradient: torch.Tensor) -> None:
        """Backward of a forward on parameters that were the user's."""
        raise MisuseError(
            f"backward of a forward of unit {self._unit.name or '(root)'!r} that ran inside summon_full_params: its "
            "gradients would be lost. Run forward and backward outside of the context"
        )

    def _watch_outputs(self, output: Any) -> bool:
        """Hear of the first gradient of an output. Returns whether there can be one."""
        tensors = [output] if isinstance(output, torch.Tensor) else list(tensors_in(output))
        if not tensors and self._unit.trainable:
            warnings.warn(
                f"unit {self._unit.name or '(root)'!r} returned {type(output).__name__} without a tensor in a tuple, "
                "list, dict or dataclass: its backward cannot be seen, so its parameters get no gradient. Return the "
                "tensors, register the class by torch.utils._pytree.register_pytree_node, or run it under "
                "torch.no_grad()",
                stacklevel=2,
            )
        with_gradient = [tensor for tensor in tensors if tensor.requires_grad]
        for tensor in with_gradient:
            if tensor.grad_fn is None:
                tensor.register_hook(self.pre_backward)
            else:
                # What a hook of the tensor does, at half its cost.
                tensor.grad_fn.register_prehook(self.pre_backward)
        return bool(with_gradient)

    def _others_to_run(self, module: nn.Module) -> bool:
        """Whether modules of the same group have not run since the group was last complete."""
        if self._group_size == 1 or _autograd_runs():
            return False
        self._ran.add(id(module))
        if len(self._ran) == self._group_size:
            self._ran.clear()
        return bool(self._ran)

    # Backward

    def pre_backward(self, _gradients: Any) -> None:
        """A gradient of the unit's output is there: its backward begins."""
        engine = self.engine
        assert engine is not None
        if not engine.in_backward:
            engine.recover()
            end = EndOfBackward(engine)
            engine.enter_backward(end)
            Variable._execution_engine.queue_callback(end.report)
        engine.on(Event(EventKind.PRE_BACKWARD, self._unit.index))

    def post_backward(self, gradients: Gradients) -> None:
        """The gradients of all inputs are there: the unit's backward is over."""
        engine = self.engine
        assert engine is not None
        if torch.is_grad_enabled():
            self._watch_gradients(gradients)
        if self._second_order == _current_graph_task_id():
            return  # which of the two graphs ends last is not known: the unit stays full until the end of backward
        self._pending -= 1
        if self._group_size > 1 and self._pending > 0:
            return  # the backward of another module of the unit is still to come: one reduction for all
        engine.on(Event(EventKind.POST_BACKWARD, self._unit.index, reducible=self._unit.trainable))

    def _watch_gradients(self, gradients: Gradients) -> None:
        """`create_graph=True`: a graph of this backward was made, and it holds the full parameters.

        Its own backward begins with what this one ends with, and needs the unit gathered again.
        """
        for gradient in gradients:
            if gradient is not None and gradient.requires_grad:
                gradient.register_hook(self.pre_second_backward)
        _warn_of_lost_graph(self._unit)

    def pre_second_backward(self, gradient: torch.Tensor) -> None:
        """The backward of the unit's backward begins."""
        self._second_order = _current_graph_task_id()
        self.pre_backward(gradient)

    # Others

    def pre_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """A state dict holds sharded parameters, whatever came before. Nothing is freed: one rank may do this alone."""
        if self.engine is not None:
            self.engine.recover()
            self._require_rest("state_dict", "the values would be gone when that has ended")
        self._show_sharded()

    def post_state_dict(self, module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        """Names are those of the plain model."""
        hide_compiled(state, prefix)

    def pre_load(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Values are loaded into sharded parameters."""
        refuse_rows_of_others(state, prefix)
        show_compiled(module, state, prefix)
        if self.engine is not None:
            self.engine.recover()
            self._require_rest("load_state_dict", "it computes with the values that are there now")
            self.engine.written.add(self._unit.index)
        self._show_sharded()

    def post_load(self, module: nn.Module, _incompatible: Any) -> None:
        """Parameters that were assigned, not written into, are taken over."""
        self._unit.reflatten()

    def _require_rest(self, method: str, why: str) -> None:
        assert self.engine is not None
        state = self.engine.scheduler.states[self._unit.index]
        if state.in_use:
            raise MisuseError(
                f"{method} of unit {self._unit.name or '(root)'!r} was called while its {state.value} runs: {why}. "
                "Call it between steps"
            )

    def _show_sharded(self) -> None:
        engine = self.engine
        if engine is None or not engine.scheduler.states[self._unit.index].in_use:
            self._unit.show(full=False)


_RUN = UnitHooks.run.__code__


class EndOfBackward:
    """Its `report` is called by autograd at the end of a graph task, which holds the only strong reference to it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._makes_graph = torch.is_grad_enabled()  # within a backward: whether it runs with create_graph

    def report(self) -> None:
        """Every node of the backward has run."""
        for unit in self._engine.units if self._makes_graph else ():
            _warn_of_lost_graph(unit)
        self._engine.end_backward()


def _warn_of_lost_graph(unit: Unit) -> None:
    """Gradients of parameters come with a graph that the reduction cuts off."""
    if any(full.grad is not None and full.grad.requires_grad for flow in unit.flows for full in flow.buffers.full):
        warnings.warn(
            "backward(create_graph=True) reached parameters of a sharded module: their .grad are averaged over ranks "
            "and have no graph, so nothing can be differentiated through them. Through gradients of inputs it can: "
            "torch.autograd.grad(loss, inputs, create_graph=True)",
            stacklevel=2,
        )


def _autograd_runs() -> bool:
    return _current_graph_task_id() != -1


def _is_running(module: nn.Module) -> bool:
    """Whether a call of `module` is on the stack, below the one that is just beginning."""
    calls = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        calls += frame.f_code is _RUN and frame.f_locals["module"] is module
        frame = frame.f_back
    return calls > 1


def hide_when_loading(module: nn.Module, hidden: str) -> None:
    """Keep `hidden`, part of the name under which a module holds another, out of what `load_state_dict` reports."""

    def clean(_module: nn.Module, incompatible: Any) -> None:
        for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
            keys[:] = [key.replace(hidden, "") for key in keys]

    module.register_load_state_dict_post_hook(clean)


# Optimizers


def _check_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    REGISTRY.about_to_write()
    check_optimizer(optimizer)


def _note_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Parameters have changed: full copies of them from before are stale."""
    undo_allocating_step(optimizer)
    if isinstance(optimizer, FlatOptimizer):
        return  # it has reported the units itself
    written: dict[Engine, dict[Unit, None]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # Without a gradient it was left alone. Whoever writes it by hand raises its version counter.
            unit = REGISTRY.owner(parameter) if parameter.grad is not None else None
            if unit is not None and unit.engine is not None:
                written.setdefault(unit.engine, {})[unit] = None
    for engine, units in written.items():
        engine.note_written(*units)


class OptimizerHooks:
    """Hooks on all optimizers of the process, registered at the first `fully_shard`."""

    def __init__(self) -> None:
        self._handles: list[Any] = []

    def ensure(self) -> None:
        """Register once."""
        if not self._handles:
            self._handles = [
                register_optimizer_step_pre_hook(_check_optimizer),
                register_optimizer_step_post_hook(_note_step),
            ]


OPTIMIZER_HOOKS = OptimizerHooks()

__all__ = ["OPTIMIZER_HOOKS", "EndOfBackward", "FindEngine", "OptimizerHooks", "UnitHooks", "hide_when_loading"]
