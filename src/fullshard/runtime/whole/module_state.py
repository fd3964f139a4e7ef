"""State of a module with sharded parameters, in the forms of `forms.py`, under the names of the plain model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.runtime.failures.postmortem import explained
from fullshard.runtime.names import plain_name
from fullshard.runtime.whole.forms import Form, keeps_values
from fullshard.runtime.whole.tensors import Gatherer


def write_module(module: nn.Module, state: dict[str, Any], prefix: str, form: Form) -> None:
    """Bring what `module` has put into a state dict below `prefix` into `form`, one tensor after the other.

    Memory: the result where this rank keeps it, and one whole tensor at a time beside. Tied parameters stay one tensor.
    On ranks that keep nothing, the keys are removed.
    """
    gatherer, keep = Gatherer("full state dict"), keeps_values(module, form)
    names = {plain_name(name): id(p) for name, p in module.named_parameters(remove_duplicate=False)}
    written: dict[int, torch.Tensor | None] = {}
    for key in [key for key in state if key.startswith(prefix)]:
        value = state[key]
        if isinstance(value, torch.Tensor):
            # By the parameter, not by its memory: an empty part has none, and all ranks must gather the same.
            identity = names.get(plain_name(key.removeprefix(prefix)), id(value))
            if identity not in written:
                # No name for what is not kept: the next tensor is gathered after this one has gone.
                with explained(module.parameters()):
                    written[identity] = _if(keep, form.write(value, key, gatherer))
            state[key] = written[identity]
        if not keep:
            del state[key]


def _if(keep: bool, tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor if keep else None


def read_module(module: nn.Module, state: dict[str, Any], prefix: str, form: Form) -> None:
    """Replace values below `prefix` by `DTensor`s like the parameters of `module` that they are for.

    Nothing is copied where the rows are in one piece. Values that do not fit stay as they are, for
    `nn.Module.load_state_dict` to report.
    """
    places = module.named_parameters(remove_duplicate=False)
    parameters: dict[str, torch.Tensor] = {plain_name(name): parameter for name, parameter in places}
    for key, value in state.items():
        if key.startswith(prefix) and isinstance(value, torch.Tensor):
            parameter = parameters.get(plain_name(key.removeprefix(prefix)))
            if isinstance(parameter, DTensor):
                state[key] = form.read(value.detach(), parameter)
