"""Parameters that lie side by side in a flat shard as one tensor, and the state of an optimizer for it.

[Note: one state, seen by parameter]
An optimizer that updates a flat tensor has one state for it. What it has an element each (moments) is a flat tensor,
and each parameter is shown its range of it as a `DTensor` on the same memory: what the user reads is what is computed
with, and a value written in place counts. What it has once a tensor (the number of steps) is shown as a tensor of its
own for each parameter, brought up to date after every step, so that a value loaded into one does not end up in all.
Before every step it is looked whether the user still has what was shown; if not, pieces are made anew from that.

Parameters whose shared values differ cannot be one tensor. They come to differ where a parameter had no gradient in
some step: optimizers leave such a one alone, its number of steps too. Then the piece is split, for good.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.errors import MisuseError
from fullshard.runtime.dtensors import local_of, sharded_like

StateByParameter = MutableMapping[Any, dict[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One sharded parameter in a flat shard.

    Attributes:
        parameter: The sharded parameter.
        name: Its name in its unit.
        local: Its local tensor, which lies in the flat shard.
        start: Where its rows begin in the flat shard, in elements.
        stop: Where they end.
    """

    parameter: nn.Parameter
    name: str
    local: torch.Tensor
    start: int
    stop: int


@dataclass(slots=True)
class _Shared:
    """A value of the state that a flat tensor has once.

    Attributes:
        shown: [number of parameters, ...]; each parameter is shown its entry.
        version: Version counter of `shown` when it was last brought up to date.
    """

    shown: torch.Tensor
    version: int


@dataclass(slots=True, eq=False)
class Piece:
    """Consecutive parts of one flat shard that are updated as one tensor.

    Attributes:
        parts: The parameters, in the order of the flat shard.
        flat: 1-D view of the flat shard; between the parts lie zeros. Its `.grad` is set during a step only.
        state: What the optimizer keeps for `flat`.
    """

    parts: Sequence[Part]
    flat: nn.Parameter
    state: dict[str, Any] = field(default_factory=dict)
    _shown: list[dict[str, Any]] = field(default_factory=list)
    _values: list[tuple[Any, ...]] = field(default_factory=list)  # those of `_shown`, to see whether one was replaced
    _sources: tuple[Any, ...] = ()  # values of `state` that `_shown` was made of
    _shared: dict[str, _Shared] = field(default_factory=dict)

    @classmethod
    def of(cls, parts: Sequence[Part], shard: torch.Tensor) -> Piece:
        """A piece without state."""
        start, stop = parts[0].start, parts[-1].stop
        return cls(parts, nn.Parameter(shard[start:stop], requires_grad=shard.is_floating_point()))

    def rows(self, flat: torch.Tensor, part: Part) -> torch.Tensor:
        """The elements of one parameter, in its local shape, of a tensor that is laid out like `flat`."""
        return flat.narrow(0, part.start - self.parts[0].start, part.stop - part.start).view(part.local.shape)

    # Gradients

    def used(self) -> list[bool]:
        """Per part whether it has a gradient."""
        return [part.parameter.grad is not None for part in self.parts]

    def take_gradient(self) -> None:
        """Set the gradient of `flat` to those of the parameters, which all have one.

        Usually they are parts of one flat gradient shard, and the range of that is it. Gradients that the user replaced
        are copied, for this step.
        """
        base: torch.Tensor | None = None
        for number, part in enumerate(self.parts):
            gradient: Any = part.parameter.grad
            local = local_of(gradient)
            base = local._base if number == 0 else base
            if base is None or local._base is not base or local.storage_offset() != part.start:
                base = None
                break
        if base is not None and base.dim() == 1 and base.numel() >= self.parts[-1].stop:
            self.flat.grad = base.narrow(0, self.parts[0].start, self.flat.numel())
            return
        made = torch.zeros_like(self.flat)
        for part in self.parts:
            self.rows(made, part).copy_(_local_part(part.parameter.grad, part))
        self.flat.grad = made

    # State

    def split(self, used: Sequence[bool]) -> list[Piece]:
        """Pieces of the longest runs of parts that are alike in `used`; their state stays where it is in memory."""
        made = []
        for _, numbers in groupby(range(len(self.parts)), key=lambda number: used[number]):
            picked = list(numbers)
            parts = [self.parts[number] for number in picked]
            first = parts[0].start - self.parts[0].start
            numel = parts[-1].stop - parts[0].start
            state = {}
            for name, value in self.state.items():
                if self._is_elementwise(value):
                    state[name] = value.narrow(0, first, numel)
                else:
                    state[name] = value.clone() if isinstance(value, torch.Tensor) else value
            flat = nn.Parameter(self.flat.detach().narrow(0, first, numel), requires_grad=self.flat.requires_grad)
            made.append(Piece(parts, flat, state))
        return made

    def is_seen_in(self, states: StateByParameter) -> bool:
        """Whether the user still has what was shown, as it was shown."""
        if not self._shown:
            return not any(states.get(part.parameter) for part in self.parts)
        for part, shown, values in zip(self.parts, self._shown, self._values, strict=True):
            found = states.get(part.parameter)
            if found is not shown or len(found) != len(values) or not all(map(is_, found.values(), values)):
                return False
        return all(shared.shown._version == shared.version for shared in self._shared.values())

    def show(self, states: StateByParameter) -> None:
        """Let `states` show the state, after a step."""
        sources = tuple(self.state.values())
        if len(sources) != len(self._sources) or not all(map(is_, sources, self._sources)):
            self._show_anew(states)
        for name, shared in self._shared.items():
            shared.shown.copy_(self.state[name])
            shared.version = shared.shown._version

    def _show_anew(self, states: StateByParameter) -> None:
        self._sources = tuple(self.state.values())
        self._shared = {
            name: _Shared(value.new_empty((len(self.parts), *value.shape)), 0)
            for name, value in self.state.items()
            if isinstance(value, torch.Tensor) and not self._is_elementwise(value)
        }
        self._shown = []
        for number, part in enumerate(self.parts):
            shown = states.setdefault(part.parameter, {})
            shown.clear()  # the same dict stays, for whoever holds it
            shown.update({name: self._shown_value(name, value, number) for name, value in self.state.items()})
            self._shown.append(shown)
        self._values = [tuple(shown.values()) for shown in self._shown]

    def _shown_value(self, name: str, value: Any, number: int) -> Any:
        if name in self._shared:
            return self._shared[name].shown[number]
        if not isinstance(value, torch.Tensor):
            return value
        part = self.parts[number]
        rows = self.rows(value, part)
        # A tensor with a storage of its own on the same memory: a DTensor with an offset cannot be pickled or copied.
        return sharded_like(part.parameter, torch.utils.dlpack.from_dlpack(rows))

    def _is_elementwise(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.shape == self.flat.shape


def pieces_of(parts: Sequence[Part], shard: torch.Tensor, states: StateByParameter) -> list[Piece]:
    """The longest pieces of consecutive parts whose states, as the user has them, can be those of one tensor.

    Args:
        parts: Neighbours in the flat shard.
        shard: The flat shard.
        states: State of each parameter, read by an optimizer's `load_state_dict`, set by hand, or shown by a piece
            that is given up. Values are copied; afterwards the pieces' own are shown.
    """
    made = []
    kinds = [_kinds(states.get(part.parameter) or {}, part) for part in parts]
    for _, numbers in groupby(range(len(parts)), key=lambda number: kinds[number]):
        piece = Piece.of([parts[number] for number in numbers], shard)
        found = [states.get(part.parameter) or {} for part in piece.parts]
        piece.state = {name: _joined(piece, name, found) for name in found[0]}
        if piece.state:
            piece.show(states)
        made.append(piece)
    return made


def _kinds(state: dict[str, Any], part: Part) -> dict[str, Any]:
    """What must be equal for two parameters to be one tensor: the kinds of values, and values that are shared."""
    return {name: _kind(name, value, part) for name, value in state.items()}


def _kind(name: str, value: Any, part: Part) -> Any:
    if isinstance(value, DTensor):
        if value.shape != part.parameter.shape:
            raise MisuseError(
                f"optimizer state {name!r} of parameter {part.name!r} has shape {tuple(value.shape)}, but a flat "
                f"optimizer keeps values of the parameter's own shape, {tuple(part.parameter.shape)}"
            )
        return (value.dtype, value.device)
    if isinstance(value, torch.Tensor):
        if value.shape == part.parameter.shape and value.dim():
            raise MisuseError(
                f"optimizer state {name!r} of the sharded parameter {part.name!r} is a whole plain tensor of shape "
                f"{tuple(value.shape)}; expected a DTensor placed like the parameter. Load it by "
                "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict with full_state_dict=True, or by "
                "FSDP.optim_state_dict_to_load"
            )
        return (value.dtype, value.device, value.tolist())
    return (type(value), value)


def _joined(piece: Piece, name: str, states: Sequence[dict[str, Any]]) -> Any:
    value = states[0][name]
    if not isinstance(value, DTensor):
        return value.clone() if isinstance(value, torch.Tensor) else value
    like = local_of(value)
    # Zeros between the parts stay zeros.
    flat = torch.zeros(piece.flat.shape, dtype=like.dtype, device=like.device)
    for part, state in zip(piece.parts, states, strict=True):
        piece.rows(flat, part).copy_(_local_part(state[name], part))
    return flat


def _local_part(value: Any, part: Part) -> torch.Tensor:
    """This rank's part of a DTensor of the parameter's shape, placed like the parameter."""
    parameter: Any = part.parameter
    if value.device_mesh != parameter.device_mesh or value.placements != parameter.placements:
        value = value.redistribute(parameter.device_mesh, parameter.placements)
    return local_of(value)
