"""Makes a module a sharded one: its class, and what drives its unit."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torch import nn

from fullshard.runtime.build import find_engine
from fullshard.runtime.graphs import keep_out_of_graphs
from fullshard.runtime.hooks import OPTIMIZER_HOOKS, EndOfBackward, UnitHooks
from fullshard.runtime.module import HANDLE, FSDPModule
from fullshard.runtime.unit import Unit
from fullshard.runtime.values.init import init_methods


@dataclass(frozen=True, slots=True)
class Handle:
    """What a sharded module carries: its unit, its hooks, and where it was sharded."""

    unit: Unit
    hooks: UnitHooks
    site: str


def attach(modules: list[nn.Module], unit: Unit, site: str) -> None:
    """Let the forward and backward of `modules` drive `unit`. What they call `site` is where the user sharded them."""
    hooks = UnitHooks(unit, modules, functools.partial(find_engine, attribute=HANDLE))
    OPTIMIZER_HOOKS.ensure()
    keep_out_of_graphs(FSDPModule, UnitHooks, EndOfBackward)
    handle = Handle(unit, hooks, site)
    for each in modules:
        each.__dict__[HANDLE] = handle


@functools.cache
def sharded_class(original: Any) -> type[nn.Module]:
    """The subclass of `original` and `FSDPModule` that sharded modules get."""
    body = {"__module__": original.__module__, **init_methods(original)}
    return type(f"FSDP{original.__name__}", (FSDPModule, original), body)
