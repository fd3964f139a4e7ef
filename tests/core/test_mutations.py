"""Every property of core/ catches a deliberate fault: see mutations.py."""

from __future__ import annotations

import re

import pytest

from core import (
    test_calibration,
    test_cost,
    test_grouping,
    test_layout,
    test_policy,
    test_profile,
    test_replay,
    test_scaling,
    test_schedule,
    test_spec,
)
from core.mutations import MUTATIONS, Mutation
from core.support import PROPERTIES, Core, source_of

# Importing them has registered their properties.
WITH_PROPERTIES = (
    *(test_cost, test_grouping, test_layout, test_policy, test_profile, test_replay),
    *(test_scaling, test_schedule, test_spec),
    test_calibration,
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[f"{m.module}: {m.name}" for m in MUTATIONS])
def test_fault_is_caught(mutation: Mutation) -> None:
    source = source_of(mutation.module)
    assert source.count(mutation.snippet) == 1, (
        f"{mutation.snippet!r} must occur once in core/{mutation.module}.py: write this fault anew in the code of today"
    )
    core = Core({mutation.module: source.replace(mutation.snippet, mutation.replacement)})
    caught = (AssertionError, ValueError, pytest.fail.Exception)
    with pytest.raises(caught, match=re.escape(mutation.saying) or None):
        PROPERTIES[mutation.caught_by].run(core, find_only=True)


def test_every_property_has_a_fault_that_it_catches() -> None:
    assert set(PROPERTIES) == {mutation.caught_by for mutation in MUTATIONS}


def test_faults_are_told_apart_by_their_names() -> None:
    names = [mutation.name for mutation in MUTATIONS]
    assert len(names) == len(set(names))
