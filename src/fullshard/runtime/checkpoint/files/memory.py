"""Memory that files are read into and written from: whole pages, so that it can bypass the cache of the system."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

from fullshard.core.ckpt.manifest import DTYPE_BYTES

_HUGE_BYTES = 2 << 20

# Only those that torch and safetensors share.
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
assert _DTYPES.keys() == DTYPE_BYTES.keys()
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a safetensors name."""
    return _DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name of a dtype.

    Raises:
        ValueError: It has none.
    """
    try:
        return _NAMES[dtype]
    except KeyError:
        raise ValueError(f"{dtype} cannot be written to a safetensors file; convert it to another dtype") from None


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as its bytes: uint8 [nbytes], the same memory."""
    return tensor.detach().view(-1).view(torch.uint8)


class Pages:
    """A buffer of whole pages, huge ones where the system has them.

    With pages of 4 KiB one direct write is thousands of pieces of memory for the disk, and took twice as long.

    Attributes:
        view: Its memory.
        tensor: The same as uint8 [nbytes].
    """

    def __init__(self, nbytes: int) -> None:
        # Private: shared memory, which is what `mmap` makes otherwise, has no huge pages.
        memory = mmap.mmap(-1, nbytes + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        advice = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux
        if advice is not None:
            with suppress(OSError):  # a kernel without them
                memory.madvise(advice)
        everything = torch.frombuffer(memory, dtype=torch.uint8)
        start = -everything.data_ptr() % _HUGE_BYTES
        self.view = memoryview(memory)[start : start + nbytes]
        self.tensor = everything[start : start + nbytes]
