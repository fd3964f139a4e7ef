"""The profiles of all ranks as one text that a person can read, and as plain data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fullshard.core.bars import bar
from fullshard.core.profile import COMMUNICATION, COMPUTE, OTHER, RankProfile

_SHOWN_WAITS = 5
_BAR_WIDTH = 24
_FIRST = (COMPUTE, *COMMUNICATION, OTHER)


@dataclass(frozen=True)
class Summary:
    """What a profile found; `print` it. Numbers without a rank are means over the ranks.

    Attributes:
        ranks: One profile a rank.
    """

    ranks: tuple[RankProfile, ...]

    @property
    def step_seconds(self) -> float:
        """Length of a step."""
        return self._mean(lambda rank: rank.step_seconds)

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of a step by name, which add up to `step_seconds`."""
        names = list(dict.fromkeys(name for rank in self.ranks for name in rank.parts))
        means = {name: self._mean(lambda rank, name=name: rank.parts.get(name, 0.0)) for name in names}  # type: ignore[misc]
        ranges = sorted((name for name in names if name not in _FIRST), key=lambda name: -means[name])
        return {name: means[name] for name in (*_FIRST, *ranges) if name in means}

    @property
    def exposed_seconds(self) -> float:
        """Communication for which the computation of a step stands still: starting transfers and waiting for them."""
        return self._mean(lambda rank: rank.exposed_seconds)

    @property
    def alone_seconds(self) -> float | None:
        """Communication of a step in which nothing overlaps."""
        found = [rank.alone_seconds for rank in self.ranks if rank.alone_seconds is not None]
        return sum(found) / len(found) if found else None

    @property
    def overlap(self) -> float | None:
        """Share of communication that is hidden behind computation, 0 to 1."""
        return max(0.0, 1.0 - self.exposed_seconds / self.alone_seconds) if self.alone_seconds else None

    @property
    def waits(self) -> dict[str, float]:
        """Seconds of a step by wait and unit, longest first."""
        labels = dict.fromkeys(label for rank in self.ranks for label in rank.waits)
        means = {label: self._mean(lambda rank, label=label: rank.waits.get(label, 0.0)) for label in labels}  # type: ignore[misc]
        return dict(sorted(means.items(), key=lambda item: -item[1]))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "measured_steps": self.ranks[0].steps,
            "step_seconds": self.step_seconds,
            "parts": self.parts,
            "exposed_seconds": self.exposed_seconds,
            "alone_seconds": self.alone_seconds,
            "overlap": self.overlap,
            "gathered_bytes": self.ranks[0].gathered_bytes,
            "reduced_bytes": self.ranks[0].reduced_bytes,
            "copied_bytes": self.ranks[0].copied_bytes,
            "waits": self.waits,
            "ranks": [asdict(rank) for rank in self.ranks],
        }

    def __str__(self) -> str:
        count = len(self.ranks)
        steps = self.ranks[0].steps
        head = f"a step of {1e3 * self.step_seconds:.1f} ms, mean of {steps} step(s) and {count} rank(s)"
        return "\n".join([head, "", *self._table(), "", *self._communication(), "", *self._waits()])

    def _mean(self, of: Callable[[RankProfile], float]) -> float:
        return sum(of(rank) for rank in self.ranks) / len(self.ranks)

    def _table(self) -> list[str]:
        width = max(len(name) for name in (*self.parts, "start gathers"))
        many = len(self.ranks) > 1
        lines = [f"{'':<{width}}  {'ms':>9}  {'share':>7}" + (f"  {'least':>9}  {'most':>9}  (ranks)" if many else "")]
        for name, seconds in self.parts.items():
            share = seconds / self.step_seconds
            line = f"{name:<{width}}  {1e3 * seconds:>9.2f}  {100 * share:>5.1f} %"
            if many:
                each = [1e3 * rank.parts.get(name, 0.0) for rank in self.ranks]
                line += f"  {min(each):>9.2f}  {max(each):>9.2f}"
            lines.append(f"{line}  {bar(share, _BAR_WIDTH)}".rstrip())
        return lines

    def _communication(self) -> list[str]:
        first = self.ranks[0]
        lines = [f"communication   {1e3 * self.exposed_seconds:.2f} ms exposed"]
        if self.overlap is not None and self.alone_seconds is not None:
            without = self._mean(lambda rank: rank.alone_step_seconds or 0.0)
            lines[0] += f" of {1e3 * self.alone_seconds:.2f} ms that it takes alone: {100 * self.overlap:.0f} % overlap"
            lines.append(f"                (a step in which nothing overlaps takes {1e3 * without:.1f} ms)")
        copied = "not counted" if first.copied_bytes is None else _mib(first.copied_bytes)
        moved = f"gathered {_mib(first.gathered_bytes)}, reduced {_mib(first.reduced_bytes)}, copied {copied}"
        return [*lines, f"bytes a step    {moved}"]

    def _waits(self) -> Sequence[str]:
        lines = [f"{1e3 * seconds:>8.2f} ms  {label}" for label, seconds in list(self.waits.items())[:_SHOWN_WAITS]]
        return [f"{'longest waits' if not i else '':<16}{line}" for i, line in enumerate(lines)]


def _mib(count: int) -> str:
    return f"{count / 2**20:.2f} MiB"
