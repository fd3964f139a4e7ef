"""State dicts of optimizers of wrapped models, under the names that torch has for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard.runtime.whole.forms import Form, Kind
from fullshard.runtime.whole.optim_state import read_optimizer, rekey, scatter_optimizer, write_optimizer
from fullshard.wrapper.settings import FullOptimStateDictConfig, OptimStateKeyType
from fullshard.wrapper.state_dicts import StateDicts, form_of

_State = dict[str, Any]
_OptimizerInput = list[dict[str, Any]] | Iterable[nn.Parameter]


class OptimizerStates(StateDicts):
    """The part of `FullyShardedDataParallel` that writes and reads state dicts of optimizers.

    Every dict has "state", by parameter name, and "param_groups", whose "params" are names; see
    `runtime/whole/optim_state.py`.
    """

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: _State | None = None,
        group: dist.ProcessGroup | None = None,  # noqa: ARG004 - of torch's signature
    ) -> _State:
        """State of `optim` by parameter names, in the type that `set_state_dict_type` set for `model`; default full.

        Args:
            model: A model with wrappers in it.
            optim: An optimizer of its parameters.
            optim_state_dict: What `optim.state_dict()` returned, if it is not to be called here.
            group: Not needed: each tensor knows its ranks.

        Returns:
            The state; {} on other ranks than the first if the configuration says `rank0_only`.
        """
        return write_optimizer(model, optim, _form(model), optim_state_dict)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: _State,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> _State:
        """The reverse of `optim_state_dict` under the same type: what `optim.load_state_dict` takes.

        Args:
            model: The model, on any number of ranks.
            optim: An optimizer of its parameters.
            optim_state_dict: The state by names. With a full configuration that says `rank0_only`, only the first
                rank's is looked at, and the ranks communicate.
            is_named_optimizer: Keys of the result are names, for an optimizer that numbers nothing.
            load_directly: Load it into `optim`, too.
            group: Ranks that get the first rank's; default all.
        """
        config = StateDicts.get_state_dict_type(model).optim_state_dict_config
        if isinstance(config, FullOptimStateDictConfig) and config.rank0_only:
            made = scatter_optimizer(model, optim, optim_state_dict, group)
        else:
            made = read_optimizer(model, optim, _form(model), optim_state_dict)
        if is_named_optimizer:
            made = rekey(made, True, model, optim)
        if load_directly:
            optim.load_state_dict(made)
        return made

    # Older names, each with its form in the name

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: _OptimizerInput | None = None,  # noqa: ARG004 - of torch's signature; the optimizer knows
        rank0_only: bool = True,
        group: dist.ProcessGroup | None = None,  # noqa: ARG004 - as above
    ) -> _State:
        """Full state by names, on the CPU; on the first rank only unless `rank0_only` is False."""
        return write_optimizer(model, optim, Form(Kind.FULL, offload_to_cpu=True, rank0_only=rank0_only))

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        group: dist.ProcessGroup | None = None,  # noqa: ARG004 - of torch's signature
    ) -> _State:
        """State by names, of `DTensor`s."""
        return write_optimizer(model, optim, Form(Kind.SHARDED))

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: _State,
        model: nn.Module,
        optim_input: _OptimizerInput | None = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> _State:
        """What `optim.load_state_dict` takes, of full state that every rank has."""
        return read_optimizer(model, _optimizer(model, optim_input, optim), Form(), full_optim_state_dict)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: _State | None,
        model: nn.Module,
        optim_input: _OptimizerInput | None = None,
        optim: torch.optim.Optimizer | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> _State:
        """What `optim.load_state_dict` takes, of full state that only the first rank has. All ranks must call it."""
        return scatter_optimizer(model, _optimizer(model, optim_input, optim), full_optim_state_dict, group)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: _State, model: nn.Module, optim: torch.optim.Optimizer
    ) -> _State:
        """What `optim.load_state_dict` takes, of what `sharded_optim_state_dict` returned."""
        return read_optimizer(model, optim, Form(Kind.SHARDED), sharded_optim_state_dict)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: _State,
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: _OptimizerInput | None = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> _State:
        """The same state with names for numbers or numbers for names; `model` may be sharded or not.

        So full state of a sharded model fits the plain model's optimizer, and the reverse.
        """
        name = getattr(optim_state_key_type, "name", None)
        if name not in OptimStateKeyType.__members__:
            raise TypeError(f"optim_state_key_type must be an OptimStateKeyType, got {optim_state_key_type!r}")
        to_names = name == OptimStateKeyType.PARAM_NAME.name
        return rekey(optim_state_dict, to_names, model, _optimizer(model, optim_input, optim))


def _form(model: nn.Module) -> Form:
    settings = StateDicts.get_state_dict_type(model)
    return form_of(settings.state_dict_type, settings.optim_state_dict_config)


def _optimizer(
    model: nn.Module, given: _OptimizerInput | None, optim: torch.optim.Optimizer | None
) -> torch.optim.Optimizer:
    """The optimizer, or one with the parameter groups that the user would give it: only their order matters."""
    if optim is not None:
        if given is not None:
            raise ValueError("optim_input and optim cannot be given together; give optim")
        return optim
    parameters: list[Any] = list(model.parameters() if given is None else given)
    return torch.optim.SGD(parameters, lr=0.0)
