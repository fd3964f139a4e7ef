"""Files of checkpoints: written and read in ranges, verified, and what the library safetensors reads and writes."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from fullshard.core.ckpt.boxes import Box, Division
from fullshard.core.ckpt.manifest import Manifest, TensorEntry, file_name
from fullshard.errors import CheckpointDamagedError, CheckpointError
from fullshard.runtime.checkpoint.collector import no_collection
from fullshard.runtime.checkpoint.files import folder as folder_module
from fullshard.runtime.checkpoint.files import reading as reading_module
from fullshard.runtime.checkpoint.files import stretches as stretches_module
from fullshard.runtime.checkpoint.files.checks import BLOCK_BYTES
from fullshard.runtime.checkpoint.files.folder import MANIFEST_FILE, Checkpoint, manifest_bytes
from fullshard.runtime.checkpoint.files.memory import dtype_name, torch_dtype
from fullshard.runtime.checkpoint.files.reading import Buffer, Portion, TensorFile
from fullshard.runtime.checkpoint.files.stretches import Stretch
from fullshard.runtime.checkpoint.files.writing import piece_of, write_file

ROWS = Division((3,), (0, 1, 2), ((0, 0),))
COLUMNS = Division((3,), (2, 0, 1), ((1, 0),))
BOTH = Division((3, 1), (0, 1, 2), ((1, 1), (1, 0)))


def write(path: Path, tensors: dict[str, tuple[torch.Tensor, Division]], ranks: int = 3) -> Path:
    """A checkpoint of whole tensors, as its ranks would write it."""
    divisions = list({id(d): d for _, d in tensors.values()}.values())
    entries = {
        name: TensorEntry(tuple(tensor.shape), dtype_name(tensor.dtype), divisions.index(division))
        for name, (tensor, division) in tensors.items()
    }
    manifest = Manifest(7, ranks, tuple(divisions), entries, {"other": next(iter(tensors))}, (), {"note": {"a": [1]}})
    path.mkdir()
    files = []
    for rank in range(ranks):
        pieces = [
            piece_of(
                name, tensors[name][0][box.within(Box.whole(entries[name].shape))] if box.sizes else tensors[name][0]
            )
            for name, box in manifest.pieces(rank).items()
        ]
        files.append(write_file(path / file_name(rank), pieces))
    manifest = replace(manifest, files=tuple(files))
    (path / MANIFEST_FILE).write_bytes(manifest_bytes(manifest))
    return path


def menagerie() -> dict[str, tuple[torch.Tensor, Division]]:
    torch.manual_seed(0)
    return {
        "model/rows": (torch.randn(7, 5), ROWS),
        "model/columns": (torch.randn(4, 301), COLUMNS),
        "model/deep": (torch.randn(2, 9, 3).bfloat16(), BOTH),
        "model/bytes": (torch.randint(0, 255, (13,), dtype=torch.uint8), ROWS),
        "model/flags": (torch.rand(5) > 0.5, ROWS),
        "model/number": (torch.tensor(3.5, dtype=torch.float64), Division.whole_on(1)),
        "model/nothing": (torch.empty(0, 4), ROWS),
        "model/large": (torch.randn(3 * BLOCK_BYTES // 4 + 1, 2), ROWS),
    }


def test_whole_tensors_are_those_that_were_written(tmp_path: Path) -> None:
    tensors = menagerie()
    with Checkpoint(write(tmp_path / "c", tensors)) as checkpoint:
        for name, (tensor, _) in tensors.items():
            assert torch.equal(checkpoint.tensor(name), tensor)
        assert torch.equal(checkpoint.tensor("other"), tensors["model/rows"][0])
        for rank in range(3):
            checkpoint.check_file(rank)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_box_of_any_division_is_read(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    """Also in portions smaller than a row, and past the cache of the system."""
    monkeypatch.setattr(reading_module, "_DIRECT_BYTES", 1)
    monkeypatch.setattr(stretches_module, "STRETCH_BYTES", data.draw(st.sampled_from([1, 4096, 1 << 20])))
    monkeypatch.setattr(folder_module, "PORTION_BYTES", data.draw(st.sampled_from([8, 24, 100, 1 << 20])))
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    dims = data.draw(st.lists(st.integers(0, len(shape) - 1), max_size=2))
    division = Division((2, 2), (1, 3, 0, 2), tuple((dim, axis) for axis, dim in enumerate(dims)))
    offsets = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    box = Box(offsets, tuple(data.draw(st.integers(1, size - a)) for size, a in zip(shape, offsets, strict=True)))
    tensor = torch.arange(prod(shape)).view(shape).double()
    first = (torch.randn(8).double(), Division((4,), (0, 1, 2, 3), ((0, 0),)))  # so that the other begins within a page
    path = write(tmp_path_factory.mktemp("c") / "c", {"first": first, "t": (tensor, division)}, ranks=4)
    out = torch.full(box.sizes, -1.0, dtype=data.draw(st.sampled_from([torch.float64, torch.float32])))
    with Checkpoint(path) as checkpoint:
        if data.draw(st.booleans()):
            checkpoint.bypass_cache()
        checkpoint.read("t", box, out)
    assert torch.equal(out, tensor[box.within(Box.whole(shape))].to(out.dtype))


def three_portions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, torch.Tensor]:
    """A checkpoint of one file with a tensor that is read in three portions."""
    monkeypatch.setattr(folder_module, "PORTION_BYTES", 2 * BLOCK_BYTES)
    monkeypatch.setattr(stretches_module, "STRETCH_BYTES", 2 * BLOCK_BYTES)
    tensor = torch.randn(6 * BLOCK_BYTES // 4)
    return write(tmp_path / "c", {"t": (tensor, Division.whole_on(0))}, ranks=1), tensor


def test_the_next_portion_is_fetched_while_one_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, tensor = three_portions(tmp_path, monkeypatch)
    begun = [threading.Event() for _ in range(3)]
    fetch, verify = TensorFile.fetch, TensorFile.verify

    def fetching(self: TensorFile, begin: int, end: int, buffer: Buffer) -> int:
        begun[begin // (2 * BLOCK_BYTES)].set()
        return fetch(self, begin, end, buffer)

    def verifying(self: TensorFile, portion: Portion, data: memoryview) -> None:
        following = portion.begin // (2 * BLOCK_BYTES) + 1
        assert following == 3 or begun[following].wait(60), "nothing is read ahead"
        verify(self, portion, data)

    monkeypatch.setattr(TensorFile, "fetch", fetching)
    monkeypatch.setattr(TensorFile, "verify", verifying)
    with Checkpoint(path) as checkpoint:
        assert torch.equal(checkpoint.tensor("t"), tensor)


def test_what_was_read_ahead_before_an_error_does_not_reach_who_reads_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes with the second portion, while the third one is on its way to the buffer of the first."""
    path, tensor = three_portions(tmp_path, monkeypatch)
    slow, fetch, verify = threading.Event(), TensorFile.fetch, TensorFile.verify

    def fetching(self: TensorFile, begin: int, end: int, buffer: Buffer) -> int:
        if begin > 4 * BLOCK_BYTES and not slow.is_set():
            slow.set()
            time.sleep(0.2)
        return fetch(self, begin, end, buffer)

    def verifying(self: TensorFile, portion: Portion, data: memoryview) -> None:
        if portion.begin > 2 * BLOCK_BYTES and broken:
            broken.clear()
            raise CheckpointDamagedError("as if")
        verify(self, portion, data)

    monkeypatch.setattr(TensorFile, "fetch", fetching)
    monkeypatch.setattr(TensorFile, "verify", verifying)
    broken, out = [1], torch.zeros(2 * BLOCK_BYTES // 4)
    with Checkpoint(path, verify=False) as checkpoint:
        with pytest.raises(CheckpointDamagedError, match="as if"):
            checkpoint.tensor("t")
        assert slow.is_set()
        checkpoint.read("t", Box((2 * BLOCK_BYTES // 4,), (out.numel(),)), out)
        time.sleep(0.3)
        assert torch.equal(out, tensor[out.numel() : 2 * out.numel()])
        assert not [thread for thread in threading.enumerate() if thread.name == "fullshard-read"]


def test_damage_costs_a_file_only_its_portion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = three_portions(tmp_path, monkeypatch)
    flip(path / file_name(0), 4096 + 1000)
    with Checkpoint(path) as checkpoint:
        found = checkpoint.examine(0)
    assert "bytes 0 to 262144" in found.problems[0]
    assert (len(found.problems), found.nbytes) == (1, 4 * BLOCK_BYTES)


def test_parts_that_overlap_are_read_at_once(tmp_path: Path) -> None:
    tensor = torch.randn(1000, 700)
    path = write(tmp_path / "c", {"t": (tensor, ROWS)})
    boxes = [Box((0, 0), (1000, 700)), Box((5, 3), (2, 7)), Box((300, 0), (60, 700)), Box((400, 699), (1, 1))]
    outs = [torch.full(box.sizes, -1.0) for box in boxes]
    with Checkpoint(path) as checkpoint:
        checkpoint.read_all([("t", box, out) for box, out in zip(boxes, outs, strict=True)])
    for box, out in zip(boxes, outs, strict=True):
        assert torch.equal(out, tensor[box.within(Box.whole(tensor.shape))])


@pytest.mark.parametrize("direct", [True, False])
def test_more_files_than_are_kept_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    """The one that is closed is never the one that is being read ahead."""
    fetch = TensorFile.fetch
    monkeypatch.setattr(TensorFile, "fetch", lambda *arguments: (time.sleep(0.01), fetch(*arguments))[1])
    ranks = 3 * folder_module._OPEN_FILES + 1
    division = Division((ranks,), tuple(range(ranks)), ((0, 0),))
    tensors = {f"t{i}": (torch.randn(ranks * 3, 1000), division) for i in range(2)}
    with Checkpoint(write(tmp_path / "c", tensors, ranks)) as checkpoint:
        if direct:
            checkpoint.bypass_cache()
        outs = {name: torch.zeros_like(tensor) for name, (tensor, _) in tensors.items()}
        checkpoint.read_all([(name, Box.whole(out.shape), out) for name, out in outs.items()])
    for name, (tensor, _) in tensors.items():
        assert torch.equal(outs[name], tensor)


@pytest.mark.parametrize("fault", ["error", "early end"])
def test_a_stretch_that_cannot_be_read_at_once_is_read_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """What cannot be read may be a gap, or another tensor; also when nothing is verified."""
    tensors = {name: (torch.randn(BLOCK_BYTES // 4), Division.whole_on(0)) for name in ("a", "b", "c")}
    path = write(tmp_path / "c", tensors, ranks=1)
    monkeypatch.setattr(stretches_module, "_GAP_BYTES", BLOCK_BYTES)  # so that all three are in one
    read, bad = os.preadv, range(4096 + BLOCK_BYTES, 4096 + 2 * BLOCK_BYTES)

    def reading(file: int, views: list[memoryview], start: int) -> int:
        if start < bad.stop and start + len(views[0]) > bad.start:
            if fault == "error":
                raise OSError(5, "Input/output error")
            return 0 if start >= bad.start else read(file, [views[0][: bad.start - start]], start)
        return read(file, views, start)

    with Checkpoint(path, verify=False) as checkpoint:
        checkpoint.bypass_cache()
        checkpoint._open(0)
        monkeypatch.setattr(os, "preadv", reading)
        outs = {name: torch.zeros(BLOCK_BYTES // 4) for name in tensors}
        wanted = [(name, Box.whole(out.shape), out) for name, out in outs.items()]
        checkpoint.read_all([wanted[0], wanted[2]])
        with pytest.raises(CheckpointError, match=r"Input/output error|ended at byte"):
            checkpoint.read_all(wanted)
    assert torch.equal(outs["a"], tensors["a"][0])
    assert torch.equal(outs["c"], tensors["c"][0])


def test_the_largest_portion_fits_the_buffer_wherever_it_begins(tmp_path: Path) -> None:
    """A portion begins and ends within blocks, and its file's data within a page."""
    portion = reading_module.PORTION_BYTES // 4
    tensor = torch.randn(portion + BLOCK_BYTES)
    first = torch.zeros(100)  # so that the tensor begins within a page
    path = write(tmp_path / "c", {"first": (first, ROWS), "t": (tensor, Division.whole_on(0))})
    out = torch.zeros(portion)
    begin = BLOCK_BYTES // 4 - 1
    with Checkpoint(path) as checkpoint:
        checkpoint.bypass_cache()
        checkpoint.read("t", Box((begin,), (portion,)), out)
    assert torch.equal(out, tensor[begin : begin + portion])


def test_views_that_torch_has_not_computed_yet_are_written_as_their_values(tmp_path: Path) -> None:
    tensor = torch.complex(torch.randn(3), torch.randn(3))
    pieces = [piece_of("conjugate", tensor.conj()), piece_of("negative", tensor.conj().imag)]
    write_file(tmp_path / "f", pieces)
    with safe_open(tmp_path / "f", "pt") as file:
        assert torch.equal(file.get_tensor("conjugate"), tensor.conj().resolve_conj())
        assert torch.equal(file.get_tensor("negative"), -tensor.imag)


def test_elements_of_other_programs_may_begin_anywhere(tmp_path: Path) -> None:
    header = (
        b'{"odd":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"t":{"dtype":"F32","shape":[2],"data_offsets":[3,11]}}'
    )
    data = len(header).to_bytes(8, "little") + header + b"abc" + torch.tensor([1.5, -2.0]).numpy().tobytes()
    (tmp_path / "theirs").write_bytes(data)
    file = TensorFile(tmp_path / "theirs", None)
    portion = file.portion("t", 0, 8)
    stretch = Stretch(file, portion, None)
    stretch.fetch(Buffer())
    assert stretch.data(portion).tolist() == [1.5, -2.0]
    file.close()


def test_the_library_reads_our_files_and_we_read_its(tmp_path: Path) -> None:
    tensors = menagerie()
    path = write(tmp_path / "c", tensors)
    with safe_open(path / file_name(0), "pt") as file:
        assert torch.equal(file.get_tensor("model/rows"), tensors["model/rows"][0][:3])
        assert torch.equal(file.get_tensor("model/columns"), tensors["model/columns"][0][:, 101:202])
        assert ".checksums" in file.keys()  # noqa: SIM118  it has no __iter__
    save_file({"a": torch.arange(6).view(2, 3), "b": torch.tensor(2.0)}, tmp_path / "theirs", metadata={"format": "pt"})
    theirs = TensorFile(tmp_path / "theirs", None)
    assert {name: span.shape for name, span in theirs.spans.items()} == {"a": (2, 3), "b": ()}
    portion = theirs.portion("a", 8, 24)
    stretch = Stretch(theirs, portion, None)
    stretch.fetch(Buffer())
    assert stretch.data(portion).tolist() == [1, 2]
    theirs.close()


def test_tensors_begin_at_multiples_of_their_elements(tmp_path: Path) -> None:
    odd = {f"t{i}": torch.zeros(i, dtype=d) for i, d in enumerate([torch.int8, torch.double, torch.half] * 3, start=1)}
    write_file(tmp_path / "f", [piece_of(name, tensor) for name, tensor in odd.items()])
    file = TensorFile(tmp_path / "f", None)
    assert all(span.start % torch_dtype(span.dtype).itemsize == 0 for span in file.spans.values())
    assert min(span.start for span in file.spans.values()) % 4096 == 0
    file.close()


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 4]))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda f: flip(f, 4096 + 300_000), r"rank-00001.* tensor 'model/large' is damaged: bytes 262144 to 524288"),
        (lambda f: flip(f, -1), r"rank-00001.*the seal does not fit"),
        (lambda f: flip(f, 12), r"rank-00001.* (the seal does not fit|not valid JSON|header)"),
        (cut, r"rank-00001.* bytes, but the manifest says"),
        (Path.unlink, r"rank-00001.safetensors is missing"),
    ],
    ids=["data", "checksums", "header", "cut", "missing"],
)
def test_damage_is_named(tmp_path: Path, harm: Callable[[Path], None], message: str) -> None:
    path = write(tmp_path / "c", {"model/large": menagerie()["model/large"]})
    harm(path / file_name(1))
    with Checkpoint(path) as checkpoint:
        checkpoint.check_file(0)
        with pytest.raises(CheckpointDamagedError, match=message):
            checkpoint.check_file(1)
        with pytest.raises(CheckpointDamagedError, match=message):
            checkpoint.tensor("model/large")


@pytest.mark.parametrize("at", [3, 200, -5])
def test_a_flipped_bit_in_the_manifest_is_noticed(tmp_path: Path, at: int) -> None:
    path = write(tmp_path / "c", menagerie())
    flip(path / MANIFEST_FILE, at)
    with pytest.raises(CheckpointDamagedError, match=r"manifest\.json"):
        Checkpoint(path)


def test_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    """B115."""
    path = write(tmp_path / "c", menagerie())
    (path / file_name(0)).rename(tmp_path / "elsewhere")
    (path / file_name(0)).symlink_to(tmp_path / "elsewhere")
    (path / file_name(1)).unlink()
    os.mkfifo(path / file_name(1))
    with Checkpoint(path) as checkpoint:
        for rank, message in enumerate(["symbolic link", "not a regular file"]):
            with pytest.raises(CheckpointError, match=message):
                checkpoint.check_file(rank)


def test_files_are_written_new_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("mine")
    with pytest.raises(CheckpointError, match="cannot write"):
        write_file(tmp_path / "f", [])
    with pytest.raises(CheckpointError, match="No such file"):
        write_file(tmp_path / "nowhere" / "f", [])
    assert (tmp_path / "f").read_text() == "mine"


def test_collection_comes_back_also_after_an_error() -> None:
    @no_collection()
    def fail() -> None:
        assert not gc.isenabled()
        raise KeyError

    with pytest.raises(KeyError), no_collection():
        fail()
    assert gc.isenabled()
