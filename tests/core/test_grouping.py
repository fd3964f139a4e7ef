"""Grouping: which unit owns which parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from core.support import Core, holds, holds_for


@dataclass(frozen=True)
class Walk:
    """What a walk over modules finds: the identity at each place, in two orders; and which identities are taken."""

    identities: tuple[int, ...]
    other_order: tuple[int, ...]
    taken: frozenset[int]


@st.composite
def walks(draw: st.DrawFn) -> Walk:
    identities = draw(st.lists(st.integers(0, 5), max_size=10))
    order = draw(st.permutations(range(len(identities))))
    return Walk(tuple(identities), tuple(order), draw(st.frozensets(st.integers(0, 7), max_size=3)))


def _group(core: Core, walk: Walk, order: Sequence[int]) -> tuple[object, ...]:
    places = [core.grouping.Occurrence(f"p{i}", walk.identities[i]) for i in order]
    groups: tuple[object, ...] = core.grouping.group_occurrences(iter(places), iter(walk.taken))
    return groups


@holds_for(walks())
def test_every_parameter_is_in_exactly_one_group(core: Core, walk: Walk) -> None:
    """A name is lost only if its parameter is taken, and no name and no parameter comes twice."""
    groups = _group(core, walk, range(len(walk.identities)))
    names = [name for group in groups for name in (group.name, *group.aliases)]
    free = [f"p{i}" for i, identity in enumerate(walk.identities) if identity not in walk.taken]
    assert sorted(names) == sorted(free)
    assert len({group.identity for group in groups}) == len(groups)
    assert not {group.identity for group in groups} & walk.taken


@holds_for(walks())
def test_tied_names_are_together(core: Core, walk: Walk) -> None:
    """All names of one parameter, in the order of the walk, the first one as its name."""
    for group in _group(core, walk, range(len(walk.identities))):
        places = [f"p{i}" for i, identity in enumerate(walk.identities) if identity == group.identity]
        assert [group.name, *group.aliases] == places


@holds_for(walks())
def test_groups_are_the_same_in_any_order_of_the_walk(core: Core, walk: Walk) -> None:
    """The order of a walk decides order and first names, never what belongs together."""

    def together(order: Sequence[int]) -> set[tuple[object, frozenset[str]]]:
        return {(g.identity, frozenset((g.name, *g.aliases))) for g in _group(core, walk, order)}

    assert together(range(len(walk.identities))) == together(walk.other_order)


@holds_for(walks())
def test_groups_come_in_the_order_of_the_walk(core: Core, walk: Walk) -> None:
    """So ranks that walk the same modules number parameters alike."""
    firsts = [int(group.name[1:]) for group in _group(core, walk, range(len(walk.identities)))]
    assert firsts == sorted(firsts)


@holds_for(st.tuples(st.lists(st.sampled_from("ab"), max_size=4), st.lists(st.sampled_from("ab"), max_size=4)))
def test_first_difference_is_the_first(core: Core, case: tuple[list[str], list[str]]) -> None:
    mine, theirs = case
    found = core.grouping.first_difference(mine, theirs)
    if mine == theirs:
        assert found is None
        return
    assert found is not None
    index, a, b = found
    assert mine[:index] == theirs[:index]
    assert a != b
    assert a == (mine[index] if index < len(mine) else "(nothing)")
    assert b == (theirs[index] if index < len(theirs) else "(nothing)")


@holds
def test_a_parameter_that_another_unit_owns_is_left_out(core: Core) -> None:
    occurrence = core.grouping.Occurrence
    walk = [occurrence("embed.weight", 1), occurrence("norm.weight", 2), occurrence("head.weight", 1)]
    (group,) = core.grouping.group_occurrences(walk, taken=[1])
    assert (group.name, group.aliases, group.identity) == ("norm.weight", (), 2)
