"""Making many objects that all stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Without Python's search for cycles meanwhile.

    Describing 100 000 tensors makes several objects for each, none of which is garbage, and the search would go through
    all objects of the process again and again as they come: half of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
