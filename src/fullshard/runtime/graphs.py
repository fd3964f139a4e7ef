"""What records, compiles or transforms a sharded module: what of ours it may see."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._C import _get_tracing_state
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._C._functorch import peek_interpreter_stack

from fullshard.errors import MisuseError

_OUTSIDE = "a sharded module gathers and frees parameters outside of graphs; its forward is a graph of its own"

# Around a forward; what they call is the forward, which is to be compiled.
_AROUND = {"__call__", "run", "use"}


@functools.cache
def keep_out_of_graphs(*classes: type) -> None:
    """Let `torch.compile` leave alone what we do around a forward, in backward and when the user calls a method.

    A call of a sharded module breaks the graph of its caller, and its forward begins one of its own. So graphs hold
    neither communication nor guards on it. Done once, at the first `fully_shard` and not at import: it takes dynamo,
    which `fully_shard` imports anyway (DTensor does) and a program that only imports this package need not wait for.

    Args:
        classes: Those whose methods are called by users, by modules and by autograd. Methods whose names begin with an
            underscore are only called by others of them.
    """
    for owner in classes:
        for name, function in list(vars(owner).items()):
            if not isinstance(function, FunctionType):
                continue
            if name in _AROUND:
                _break_graphs_at(function)
            elif not name.startswith("_"):
                setattr(owner, name, _outside_of_graphs(function))


def _break_graphs_at(function: Any) -> None:
    """Dynamo calls `function` where it finds it, and does not look into its own code, but into what that calls."""
    function._torchdynamo_disable = True
    function._torchdynamo_disable_recursive = False
    function._torchdynamo_disable_msg = _OUTSIDE
    _skip(function)


def _outside_of_graphs(function: FunctionType) -> Callable[..., Any]:
    """`function`, which dynamo calls where it finds it, and never looks into.

    `torch.compiler.disable` switches dynamo off and on again around each call, which costs more than some of our
    methods do. Most programs have it switched off when they come here: one question tells.
    """
    disabled = torch.compiler.disable(function, reason=_OUTSIDE)

    @functools.wraps(disabled)  # with the marks that `disable` made on it
    def outside_of_graphs(*args: Any, **kwargs: Any) -> Any:
        return (function if get_eval_frame_callback() is None else disabled)(*args, **kwargs)

    _skip(outside_of_graphs)
    return outside_of_graphs


def _skip(function: Any) -> None:
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)


def refuse_transforms(module: nn.Module) -> None:
    """What records or transforms every operation would do so with those that gather parameters.

    Raises:
        MisuseError: Something does.
    """
    if _get_tracing_state() is not None:
        raise MisuseError(
            f"torch.jit.trace of a sharded {_name(module)}: the trace would hold parameters that are freed after the "
            "call. Trace a plain module with a full state dict, or use torch.compile"
        )
    if peek_interpreter_stack() is not None:
        raise MisuseError(
            f"a sharded {_name(module)} was called inside a transform of torch.func (grad, vjp, jvp, vmap, ...), which "
            "would transform the communication too. Use torch.autograd.grad (with create_graph=True for further "
            "derivatives), torch.autograd.functional or torch.autograd.forward_ad"
        )


def _name(module: nn.Module) -> str:
    return type(module).__mro__[2].__name__
