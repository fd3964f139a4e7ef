"""Says more about errors of torch that come from a sharded parameter being used like a full one."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator

from fullshard.runtime.unit import Unit

_MIXED = "got mixed torch.Tensor and DTensor"


def explain_mixed(error: BaseException | None, sharded: list[Unit]) -> None:
    """Add a note to torch's error about a `DTensor` among plain tensors: which parameter it is likely to be.

    Args:
        error: Raised in a forward; None if a forward ended without one.
        sharded: Units whose parameters are not full at this moment.
    """
    if (
        error is None
        or _MIXED not in str(error)
        or any("use_parameters" in note for note in getattr(error, "__notes__", ()))
    ):
        return
    names = list(_named_in(error, sharded))
    what = f"parameter {', '.join(map(repr, names[:5]))} is" if names else "a parameter of another unit is"
    error.add_note(
        f"fullshard: {what} sharded here, because the forward of its own unit does not run. Wrap the code that uses it "
        "in fullshard.use_parameters(module, function, ...), or shard both modules as one unit"
    )


def _named_in(error: BaseException, units: list[Unit]) -> Iterator[str]:
    """Parameters that are written, such as "head.weight", in one of the lines that the error went through."""
    lines = []
    trace = error.__traceback__
    while trace is not None:
        lines.append(linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    for unit in units:
        for member in unit.members:
            name = f"{unit.name}.{member.spec.name}".lstrip(".")
            module, _, own = re.sub(r"\.(\d+)", r"[\1]", name).rpartition(".")
            if module and any(f"{module.rpartition('.')[2]}.{own}" in line for line in lines):
                yield name
