"""State of any torch optimizer by parameter names, in the forms of `forms.py`.

    {"state": {"layers.0.weight": {"step": tensor(3.), "exp_avg": ...}, ...},
     "param_groups": [{"lr": 0.1, ..., "params": ["layers.0.weight", ...]}, ...]}

Names are those of the plain model, whatever wraps it, so the state fits other numbers of ranks, and (full) the plain
model's optimizer. State is written as the optimizer has it: of frozen parameters too, and none before a first step. No
step is taken to make state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor, Replicate

from fullshard.runtime.collectives import broadcast_from_first, exchange
from fullshard.runtime.failures.postmortem import explained
from fullshard.runtime.names import plain_name
from fullshard.runtime.values.loading import refuse_rows_of_others
from fullshard.runtime.whole.forms import Form, keeps_values, of_chunks
from fullshard.runtime.whole.tensors import Gatherer

StateDict = dict[str, Any]


def write_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, form: Form, state_dict: Mapping[str, Any] | None = None
) -> StateDict:
    """The state of `optimizer` by parameter names. All ranks must call it if the form is FULL.

    Memory: the result where this rank keeps it; elsewhere the state of one parameter at a time.

    Args:
        model: Has the optimizer's parameters.
        optimizer: Any torch optimizer.
        form: How values are written.
        state_dict: What `optimizer.state_dict()` returned, if it is not to be called; without "param_groups" the result
            has none either.

    Raises:
        ValueError: A parameter of the optimizer is not in the model.
    """
    saved = optimizer.state_dict() if state_dict is None else state_dict
    names = names_by_key(names_in(model), optimizer, saved, type(model).__name__)
    gatherer, keep = Gatherer("full optimizer state"), keeps_values(model, form)
    state: dict[str, dict[str, Any]] = {}
    for key, name in names.items():
        values = saved["state"].get(key)
        if values is None:
            continue
        with explained(model.parameters()):
            written = {kind: _write(value, f"{name}.{kind}", form, gatherer) for kind, value in values.items()}
        if keep:
            state[name] = written
    if not keep:
        return {}
    others = {str(key): values for key, values in saved["state"].items() if key not in names}
    made: StateDict = {"state": {**state, **others}}
    if "param_groups" in saved:
        made["param_groups"] = [
            {**copy.deepcopy(_settings(group)), "params": [names[key] for key in group["params"]]}
            for group in saved["param_groups"]
        ]
    return made


def _write(value: Any, name: str, form: Form, gatherer: Gatherer) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    written = form.write(value, name, gatherer)
    # A counter that goes on counting must not change what was saved.
    return written.clone() if not isinstance(value, DTensor) and written.data_ptr() == value.data_ptr() else written


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def read_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    form: Form,
    named: Mapping[str, Any],
    fetch: Callable[[Any, str], Any] = lambda value, _name: value,
) -> StateDict:
    """The reverse of `write_optimizer`: what `optimizer.load_state_dict` takes. Does not communicate.

    Groups of the optimizer get the settings of the saved group that has their parameters, in whatever order they were
    saved. Parameters that have no saved state get none.

    Args:
        model: Has the optimizer's parameters.
        optimizer: Any torch optimizer; it is not changed.
        form: How values were written.
        named: What `write_optimizer` returned, at any number of ranks; without "param_groups" the result has none.
        fetch: Gets each value and its name, in the order in which they were saved, and returns the value to read.

    Raises:
        ValueError: Saved and present parameters are not the same, a saved group is divided over several groups, or a
            value has another shape than its parameter needs.
    """
    if "state" not in named:
        raise ValueError(f"the saved optimizer state has no 'state', only {sorted(map(str, named))}")
    names = names_by_key(names_in(model), optimizer, None, type(model).__name__)
    return read_by_names(names, optimizer, form, named, fetch)


def read_by_names(
    names: dict[Any, str],
    optimizer: torch.optim.Optimizer,
    form: Form,
    named: Mapping[str, Any],
    fetch: Callable[[Any, str], Any] = lambda value, _name: value,
) -> StateDict:
    """As `read_optimizer`, with `names` of the optimizer's parameters by their keys, see `names_by_key`."""
    parameters = _parameters_by_key(optimizer)
    if "param_groups" in named:
        _check_names(set(names.values()), named)
    reader = _Reader(form, optimizer, _counters(parameters, names, named))
    keys = {name: key for key, name in names.items()}
    state = {}
    for name, values in named["state"].items():
        key = keys.get(name)
        if key is None:
            state[name] = values  # not of a parameter
        else:
            parameter = parameters[key]
            state[key] = {
                kind: reader.read(kind, fetch(value, f"{name}.{kind}"), parameter, name)
                for kind, value in values.items()
            }
    if "param_groups" not in named:
        return {"state": state}
    groups = []
    for number, group in enumerate(numbered_groups(optimizer)):
        source = group_of([names[key] for key in group], named["param_groups"], number)
        groups.append({**copy.deepcopy(_settings(source)), "params": group})
    return {"state": state, "param_groups": groups}


def _check_names(present: set[str], named: Mapping[str, Any]) -> None:
    saved = {name for group in named["param_groups"] for name in group["params"]}
    missing, unexpected = sorted(present - saved), sorted(saved - present)
    if missing or unexpected:
        raise ValueError(
            "the saved optimizer state is not of this optimizer's parameters. "
            f"Not saved: {_some(missing)}. Saved, but not in the optimizer: {_some(unexpected)}. Build the optimizer "
            "from the same parameters as when it was saved"
        )


def group_of(names: list[str], saved: Sequence[Mapping[str, Any]], number: int) -> Mapping[str, Any]:
    """The saved group with these parameters; one without parameters goes by its number."""
    found = [group for group in saved if set(names) & set(group["params"])]
    if not names and number < len(saved):
        return saved[number]
    if len(found) != 1:
        raise ValueError(
            f"the parameters of group {number} of the optimizer ({_some(names)}) were saved in {len(found)} groups, so "
            "its settings are not known; make the same groups as when it was saved"
        )
    return found[0]


def _counters(parameters: dict[int, torch.Tensor], names: dict[int, str], named: Mapping[str, Any]) -> set[str]:
    """Kinds of state that are one number even of a parameter with rows: one number of a 0-d parameter, too."""
    with_rows = (named["state"].get(name, {}) for key, name in names.items() if parameters[key].dim())
    kinds = (kind for values in with_rows for kind, value in values.items() if _is_one_number(value))
    return {"step", *kinds}


def _is_one_number(value: Any) -> bool:
    # Asking a ShardedTensor for its shape warns; torch makes them of values with rows only.
    return not isinstance(value, ShardedTensor) and getattr(value, "shape", None) == ()


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads values for an optimizer; `counters` are the kinds of state that stay plain tensors."""

    form: Form
    optimizer: torch.optim.Optimizer
    counters: set[str]

    def read(self, kind: str, value: Any, parameter: torch.Tensor, name: str) -> Any:
        """One value of the state of `parameter`, as the optimizer computes with it."""
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        if isinstance(value, ShardedTensor) and isinstance(parameter, DTensor):
            value = of_chunks(value, parameter)
        has = self.optimizer.state.get(parameter, {}).get(kind)
        is_plain = kind in self.counters or (isinstance(has, torch.Tensor) and not isinstance(has, DTensor))
        if isinstance(value, DTensor):
            refuse_rows_of_others({f"{name}.{kind}": value}, "")
        if is_plain or not isinstance(parameter, DTensor) or isinstance(value, DTensor):
            return self.form.take(value, has, parameter)
        if isinstance(has, DTensor):
            like = has
        elif value.shape == parameter.shape:
            like = parameter
        else:  # a factor of another shape, made from the gradient: every rank holds all of it
            everywhere = [Replicate()] * parameter.device_mesh.ndim
            local = self.form.take(value, None, parameter).to(parameter.device)
            return DTensor.from_local(local, parameter.device_mesh, everywhere, run_check=False)
        # Fresh: a view of this rank's rows would keep the whole tensor in memory.
        made = self.form.read(value, like, fresh=True)
        if not isinstance(made, DTensor):
            raise ValueError(
                f"optimizer state {kind!r} of parameter {name!r} has shape {tuple(value.shape)}, but this optimizer "
                f"needs shape {tuple(like.shape)}"
            )
        return made


# From one rank


@dataclass(frozen=True, slots=True)
class _Announced:
    """A tensor that follows by itself; `number` counts in the order in which they follow."""

    number: int
    shape: torch.Size
    dtype: torch.dtype


def scatter_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    named: Mapping[str, Any] | None,
    group: dist.ProcessGroup | None = None,
) -> StateDict:
    """As `read_optimizer` in full form, where only the first rank of `group` has the state. All ranks must call it.

    Memory: this rank's part of the result, and one whole tensor at a time beside.

    Args:
        model: As of `read_optimizer`.
        optimizer: As of `read_optimizer`.
        named: Full state by names on the first rank; what other ranks pass is not looked at.
        group: Ranks that take part; default all.

    Raises:
        ValueError: As of `read_optimizer`, or the first rank has no state dict. On every rank.
    """
    if group is None:
        group = dist.group.WORLD
    assert group is not None, "a sharded model has a process group"
    skeleton, tensors = _announce(named) if group.rank() == 0 and named is not None else (None, [])
    skeleton = exchange(skeleton, group)[0]
    if skeleton is None:
        raise ValueError(f"rank {dist.get_process_group_ranks(group)[0]} has no optimizer state to give to the others")
    meshes = (p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
    device = next((mesh.device_type for mesh in meshes), "cpu")  # whose backend the ranks have

    def fetch(value: Any, name: str) -> Any:
        if not isinstance(value, _Announced):
            return value
        whole = tensors[value.number].detach() if tensors else torch.empty(value.shape, dtype=value.dtype)
        sent = whole.to(device).contiguous()
        broadcast_from_first(sent, group, name)
        return sent if value.shape else sent.cpu()  # counters live on the CPU, whatever the device

    return read_optimizer(model, optimizer, Form(), skeleton, fetch)


def _announce(named: Mapping[str, Any]) -> tuple[StateDict, list[torch.Tensor]]:
    """A picklable copy of the state dict without the tensors, and the tensors."""
    tensors: list[torch.Tensor] = []
    if "state" not in named:
        return dict(named), tensors  # every rank is to see that, not only the first

    def announce(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        tensors.append(value)
        return _Announced(len(tensors) - 1, value.shape, value.dtype)

    state = {name: {kind: announce(value) for kind, value in values.items()} for name, values in named["state"].items()}
    return {**named, "state": state}, tensors


# Names and numbers


def numbered_groups(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    """The numbers that `state_dict()` gives the parameters of each group."""
    count = 0
    groups = []
    for group in optimizer.param_groups:
        groups.append(list(range(count, count + len(group["params"]))))
        count += len(group["params"])
    return groups


def _parameters_by_key(optimizer: torch.optim.Optimizer) -> dict[int, torch.Tensor]:
    return dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))


def names_in(model: nn.Module) -> dict[int, str]:
    """Identity of each parameter -> its name in the plain model."""
    return {id(p): plain_name(name) for name, p in model.named_parameters()}


def names_by_key(
    names: Mapping[int, str], optimizer: torch.optim.Optimizer, saved: Mapping[str, Any] | None, owner: str
) -> dict[Any, str]:
    """Name of each parameter by its key in a state dict of `optimizer`; keys are numbers unless `saved` has others.

    Args:
        names: By the identity of parameters.
        optimizer: Any torch optimizer.
        saved: What its `state_dict()` returned.
        owner: What has these parameters, for the message.

    Raises:
        ValueError: A parameter has no name.
    """
    parameters = _parameters_by_key(optimizer)
    unknown = [number for number, p in parameters.items() if id(p) not in names]
    if unknown:
        number = unknown[0]
        raise ValueError(
            f"parameter {number} of the {type(optimizer).__name__} (shape {tuple(parameters[number].shape)}) and "
            f"{len(unknown) - 1} more are not parameters of this {owner}; pass the model that the "
            "optimizer was built for, and build the optimizer after sharding"
        )
    keys: Iterable[Any] = parameters
    if saved is not None and "param_groups" in saved:
        keys = [key for group in saved["param_groups"] for key in group["params"]]
    return {key: names[id(p)] for key, p in zip(keys, parameters.values(), strict=True)}


def _some(names: list[str]) -> str:
    return (", ".join(repr(name) for name in names[:5]) or "none") + (" ..." if len(names) > 5 else "")


def rekey(saved: Mapping[str, Any], to_names: bool, model: nn.Module, optimizer: torch.optim.Optimizer) -> StateDict:
    """A state dict with names for keys where it had numbers, or the reverse; values are taken over as they are.

    Args:
        saved: Optimizer state dict, with keys of either kind.
        to_names: The kind of keys that is wanted.
        model: Has the parameters, sharded or not.
        optimizer: Its numbers are meant.

    Raises:
        ValueError: Keys are of both kinds, or name parameters that the optimizer does not have.
    """
    kinds = {type(key) for key in saved["state"]} | {
        type(key) for group in saved["param_groups"] for key in group["params"]
    }
    if len(kinds) > 1:
        raise ValueError(f"the optimizer state has keys of several types: {sorted(kind.__name__ for kind in kinds)}")
    if kinds <= ({str} if to_names else {int}):
        return dict(saved)
    names: dict[Any, Any] = names_by_key(names_in(model), optimizer, None, type(model).__name__)
    table = names if to_names else {name: number for number, name in names.items()}
    unknown = [key for group in saved["param_groups"] for key in group["params"] if key not in table]
    if unknown:
        raise ValueError(f"the optimizer has no parameters {_some([str(key) for key in unknown])}")
    return {
        "state": {table[key]: values for key, values in saved["state"].items()},
        "param_groups": [
            {**copy.deepcopy(_settings(group)), "params": sorted(table[key] for key in group["params"])}
            for group in saved["param_groups"]
        ],
    }
