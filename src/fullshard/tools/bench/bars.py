"""Bars of measured values: what was measured at all is seen."""

from __future__ import annotations

from fullshard.core import bars


def bar(part: float, width: int) -> str:
    """See `fullshard.core.bars.bar`; a part that is too small for it is as thin as can be, not nothing."""
    return bars.bar(part, width) or ("▏" if part > 0 else "")
