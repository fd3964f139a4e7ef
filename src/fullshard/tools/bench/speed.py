"""What a rank does by itself: matrix products and copies, on all ranks at once, as in training."""

from __future__ import annotations

from functools import partial

import torch

from fullshard.core.calibration import CopySpeed, MatrixSpeed
from fullshard.tools.bench.timing import Ranks

DTYPES = (torch.float32, torch.bfloat16)


def measure_matrices(sizes: tuple[int, ...], ranks: Ranks) -> tuple[MatrixSpeed, ...]:
    """Square matrices, by dtype and size."""
    found = []
    for dtype in DTYPES:
        for size in sizes:
            left = torch.ones(size, size, dtype=dtype, device=ranks.device)
            right, out = torch.ones_like(left), torch.empty_like(left)
            seconds = ranks.time(partial(torch.mm, left, right, out=out))
            found.append(MatrixSpeed(str(dtype).removeprefix("torch."), size, 2 * size**3 / seconds))
    return tuple(found)


def measure_copies(nbytes: int, ranks: Ranks) -> tuple[CopySpeed, ...]:
    """From one block of memory to another."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=ranks.device)
    target = torch.empty_like(source)
    seconds = ranks.time(lambda: target.copy_(source))
    return (CopySpeed(nbytes, nbytes / seconds),)
