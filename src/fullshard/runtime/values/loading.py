"""Loading a state dict into sharded modules: full tensors are split, and what does not fit is said before a write.

[Note: where each part runs]
`nn.Module.load_state_dict` walks the modules, and pre-hooks on the way may rename keys (activation checkpointing does).
Only the hook of the module that holds a parameter sees the key as it is used, so full tensors become rows there
(`take_rows`). Whether everything fits must be known before the first write, so that is checked at the entry
(`check_fits`), and only for modules whose loading nobody has changed: what other hooks do cannot be foreseen.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.errors import MisuseError
from fullshard.runtime.dtensors import local_of, sharded_by_rows
from fullshard.runtime.names import plain_name
from fullshard.runtime.registry import REGISTRY
from fullshard.runtime.unit import Unit


def holders_of(unit: Unit, modules: list[nn.Module]) -> Iterator[nn.Module]:
    """The modules below `modules`, or themselves, in which parameters of `unit` are registered."""
    registries = {id(slot.registry) for member in unit.members for slot in member.slots}
    for root in modules:
        yield from (module for module in root.modules() if id(module._parameters) in registries)


def take_rows(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Pre-hook of a module that holds sharded parameters: put this rank's rows in place of full tensors.

    The rows are views of the full tensor: nothing is copied before they are written to the shard, and nothing is sent.
    """
    REGISTRY.about_to_write()
    for name, parameter in module._parameters.items():
        value: object = state_dict.get(prefix + name)
        if parameter is None or REGISTRY.owner(parameter) is None:
            continue
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.shape == parameter.shape:
            state_dict[prefix + name] = sharded_by_rows(parameter, value)


@dataclass(slots=True)
class _Expected:
    """What a model loads.

    Attributes:
        tensors: Key -> parameter or buffer.
        open: Prefixes below which hooks or methods of others decide about keys.
        reports: Whether nobody else edits the report on missing and unexpected keys.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    open: list[str] = field(default_factory=list)
    reports: bool = True

    def add(self, module: nn.Module, prefix: str) -> None:
        """Walk `module` as loading does."""
        self.reports = self.reports and not any(map(_is_foreign, module._load_state_dict_post_hooks.values()))
        if _loads_its_own_way(module):
            self.open.append(prefix)
            return
        kept = (item for item in module._buffers.items() if item[0] not in module._non_persistent_buffers_set)
        for name, tensor in (*module._parameters.items(), *kept):
            if tensor is not None:
                self.tensors[prefix + name] = tensor
        for name, child in module._modules.items():
            if child is not None:
                shown = plain_name(name)
                self.add(child, f"{prefix}{shown}." if shown else prefix)


def _loads_its_own_way(module: nn.Module) -> bool:
    kind = type(module)
    return (
        kind._load_from_state_dict is not nn.Module._load_from_state_dict
        or kind.set_extra_state is not nn.Module.set_extra_state
        or any(map(_is_foreign, module._load_state_dict_pre_hooks.values()))
    )


def _is_foreign(hook: Any) -> bool:
    function = getattr(hook, "hook", hook)  # torch wraps hooks that take their module
    return not str(getattr(function, "__module__", "")).startswith("fullshard.")


@contextmanager
def unchanged_if_it_fails(model: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> Iterator[None]:
    """Whatever raises in the block that loads `state_dict`, or here before it, `model` is left as it was.

    What can be foreseen is, and costs no memory; for the rest there is `all_or_nothing`.

    Raises:
        RuntimeError: See `check_fits`.
    """
    # A method of the user's may rename keys before it loads.
    usual = type(model).__mro__[2].load_state_dict is nn.Module.load_state_dict  # type: ignore[attr-defined]
    with nullcontext() if usual and check_fits(model, state_dict, strict) else all_or_nothing(model):
        yield


def check_fits(model: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> bool:
    """Raise for what loading would raise for, before anything is written.

    Returns:
        Whether all of it can be told beforehand: no method or hook of others takes part.

    Raises:
        RuntimeError: Missing or unexpected keys under `strict`, other shapes, or tensors on another mesh; all of them
            are named, in the form of torch's own error.
    """
    given, state_dict = state_dict, {plain_name(key): value for key, value in state_dict.items()}
    expected = _Expected()
    expected.add(model, "")
    problems = [
        problem
        for key, tensor in expected.tensors.items()
        if key in state_dict and (problem := _mismatch(key, tensor, state_dict[key]))
    ]
    if strict and expected.reports:
        problems = [*_wrong_keys(expected, state_dict), *problems]
    if problems:
        listed = "\n\t".join(problems)
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(model).__name__} (nothing was changed):\n\t{listed}"
        )
    _warn_of_different_values(expected.tensors, state_dict)
    return expected.reports and not expected.open and state_dict.keys() == given.keys()


def _wrong_keys(expected: _Expected, state_dict: Mapping[str, Any]) -> Iterator[str]:
    missing = [key for key in expected.tensors if key not in state_dict]
    unexpected = [key for key in state_dict if key not in expected.tensors and not key.startswith(tuple(expected.open))]
    if missing:
        yield f"Missing key(s) in state_dict: {_quoted(missing)}."
    for names in _tied(expected.tensors):
        absent, present = ([n for n in names if (n in state_dict) is there] for there in (False, True))
        if absent and present:
            yield f"{_quoted(absent)} is tied to {_quoted(present)}, which is there: strict=False loads it."
    if unexpected:
        yield f"Unexpected key(s) in state_dict: {_quoted(unexpected)}."


def _mismatch(key: str, tensor: torch.Tensor, value: Any) -> str:
    """What is wrong with one value, or nothing; what is no tensor is torch's to judge."""
    if not isinstance(value, torch.Tensor) or nn.parameter.is_lazy(tensor):
        return ""
    if value.shape != tensor.shape and not (tensor.ndim == 0 and value.shape == (1,)):
        return (
            f"size mismatch for {key}: copying a param with shape {value.shape} from checkpoint, "
            f"the shape in current model is {tensor.shape}."
        )
    if isinstance(value, DTensor) and isinstance(tensor, DTensor) and value.device_mesh != tensor.device_mesh:
        return (
            f"{key} is sharded over the mesh {value.device_mesh}, but the model over {tensor.device_mesh}: load full "
            "tensors (value.full_tensor()), or let torch.distributed.checkpoint reshard what was saved."
        )
    return ""


def _tied(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for key, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(key)
    return [keys for keys in names.values() if len(keys) > 1]


def _warn_of_different_values(tensors: Mapping[str, torch.Tensor], state_dict: Mapping[str, Any]) -> None:
    for names in _tied(tensors):
        found = [name for name in names if isinstance(state_dict.get(name), torch.Tensor)]
        if any(_differ(state_dict[name], state_dict[found[-1]]) for name in found[:-1]):
            warnings.warn(
                f"{_quoted(found)} are one parameter in this model, but the state dict has different values for them; "
                f"that of {found[-1]!r} is kept. Was it saved from a model in which they are not tied?",
                stacklevel=6,
            )


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one is other or one.is_meta or other.is_meta or isinstance(one, DTensor) is not isinstance(other, DTensor):
        return False
    if isinstance(one, DTensor):
        one, other = local_of(one), local_of(other)
    return one.shape != other.shape or not torch.equal(one, other.to(one.device, one.dtype))


def _quoted(keys: list[str]) -> str:
    return ", ".join(f'"{key}"' for key in keys)


@contextmanager
def all_or_nothing(module: nn.Module) -> Iterator[None]:
    """If the block raises, parameters and buffers of `module` are the same objects with the same values as before.

    `nn.Module.load_state_dict` writes what fits before it raises for what does not. Memory: a copy of this rank's
    shards and of all buffers while the block runs.
    """
    kept: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]] = [
        (registry, name, tensor, tensor if tensor.is_meta else local_part_of(tensor).clone())
        for part in module.modules()
        for registry in (part._parameters, part._buffers)
        for name, tensor in registry.items()
        if tensor is not None
    ]
    try:
        yield
    except Exception:
        with torch.no_grad():
            for registry, name, tensor, value in kept:
                registry[name] = tensor
                if not tensor.is_meta:
                    local_part_of(tensor).copy_(value)
        raise


def local_part_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor: its part of a `DTensor`, all of another one."""
    return local_of(tensor).detach() if isinstance(tensor, DTensor) else tensor.detach()


def refuse_rows_of_others(state: dict[str, Any], prefix: str) -> None:
    """Find `DTensor`s that another rank has pickled: they hold that rank's rows, and would go where ours belong.

    Raises:
        MisuseError: There is one below `prefix`. Not on the rank that saved it.
    """
    ranks: dict[int, int | None] = {}  # by mesh: those of one file share it
    for key, value in state.items():
        if key.startswith(prefix) and isinstance(value, DTensor):
            mesh = value.device_mesh
            if id(mesh) not in ranks:
                place = mesh.get_coordinate()
                ranks[id(mesh)] = None if place is None else int(mesh.mesh[tuple(place)])
            if ranks[id(mesh)] != dist.get_rank() and not all(p.is_replicate() for p in value.placements):
                raise MisuseError(
                    f"the value of {plain_name(key)!r} holds only the rows of rank {ranks[id(mesh)]}, which saved it, "
                    f"and this is rank {dist.get_rank()}. A sharded state dict in one rank's file is not the whole "
                    "model: save with torch.distributed.checkpoint, or save full tensors (fullshard.full_tensor, "
                    "FULL_STATE_DICT)"
                )
