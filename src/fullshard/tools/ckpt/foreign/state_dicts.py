"""The weights in a file of `torch.save`: a state dict, or one of those in what a training program saved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fullshard.errors import CheckpointError
from fullshard.tools.ckpt.foreign.stored import Folder, StoredTensor
from fullshard.tools.ckpt.foreign.torch_files import torch_file
from fullshard.tools.ckpt.sources import Source

_USUAL = ("model", "state_dict", "model_state_dict", "module", "params", "weights")


def read_torch(path: Path, member: str | None = None) -> Source:
    """The weights in a file of `torch.save`.

    Args:
        path: The file.
        member: Keys that lead to the state dict, joined by dots; None: the whole value if it is one, or else its
            member of one of the usual names.

    Raises:
        CheckpointError: It holds no state dict there.
        UnsafePickleError: It holds more than weights and plain values.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path} is no file")
    path = path.resolve()  # the user's own link; nothing in the file leads anywhere
    folder = Folder(path.parent)
    found = _choose(torch_file(folder, path.name), member, path)
    source = Source({}, on_close=folder.close)
    names: dict[StoredTensor, str] = {}
    left: list[str] = []
    for name, tensor in found.items():
        if not isinstance(tensor, StoredTensor):
            left.append(str(name))
            continue
        first = names.setdefault(tensor, str(name))  # names of one tensor lie in the same place
        if first == name:
            source.tensors[str(name)] = tensor
        else:
            source.aliases[str(name)] = first
    if left:
        source.notes.append(f"{', '.join(left[:5])} ({len(left)} entries) left out: they are no tensors")
    return source


def _choose(value: Any, member: str | None, path: Path) -> Mapping[Any, Any]:
    if member is not None:
        for key in member.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if not _is_state_dict(value):
            raise CheckpointError(f"{path} has no state dict under {member!r}")
        return dict(value)
    if _is_state_dict(value):
        return dict(value)
    inside = [key for key, item in value.items() if _is_state_dict(item)] if isinstance(value, dict) else []
    usual = [key for key in _USUAL if key in inside]
    if usual or len(inside) == 1:
        return dict(value[(usual or inside)[0]])
    hint = f" It has some under {', '.join(map(str, inside))}: say which with --member." if inside else ""
    raise CheckpointError(f"{path} is no state dict: expected a dictionary of tensors.{hint}")


def _is_state_dict(value: Any) -> bool:
    return isinstance(value, dict) and any(isinstance(item, StoredTensor) for item in value.values())
