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
        is_cause: Whether that was something of its own, not that others did not come.
        waits_for: Ranks that it gave up waiting for, as far as it can tell: some of them may wait themselves.
        lost: Whether it gave up because the process of one of them had ended.
    """

    commands: tuple[Told, ...]
    last: str
    end: str = ""
    is_cause: bool = False
    waits_for: tuple[int, ...] = ()
    lost: bool = False

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
        told = tuple(Told(**command) for command in fields.pop("commands"))
        return cls(told, waits_for=tuple(fields.pop("waits_for")), **fields)

    @property
    def place(self) -> str:
        """Where this rank is, such as " (command 17 of step 3)"; "" before any command."""
        return f" ({_place((self.commands[-1].step, self.commands[-1].number))})" if self.commands else ""


def report(trails: Mapping[int, Trail], ranks: Sequence[int]) -> str:
    """One line a rank; the first difference if there is one; whom to look at first.

    Args:
        trails: What was told, by rank.
        ranks: Everybody who could have told something.
    """
    lines = ["What each rank did last:"]
    for rank in sorted({*ranks, *trails}):
        trail = trails.get(rank)
        if trail is None:
            lines.append(
                f"  rank {rank} posted nothing: its process has ended, it is stuck or busy outside of fullshard, or "
                "the network to it is cut"
            )
        else:
            lines.append(f"  rank {rank}: {trail.last}{trail.place}{'; ' if trail.end else ''}{trail.end}")
    advice = (first_difference(trails), suspect(trails, ranks))
    return "\n".join([*lines, *filter(None, advice)])


def suspect(trails: Mapping[int, Trail], ranks: Sequence[int]) -> str:
    """Whom to look at first, and why, in words; "" if nobody can be told from the others.

    A rank that ended by itself, with or without an error, comes before one that says nothing; of those, one that others
    waited for comes before one that may only be late to speak.
    """
    raised = [f"rank {rank}: {trails[rank].end}" for rank in sorted(trails) if trails[rank].is_cause]
    if raised:
        return f"Look first at {'; '.join(raised)}."
    waited_for = {rank for trail in trails.values() for rank in trail.waits_for}
    silent = [rank for rank in ranks if rank not in trails]
    silent = [rank for rank in silent if rank in waited_for] or silent
    lost = any(trail.lost for trail in trails.values())
    if not silent:
        # Who found that others have ended came after those who waited until the limit: they waited for it.
        gave_up = {rank for rank, trail in trails.items() if trail.waits_for and not trail.lost}
        late = sorted({peer for rank in gave_up for peer in trails[rank].waits_for} - gave_up)
        return f"Look first at {_ranks(late)}: late, the others had given up by then." if lost and late else ""
    who = _ranks(silent)
    if lost:
        return (
            f"Look first at {who}: ended without a word. Either it was killed (the kernel's log tells of a lack of "
            "memory), or its program came to its end before those of the others."
        )
    return f"Look first at {who}: stopped, stuck, busy with something else, or not to be reached."


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"


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
