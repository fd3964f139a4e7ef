"""The menagerie itself is sound: unsharded, each model is deterministic and trains what it says it trains."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models import CASES, Case, make_model, run_case

STEPS = 2
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


def _gradients(model: nn.Module, case: Case, step: int, rank: int = 0) -> dict[str, torch.Tensor | None]:
    model.zero_grad()
    loss = run_case(case, model, rank, step)
    assert loss.shape == ()
    assert torch.isfinite(loss)
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@every_case
@every_dtype
def test_trains_unsharded_in_either_precision(case: Case, dtype: torch.dtype) -> None:
    model = make_model(case, dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    missing = set()
    for step in range(STEPS):
        for name, gradient in _gradients(model, case, step).items():
            if gradient is None:
                missing.add(name)
                continue
            assert gradient.dtype == dtype
            assert gradient.abs().sum() > 0, f"{name} has a gradient of zeros: it would hide any error"
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert missing & trainable == {name for name in trainable if name.startswith(case.gets_no_gradient or ("-",))}


@every_case
def test_same_seed_gives_the_same_model_and_gradients(case: Case) -> None:
    first, second = make_model(case), make_model(case)
    for (name, one), two in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(one, two), name
    gradients = _gradients(first, case, 0), _gradients(second, case, 0)
    for name, one in gradients[0].items():
        two = gradients[1][name]
        assert one is two is None or (one is not None and two is not None and torch.equal(one, two)), name


@every_case
def test_ranks_and_steps_see_different_data(case: Case) -> None:
    model = make_model(case)
    losses = {run_case(case, model, rank, step).item() for rank in range(2) for step in range(STEPS)}
    assert len(losses) == 4


@every_case
def test_units_are_inner_before_outer_and_without_the_root(case: Case) -> None:
    model = make_model(case)
    seen: set[nn.Module] = set()
    for unit in case.unit_modules(model):
        for module in unit if isinstance(unit, list) else [unit]:
            assert module is not model
            assert module in set(model.modules())
            assert not seen & {parent for parent in model.modules() if module in set(parent.modules())}
            seen.add(module)


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
