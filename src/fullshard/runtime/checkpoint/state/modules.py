"""The tensors of a module, sharded as they are, under the names of the plain model; without communication.

[Note: not `state_dict()`]
The walk is that of `nn.Module.state_dict`, but modules of fullshard take no part in it: the class FSDP would gather,
and wrappers would be in the names. What others do is honoured: their `state_dict` methods, `_save_to_state_dict`, hooks
and extra states. A hook sees what is below its module, under plain names.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys

from fullshard.errors import MisuseError
from fullshard.runtime.dtensors import local_of
from fullshard.runtime.module import HANDLE
from fullshard.runtime.names import plain_name
from fullshard.runtime.params.registered import Shown
from fullshard.runtime.registry import REGISTRY
from fullshard.runtime.unit import Unit

_EXTRA = "_extra_state"
# Hooks of these only change names of wrappers, which are not in the names here.
_OURS = ("fullshard.", "torch.distributed.algorithms._checkpoint.")
_DATA_PARALLEL = ("torch.nn.parallel.distributed", "torch.nn.parallel.data_parallel")


@dataclass(slots=True)
class ModuleState:
    """What a module has to save.

    Attributes:
        tensors: Name -> parameter or buffer as it is registered, or what a hook put there. Tied ones once.
        aliases: Other name of a tensor -> its name.
        extra: Name -> what is no tensor of its own, such as extra states.
        owners: Name of an extra state -> its module.
        makers: Name -> (module, prefix) for tensors below modules that save in their own way.
        parameters: Identity of each parameter -> its name, whatever hooks made of it.
        modules: Every module that was walked through.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    owners: dict[str, nn.Module] = field(default_factory=dict)
    makers: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)
    parameters: dict[int, str] = field(default_factory=dict)
    modules: list[nn.Module] = field(default_factory=list)


def module_state(module: nn.Module) -> ModuleState:
    """The state of a module with or without sharded parameters.

    Raises:
        MisuseError: A forward or backward of it is running.
    """
    show_sharded(module)
    made = ModuleState()
    found: dict[str, Any] = {}
    with torch.no_grad():
        _walk(module, "", found, made)
    names: dict[int, str] = {}
    for name, value in found.items():
        is_extra = name.rpartition(".")[2] == _EXTRA
        if is_extra or not isinstance(value, torch.Tensor):
            made.extra[name] = value
        # By identity, not by memory: an empty part has none, and all ranks must find the same.
        elif names.setdefault(id(value), name) != name:
            made.aliases[name] = names[id(value)]
        else:
            made.tensors[name] = value
    return made


def units_of(module: nn.Module) -> list[Unit]:
    """Units of the sharded modules in a module, or itself."""
    handles = (part.__dict__.get(HANDLE) for part in module.modules())
    return list({id(handle.unit): handle.unit for handle in handles if handle is not None}.values())


def show_sharded(module: nn.Module) -> None:
    """Let modules hold sharded parameters, whatever came before. Nothing is freed: one rank may do this alone.

    Raises:
        MisuseError: Somebody computes with full ones, or looks at them.
    """
    for unit in units_of(module):
        engine, what = unit.engine, ""
        if engine is not None:
            engine.recover()
            state = engine.scheduler.states[unit.index]
            what = f"while its {state.value} runs" if state.in_use else ""
        if unit.registration.shown is Shown.SUMMONED:
            what = "inside full_parameters or summon_full_params"
        if what:
            raise MisuseError(
                f"unit {unit.name or '(root)'!r} was to be saved or loaded {what}: do so between steps. After Ctrl-C "
                "in one, call reset_iter_state() of the model first"
            )
        unit.show(full=False)


def registered(state: ModuleState) -> Callable[[torch.Tensor], bool]:
    """Whether writing into a tensor of the state writes into a parameter or buffer of its modules."""
    tensors = [
        tensor
        for module in state.modules
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None
    ]
    known = {id(tensor) for tensor in tensors}
    memory = {_memory(tensor) for tensor in tensors} - {0}
    return lambda tensor: id(tensor) in known or _memory(tensor) in memory


def _memory(tensor: torch.Tensor) -> int:
    local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()


def finish_module(module: nn.Module, state: ModuleState, made: dict[str, torch.Tensor], extra: dict[str, Any]) -> None:
    """Parameters and buffers have been written in place: let everybody know, and hand over what is not in place.

    Args:
        module: It.
        state: As it was found.
        made: Tensors by name that hooks or methods of modules had made for saving.
        extra: Values by name that are no tensors of their own.
    """
    loose: dict[str, Any] = dict(made)
    for name, value in extra.items():
        owner = state.owners.get(name)
        if owner is None:
            loose[name] = value
        else:
            owner.set_extra_state(value)
    for maker, prefix in dict.fromkeys(state.makers[name] for name in loose):
        own = {n.removeprefix(prefix): v for n, v in loose.items() if state.makers[n] == (maker, prefix)}
        maker.load_state_dict(own, strict=False)
    for unit in units_of(module):
        REGISTRY.marked.difference_update(id(member.sharded) for member in unit.members)
        if unit.engine is not None:
            unit.engine.written.add(unit.index)
    for part in state.modules:
        for hook in part._load_state_dict_post_hooks.values():
            if _is_foreign(hook):
                hook(part, _IncompatibleKeys([], []))


def _places(module: nn.Module, prefix: str) -> Iterable[tuple[nn.Module, str]]:
    yield module, prefix
    for name, child in module._modules.items():
        if child is not None:
            yield from _places(child, _below(module, name, prefix))


def _below(module: nn.Module, name: str, prefix: str) -> str:
    """Prefix of what a module holds as `name`; wrappers add nothing."""
    if not plain_name(name) or (name == "module" and _is_data_parallel(module)):
        return prefix
    return f"{prefix}{name}."


def _is_data_parallel(module: nn.Module) -> bool:
    return any(kind.__module__ in _DATA_PARALLEL for kind in type(module).__mro__)


def _walk(module: nn.Module, prefix: str, found: dict[str, Any], made: ModuleState) -> None:
    kind = type(module)
    if kind.state_dict is not nn.Module.state_dict and _is_foreign(kind.state_dict):
        _keep(module, prefix, module.state_dict(destination=OrderedDict(), prefix=prefix, keep_vars=True), found, made)
        for inside, below in _places(module, prefix):
            _note(inside, below, made)
        return
    _note(module, prefix, made)
    before = [hook for hook in module._state_dict_pre_hooks.values() if _is_foreign(hook)]
    after = [hook for hook in module._state_dict_hooks.values() if _is_foreign(hook)]
    own_way = kind._save_to_state_dict is not nn.Module._save_to_state_dict
    if not (before or after or own_way):
        _save(module, prefix, found, made)
        _walk_children(module, prefix, found, made)
        return
    part: Any = OrderedDict()
    for hook in before:
        hook(module, prefix, True)
    if own_way:
        module._save_to_state_dict(part, prefix, True)
    else:
        _save(module, prefix, part, made)
    _walk_children(module, prefix, part, made)
    for hook in after:
        changed = hook(module, part, prefix, {"version": module._version})
        part = part if changed is None else changed
    _keep(module, prefix, part, found, made)


def _walk_children(module: nn.Module, prefix: str, found: dict[str, Any], made: ModuleState) -> None:
    for name, child in module._modules.items():
        if child is not None:
            _walk(child, _below(module, name, prefix), found, made)


def _keep(module: nn.Module, prefix: str, part: dict[str, Any], found: dict[str, Any], made: ModuleState) -> None:
    """Take over what a module has made in its own way."""
    for name, value in part.items():
        found[plain_name(name)] = value
        made.makers.setdefault(plain_name(name), (module, prefix))  # the innermost one that has a say


def _note(module: nn.Module, prefix: str, made: ModuleState) -> None:
    made.modules.append(module)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            made.parameters.setdefault(id(parameter), prefix + name)


def _save(module: nn.Module, prefix: str, found: dict[str, Any], made: ModuleState) -> None:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            found[prefix + name] = parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            found[prefix + name] = buffer
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        found[prefix + _EXTRA] = module.get_extra_state()
        made.owners[prefix + _EXTRA] = module


def _is_foreign(hook: Any) -> bool:
    function = getattr(hook, "hook", hook)  # torch wraps hooks that take their module
    function = getattr(function, "func", function)
    return not str(getattr(function, "__module__", "")).startswith(_OURS)
