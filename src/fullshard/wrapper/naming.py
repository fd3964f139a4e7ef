"""A module that stands for the one inside of it: names of parameters, buffers and modules do not show the wrapper."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from fullshard.runtime.hooks import hide_when_loading

# Attribute that holds the wrapped module.
WRAPPED = "_fsdp_wrapped_module"
_PREFIX = WRAPPED + "."


class Transparent(nn.Module):
    """Attributes, items, names and state dicts are those of the module inside."""

    def stand_for(self, module: nn.Module) -> None:
        """Put `module` inside."""
        self._fsdp_wrapped_module = module
        hide_when_loading(self, _PREFIX)

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        wrapped: nn.Module = self._modules[WRAPPED]  # type: ignore[assignment]
        # What checkpoint_wrapper put around it after wrapping is no part of the model either.
        inside = wrapped._modules.get("_checkpoint_wrapped_module")
        return wrapped if inside is None else inside

    def __getattr__(self, name: str) -> Any:
        """What the wrapper does not have is the wrapped module's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            wrapped = self.__dict__.get("_modules", {}).get(WRAPPED)
            if wrapped is None:
                raise
            return getattr(wrapped, name)

    def __getitem__(self, key: Any) -> Any:
        """An item of the wrapped module, as of an `nn.Sequential`."""
        wrapped: Any = self._fsdp_wrapped_module
        return wrapped[key]

    def _fqn_modifiers(self) -> dict[str, str]:
        """What `torch.distributed.checkpoint.state_dict` asks for: children (values) that are no part of names."""
        inside: Any = getattr(self.module, "_fqn_modifiers", dict)
        return {**inside(), "": WRAPPED}

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As of any module, and the wrapped module has the name of its wrapper: so names are those without wrappers."""
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        for name, child in self._modules.items():
            if child is not None:
                label = prefix if name == WRAPPED else f"{prefix}.{name}".lstrip(".")
                yield from child.named_modules(memo, label, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of the wrapped module."""
        made = super().state_dict(*args, **kwargs)
        _strip(made, args[1] if len(args) > 1 else kwargs.get("prefix", ""))
        return made

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Called by `load_state_dict`, which looks for what is in the wrapped module under the wrapper's own name."""
        own = {*self._modules, *self._parameters, *self._buffers}
        for key in [key for key in state_dict if key.startswith(prefix)]:
            rest = key.removeprefix(prefix)
            if rest.split(".", 1)[0] not in own:
                state_dict[prefix + _PREFIX + rest] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """As of the wrapped module; keys of a state dict that was saved with the wrapper in its names fit, too."""
        metadata = getattr(state_dict, "_metadata", None)
        if metadata is not None:
            state_dict = state_dict.copy()
            versions = {f"{WRAPPED}.{name}".rstrip("."): version for name, version in metadata.items()}
            state_dict._metadata = {**metadata, **versions}
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except RuntimeError as error:
            if type(error) is not RuntimeError:
                raise  # an error of ours, which has the names right
            raise RuntimeError(str(error).replace(_PREFIX, "")) from error


def _strip(made: dict[str, Any], prefix: str) -> None:
    """Take the wrapper out of the names that a state dict has got below `prefix`."""
    hidden = prefix + _PREFIX
    for key in [key for key in made if key.startswith(hidden)]:
        made[prefix + key.removeprefix(hidden)] = made.pop(key)
    metadata: dict[str, Any] = getattr(made, "_metadata", {})
    for key in [key for key in metadata if f"{key}.".startswith(hidden)]:
        metadata[(prefix + f"{key}.".removeprefix(hidden)).rstrip(".")] = metadata.pop(key)
