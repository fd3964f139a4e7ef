"""Which submodules an auto-wrap policy makes units of their own, decided before any is wrapped."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from fullshard.runtime.module import FSDPModule
from fullshard.wrapper.arguments import Arguments
from fullshard.wrapper.places import LeftAlone, slots_in

# Makes a wrapper of a module, with its arguments and what it leaves alone; the flag asks for full precision.
WrapOne = Callable[[nn.Module, Arguments, LeftAlone, bool], nn.Module]


def auto_wrap(root: nn.Module, arguments: Arguments, ignored: LeftAlone, wrap_one: WrapOne) -> None:
    """Replace the submodules of `root` that its policy chooses by wrappers, inner ones first.

    Raises:
        ValueError: A module in `root` is wrapped already.
    """
    for name, module in root.named_modules():
        if isinstance(module, FSDPModule):
            raise ValueError(
                f"auto_wrap_policy needs a model without wrapped modules, but {name or '(root)'!r} is wrapped already; "
                "leave the policy out, or wrap by the policy only"
            )
    chosen = _choose(root, arguments, ignored)
    classes = () if arguments.mixed_precision is None else tuple(arguments.mixed_precision._module_classes_to_ignore)
    _warn_if_one_unit(root, chosen, ignored)
    outer = _SharedParameters(root, ignored)
    for module, its_own in chosen.items():
        full_precision = isinstance(module, classes)
        given = its_own.replace({"mixed_precision": None}) if full_precision else its_own
        wrapper = wrap_one(module, given, ignored | outer.than(module), full_precision)
        _replace(root, module, wrapper)


def _choose(root: nn.Module, arguments: Arguments, ignored: LeftAlone) -> dict[nn.Module, Arguments]:
    """The modules to wrap, inner ones first, with the arguments of each."""
    policy: Any = arguments.auto_wrap_policy
    inherited = dataclasses.replace(arguments, auto_wrap_policy=None)
    if hasattr(policy, "_run_policy"):
        kwargs = {field.name: getattr(inherited, field.name) for field in dataclasses.fields(inherited)}
        answers = policy._run_policy(root, set(ignored.modules), kwargs)
        wanted = {module: inherited.replace(answer) for module, answer in answers.items()}
    else:
        wanted = dict.fromkeys(_ask(policy, root, ignored), inherited)
    if arguments.mixed_precision is not None:
        classes = tuple(arguments.mixed_precision._module_classes_to_ignore)
        for module in root.modules():
            if isinstance(module, classes):
                wanted.setdefault(module, inherited)
    return {
        module: wanted[module]
        for module in _inner_first(root)
        if module in wanted and module is not root and module not in ignored.modules and _can_be_unit(module)
    }


def _inner_first(root: nn.Module) -> list[nn.Module]:
    """All modules, each after those inside of it."""
    ordered: dict[nn.Module, None] = {}

    def visit(module: nn.Module, around: frozenset[nn.Module]) -> None:
        for child in module.children():
            if child not in ordered and child not in around:
                visit(child, around | {child})
        ordered[module] = None

    visit(root, frozenset({root}))
    return list(ordered)


def _can_be_unit(module: nn.Module) -> bool:
    """A container without a forward (a list of modules or parameters) would never be gathered."""
    return type(module).forward is not nn.Module.forward


def _ask(policy: Any, root: nn.Module, ignored: LeftAlone) -> list[nn.Module]:
    """Run a callable policy over the tree; see the `wrap` module for what it is asked."""
    left_out = {id(parameter) for parameter in ignored.parameters()}
    wanted: list[nn.Module] = []
    seen: dict[nn.Module, int] = {}

    def visit(module: nn.Module) -> int:
        """Decide about a module and what is in it; returns how many of its elements are in wrapped modules."""
        if module in seen:
            return seen[module]
        numel = sum(parameter.numel() for parameter in module.parameters() if id(parameter) not in left_out)
        wrapped = 0
        if policy(module=module, recurse=True, nonwrapped_numel=numel):
            wrapped = sum(visit(child) for child in module.children() if child not in ignored.modules)
            if module is not root and policy(module=module, recurse=False, nonwrapped_numel=numel - wrapped):
                wanted.append(module)
                wrapped = numel
        seen[module] = wrapped
        return wrapped

    visit(root)
    return wanted


class _SharedParameters:
    """Parameters that are registered in several modules belong to the innermost unit that contains all of these."""

    def __init__(self, root: nn.Module, ignored: LeftAlone) -> None:
        left_out = {id(parameter) for parameter in ignored.parameters()}
        holders: dict[int, list[Any]] = {}
        for _, part, slot in slots_in(root):
            if id(slot.registry[slot.name]) not in left_out:
                holders.setdefault(id(slot.registry[slot.name]), []).append((part, slot))
        self._shared = [places for places in holders.values() if len({part for part, _ in places}) > 1]

    def than(self, module: nn.Module) -> LeftAlone:
        """What `module` shares with modules outside of it, and so leaves to an outer unit."""
        inside = set(module.modules())
        shared = [places for places in self._shared if not all(part in inside for part, _ in places)]
        return LeftAlone(slots=[slot for places in shared for _, slot in places])


def _replace(root: nn.Module, module: nn.Module, wrapper: nn.Module) -> None:
    """Register the wrapper in every place where the module was."""
    for parent in list(root.modules()):
        if parent is wrapper:
            continue
        for name, child in parent._modules.items():
            if child is module:
                setattr(parent, name, wrapper)


def _warn_if_one_unit(root: nn.Module, chosen: dict[nn.Module, Arguments], ignored: LeftAlone) -> None:
    """Say it if the policy divides nothing: then the whole model is gathered at once."""
    left_out = {id(parameter) for parameter in ignored.parameters()}

    def holds_any(part: nn.Module) -> bool:
        return any(id(parameter) not in left_out for parameter in part.parameters(recurse=False))

    holders = {part for part in root.modules() if holds_any(part)}
    units = [holders & set(module.modules()) for module in chosen]
    if len(holders) < 2 or any(unit and unit != holders for unit in units):
        return
    blocks = repeated_blocks(root)
    if chosen and not blocks:
        return  # there is nothing better to choose
    hint = f"Repeated blocks of this model are of the classes {', '.join(blocks)}" if blocks else "Choose other modules"
    what = "matched no module" if not chosen else "put all parameters into one module"
    warnings.warn(
        f"auto_wrap_policy {what}, so the whole model is one unit: all of its parameters are gathered at once, and "
        f"nothing overlaps. {hint}: ModuleWrapPolicy takes classes, size_based_auto_wrap_policy a min_num_params",
        stacklevel=4,
    )


def repeated_blocks(root: nn.Module) -> list[str]:
    """Names of classes of which `root` has several modules with parameters and children, outermost first."""
    counts: dict[str, int] = {}
    for module in root.modules():
        if any(True for _ in module.parameters()) and _can_be_unit(module) and any(True for _ in module.children()):
            counts[type(module).__name__] = counts.get(type(module).__name__, 0) + 1
    return [name for name, count in counts.items() if count > 1]
