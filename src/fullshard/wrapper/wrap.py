"""Policies that say which submodules `FullyShardedDataParallel` wraps, and wrapping by hand inside `enable_wrap`.

A policy is a callable `(module, recurse, nonwrapped_numel) -> bool`, asked twice about a module: with `recurse=True`
whether to look at its children, and with `recurse=False` whether to wrap it, given how many elements in it no wrapped
child has taken; or it is an object that chooses modules all at once (`ModuleWrapPolicy`, `CustomPolicy`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]

# Called with (module, recurse, nonwrapped_numel).
WrapPolicy = Callable[..., bool]
Overrides = dict[str, Any]


class _Policy(ABC):
    """A policy that chooses all modules at once."""

    @abstractmethod
    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Overrides
    ) -> dict[nn.Module, Overrides]:
        """The modules to wrap, each with the arguments of its wrapper.

        Args:
            root_module: Walked with all its submodules.
            ignored_modules: Not to be chosen.
            root_kwargs: Arguments of the root's wrapper.
        """


class ModuleWrapPolicy(_Policy):
    """Wraps every module of the given classes.

    Args:
        module_classes: Classes of blocks, such as the transformer layer of the model.
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._module_classes = tuple(dict.fromkeys(module_classes))

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Overrides
    ) -> dict[nn.Module, Overrides]:
        return {
            module: dict(root_kwargs)
            for module in root_module.modules()
            if module not in ignored_modules and isinstance(module, self._module_classes)
        }

    def __call__(self, module: nn.Module, recurse: bool, *_: Any, **__: Any) -> bool:
        """The same as a callable policy."""
        return recurse or isinstance(module, self._module_classes)

    def __repr__(self) -> str:
        return f"ModuleWrapPolicy({', '.join(cls.__name__ for cls in self._module_classes)})"


class CustomPolicy(_Policy):
    """Asks a function about every module.

    Args:
        lambda_fn: Module -> True (wrap), False (do not), or a dict of constructor arguments that replace the root's.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | Overrides]) -> None:
        self._lambda_fn = lambda_fn

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Overrides
    ) -> dict[nn.Module, Overrides]:
        chosen: dict[nn.Module, Overrides] = {}
        for module in root_module.modules():
            if module in ignored_modules:
                continue
            answer = self._lambda_fn(module)
            if not isinstance(answer, bool | dict):
                raise ValueError(
                    f"the function of CustomPolicy must return a bool or a dict of arguments, got {answer!r} for a "
                    f"{type(module).__name__}"
                )
            if answer:
                chosen[module] = {**root_kwargs, **(answer if isinstance(answer, dict) else {})}
        return chosen


def always_wrap_policy(*_: Any, **__: Any) -> bool:
    """Wrap every module."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,  # noqa: ARG001 - of every callable policy
    lambda_fn: Callable[[nn.Module], bool],
) -> bool:
    """Wrap the modules for which `lambda_fn` is true; give it with `functools.partial`."""
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,  # noqa: ARG001 - of every callable policy
    transformer_layer_cls: Collection[type[nn.Module]],
) -> bool:
    """Wrap the modules of the given classes; give them with `functools.partial`."""
    return recurse or isinstance(module, tuple(transformer_layer_cls))


# Two policies that torch calls private, and that public training code imports all the same.


def _module_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,  # noqa: ARG001 - of every callable policy
    module_classes: Collection[type[nn.Module]],
) -> bool:
    """`ModuleWrapPolicy` as a function; give the classes with `functools.partial`."""
    return recurse or isinstance(module, tuple(module_classes))


def _or_policy(module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[WrapPolicy]) -> bool:
    """Wrap what any of `policies` wraps; give them, as a list, with `functools.partial`."""
    return any(policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel) for policy in policies)


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: Collection[type[nn.Module]] | None = None,
    exclude_wrap_modules: Collection[type[nn.Module]] | None = None,
) -> bool:
    """Wrap modules once enough of their elements are in no wrapped child.

    Args:
        module: The module in question.
        recurse: Whether to look at its children, in place of whether to wrap it.
        nonwrapped_numel: Elements in it that no wrapped child has taken.
        min_num_params: From this number of elements on it is wrapped.
        force_leaf_modules: Classes whose children are never looked at; default the attribute `FORCE_LEAF_MODULES`.
        exclude_wrap_modules: Classes that are never wrapped; default the attribute `EXCLUDE_WRAP_MODULES`.
    """
    policy: Any = size_based_auto_wrap_policy
    leaves = policy.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
    excluded = policy.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
    return nonwrapped_numel >= min_num_params and not isinstance(module, tuple(leaves if recurse else excluded))


size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]
size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]

# Wrapper class and arguments of the `enable_wrap` around the current code, or None.
_ENABLED: ContextVar[tuple[Callable[..., nn.Module], Overrides] | None] = ContextVar("enable_wrap", default=None)


@contextmanager
def enable_wrap(*, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs: Any) -> Iterator[None]:
    """Inside, `wrap(module)` wraps by `wrapper_cls(module, **wrapper_kwargs)`; elsewhere it does nothing.

    Raises:
        NotImplementedError: Inside another `enable_wrap`.
    """
    if _ENABLED.get() is not None:
        raise NotImplementedError("enable_wrap inside enable_wrap: give all arguments to one of them")
    token = _ENABLED.set((wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _ENABLED.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap `module` if inside `enable_wrap`, with its arguments and `wrap_overrides` over them."""
    enabled = _ENABLED.get()
    if enabled is None:
        return module
    wrapper_cls, wrapper_kwargs = enabled
    return wrapper_cls(module, **{**wrapper_kwargs, **wrap_overrides})
