"""Names without wrappers: activation checkpointing, `torch.compile` and the class FSDP put a level into every name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import nn

_COMPILED = "_orig_mod"
_TORCHS_TOOLS = "torch.distributed.checkpoint.state_dict"
# Levels that their wrappers themselves keep out of the keys of state dicts.
_HIDDEN = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def plain_name(name: str) -> str:
    """`name` as the plain model has it."""
    return ".".join(level for level in name.split(".") if level not in (_COMPILED, *_HIDDEN))


def hide_compiled(state: dict[str, Any], prefix: str) -> None:
    """Take the level of `torch.compile` out of the keys that a module has just written below `prefix`."""
    if any(f"{_COMPILED}." in key for key in state if key.startswith(prefix)) and not _asked_by_torchs_tools():
        _rename(state, prefix, lambda rest: ".".join(level for level in rest.split(".") if level != _COMPILED))


def _asked_by_torchs_tools() -> bool:
    """Whether `get_model_state_dict` and its like ask. They walk through modules by the keys, so they need every level.

    The names that they give to the user have none of them.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != _TORCHS_TOOLS:
        frame = frame.f_back
    return frame is not None


def show_compiled(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """The reverse, before the keys of `state` below `prefix` are loaded into `module` and what is in it.

    The module itself has put its level into the keys already; wrappers inside of it have not yet.
    """
    _show(module, state, prefix, hidden=())


def _show(module: nn.Module, state: dict[str, Any], prefix: str, hidden: tuple[str, ...] = _HIDDEN) -> None:
    if _COMPILED in module._modules:
        _rename(state, prefix, lambda rest: rest if rest.startswith(f"{_COMPILED}.") else f"{_COMPILED}.{rest}")
    for name, child in module._modules.items():
        if child is not None:
            _show(child, state, prefix if name in hidden else f"{prefix}{name}.")


def _rename(state: dict[str, Any], prefix: str, change: Callable[[str], str]) -> None:
    """Change what follows `prefix` in keys; the order of the keys below it stays, and they come last."""
    for key in [key for key in state if key.startswith(prefix)]:
        state[prefix + change(key.removeprefix(prefix))] = state.pop(key)
