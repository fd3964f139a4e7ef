"""Factors that turn sums into means."""

from __future__ import annotations

from math import isinf


def divide_factors(world_size: int, small_range: bool, override: float | None = None) -> tuple[float, float]:
    """Factors to divide by before and after a sum over ranks, so that the result is the mean.

    Args:
        world_size: Data-parallel ranks in the sum.
        small_range: The sum is made in a dtype with a small range (float16), which overflows if it is divided only
            after; the division is then split evenly, to a power of two, between before and after.
        override: Total factor to divide by in place of `world_size`.

    Returns:
        (before, after), whose product is the total factor.
    """
    total = float(world_size if override is None else override)
    if not total > 0 or isinf(total):
        raise ValueError(f"the gradient divide factor must be a positive finite number, got {override}")
    if not small_range:
        return 1.0, total
    before = 1.0
    while before * before < total:
        before *= 2.0
    return before, total / before
