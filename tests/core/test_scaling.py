"""Scaling: sums become means, long gradients become short ones."""

from __future__ import annotations

from math import inf, isnan, log2, nan

import pytest
import torch
from hypothesis import strategies as st

from core.support import Core, holds, holds_for

FACTORS = st.one_of(st.integers(1, 4096).map(float), st.floats(2**-20, 2**20))


@holds_for(st.tuples(st.integers(1, 4096), st.booleans()))
def test_sums_become_means(core: Core, case: tuple[int, bool]) -> None:
    """The factors multiply to the number of ranks; the first is a power of two, so dividing by it rounds nothing."""
    ranks, small_range = case
    before, after = core.scaling.divide_factors(ranks, small_range)
    assert before * after == ranks
    assert log2(before).is_integer()
    if not small_range:
        assert before == 1.0


@holds_for(FACTORS)
def test_small_ranges_are_divided_evenly(core: Core, factor: float) -> None:
    """float16 neither overflows in the sum nor vanishes before it: both factors stay near the square root."""
    before, after = core.scaling.divide_factors(7, True, factor)
    assert before * after == factor
    if factor > 1:
        assert before / 2 < factor**0.5 <= before
    else:
        assert before == 1.0


@holds
def test_bad_divide_factors_are_refused(core: Core) -> None:
    for factor in (0.0, -2.0, inf, nan):
        with pytest.raises(
            ValueError, match=f"^the gradient divide factor must be a positive finite number, got {factor}$"
        ):
            core.scaling.divide_factors(4, False, factor)
    assert core.scaling.divide_factors(4, False, 0.5) == (1.0, 0.5)


@holds_for(st.tuples(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=5), st.floats(0, 1e3)))
def test_clip_coefficient_is_that_of_torch(core: Core, case: tuple[list[float], float]) -> None:
    values, max_norm = case
    _check_against_torch(core, values, max_norm)


@holds
def test_clip_coefficient_of_bad_norms_is_that_of_torch(core: Core) -> None:
    """A NaN must reach the gradients: hidden by a coefficient of 1, it would train on."""
    _check_against_torch(core, [nan, 1.0], 1.0)
    _check_against_torch(core, [inf, 1.0], 1.0)
    _check_against_torch(core, [0.0], 0.0)


def _check_against_torch(core: Core, values: list[float], max_norm: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(len(values), dtype=torch.float64))
    parameter.grad = torch.tensor(values, dtype=torch.float64)
    norm = float(torch.nn.utils.clip_grad_norm_([parameter], max_norm))
    coefficient = core.scaling.clip_coefficient(norm, max_norm)
    expected = parameter.grad.tolist()
    found = (torch.tensor(values, dtype=torch.float64) * coefficient).tolist()
    assert all(
        a == pytest.approx(b, rel=1e-12) or (isnan(a) and isnan(b)) for a, b in zip(found, expected, strict=True)
    )
