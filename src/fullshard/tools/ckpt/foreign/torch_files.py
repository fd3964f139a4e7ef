"""Files that `torch.save` writes, read without torch's unpickler and without reading them whole.

Such a file is a zip archive that is not compressed: NAME/data.pkl says what there is, NAME/data/KEY is the memory of a
storage. So a tensor is a range of bytes, and any part of it can be read. Only the form from before torch 1.6, which is
no archive, must be read as a whole; torch does that, with `weights_only=True`.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fullshard.errors import CheckpointDamagedError, CheckpointError
from fullshard.tools.ckpt.foreign.pickles import MAX_PICKLE_BYTES, Lookup, Maker, Named, as_dict, as_record, read_pickle
from fullshard.tools.ckpt.foreign.stored import Elements, Folder, InFile, InMemory, StoredTensor

STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
_STORAGE_NAMES = {f"torch.{name}": dtype for name, dtype in STORAGES.items()}
_UNTYPED = ("torch.storage.UntypedStorage", "torch.UntypedStorage")
DTYPES: Mapping[str, torch.dtype] = {
    str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
# Classes whose objects hold no weights, as names only: settings and counters that people save beside them.
_RECORDS = (
    *("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer", "torch.device"),
    *("torch.serialization._get_layout", "collections.Counter", "collections.deque", "argparse.Namespace"),
    *("numpy.dtype", "numpy.ndarray", "_codecs.encode", "datetime.datetime", "datetime.timedelta"),
    *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
    *(f"{module}.{name}" for module in ("builtins", "__builtin__") for name in ("bytearray", "complex", "slice")),
    *(f"pathlib.{name}" for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath")),
    *(f"pathlib._local.{name}" for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath")),
)
_ZIP, _LOCAL_HEADER = b"PK\x03\x04", 30


def torch_file(folder: Folder, name: str, extra: Lookup | None = None) -> Any:
    """What is in a file of `torch.save`: dicts, lists and plain values, with a `StoredTensor` for each tensor.

    Args:
        folder: Where it is.
        name: Of the file.
        extra: Further names that its pickle may use.

    Raises:
        UnsafePickleError: Its pickle uses other names.
        CheckpointDamagedError: It is cut short, or no such file.
    """
    if folder.size(name) >= 4 and folder.bytes(name, 0, 4) == _ZIP:
        return read_archive(Range(folder, name, 0, folder.size(name)), extra)
    return _old_file(Range(folder, name, 0, folder.size(name)))


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes [offset, offset + nbytes) of a file."""

    folder: Folder
    name: str
    offset: int
    nbytes: int

    def __str__(self) -> str:
        path = self.folder.path / self.name
        return str(path) if not self.offset else f"{path} (at byte {self.offset})"


def read_archive(where: Range, extra: Lookup | None = None) -> Any:
    """What is in an archive of `torch.save` that may be part of a file. See `torch_file`."""
    archive = _Archive(where)

    def lookup(name: str) -> Maker | None:
        return _known(name, archive) or (extra(name) if extra is not None else None)

    return read_pickle(archive.program(), lookup, archive.storage, str(where))


class _Archive:
    """The entries of an archive, none of them compressed."""

    def __init__(self, where: Range) -> None:
        self._where = where
        self._storages: dict[str, Elements] = {}  # by key, so that tensors that share memory share the object
        try:
            with zipfile.ZipFile(io.BufferedReader(_View(where))) as archive:
                entries = {entry.filename: entry for entry in archive.infolist()}
        except CheckpointError:
            raise
        except Exception as error:  # noqa: BLE001  the library raises whatever a damaged archive makes it stumble on
            raise CheckpointDamagedError(f"{where} is no archive of torch.save, or is cut short ({error})") from None
        programs = [name for name in entries if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(programs) != 1:
            raise CheckpointDamagedError(f"{where}: expected one entry data.pkl, as torch.save writes it")
        self.root = programs[0].removesuffix("data.pkl")
        self._entries = entries
        order = self._entry("byteorder") if f"{self.root}byteorder" in entries else b"little"
        if order != b"little":
            raise CheckpointError(f"{where} was written on a machine of another byte order")

    def program(self) -> bytes:
        """The pickle."""
        return self._entry("data.pkl")

    def _entry(self, name: str) -> bytes:
        start, nbytes = self._place(name)
        if nbytes > MAX_PICKLE_BYTES:
            raise CheckpointDamagedError(f"{self._where}: {name} has {nbytes} bytes, more than any real one")
        return self._where.folder.bytes(self._where.name, start, nbytes)

    def _place(self, name: str) -> tuple[int, int]:
        """(first byte in the file, bytes) of an entry."""
        where, entry = self._where, self._entries.get(self.root + name)
        if entry is None:
            raise CheckpointDamagedError(f"{where} has no entry {name}: it is damaged")
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise CheckpointError(f"{where}: entry {name} is compressed or encrypted, as torch.save never does")
        if 0 <= entry.header_offset <= where.nbytes - _LOCAL_HEADER:
            header = where.folder.bytes(where.name, where.offset + entry.header_offset, _LOCAL_HEADER)
            # The lengths of name and extra field, which differ from those in the directory.
            skipped = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
            start = entry.header_offset + _LOCAL_HEADER + skipped
            if header[:4] == _ZIP and start + entry.file_size <= where.nbytes:
                return where.offset + start, entry.file_size
        raise CheckpointDamagedError(f"{where}: entry {name} is not where the archive says: it is damaged")

    def storage(self, identity: tuple[Any, ...]) -> Elements:
        """What a persistent id stands for: ("storage", class, key, device, elements)."""
        if len(identity) != 5 or identity[0] != "storage" or not isinstance(identity[1], Named):
            raise TypeError("a persistent id is not that of a storage")
        _, kind, key, _, numel = identity
        if not isinstance(key, str) or not key.isalnum() or type(numel) is not int:
            raise TypeError("a persistent id is not that of a storage")
        if key not in self._storages:
            dtype = _STORAGE_NAMES.get(kind.name, torch.uint8)
            start, nbytes = self._place(f"data/{key}")
            if numel < 0 or numel * dtype.itemsize != nbytes:
                raise CheckpointDamagedError(
                    f"{self._where}: storage {key} has {nbytes} bytes, expected {numel} x {dtype}: it is damaged"
                )
            self._storages[key] = InFile(self._where.folder, self._where.name, start, dtype, numel)
        return self._storages[key]

    def tensor(self, args: tuple[Any, ...]) -> StoredTensor:
        """`_rebuild_tensor_v2(storage, offset, size, stride, ...)`."""
        elements, offset, shape, strides = args[:4]
        if not isinstance(elements, InFile) or not isinstance(shape, tuple) or not isinstance(strides, tuple):
            raise TypeError("a tensor is not described as torch.save does")
        return StoredTensor(elements, shape, strides, offset).checked(str(self._where))

    def typed_tensor(self, args: tuple[Any, ...]) -> StoredTensor:
        """`_rebuild_tensor_v3(storage, offset, size, stride, requires_grad, hooks, dtype)` over bytes."""
        elements, dtype = args[0], dtype_of(args[6])
        if not isinstance(elements, InFile):
            raise TypeError("a tensor is not described as torch.save does")
        numel = elements.numel * elements.dtype.itemsize // dtype.itemsize
        typed = InFile(elements.folder, elements.name, elements.offset, dtype, numel)
        return self.tensor((typed, *args[1:4]))


def _known(name: str, archive: _Archive) -> Maker | None:
    """What the pickle of a torch file may use."""
    makers: dict[str, Callable[[tuple[Any, ...]], Any]] = {
        "torch._utils._rebuild_tensor_v2": archive.tensor,
        "torch._utils._rebuild_tensor": archive.tensor,
        "torch._utils._rebuild_tensor_v3": archive.typed_tensor,
        "torch._utils._rebuild_parameter": lambda args: args[0],
        "torch._utils._rebuild_parameter_with_state": lambda args: args[0],
        "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
        "torch.Size": lambda args: tuple(args[0]),
        "collections.OrderedDict": _ordered,
        "collections.defaultdict": as_dict,
        "builtins.set": lambda args: list(args[0]) if args else [],
        "__builtin__.set": lambda args: list(args[0]) if args else [],
    }
    if name in makers:
        return makers[name]
    if name in _STORAGE_NAMES or name in _UNTYPED or name in _RECORDS or name in DTYPES:
        return as_record(name)
    return None


def dtype_of(named: Any) -> torch.dtype:
    """The dtype that a pickle names."""
    if not isinstance(named, Named) or named.name not in DTYPES:
        raise TypeError("a dtype is not one of torch's")
    return DTYPES[named.name]


def _rebuild_from_type(args: tuple[Any, ...]) -> Any:
    """(function, class, its arguments, state): a tensor that has attributes of its own."""
    function, kind, inner, _ = args
    if not isinstance(function, Named) or not isinstance(inner, tuple) or not isinstance(kind, Named):
        raise TypeError("a tensor is not described as torch.save does")
    return function.make(inner)


def _ordered(args: tuple[Any, ...]) -> dict[Any, Any]:
    return {key: value for key, value in args[0] if isinstance(key, str)} if args else {}


class _View(io.RawIOBase):
    """A range of a file as a file, for the zip library."""

    def __init__(self, where: Range) -> None:
        self._where, self._at = where, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._where.nbytes}[whence]
        if base + offset < 0:
            raise ValueError("before the beginning")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, out: Any) -> int:
        view = memoryview(out).cast("B")
        count = max(min(len(view), self._where.nbytes - self._at), 0)
        self._where.folder.read(self._where.name, self._where.offset + self._at, view[:count])
        self._at += count
        return count


def _old_file(where: Range) -> Any:
    """A file in the form from before torch 1.6. Its tensors are in memory."""
    try:
        loaded = torch.load(io.BufferedReader(_View(where)), map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001  torch raises many things about files that are none
        text = str(error).split("\n", 1)[0][:300]
        raise CheckpointError(f"{where} is no file of torch.save that holds only weights: {text}") from None
    return _in_memory(loaded, {})


def _in_memory(value: Any, seen: dict[tuple[int, torch.dtype], InMemory]) -> Any:
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        usable = storage.nbytes() // value.dtype.itemsize
        whole = torch.empty(0, dtype=value.dtype).set_(storage, 0, (usable,))  # type: ignore[call-overload]
        # The same object for the same memory, by which tied tensors are known; what is empty has none.
        elements = seen.setdefault((storage.data_ptr() or id(value), value.dtype), InMemory(whole))
        return StoredTensor(elements, tuple(value.shape), value.stride(), int(value.storage_offset()))
    if isinstance(value, dict):
        return {key: _in_memory(item, seen) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_in_memory(item, seen) for item in value]
    return value
