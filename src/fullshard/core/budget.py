"""How many bytes of full parameters may be alive beside those in use: gathered ahead, or kept for backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def one_unit_bytes(full_bytes: Sequence[int]) -> int:
    """Bytes that may be gathered ahead of use when the user gives no number: those of the largest unit below the root.

    Many small units are then gathered together, each long before its use, and full buffers still are no more than the
    root, the units in use and as much again as the largest of them. The root does not count: it is no measure for the
    others where it holds an embedding, and it is full all the time.

    Args:
        full_bytes: Of each unit, the root first.
    """
    return max(full_bytes[1:], default=0)


def units_to_keep(
    stay: Iterable[int], latest_first: Sequence[int], full_bytes: Sequence[int], keep_bytes: int, last: int | None
) -> frozenset[int]:
    """Units that stay full from forward to backward within a budget: 0 is ZeRO-3, room for all is ZeRO-2.

    Each kept byte saves one gathered byte, whichever unit it is of, and all that is kept is alive when forward ends. So
    those that leave forward last are taken: they are held for the shortest time.

    Args:
        stay: Units that are kept already.
        latest_first: Units that may be kept, in the order of their backward.
        full_bytes: Of each unit.
        keep_bytes: Budget.
        last: The unit whose buffer stays for backward anyway, as a prefetch: nothing is saved by keeping it, unless
            everything is kept.

    Returns:
        Units, those of `stay` among them. All ranks choose the same.
    """
    kept = set(stay)
    left = keep_bytes - sum(full_bytes[unit] for unit in kept)
    new = [unit for unit in latest_first if unit not in kept]
    if keep_bytes and sum(full_bytes[unit] for unit in new) <= left:
        return frozenset([*kept, *new])
    for unit in new:
        if unit != last and 0 < full_bytes[unit] <= left:
            left -= full_bytes[unit]
            kept.add(unit)
    return frozenset(kept)
