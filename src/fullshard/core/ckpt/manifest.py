"""The manifest of a checkpoint: what docs/checkpoint-format.md says, as data and as JSON text.

A manifest may come from anyone. Everything in it is checked before it is used: types, ranges, that names of files are
the only possible ones, that tensors can be divided as it says. A `ManifestError` names the member that is wrong.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NoReturn, TypeVar

from fullshard.core.ckpt.boxes import Box, Division

FORMAT = "fullshard-checkpoint"
VERSION = 1
# Names of dtypes as safetensors writes them, by the bytes of an element.
_DTYPES = {
    1: "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ",
    2: "I16 U16 F16 BF16",
    4: "I32 U32 F32",
    8: "I64 U64 F64 C64",
}
DTYPE_BYTES: Mapping[str, int] = {name: size for size, names in _DTYPES.items() for name in names.split()}
MAX_BYTES = 2**62  # of a tensor or a file: sums of them stay far from what a 64-bit reader can hold
_MAX_AXES = 64  # of a tensor or a mesh

_T = TypeVar("_T")


class ManifestError(ValueError):
    """A manifest is not as the format asks; the text says where, and what was found."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor: its global shape, its dtype as safetensors writes it, and the number of its division."""

    shape: tuple[int, ...]
    dtype: str
    division: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A rank's file: its size and the checksum of its header and its table of checksums."""

    name: str
    nbytes: int
    seal: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint without its data.

    Attributes:
        step: Optimizer steps done.
        world_size: Ranks that wrote it, one file each.
        divisions: Ways in which tensors are divided over the files.
        tensors: By name, in the order of the files.
        aliases: Other name of a tensor -> its name (tied parameters).
        files: By rank.
        state: JSON values of each key of the state, the same for all ranks.
        rank_state: The same for values that each rank has for itself, by rank.
    """

    step: int
    world_size: int
    divisions: tuple[Division, ...]
    tensors: Mapping[str, TensorEntry]
    aliases: Mapping[str, str]
    files: tuple[FileEntry, ...]
    state: Mapping[str, Any] = field(default_factory=dict)
    rank_state: tuple[Mapping[str, Any], ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.tensors.values())

    def resolve(self, name: str) -> str:
        """The name under which a tensor lies in the files, of any of its names."""
        return self.aliases.get(name, name)

    def division_of(self, name: str) -> Division:
        """How a tensor is divided over the files."""
        return self.divisions[self.tensors[name].division]

    def box(self, name: str, rank: int) -> Box | None:
        """The part of a tensor in the file of `rank`."""
        return self.division_of(name).box(self.tensors[name].shape, rank)

    def pieces(self, rank: int) -> dict[str, Box]:
        """What is in the file of `rank`, in its order."""
        found = ((name, self.box(name, rank)) for name in self.tensors)
        return {name: box for name, box in found if box is not None}

    def digest(self) -> bytes:
        """The same for the same manifest: files of other content have other seals."""
        told = repr((self.step, self.files, self.state, self.rank_state, self.aliases))
        return hashlib.blake2b(told.encode(), digest_size=16).digest()

    def to_text(self) -> str:
        """As JSON. Not yet with the checksum of the text itself."""
        document = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "world_size": self.world_size,
            "divisions": [
                {"mesh": list(d.mesh), "ranks": list(d.ranks), "splits": [list(split) for split in d.splits]}
                for d in self.divisions
            ],
            "tensors": {
                name: {"shape": list(t.shape), "dtype": t.dtype, "division": t.division}
                for name, t in self.tensors.items()
            },
            "aliases": dict(self.aliases),
            "files": [{"name": file.name, "bytes": file.nbytes, "seal": file.seal} for file in self.files],
            "state": dict(self.state),
            "rank_state": [dict(values) for values in self.rank_state],
        }
        return json.dumps(document, allow_nan=False, check_circular=False)

    @classmethod
    def from_text(cls, text: str | bytes) -> Manifest:
        """Read JSON that may come from anyone.

        Raises:
            ManifestError: It is not the manifest of a checkpoint that this version reads.
        """
        document = strict_json(text)
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ManifestError(f'expected a JSON object with "format": "{FORMAT}"')
        version = _integer(document.get("version"), "version", 1)
        if version > VERSION:
            raise ManifestError(f"version {version} is newer than {VERSION}, the newest known here: upgrade fullshard")
        world_size = _integer(document.get("world_size"), "world_size", 1)
        divisions = _list(document, "divisions", lambda value, at: _division(value, at, world_size))
        tensors = _members(document, "tensors", lambda value, at: _tensor(value, at, divisions))
        manifest = cls(
            step=_integer(document.get("step"), "step", 0),
            world_size=world_size,
            divisions=divisions,
            tensors=tensors,
            aliases=_members(document, "aliases", _string),
            files=_list(document, "files", _file),
            state=_members(document, "state", lambda value, _: value),
            rank_state=_list(document, "rank_state", _object),
        )
        _check_together(manifest)
        return manifest


def file_name(rank: int) -> str:
    """Name of a rank's file. It is computed, never taken from a checkpoint, so that no path in a file is trusted."""
    return f"rank-{rank:05d}.safetensors"


def strict_json(text: str | bytes) -> Any:
    """Parse JSON that may come from anyone: no repeated members, no NaN, nothing too deep or too long.

    Raises:
        ManifestError: It is not such JSON.
    """
    try:
        return json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_no_constant)
    except ManifestError:
        raise
    except (ValueError, RecursionError) as error:  # also UnicodeDecodeError, and integers of too many digits
        raise ManifestError(f"not valid JSON: {error}") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ManifestError(f"the member {twice!r} appears twice in one object")
    return made


def _no_constant(name: str) -> NoReturn:
    raise ManifestError(f"{name} is not JSON")


def _fail(at: str, expected: str, found: Any) -> NoReturn:
    text = repr(found)
    raise ManifestError(f"{at}: expected {expected}, found {text if len(text) <= 60 else text[:60] + '...'}")


def _integer(value: Any, at: str, least: int) -> int:
    if type(value) is not int or not least <= value <= MAX_BYTES:
        _fail(at, f"an integer of at least {least}", value)
    return value


def _string(value: Any, at: str) -> str:
    if not isinstance(value, str):
        _fail(at, "a string", value)
    return value


def _object(value: Any, at: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        _fail(at, "an object", value)
    return value


def _integers(value: Any, at: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        _fail(at, "a list of integers", value)
    return tuple(_integer(item, at, 0) for item in value)


def _list(document: dict[str, Any], name: str, read: Callable[[Any, str], _T]) -> tuple[_T, ...]:
    values = document.get(name)
    if not isinstance(values, list):
        _fail(name, "a list", values)
    return tuple(read(value, f"{name}[{number}]") for number, value in enumerate(values))


def _members(document: dict[str, Any], name: str, read: Callable[[Any, str], _T]) -> dict[str, _T]:
    values = _object(document.get(name), name)
    return {key: read(value, f"{name}.{key}") for key, value in values.items()}


def _division(value: Any, at: str, world_size: int) -> Division:
    members = _object(value, at)
    splits = members.get("splits")
    if not isinstance(splits, list):
        _fail(f"{at}.splits", "a list", splits)
    pairs = [_integers(pair, f"{at}.splits") for pair in splits]
    if any(len(pair) != 2 for pair in pairs):
        _fail(f"{at}.splits", "pairs of (dimension, mesh axis)", splits)
    ranks = _integers(members.get("ranks"), f"{at}.ranks")
    mesh = _integers(members.get("mesh"), f"{at}.mesh")
    if len(mesh) > _MAX_AXES:  # work grows with the square of their number
        _fail(f"{at}.mesh", f"at most {_MAX_AXES} axes", len(mesh))
    if ranks and max(ranks) >= world_size:
        _fail(f"{at}.ranks", f"ranks below the world size {world_size}", max(ranks))
    try:
        return Division(mesh, ranks, tuple((d, a) for d, a in pairs))
    except ValueError as error:
        raise ManifestError(f"{at}: {error}") from None


def _tensor(value: Any, at: str, divisions: tuple[Division, ...]) -> TensorEntry:
    members = _object(value, at)
    dtype = members.get("dtype")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        _fail(f"{at}.dtype", f"one of {', '.join(DTYPE_BYTES)}", dtype)
    number = _integer(members.get("division"), f"{at}.division", 0)
    if number >= len(divisions):
        _fail(f"{at}.division", f"a number below {len(divisions)}", number)
    entry = TensorEntry(_integers(members.get("shape"), f"{at}.shape"), dtype, number)
    # Without zeros: nobody can count the elements of a shape like [2**62, 2**62, 0], though there are none.
    numel = prod(size for size in entry.shape if size)
    if len(entry.shape) > _MAX_AXES or numel * DTYPE_BYTES[dtype] > MAX_BYTES:
        _fail(f"{at}.shape", "a shape that any machine can hold", list(entry.shape[:8]))
    if not divisions[number].fits(entry.shape):
        _fail(f"{at}.division", f"splits of {len(entry.shape)} dimensions", [list(s) for s in divisions[number].splits])
    return entry


def _file(value: Any, at: str) -> FileEntry:
    members = _object(value, at)
    seal = _string(members.get("seal"), f"{at}.seal")
    return FileEntry(_string(members.get("name"), f"{at}.name"), _integer(members.get("bytes"), f"{at}.bytes", 8), seal)


def _check_together(manifest: Manifest) -> None:
    """What holds between the members of a manifest."""
    if len(manifest.files) != manifest.world_size:
        _fail("files", f"one of each of {manifest.world_size} ranks", len(manifest.files))
    for rank, file in enumerate(manifest.files):
        if file.name != file_name(rank):  # anything else could lead out of the folder
            _fail(f"files[{rank}].name", repr(file_name(rank)), file.name)
    needed, there = manifest.nbytes, sum(file.nbytes for file in manifest.files)
    if needed > there:  # memory would be taken for what no file can hold
        _fail("tensors", f"at most the {there} bytes of the files", f"tensors of {needed} bytes")
    if len(manifest.rank_state) not in (0, manifest.world_size):
        _fail("rank_state", f"no entry or {manifest.world_size}", len(manifest.rank_state))
    for alias, name in manifest.aliases.items():
        if name not in manifest.tensors or alias in manifest.tensors:
            _fail(f"aliases.{alias}", "another name of a tensor", name)
    if any(name.startswith(".") or not name for name in manifest.tensors):
        _fail("tensors", "names that do not begin with a dot", "one that does")
