"""Optimizers by the names of their parameters: what is saved of one, and how it gets that back.

[Note: the JSON value]
    "class":  name of its class
    "groups": [{"params": [name of the parameter's tensor, ...], "state": [number, ...], "settings": value}, ...]
    "kinds":  [[kind, ...], ...]      kinds of state that are tensors; "state" has a number of these, or -1 for no state
    "values": {name: value}           kinds that are no tensors, of parameters that have any
    "others": {"state": value, "more": value}    what its `state_dict()` has beside that, of no parameter; or null

The tensor of a kind is called KEY/PARAMETER'S TENSOR NAME/KIND. So 100 000 parameters are a list of names and numbers,
and a state that is not there is known to be missing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.runtime.checkpoint.files.memory import torch_dtype
from fullshard.runtime.checkpoint.state.plan import Plan, blank_like
from fullshard.runtime.checkpoint.state.values import Path
from fullshard.runtime.loop.flat import FlatOptimizer
from fullshard.runtime.tree import map_tensors
from fullshard.runtime.whole.forms import Form
from fullshard.runtime.whole.optim_state import group_of, names_by_key, numbered_groups, read_by_names

_LOG = logging.getLogger("fullshard")
_NOT_SETTINGS = ("params", "param_names")
_IN_MODEL = "module of the state (save and load an optimizer together with its model)"

Takes = Callable[[str], bool]


class Sink(Protocol):
    """Takes what is found."""

    def tensor(self, name: str, tensor: torch.Tensor) -> None:
        """A tensor of its own."""

    def encode(self, value: Any, path: Path) -> Any:
        """A value as JSON; tensors in it become tensors of their own."""


def collect_optimizer(
    optimizer: torch.optim.Optimizer, key: str, names: Mapping[int, str], takes: Takes, sink: Sink
) -> dict[str, Any]:
    """The JSON value of an optimizer; its tensors go to `sink`.

    Args:
        optimizer: Any torch optimizer.
        key: Its key in the state.
        names: Identity of each parameter -> name of its tensor.
        takes: Which of these names are saved.
        sink: Takes tensors and values.

    Raises:
        ValueError: A parameter has no name, or a state's rows cannot be told.
    """
    saved = optimizer.state_dict()
    all_names = names_by_key(names, optimizer, saved, _IN_MODEL)
    parameters = dict(zip(all_names, (p for group in optimizer.param_groups for p in group["params"]), strict=True))
    kinds: dict[tuple[str, ...], int] = {}
    numbers: dict[Any, int] = {}
    values: dict[str, Any] = {}
    for parameter_key, name in all_names.items():
        state = saved["state"].get(parameter_key)
        if state is None or not takes(name):
            continue
        own = {
            kind: value for kind, value in state.items() if isinstance(kind, str) and isinstance(value, torch.Tensor)
        }
        rest = {kind: value for kind, value in state.items() if kind not in own}
        numbers[parameter_key] = kinds.setdefault(tuple(own), len(kinds))
        for kind, value in own.items():
            _check_rows(value, parameters[parameter_key], f"{key}/{name}/{kind}")
            sink.tensor(f"{key}/{name}/{kind}", value)
        if rest:
            values[name] = sink.encode(rest, (key, name))
    groups = []
    for number, group in enumerate(saved["param_groups"]):
        taken = [each for each in group["params"] if takes(all_names[each])]
        settings = {name: value for name, value in group.items() if name not in _NOT_SETTINGS}
        groups.append(
            {
                "params": [all_names[each] for each in taken],
                "state": [numbers.get(each, -1) for each in taken],
                "settings": sink.encode(settings, (key, "param_groups", number)),
            }
        )
    others = {name: value for name, value in saved.items() if name not in ("state", "param_groups")}
    loose = {each: value for each, value in saved["state"].items() if each not in all_names}
    return {
        "kind": "optimizer",
        "class": _class_name(optimizer),
        "groups": groups,
        "kinds": [list(each) for each in kinds],
        "values": values,
        "others": {"state": sink.encode(loose, (key, "state")), "more": sink.encode(others, (key,))}
        if loose or others
        else None,
    }


def _class_name(optimizer: torch.optim.Optimizer) -> str:
    """Of the class that the user named."""
    return (optimizer._kind if isinstance(optimizer, FlatOptimizer) else type(optimizer)).__name__


def _check_rows(value: torch.Tensor, parameter: torch.Tensor, name: str) -> None:
    """A plain tensor beside a sharded parameter: one number, or all of it. Rows alone would pass for the whole."""
    if isinstance(value, DTensor) or value.numel() <= 1 or not isinstance(parameter, DTensor):
        return
    if value.shape != parameter.shape and not all(placement.is_replicate() for placement in parameter.placements):
        raise ValueError(
            f"optimizer state {name!r} of a sharded parameter of shape {tuple(parameter.shape)} is a plain tensor of "
            f"shape {tuple(value.shape)}: it cannot be told which rows these are. Keep it as a DTensor placed like the "
            "parameter, as torch.zeros_like(parameter) makes it"
        )


@dataclass(frozen=True, slots=True)
class _Saved:
    """The JSON value of an optimizer, checked. `numbers` are by parameter."""

    groups: list[dict[str, Any]]
    kinds: list[list[str]]
    numbers: dict[str, int]
    values: dict[str, Any]
    others: dict[str, Any]

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> _Saved:
        groups, kinds, values = (value.get(member) for member in ("groups", "kinds", "values"))
        if not (_all(groups, dict) and _all(kinds, list) and isinstance(values, dict)):
            raise ValueError("its groups, kinds or values are not what they should be")
        assert isinstance(groups, list)
        assert isinstance(kinds, list)
        numbers: dict[str, int] = {}
        for group in groups:
            names, states = group.get("params"), group.get("state")
            if not (_all(names, str) and _all(states, int) and len(names) == len(states)):
                raise ValueError("a group does not have a number for each parameter")
            if any(not -1 <= number < len(kinds) for number in states):
                raise ValueError(f"a group has a number of no kinds: {max(states)}")
            if not numbers.keys().isdisjoint(names) or len(set(names)) != len(names):
                raise ValueError("a parameter is in two groups")
            numbers.update(zip(names, states, strict=True))
        if not all(_all(each, str) for each in kinds):
            raise ValueError("its kinds are not lists of names")
        others = value.get("others") or {}
        if not isinstance(others, dict):
            raise ValueError("what it has beside states of parameters is not a dict")
        return cls(groups, kinds, numbers, values, others)

    def state_of(self, name: str) -> list[str] | None:
        """Kinds of tensors of a parameter; None without state."""
        number = self.numbers.get(name, -1)
        return None if number < 0 else self.kinds[number]


def _all(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


class _Blanks(Form):
    """Makes tensors to read into; values are tensors on meta, of the global shape and the dtype that was saved."""

    __slots__ = ()

    def read(self, value: torch.Tensor, like: DTensor, fresh: bool = False) -> torch.Tensor:  # noqa: ARG002
        """State that is there is read into in place."""
        return blank_like(like, value.dtype) if isinstance(like, nn.Parameter) else like

    def take(self, value: torch.Tensor, has: Any, parameter: torch.Tensor) -> torch.Tensor:
        """A plain tensor; counters are on the CPU, until the optimizer moves them."""
        if isinstance(has, torch.Tensor) and has.shape == value.shape:
            return has
        return torch.empty(value.shape, dtype=value.dtype, device=parameter.device if value.dim() else None)


@dataclass(frozen=True, slots=True)
class OptimizerPlan:
    """How one optimizer is loaded.

    Attributes:
        optimizer: It.
        key: Its key in the state.
        names: Identity of each parameter -> name of its tensor.
        takes: Which of these names are loaded.
        strict: Whether parameters on one side only are errors.
        plan: Where it is noted.
    """

    optimizer: torch.optim.Optimizer
    key: str
    names: Mapping[int, str]
    takes: Takes
    strict: bool
    plan: Plan

    def make(self, value: Mapping[str, Any]) -> None:
        """Note what is to be read, and what to do then."""
        try:
            names = names_by_key(self.names, self.optimizer, None, _IN_MODEL)
            saved = _Saved.of(value)
        except ValueError as error:
            self.plan.problems.append(f"{self.key}: {error}")
            return
        mine, theirs = _class_name(self.optimizer), value.get("class", "")
        if theirs and theirs != mine:
            what = "%r was saved by %.100s and is loaded into %s, with the states and settings of the former"
            _LOG.warning(what, self.key, theirs, mine)
        numbers = {name: number for number, name in names.items() if self.takes(name)}
        wanted = {name for name in saved.numbers if self.takes(name)}
        self.plan.miss([f"{self.key}/{name}" for name in numbers if name not in wanted], self.strict)
        self.plan.leave([f"{self.key}/{name}" for name in sorted(wanted - numbers.keys())], self.strict)
        present = {name: number for name, number in numbers.items() if name in wanted}
        templates = self._templates(saved, present)
        groups = self._groups(saved, names, present)
        rest = {name: self.plan.decode_dict(saved.values[name], self.key) for name in present if name in saved.values}
        others = {name: self.plan.decode_dict(saved.others.get(name, {}), self.key) for name in ("state", "more")}
        if self.plan.problems:
            return
        made = read_by_names(names, self.optimizer, _Blanks(), {"state": templates})
        for name, values in rest.items():
            made["state"].setdefault(present[name], {}).update(values)
        for name, kinds in ((name, saved.state_of(name)) for name in present):
            for kind in kinds or ():
                self.plan.read(f"{self.key}/{name}/{kind}", made["state"][present[name]][kind])
        made["param_groups"] = groups
        made["state"] = {**others["state"], **made["state"]}
        made = {**others["more"], **made}
        self.plan.finishers.append(lambda: self._finish(made, set(present.values())))

    def _templates(self, saved: _Saved, present: Mapping[str, int]) -> dict[str, dict[str, torch.Tensor]]:
        """What was saved of each parameter, as tensors on meta; what does not fit is noted."""
        parameters = dict(enumerate(self._parameters()))
        made: dict[str, dict[str, torch.Tensor]] = {}
        for name, number in present.items():
            parameter = parameters[number]
            whole = self.plan.entry(name)
            if whole is not None and whole.shape != tuple(parameter.shape):
                self.plan.problems.append(
                    f"{name} has shape {whole.shape} in the checkpoint, but {tuple(parameter.shape)} in {self.key}"
                )
                continue
            kinds = saved.state_of(name)
            if kinds is None:
                continue
            found = made[name] = {}
            for kind in kinds:
                entry = self.plan.entry(f"{self.key}/{name}/{kind}")
                has = self.optimizer.state.get(parameter, {}).get(kind)
                if entry is None:
                    self.plan.problems.append(f"{self.key}/{name}/{kind} is missing in the checkpoint")
                elif isinstance(has, torch.Tensor) and tuple(has.shape) != entry.shape:
                    self.plan.problems.append(
                        f"{self.key}/{name}/{kind} has shape {entry.shape} in the checkpoint, expected "
                        f"{tuple(has.shape)}"
                    )
                else:
                    found[kind] = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device="meta")
        return made

    def _groups(self, saved: _Saved, names: Mapping[int, str], present: Mapping[str, int]) -> list[dict[str, Any]]:
        """Groups as the optimizer has them, with the settings that were saved for their parameters."""
        made = []
        for number, keys in enumerate(numbered_groups(self.optimizer)):
            own = self.optimizer.param_groups[number]
            settings = {name: value for name, value in own.items() if name not in _NOT_SETTINGS}
            loaded = [names[key] for key in keys if names[key] in present]
            if loaded or not keys:
                try:
                    source = group_of(loaded, saved.groups, number)
                    settings.update(self.plan.decode_dict(source.get("settings"), self.key))
                except ValueError as error:
                    self.plan.problems.append(f"{self.key}: {error}")
            made.append({**settings, "params": keys})
        return made

    def _parameters(self) -> Iterator[torch.Tensor]:
        return (parameter for group in self.optimizer.param_groups for parameter in group["params"])

    def _finish(self, made: dict[str, Any], loaded: set[int]) -> None:
        parameters = list(self._parameters())
        for number, parameter in enumerate(parameters):
            if number not in loaded and parameter in self.optimizer.state:
                made["state"][number] = self.optimizer.state[parameter]
        if type(self.optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
            self.optimizer.load_state_dict(made)
            return
        if not self.optimizer._optimizer_load_state_dict_pre_hooks:
            # torch looks every number up in these, for each value: in lists of 100 000 that takes minutes.
            for group in made["param_groups"]:
                group["params"] = range(group["params"][0], group["params"][-1] + 1) if group["params"] else ()
        self.optimizer.load_state_dict(made)
        # torch gives state the dtype of its parameter, which is not what was saved where the two differ.
        for number, parameter in enumerate(parameters):
            for kind, value in made["state"].get(number, {}).items():
                if kind != "step":
                    self.optimizer.state[parameter][kind] = _on(parameter.device, value)


def _on(device: torch.device, value: Any) -> Any:
    return map_tensors(lambda tensor: tensor if tensor.device == device else tensor.to(device), value)
