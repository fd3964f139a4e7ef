"""Bars made of characters, for tables on a terminal and in files."""

from __future__ import annotations

_EIGHTHS = " ▏▎▍▌▋▊▉"


def bar(part: float, width: int) -> str:
    """A bar whose length is `part` (0 to 1) of `width` characters, to an eighth of one."""
    full, eighths = divmod(round(max(0.0, min(1.0, part)) * width * 8), 8)
    return "█" * full + _EIGHTHS[eighths].strip()
