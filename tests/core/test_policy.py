"""Policies: what a user's settings mean, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st

from core.support import Core, holds, holds_for


@holds_for(st.integers(1, 64))
def test_reshard_after_forward_takes_exactly_the_divisors(core: Core, size: int) -> None:
    policy = core.policy
    kinds = policy.AfterForward
    assert policy.after_forward(None, size) is policy.AfterForward.AUTO
    assert policy.after_forward("auto", size) is policy.AfterForward.FIT
    assert policy.after_forward(True, size) is policy.AfterForward.FREE
    assert policy.after_forward(False, size) is policy.AfterForward.KEEP
    for number in range(-2, size + 3):
        if 1 <= number <= size and size % number == 0:
            expected = kinds.KEEP if number == 1 else kinds.FREE if number == size else kinds.SHRINK
            assert policy.after_forward(number, size) is expected
        else:
            with pytest.raises(ValueError, match=f"reshard_after_forward={number} must be a divisor"):
                policy.after_forward(number, size)


@holds
def test_bad_settings_are_refused_with_what_to_do(core: Core) -> None:
    policy = core.policy
    with pytest.raises(ValueError, match=r"size 12: one of \[1, 2, 3, 4, 6, 12\] \(1 means False, 12 means True\)$"):
        policy.after_forward(5, 12)
    wrong: Any
    for wrong in (2.0, "2", "Auto"):
        with pytest.raises(TypeError, match=f"must be a bool, an int, None or 'auto', got {wrong!r}$"):
            policy.after_forward(wrong, 4)
    for name in ("prefetch_bytes", "keep_bytes"):
        with pytest.raises(ValueError, match=f"^{name} must be None or at least 0, got -1$"):
            policy.SchedulePolicy(**{name: -1})
        for wrong in (True, 1.5, "1 GiB"):
            with pytest.raises(TypeError, match=f"^{name} must be a number of bytes, an int, or None; got {wrong!r}$"):
                policy.SchedulePolicy(**{name: wrong})
    with pytest.raises(ValueError, match=r"^reduces_in_flight must be at least 1, got 0$"):
        policy.SchedulePolicy(reduces_in_flight=0)


@holds
def test_smallest_settings_are_accepted(core: Core) -> None:
    assert core.policy.SchedulePolicy(prefetch_bytes=0, keep_bytes=0, reduces_in_flight=1).prefetch_bytes == 0
    assert core.policy.SchedulePolicy().prefetch_bytes is None
