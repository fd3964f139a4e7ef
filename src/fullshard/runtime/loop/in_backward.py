"""A flat optimizer that updates each unit in backward, as soon as its gradients are reduced, and frees them."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import torch

from fullshard.errors import MisuseError
from fullshard.runtime.loop.flat import FlatOptimizer, Work, make_plan
from fullshard.runtime.registry import REGISTRY
from fullshard.runtime.unit import Unit

_WHY = (
    "this optimizer was made with in_backward=True: each unit is updated, and its gradients freed, inside of backward"
)


class InBackwardOptimizer(FlatOptimizer):
    """See the module. The Scheduler decides when a unit may be updated; `step` updates what has a gradient left."""

    def attach(self) -> None:
        """Let the units that hold the parameters call `update_unit`; they do not keep the optimizer alive."""
        units = list(self._current_plan().works)
        self._refuse_shared([other for unit in units for other in unit.wishes.live_updaters()])
        for unit in units:
            if all(updater is not self for updater in unit.wishes.live_updaters()):
                unit.wishes.updaters.append(weakref.ref(self))
            unit.policy = replace(unit.policy, update_in_backward=True)
            if unit.engine is not None:
                unit.engine.set_unit_policy(unit, unit.policy)

    def _refuse_shared(self, others: list[Any]) -> None:
        mine = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        for other in others:
            if other is not self and any(id(p) in mine for group in other.param_groups for p in group["params"]):
                raise MisuseError(
                    f"a parameter is in two optimizers of which each was made with in_backward=True: the first one "
                    f"({type(other).__name__}) frees its gradient, so the second would never update it. Give every "
                    "parameter to one of them, or let go of the first one before the second is made"
                )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of any optimizer; also called while one is made, before there is anything to attach to."""
        super().add_param_group(param_group)
        if self._plan is not None:
            self.attach()

    def update_unit(self, unit: Unit) -> None:
        """The gradients of `unit` are complete: apply and free them."""
        REGISTRY.about_to_write()
        work = self._work_of(unit)
        with torch.no_grad():
            self._update([work], [[] for _ in self.param_groups])
        for run in work.runs:
            for part in run.parts:
                part.parameter.grad = None

    def _work_of(self, unit: Unit) -> Work:
        work = None if self._plan is None else self._plan.works.get(unit)
        if work is None or not work.is_current():
            self._plan = make_plan(self.param_groups, at_rest=False)
            work = self._plan.works[unit]
        return work

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # The first thing that a loss scaler asks in its `step`.
        raise MisuseError(
            f"loss scaling cannot be used here: {_WHY}, before the scaler can divide them or find an overflow. (This "
            "backward has updated with scaled gradients already: start again from the last good state.) Train in "
            "bfloat16, which needs no scaling, or make the optimizer without in_backward"
        )

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, _: bool) -> None:
        """What fused optimizers write when they are made."""


def refuse_clipping(units: list[Unit]) -> None:
    """Raise if gradients are gone before they can be clipped.

    Raises:
        MisuseError: An optimizer updates one of the units in backward.
    """
    if any(unit.wishes.updaters and unit.wishes.live_updaters() for unit in units):
        raise MisuseError(
            f"gradients cannot be clipped by their global norm: {_WHY}, before the norm is known. (This "
            "backward has updated with gradients that are not clipped.) Limit them unit by unit in "
            "set_all_reduce_hook, or make the optimizer without in_backward"
        )
