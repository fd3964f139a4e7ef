"""Scaling: sums become means, long gradients become short ones."""

from __future__ import annotations

from math import inf, log2, nan

import pytest
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
