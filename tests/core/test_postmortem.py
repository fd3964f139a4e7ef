"""What ranks tell when communication fails, and where they went different ways."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fullshard.core.postmortem import Told, Trail, first_difference, report, suspect


def trail(*steps: tuple[int, str], last: str = "step 1: wait", end: str = "") -> Trail:
    """One letter a command: its unit."""
    told = [Told(step, n, f"gather unit {unit!r}") for step, units in steps for n, unit in enumerate(units, start=1)]
    return Trail(tuple(told), last, end)


@pytest.mark.parametrize(
    ("trails", "expected"),
    [
        ({0: trail((1, "abc")), 1: trail((1, "abc"))}, ""),
        # One that is behind does not differ.
        ({0: trail((1, "abc")), 1: trail((1, "ab"))}, ""),
        ({0: trail((1, "abc")), 1: trail((1, "abc"), (2, "ab"))}, ""),
        (
            {0: trail((1, "abc")), 1: trail((1, "acb"))},
            (
                "First difference: rank 1 went on to gather unit 'c' where rank 0 went on to gather unit 'b' "
                "(command 2 of step 1)."
            ),
        ),
        # The earliest of all.
        (
            {0: trail((2, "abcd")), 1: trail((2, "abcx")), 2: trail((2, "ay"))},
            (
                "First difference: rank 2 went on to gather unit 'y' where rank 0 went on to gather unit 'b' "
                "(command 2 of step 2)."
            ),
        ),
        # One has begun the next step, so it left something out.
        (
            {0: trail((1, "abc"), (2, "a")), 1: trail((1, "ab"), (2, "a"))},
            (
                "First difference: rank 0 went on to gather unit 'c' where rank 1 had nothing more to do in that step "
                "(command 3 of step 1)."
            ),
        ),
        # What is too old for one of them is not compared.
        ({0: trail((1, "xyz"), (2, "ab")), 1: trail((2, "ab"))}, ""),
        ({0: trail((1, "a")), 1: trail()}, ""),
        ({1: trail()}, ""),
        ({}, ""),
    ],
)
def test_first_difference(trails: dict[int, Trail], expected: str) -> None:
    assert first_difference(trails) == expected


def test_report_has_a_line_for_every_rank() -> None:
    told = {0: trail((3, "ab"), last="step 3: wait for the gather of unit 'b'", end="PeerTimeoutError: x"), 2: trail()}
    assert report(told, [0, 1, 2]).splitlines() == [
        "What each rank did last:",
        "  rank 0: step 3: wait for the gather of unit 'b' (command 2 of step 3); PeerTimeoutError: x",
        (
            "  rank 1 posted nothing: its process has ended, it is stuck or busy outside of fullshard, or the network "
            "to it is cut"
        ),
        "  rank 2: step 1: wait",
        "Look first at rank 1: stopped, stuck, busy with something else, or not to be reached.",
    ]


WAITS = trail(end="PeerTimeoutError: x")
RAISED = replace(trail(end="its forward raised ValueError: bad"), is_cause=True)


@pytest.mark.parametrize(
    ("trails", "expected"),
    [
        # Its own error counts for more than silence, silence for more than waiting.
        ({0: WAITS, 2: RAISED}, "Look first at rank 2: its forward raised ValueError: bad."),
        (
            {0: RAISED, 1: RAISED},
            "Look first at rank 0: its forward raised ValueError: bad; rank 1: its forward raised",
        ),
        ({0: WAITS, 1: WAITS}, "Look first at rank 2: stopped"),
        # Rank 1 may only be late to speak: nobody waited for it.
        ({0: replace(WAITS, waits_for=(2,))}, "Look first at rank 2: stopped"),
        ({0: replace(WAITS, waits_for=(1, 2))}, "Look first at ranks [1, 2]: stopped"),
        # Rank 1 waited, too; only with some backends is it known for whom.
        ({0: replace(WAITS, waits_for=(1, 2), lost=True), 1: WAITS}, "Look first at rank 2: ended without a word"),
        ({0: WAITS, 1: WAITS, 2: WAITS}, ""),
        # Rank 2 was late: the others had waited until the limit, and ended.
        (
            {
                0: replace(WAITS, waits_for=(1, 2)),
                1: replace(WAITS, waits_for=(2,)),
                2: replace(WAITS, waits_for=(0, 1), lost=True),
            },
            "Look first at rank 2: late",
        ),
    ],
)
def test_whom_to_look_at_first(trails: dict[int, Trail], expected: str) -> None:
    assert suspect(trails, [0, 1, 2]).startswith(expected)
    assert bool(suspect(trails, [0, 1, 2])) == bool(expected)


def test_trail_survives_the_way_to_another_rank() -> None:
    told = replace(trail((1, "ab"), (2, "a"), end="its 'end'"), is_cause=True, waits_for=(0, 2), lost=True)
    assert Trail.from_text(told.to_text()) == told


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"commands": [{"step": 1}], "last": "", "end": ""}'])
def test_text_that_is_no_trail(text: str) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        Trail.from_text(text)
