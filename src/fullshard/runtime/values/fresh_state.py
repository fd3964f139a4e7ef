"""Optimizer state that is made before any step: torch's state-dict tools make it by a step that must not count."""

from __future__ import annotations

import sys
from types import CodeType, FrameType

import torch

from fullshard.runtime.registry import REGISTRY

_TOOLS = "torch.distributed.checkpoint.state_dict"

# Entries of the states of torch's optimizers -> what they are before the first step. The step of torch's tools is
# taken at gradients and learning rate zero; it raises `step`, and weight decay that is added to gradients fills the
# others. What depends on the learning rate (Rprop, ASGD) cannot be told here and stays as torch makes it.
_BEFORE_FIRST_STEP = {
    "step": 0.0,
    "exp_avg": 0.0,
    "exp_avg_sq": 0.0,
    "max_exp_avg_sq": 0.0,
    "exp_inf": 0.0,
    "momentum_buffer": 0.0,
    "square_avg": 0.0,
    "grad_avg": 0.0,
    "acc_delta": 0.0,
    "mu_product": 1.0,
}

# Between the optimizer's `step` and the code that called it are only the hooks' and schedulers' wrappers.
_WRAPPERS = 8


def undo_allocating_step(optimizer: torch.optim.Optimizer) -> None:
    """After a step: if it was taken only to allocate state, let the state be that of an optimizer that never stepped.

    `get_optimizer_state_dict` and `set_optimizer_state_dict` take such a step where there is no state yet. Counted, it
    would make the first real step of Adam too small.
    """
    if not _is_allocating() or all(REGISTRY.owner(parameter) is None for parameter in optimizer.state):
        return
    with torch.no_grad():
        # Parameters beside the sharded ones (ignored) too, so that all of an optimizer's first steps are the first.
        for state in optimizer.state.values():
            for name, value in _BEFORE_FIRST_STEP.items():
                entry = state.get(name)
                if isinstance(entry, torch.Tensor):
                    entry.fill_(value)
                elif entry is not None:
                    state[name] = type(entry)(value)


def _is_allocating() -> bool:
    """Whether torch's tools, and not the user, called `step`. Who called is exact, and the same on every rank."""
    # Who has not imported the tools cannot have called them, and need not wait for that import.
    tools = sys.modules.get(_TOOLS)
    code: CodeType | None = getattr(getattr(tools, "_init_optim_state", None), "__code__", None)
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_WRAPPERS):
        if frame is None or code is None:
            return False
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False
