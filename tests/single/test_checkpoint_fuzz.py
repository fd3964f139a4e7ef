"""Checkpoints from anyone: whatever is in the files, they load what they say, or are refused by a `CheckpointError`.

B115. Damage that does not know of checksums is noticed by these. So most of the changes below make the checksums fit
again, as somebody would who means harm. Nothing else may be raised, nothing outside of the folder be opened, and no
memory be taken that the files do not fill.
"""

from __future__ import annotations

import copy
import json
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import in_fork
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.core.ckpt.boxes import Division
from fullshard.core.ckpt.manifest import file_name
from fullshard.errors import CheckpointError
from fullshard.runtime.checkpoint.files.checks import TABLE, checksum, seal_of
from fullshard.runtime.checkpoint.files.folder import MANIFEST_FILE, Checkpoint
from single.test_checkpoint_files import BOTH, COLUMNS, ROWS, write

Files = Mapping[str, bytes]


class Sound(dict[str, bytes]):
    """Files of a sound checkpoint. Hypothesis shows the arguments of a failing example."""

    def __repr__(self) -> str:
        return "Sound()"


_TRAILER_BYTES = len(', "checksum": "0123456789abcdef"}\n')


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "model/rows": torch.randn(7, 5),
        "model/columns": torch.randn(4, 31),
        "model/deep": torch.randn(2, 9, 3).bfloat16(),
        "model/number": torch.tensor(3.5, dtype=torch.float64),
        "model/flags": torch.rand(5) > 0.5,
    }


@pytest.fixture(scope="module")
def sound(tensors: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The files of a checkpoint of three ranks."""
    divisions = [ROWS, COLUMNS, BOTH, Division.whole_on(1), ROWS]
    divided = {name: (tensor, division) for (name, tensor), division in zip(tensors.items(), divisions, strict=True)}
    path = write(tmp_path_factory.mktemp("sound") / "c", divided)
    return Sound((file.name, file.read_bytes()) for file in path.iterdir())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("fuzz") / "step-1"
    made.mkdir()
    return made


def put(folder: Path, files: Files) -> None:
    for name, data in files.items():
        (folder / name).write_bytes(data)


def read_all(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor by each of its names, every file; what is read must be what the manifest says."""
    read = {}
    with Checkpoint(path) as checkpoint:
        for name in (*checkpoint.manifest.tensors, *checkpoint.manifest.aliases):
            read[name] = checkpoint.tensor(name)
            assert tuple(read[name].shape) == checkpoint.entry(name).shape
        for rank in range(checkpoint.manifest.world_size):
            checkpoint.check_file(rank)
    return read


class Watch:
    """Notes the paths of files that anything opens. An audit hook cannot be taken away again, so there is one."""

    def __init__(self) -> None:
        self._opened: list[str] | None = None
        self._hooked = False

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._opened is not None and event == "open" and not isinstance(arguments[0], int):
            path = os.fspath(arguments[0])
            # A file that is open already is opened another way by its descriptor: what counts is which file that is.
            self._opened.append(str(Path(path).readlink()) if path.startswith("/proc/self/fd/") else path)

    @contextmanager
    def looking(self) -> Iterator[list[str]]:
        if not self._hooked:
            self._hooked = True
            sys.addaudithook(self._note)
        self._opened = found = []
        try:
            yield found
        finally:
            self._opened = None


WATCH = Watch()


def try_reading(folder: Path, files: Files) -> dict[str, torch.Tensor] | None:
    """What is read; None if it was refused. Anything else fails the test."""
    put(folder, files)
    with WATCH.looking() as opened:
        try:
            read = read_all(folder)
        except CheckpointError:
            read = None
    assert {str(Path(name).parent) for name in opened} <= {str(folder)}
    return read


# -- damage ------------------------------------------------------------------------------------------------------------


@st.composite
def damages(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """Bytes changed, put in, left out or repeated somewhere."""
    place, count = draw(st.floats(0, 1)), draw(st.integers(1, 40))
    new = draw(st.binary(min_size=1, max_size=count))
    kind = draw(st.sampled_from(["change", "insert", "delete", "repeat", "cut"]))

    def damage(data: bytes) -> bytes:
        at = int(place * len(data))
        return {
            "change": data[:at] + new + data[at + len(new) :],
            "insert": data[:at] + new + data[at:],
            "delete": data[:at] + data[at + count :],
            "repeat": data[:at] + data[max(at - count, 0) :],
            "cut": data[:at],
        }[kind]

    return damage


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 3), damages())
def test_damaged_files_load_the_same_or_not_at_all(
    sound: Files, tensors: dict[str, torch.Tensor], folder: Path, number: int, damage: Callable[[bytes], bytes]
) -> None:
    name = sorted(sound)[number]
    read = try_reading(folder, {**sound, name: damage(sound[name])})
    if read is not None:
        assert all(torch.equal(read[key], tensor) for key, tensor in tensors.items())


# -- changes by somebody who makes the checksums fit again -------------------------------------------------------------


def sealed(text: str) -> bytes:
    """A manifest's file, of its JSON without the checksum."""
    body = text.encode("utf-8", "surrogatepass").rstrip()[:-1]
    return body + f', "checksum": "{checksum(body):016x}"}}\n'.encode()


def document_of(files: Files) -> Any:
    return json.loads(files[MANIFEST_FILE][:-_TRAILER_BYTES] + b"}")


def header_of(data: bytes) -> Any:
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def with_header(files: Files, rank: int, header: str, length: int | None = None) -> Files:
    """The same with another header in a rank's file; seal and size in the manifest fit it."""
    data = files[file_name(rank)]
    old = 8 + int.from_bytes(data[:8], "little")
    text = header.encode("utf-8", "surrogatepass")
    made = (len(text) if length is None else length).to_bytes(8, "little") + text
    start, stop = (old + offset for offset in header_of(data)[TABLE]["data_offsets"])
    document = document_of(files)
    entry = document["files"][rank]
    entry["bytes"], entry["seal"] = len(made) + len(data) - old, seal_of(made, data[start:stop])
    return {**files, file_name(rank): made + data[old:], MANIFEST_FILE: sealed(json.dumps(document))}


ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 255, 2**31, 2**53, 2**62, 2**63, 2**64, 10**40, 0.5, 1e300),
    *("", ".", "..", "/", "../../etc/passwd", "/etc/passwd", "a/../b", "rank-00000.safetensors", ".checksums"),
    *("\ud800", "\0", "x" * 5000, "F32", "F64", "BOOL", "U8", "C64", "model/rows"),
    *([], {}, [[]], [0, 0], [1, 0], [0, 1, 2], [2**62, 2**62], [2**62, 0, 2**62], [1] * 70, [0] * 70, [[0, 0]] * 3),
    *([2**31, 2**31], [3, 1], [1, 3], {"shape": [], "dtype": "F32", "division": 0}, {"a": {"b": []}}),
]


def paths(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in members:
        yield (*before, key)
        yield from paths(member, (*before, key))


def change(document: Any, path: tuple[Any, ...], how: str, odd: Any) -> None:
    """Change one place: its value, its name, leave it out, or have it twice."""
    parent = document
    for key in path[:-1]:
        parent = parent[key]
    key = path[-1]
    if how == "drop":
        del parent[key]
    elif how == "repeat" and isinstance(parent, list):
        parent.append(parent[key])
    elif how == "rename" and isinstance(parent, dict):
        parent[odd if isinstance(odd, str) else str(odd)] = parent.pop(key)
    elif how == "more" and type(parent[key]) is int:
        parent[key] += 1
    else:
        parent[key] = copy.deepcopy(odd)


CHANGES = st.lists(
    st.tuples(
        st.integers(0, 10**6), st.sampled_from(["set", "drop", "repeat", "rename", "more"]), st.sampled_from(ODD)
    ),
    min_size=1,
    max_size=3,
)


def changed(document: Any, changes: list[tuple[int, str, Any]]) -> str:
    for number, how, odd in changes:
        places = list(paths(document))
        if places:
            change(document, places[number % len(places)], how, odd)
    return json.dumps(document)


@settings(max_examples=200, deadline=None)
@given(CHANGES)
def test_any_manifest_loads_what_it_says_or_is_refused(sound: Files, folder: Path, changes: Any) -> None:
    try_reading(folder, {**sound, MANIFEST_FILE: sealed(changed(document_of(sound), changes))})


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2), CHANGES)
def test_any_header_loads_what_it_says_or_is_refused(sound: Files, folder: Path, rank: int, changes: Any) -> None:
    header = changed(header_of(sound[file_name(rank)]), changes)
    try_reading(folder, with_header(sound, rank, header))


# -- bombs -------------------------------------------------------------------------------------------------------------


def manifest_bomb(sound: Files, **members: Any) -> Files:
    return {**sound, MANIFEST_FILE: sealed(json.dumps({**document_of(sound), **members}))}


def text_bomb(sound: Files, text: str) -> Files:
    """A manifest with one more member, as text."""
    return {**sound, MANIFEST_FILE: sealed(json.dumps(document_of(sound))[:-1] + f", {text}}}")}


def of_shape(sound: Files, shape: list[int], nbytes: int | None = None) -> Files:
    """A manifest with one more tensor; files that claim to be as large."""
    document = document_of(sound)
    document["tensors"] = {"big": {"shape": shape, "dtype": "F32", "division": 0}, **document["tensors"]}
    if nbytes is not None:
        for file in document["files"]:
            file["bytes"] = nbytes
    return {**sound, MANIFEST_FILE: sealed(json.dumps(document))}


def long_mesh(sound: Files, axes: int) -> Files:
    document = document_of(sound)
    document["divisions"][0] = {"mesh": [1] * axes, "ranks": [0], "splits": [[0, axis] for axis in range(axes)]}
    return {**sound, MANIFEST_FILE: sealed(json.dumps(document))}


def moved(sound: Files, name: str, by: tuple[int, int]) -> Files:
    """One tensor of the first file begins and ends elsewhere."""
    header = header_of(sound[file_name(0)])
    header[name]["data_offsets"] = [place + more for place, more in zip(header[name]["data_offsets"], by, strict=True)]
    return with_header(sound, 0, json.dumps(header))


BOMBS: dict[str, Callable[[Files], Files]] = {
    "deep lists": lambda s: text_bomb(s, '"x": ' + "[" * 100_000 + "]" * 100_000),
    "deep objects": lambda s: text_bomb(s, '"x": ' + '{"a":' * 100_000 + "0" + "}" * 100_000),
    "deep lists in a header": lambda s: with_header(s, 0, "[" * 100_000),
    "long number": lambda s: text_bomb(s, '"x": ' + "9" * 1_000_000),
    "large number in a header": lambda s: with_header(s, 0, '{"a":{"dtype":"F32","shape":[' + "9" * 4000 + "]}}"),
    "repeated member": lambda s: text_bomb(s, '"step": 3'),
    "not a number": lambda s: text_bomb(s, '"x": NaN'),
    "infinity": lambda s: manifest_bomb(s, step=float("inf")),
    "other encoding": lambda s: {**s, MANIFEST_FILE: json.dumps(document_of(s)).encode("utf-16")},
    "header of 2^63 bytes": lambda s: with_header(s, 0, "{}", 2**63),
    "header longer than the file": lambda s: with_header(s, 0, "{}", 90_000_000),
    "header of nothing": lambda s: with_header(s, 0, "", 0),
    "overlapping tensors": lambda s: moved(s, "model/rows", (-4, -4)),
    "a gap between tensors": lambda s: moved(s, "model/flags", (1, 1)),
    "a tensor that ends before it begins": lambda s: moved(s, "model/rows", (100, -100)),
    "a tensor longer than its shape": lambda s: moved(s, "model/rows", (0, 4)),
    "tensor of 2^60 bytes": lambda s: of_shape(s, [2**58]),
    "tensor and files of 2^60 bytes": lambda s: of_shape(s, [2**58], 2**61),
    "tensor of 4 GiB": lambda s: of_shape(s, [2**30], 2**33),
    "sizes that overflow": lambda s: of_shape(s, [2**62, 2**62, 0]),
    "many dimensions": lambda s: of_shape(s, [1] * 1000),
    "more files than ranks": lambda s: manifest_bomb(s, world_size=2**40),
    "mesh of many axes": lambda s: long_mesh(s, 100_000),
    "version from the future": lambda s: manifest_bomb(s, version=10**9),
}


@pytest.mark.timeout(60)
def test_bombs_are_refused_without_taking_memory_or_time(sound: Files, folder: Path) -> None:
    """In a process that has 300 MiB more than it needs, of which the buffers take 9."""

    def act() -> str:
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
        limit = pages * resource.getpagesize() + (300 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
        wrong = []
        for name, bomb in BOMBS.items():
            (folder.parent / "bomb").write_text(name)
            put(folder, bomb(sound))
            try:
                read_all(folder)
                wrong.append(f"{name}: read")
            except CheckpointError:
                pass
            except BaseException as error:  # noqa: BLE001 - MemoryError, too
                wrong.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
        return "\n".join(wrong)

    ended = in_fork(act)
    assert (ended.code, ended.text) == (0, ""), (folder.parent / "bomb").read_text()


# -- what is no file ---------------------------------------------------------------------------------------------------


def link(path: Path) -> None:
    path.rename(path.parent.parent / "outside")
    path.symlink_to(path.parent.parent / "outside")


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def node(path: Path) -> None:
    path.unlink()
    os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("make", [link, device, node, pipe, directory, Path.unlink], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", [MANIFEST_FILE, file_name(1)])
def test_only_regular_files_are_read(sound: Files, tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    folder = tmp_path / "step-1"
    folder.mkdir()
    put(folder, sound)
    try:
        make(folder / name)
    except PermissionError:
        pytest.skip("needs the right to make device nodes")
    with pytest.raises(CheckpointError, match=name):
        read_all(folder)


@pytest.mark.parametrize("name", ["../rank-00001.safetensors", "/etc/passwd", "rank-00002.safetensors", "rank-1", ""])
def test_names_of_files_lead_nowhere_else(sound: Files, folder: Path, name: str) -> None:
    document = document_of(sound)
    document["files"][1]["name"] = name
    put(folder, {**sound, MANIFEST_FILE: sealed(json.dumps(document))})
    with WATCH.looking() as opened, pytest.raises(CheckpointError, match=r"files\[1\]\.name: expected 'rank-00001"):
        read_all(folder)
    assert opened == [str(folder / MANIFEST_FILE)]
