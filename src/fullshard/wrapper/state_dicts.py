"""State dicts of wrapped models: their type, and values in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fullshard.runtime.whole.forms import Form, Kind
from fullshard.runtime.whole.module_state import read_module, write_module
from fullshard.wrapper.arguments import alike
from fullshard.wrapper.naming import Transparent
from fullshard.wrapper.settings import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
}
_KINDS = {
    StateDictType.FULL_STATE_DICT: Kind.FULL,
    StateDictType.SHARDED_STATE_DICT: Kind.SHARDED,
    StateDictType.LOCAL_STATE_DICT: Kind.SHARDED,  # rows without a mark would pass for whole tensors in a checkpoint
}


def form_of(kind: StateDictType, config: StateDictConfig | OptimStateDictConfig) -> Form:
    """How values are written under a type and its configuration."""
    return Form(_KINDS[kind], config.offload_to_cpu, getattr(config, "rank0_only", False))


class StateDicts(Transparent):
    """The part of `FullyShardedDataParallel` that writes and reads state dicts of the model."""

    _state_dict_settings: StateDictSettings

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """State under the names of the plain model, in the type that `set_state_dict_type` set; default full.

        The default gathers: all ranks must call it.
        """
        made = super().state_dict(*args, **kwargs)
        settings = settings_of(self)
        prefix = args[1] if len(args) > 1 else kwargs.get("prefix", "")
        write_module(self, made, prefix, form_of(settings.state_dict_type, settings.state_dict_config))
        return made

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        settings = settings_of(self)
        read_module(self, state_dict, prefix, form_of(settings.state_dict_type, settings.state_dict_config))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Set the type of state dicts of every wrapper in `module`.

        Args:
            module: Any module; it need not be a wrapper itself.
            state_dict_type: The type.
            state_dict_config: Configuration for the model's; it must be the one that belongs to the type.
            optim_state_dict_config: The same for the optimizer's.

        Returns:
            What was set before.

        Raises:
            TypeError: A configuration belongs to another type.
            ValueError: Wrappers in `module` had different settings.
        """
        before = StateDicts.get_state_dict_type(module)
        settings = _settings(state_dict_type, state_dict_config, optim_state_dict_config)
        for each in _wrappers(module):
            each._state_dict_settings = settings
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """The type of state dicts of the wrappers in `module`, and the configurations.

        Raises:
            ValueError: They do not have the same.
        """
        found = [settings_of(each) for each in _wrappers(module)]
        if any(settings != found[0] for settings in found):
            raise ValueError(
                f"wrappers in this {type(module).__name__} have different state dict types: "
                f"{sorted({settings.state_dict_type.name for settings in found})}; set one on the outermost module"
            )
        return found[0] if found else StateDictSettings()

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """As `set_state_dict_type`, for the block; each wrapper then has its own settings back."""
        settings = _settings(state_dict_type, state_dict_config, optim_state_dict_config)
        before = [(each, settings_of(each)) for each in _wrappers(module)]
        for each, _ in before:
            each._state_dict_settings = settings
        try:
            yield
        finally:
            for each, old in before:
                each._state_dict_settings = old


def settings_of(wrapper: StateDicts) -> StateDictSettings:
    """What was set for one wrapper; the default until then."""
    settings: StateDictSettings | None = wrapper.__dict__.get("_state_dict_settings")
    return StateDictSettings() if settings is None else settings


def _wrappers(module: nn.Module) -> list[StateDicts]:
    return [each for each in module.modules() if isinstance(each, StateDicts)]


def _settings(
    kind: StateDictType, config: StateDictConfig | None, optim_config: OptimStateDictConfig | None
) -> StateDictSettings:
    name = str(getattr(kind, "name", None))
    if name not in StateDictType.__members__:
        raise TypeError(f"state_dict_type must be a StateDictType, got {kind!r}")
    kind = StateDictType[name]
    of_model, of_optimizer = _CONFIGS[kind]
    return StateDictSettings(
        kind,
        alike("state_dict_config", of_model, config) or of_model(),
        alike("optim_state_dict_config", of_optimizer, optim_config) or of_optimizer(),
    )
