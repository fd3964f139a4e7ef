"""Names without wrappers: activation checkpointing, `torch.compile` and the class FSDP put a level into every name."""

from __future__ import annotations

_LEVELS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def plain_name(name: str) -> str:
    """`name` as the plain model has it."""
    return ".".join(level for level in name.split(".") if level not in _LEVELS)
