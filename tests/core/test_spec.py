"""Specs: what the core knows of a parameter and of a rank, and what it refuses."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import strategies as st

from core.support import Core, holds, holds_for


@holds_for(st.lists(st.integers(0, 5), max_size=4).map(tuple))
def test_rows_times_row_size_is_the_parameter(core: Core, shape: tuple[int, ...]) -> None:
    for shard_dim in range(max(1, len(shape))):
        spec = core.spec.ParamSpec("p", shape, "float32", 4, shard_dim=shard_dim)
        assert spec.replicated == (shape == ())
        assert spec.rows == (shape[shard_dim] if shape else 1)
        assert spec.rows * spec.row_numel == spec.numel == prod(shape)


@holds
def test_bad_specs_are_refused(core: Core) -> None:
    with pytest.raises(
        ValueError, match=r"^parameter 'w' of shape \(2, 3\) cannot be sharded on dim 2: choose .* 0 to 1$"
    ):
        core.spec.ParamSpec("w", (2, 3), "float32", 4, shard_dim=2)
    with pytest.raises(ValueError, match=r"cannot be sharded on dim -1"):
        core.spec.ParamSpec("w", (2, 3), "float32", 4, shard_dim=-1)
    with pytest.raises(ValueError, match=r"^parameter 'w': itemsize_bytes must be positive, got 0$"):
        core.spec.ParamSpec("w", (2, 3), "float32", 0)


@holds
def test_world_checks_ranks(core: Core) -> None:
    assert core.spec.World(3, 4, 1, 2).data_parallel_size == 8
    for rank in (-1, 4):
        with pytest.raises(ValueError, match=rf"^rank must be in \[0, 4\), got {rank}$"):
            core.spec.World(rank, 4)
        with pytest.raises(ValueError, match=rf"^replica must be in \[0, 4\), got {rank}$"):
            core.spec.World(0, 1, rank, 4)
