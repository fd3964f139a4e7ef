"""What the ranks of a failed job tell about themselves, and the first point at which they went different ways."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

# Commands that a rank tells about: enough to reach back to where a rank that runs ahead left the others.
MAX_COMMANDS = 256


@dataclass(frozen=True, slots=True)
class Told:
    """One communicating command.

    Attributes:
        step: Forward of the root in which it was issued, from 1.
        number: Its place among the communicating commands of that step, from 1.
        text: What it does, such as "gather of unit 'blocks.0'".
    """

    step: int
    number: int
    text: str


@dataclass(frozen=True, slots=True)
class Trail:
    """What one rank tells.

    Attributes:
        commands: Its latest communicating commands, newest last.
        last: What it did last, in words.
        end: How it ended: its error, in one line.
    """

    commands: tuple[Told, ...]
    last: str
    end: str = ""

    def to_text(self) -> str:
        """JSON, for another rank."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Trail:
        """The trail of another rank.

        Raises:
            ValueError, KeyError, TypeError: It is none.
        """
        fields = json.loads(text)
        return cls(tuple(Told(**told) for told in fields["commands"]), fields["last"], fields["end"])

    @property
    def place(self) -> str:
        """Where this rank is, such as "command 17 of step 3"."""
        return _place((self.commands[-1].step, self.commands[-1].number)) if self.commands else "before any command"


def report(trails: Mapping[int, Trail], ranks: Sequence[int]) -> str:
    """One line a rank, and a line about the first difference if there is one.

    Args:
        trails: What was told, by rank.
        ranks: Everybody who could have told something.
    """
    lines = ["What each rank did last:"]
    for rank in sorted({*ranks, *trails}):
        trail = trails.get(rank)
        if trail is None:
            lines.append(
                f"  rank {rank} posted nothing: its process has ended, or it is stuck or busy outside of fullshard"
            )
        else:
            lines.append(f"  rank {rank}: {trail.last} ({trail.place}){'; ' if trail.end else ''}{trail.end}")
    difference = first_difference(trails)
    return "\n".join([*lines, difference] if difference else lines)


def first_difference(trails: Mapping[int, Trail]) -> str:
    """Where the first rank that differs from the lowest one went another way, in words; "" if none is known to."""
    ranks = sorted(rank for rank, trail in trails.items() if trail.commands)
    found: list[tuple[tuple[int, int], str]] = []
    for rank in ranks[1:]:
        difference = _difference((ranks[0], trails[ranks[0]]), (rank, trails[rank]))
        if difference is not None:
            found.append(difference)
    return min(found, key=lambda item: item[0])[1] if found else ""


def _difference(one: tuple[int, Trail], other: tuple[int, Trail]) -> tuple[tuple[int, int], str] | None:
    """(place, words) of the first command in which two ranks differ. One that is merely behind does not differ."""
    (rank_a, a), (rank_b, b) = one, other
    told_a, told_b = _by_place(a), _by_place(b)
    # Older commands than these are not told by one of the two.
    begin = max(min(told_a), min(told_b))
    for key in sorted({*told_a, *told_b}):
        if key < begin or told_a.get(key) == told_b.get(key):
            continue
        if key in told_a and key in told_b:
            words = f"rank {rank_b} went on to {told_b[key]} where rank {rank_a} went on to {told_a[key]}"
            return key, f"First difference: {words} ({_place(key)})."
        ahead, behind, told = (rank_a, rank_b, told_a) if key in told_a else (rank_b, rank_a, told_b)
        if max(told_b if ahead == rank_a else told_a) < key:
            continue  # it has not come so far
        words = f"rank {ahead} went on to {told[key]} where rank {behind} had nothing more to do in that step"
        return key, f"First difference: {words} ({_place(key)})."
    return None


def _by_place(trail: Trail) -> dict[tuple[int, int], str]:
    return {(told.step, told.number): told.text for told in trail.commands}


def _place(key: tuple[int, int]) -> str:
    return f"command {key[1]} of step {key[0]}"
