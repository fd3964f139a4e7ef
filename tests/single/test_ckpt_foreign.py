"""Checkpoints of other programs: read as data, whoever wrote them, any part of any tensor through a small buffer."""

from __future__ import annotations

import collections
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict

from fullshard.core.ckpt.boxes import Box
from fullshard.errors import CheckpointDamagedError, CheckpointError
from fullshard.tools.ckpt.foreign.dcp import METADATA, open_dcp
from fullshard.tools.ckpt.foreign.deepspeed import read_deepspeed
from fullshard.tools.ckpt.foreign.hugging_face import INDEX, read_safetensors
from fullshard.tools.ckpt.foreign.pickles import UnsafePickleError, as_record, read_pickle
from fullshard.tools.ckpt.foreign.state_dicts import read_torch
from fullshard.tools.ckpt.foreign.stored import Folder, InFile, InMemory, Joined, Part, StoredTensor
from fullshard.tools.ckpt.foreign.torch_files import torch_file
from fullshard.tools.ckpt.pieces import Stream, flat_boxes
from fullshard.tools.ckpt.sources import Readable, Source

DATA = Path(__file__).parents[1] / "data"
BUFFER = torch.empty(64, dtype=torch.uint8)  # so small that nothing of interest fits into it

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def read(tensor: Readable, box: Box | None = None) -> torch.Tensor:
    box = box or Box.whole(tensor.shape)
    out = torch.empty(box.sizes, dtype=tensor.dtype)
    tensor.read(box, out, BUFFER)
    return out


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equal bit by bit."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (first, second)))


def state_dict() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(7, 5))
    return {
        "weight": weight,
        "tied": weight,
        "transposed": torch.randn(6, 9).t(),
        "slice": torch.randn(3, 4, 5).to(torch.bfloat16)[:, 1:3],
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "flags": torch.tensor([True, False, True]),
        "fp8": torch.randn(9).to(torch.float8_e4m3fn),
        "unsigned": torch.arange(5).to(torch.uint16),
        "complex": torch.randn(3, dtype=torch.complex64),
    }


# -- parts of stored tensors


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_part_of_a_stored_tensor_is_read_through_a_buffer_of_any_size(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 6), max_size=4))
    order = data.draw(st.permutations(range(len(sizes))))
    whole = torch.arange(1500)[3 : 3 + torch.Size(sizes).numel()].view(sizes).permute(tuple(order))
    stored = StoredTensor(InMemory(torch.arange(1500)), tuple(whole.shape), whole.stride(), 3).checked("it")
    starts = [data.draw(st.integers(0, size - 1)) for size in whole.shape]
    counts = [data.draw(st.integers(1, size - start)) for size, start in zip(whole.shape, starts, strict=True)]
    out = torch.empty(counts, dtype=torch.int64)
    stored.read(
        Box(tuple(starts), tuple(counts)), out, torch.empty(8 * data.draw(st.integers(1, 9)), dtype=torch.uint8)
    )
    slices = tuple(slice(start, start + count) for start, count in zip(starts, counts, strict=True))
    assert torch.equal(out, whole[slices])


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
@settings(max_examples=60, deadline=None)
def test_boxes_of_a_range_of_elements_hold_just_these_in_order(sizes: list[int], data: st.DataObject) -> None:
    whole = torch.arange(torch.Size(sizes).numel()).view(sizes)
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    parts = [whole[box.within(Box.whole(sizes))].flatten() for box in flat_boxes(tuple(sizes), start, stop)]
    assert torch.equal(torch.cat([torch.empty(0, dtype=torch.int64), *parts]), torch.arange(start, stop))
    assert len(parts) <= max(2 * len(sizes), 1)


def test_joined_elements_are_read_across_their_seams() -> None:
    numbers = torch.arange(20)
    joined = Joined([Part(InMemory(numbers), 2, 3), Part(InMemory(numbers), 0, 0), Part(InMemory(numbers), 10, 5)])
    assert joined.numel == 8
    for start in range(8):
        for stop in range(start, 9):
            out = torch.empty(stop - start, dtype=torch.int64)
            joined.read(start, out)
            assert out.tolist() == [2, 3, 4, 10, 11, 12, 13, 14][start:stop]


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [
        ((5,), (1,), 6),
        ((2, 5), (5, 1), 1),
        ((5,), (1,), -1),
        ((1 << 40,), (0,), 0),
        ((2, 2), (1, 1), 0),
        ((3,), (1, 1), 0),
        ((3,), ("1",), 0),
    ],
)
def test_a_tensor_that_its_elements_do_not_hold_is_refused(shape: Any, strides: Any, offset: int) -> None:
    with pytest.raises(CheckpointDamagedError, match="stored elements do not hold"):
        StoredTensor(InMemory(torch.arange(10)), shape, strides, offset).checked("it")


# -- torch.save


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_files_of_torch_save_are_read_bit_by_bit(tmp_path: Path, zipped: bool) -> None:
    expected = state_dict()
    if not zipped:
        del expected["fp8"], expected["unsigned"]  # torch's old form does not have them
    torch.save(expected, tmp_path / "model.pt", _use_new_zipfile_serialization=zipped)
    with read_torch(tmp_path / "model.pt") as source:
        assert source.aliases == {"tied": "weight"}
        for name, tensor in expected.items():
            stored = source.tensors[source.aliases.get(name, name)]
            assert same(read(stored), tensor.detach()), name
            if zipped:
                assert isinstance(stored, StoredTensor)
                assert isinstance(stored.elements, InFile), "it was read as a whole"


def test_the_state_dict_in_what_a_training_program_saved_is_found(tmp_path: Path) -> None:
    inner = {"w": torch.ones(2)}
    path = tmp_path / "checkpoint.pt"
    torch.save({"epoch": 3, "model": inner, "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}}}, path)
    with read_torch(path) as source:
        assert list(source.tensors) == ["w"]
    torch.save({"generator": inner, "critic": {"v": torch.ones(3)}}, path)
    with pytest.raises(CheckpointError, match="generator, critic: say which with --member"):
        read_torch(path)
    with read_torch(path, "critic") as source:
        assert list(source.tensors) == ["v"]
    with pytest.raises(CheckpointError, match=r"no state dict under 'critic\.v'"):
        read_torch(path, "critic.v")


def test_lists_that_share_lists_do_not_unfold() -> None:
    """B115: forty levels of a list that holds the one below twice are 10^12 values."""

    def read(value: Any) -> Any:
        return read_pickle(pickle.dumps(value), {}.get, lambda identity: identity, "it")

    value: list[Any] = []
    for _ in range(40):
        value = [value, value]
    with pytest.raises(CheckpointDamagedError, match="unfolds to more than"):
        read(value)
    shared = ["x"] * 100
    assert read([shared] * 100) == [shared] * 100


def test_entries_that_are_no_tensors_are_named(tmp_path: Path) -> None:
    torch.save(collections.OrderedDict(w=torch.ones(2), _extra_state={"a": 1}), tmp_path / "model.pt")
    with read_torch(tmp_path / "model.pt") as source:
        assert "_extra_state" in source.notes[0]


# -- torch.distributed.checkpoint


def save_dcp(path: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optimizer_state, "step": 5, "note": ["a", None]}
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return state


def test_folders_of_torch_distributed_checkpoint_are_read_bit_by_bit(tmp_path: Path) -> None:
    state = save_dcp(tmp_path / "dcp")
    found = open_dcp(tmp_path / "dcp")
    assert same(read(found.tensors["model.1.weight"]), state["model"]["1.weight"])
    assert same(read(found.tensors["optim.state.0.bias.exp_avg"]), state["optim"]["state"]["0.bias"]["exp_avg"])
    assert found.paths["optim.state.0.bias.exp_avg"] == ("optim", "state", "0.bias", "exp_avg")
    assert found.value("step") == 5
    assert found.value("note") == ["a", None]
    assert found.value("optim.param_groups.0.betas") == (0.9, 0.999)
    assert same(
        read(found.tensors["model.0.weight"], Box((1, 1), (2, 2))), state["model"]["0.weight"][1:3, 1:3].contiguous()
    )


def test_a_folder_without_metadata_is_incomplete(tmp_path: Path) -> None:
    with pytest.raises(CheckpointDamagedError, match=r"no file \.metadata"):
        open_dcp(tmp_path)


def edit_metadata(path: Path, change: Callable[[Any], None]) -> None:
    """Change torch's own metadata, and write it as torch does."""
    metadata = FileSystemReader(path).read_metadata()
    change(metadata)
    (path / METADATA).write_bytes(pickle.dumps(metadata))


def _move(metadata: Any, **changed: Any) -> None:
    index = next(index for index in metadata.storage_data if index.fqn == "model.0.weight")
    metadata.storage_data[index] = replace(metadata.storage_data[index], **changed)


def _resize(metadata: Any) -> None:
    metadata.state_dict_metadata["model.0.weight"].size = torch.Size([5, 3])


def _overlap(metadata: Any) -> None:
    entry = metadata.state_dict_metadata["model.0.weight"]
    entry.size = torch.Size([8, 3])
    entry.chunks = entry.chunks * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda metadata: _move(metadata, offset=1 << 40), "has no bytes"),
        (lambda metadata: _move(metadata, length=-5), "has no bytes"),
        (lambda metadata: _move(metadata, transform_descriptors=["zstd"]), "stored transformed"),
        (_resize, "are not together its shape"),
        (_overlap, "are not together its shape"),
    ],
)
def test_metadata_that_cannot_be_true_are_refused(tmp_path: Path, change: Callable[[Any], None], message: str) -> None:
    save_dcp(tmp_path / "dcp")
    edit_metadata(tmp_path / "dcp", change)
    with pytest.raises(CheckpointError, match=message):
        open_dcp(tmp_path / "dcp")


def test_a_chunk_that_is_another_tensor_is_damage(tmp_path: Path) -> None:
    save_dcp(tmp_path / "dcp")
    metadata = FileSystemReader(tmp_path / "dcp").read_metadata()
    other = next(info for index, info in metadata.storage_data.items() if index.fqn == "model.1.weight")
    edit_metadata(tmp_path / "dcp", lambda found: _move(found, offset=other.offset, length=other.length))
    found = open_dcp(tmp_path / "dcp")
    with pytest.raises(CheckpointDamagedError, match=r"expected torch.float32 \[4, 3\] of 'model.0.weight'"):
        read(found.tensors["model.0.weight"])


# -- DeepSpeed


@pytest.mark.parametrize("kind", ["zero1", "zero2", "zero3", "zero3-groups"])
def test_deepspeed_folders_hold_what_deepspeed_itself_finds_in_them(kind: str) -> None:
    """B106."""
    folder = DATA / f"deepspeed-{kind}"
    expected = load_file(folder / "expected.safetensors")
    with read_deepspeed(folder) as source:
        assert source.step == 2
        assert source.notes == []
        assert source.aliases == {"head.weight": "embed.weight"}
        for name, tensor in expected.items():
            assert same(read(source.tensors[source.aliases.get(name, name)]), tensor), name
        # DeepSpeed's own converter loses frozen parameters of stage 1.
        assert {*source.tensors, *source.aliases} == {*expected, "frozen.weight", "frozen.bias"}
        assert source.tensors["embed.weight"].dtype == torch.float32, "not the master weights"
        assert source.tensors["norm.seen"].dtype == torch.int64


@pytest.mark.parametrize("kind", ["zero0", "zero1", "zero2", "bf16"])
def test_weights_of_deepspeed_are_those_of_its_model_before_they_are_rounded(kind: str) -> None:
    """Also of the kinds that DeepSpeed's own converter does not read."""
    folder = DATA / f"deepspeed-{kind}"
    model = torch.load(folder / "global_step2" / "mp_rank_00_model_states.pt", weights_only=True)["module"]
    with read_deepspeed(folder) as source:
        assert source.aliases == {"head.weight": "embed.weight"}
        assert {*source.tensors, *source.aliases} == model.keys()
        assert source.tensors["embed.weight"].dtype == torch.float32
        for name, tensor in model.items():
            assert same(read(source.tensors[source.aliases.get(name, name)]).to(tensor.dtype), tensor), name


def test_the_folder_of_a_step_is_taken_itself() -> None:
    with read_deepspeed(DATA / "deepspeed-zero3" / "global_step2") as source:
        assert tuple(source.tensors["embed.weight"].shape) == (11, 6)


def copied(stage: int, tmp_path: Path) -> Path:
    folder = tmp_path / f"zero{stage}"
    folder.mkdir()
    for path in (DATA / f"deepspeed-zero{stage}" / "global_step2").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.parametrize(
    ("stage", "gone", "message"),
    [
        (2, "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "files of 1 ranks, but 2 ranks wrote it"),
        (2, "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", r"ranks \[1\]: some are missing"),
        (3, "zero_pp_rank_1_mp_rank_00_model_states.pt", "expected one of each of 2 ranks"),
        (2, "mp_rank_00_model_states.pt", "no DeepSpeed checkpoint"),
    ],
)
def test_a_missing_file_of_deepspeed_is_named(tmp_path: Path, stage: int, gone: str, message: str) -> None:
    folder = copied(stage, tmp_path)
    (folder / gone).unlink()
    with pytest.raises(CheckpointDamagedError, match=message):
        read_deepspeed(folder)


def test_without_its_masters_a_deepspeed_folder_is_not_taken_for_one_without_zero(tmp_path: Path) -> None:
    folder = copied(2, tmp_path)
    for path in folder.glob("*optim*"):
        path.unlink()
    with pytest.raises(CheckpointDamagedError, match="of ZeRO stage 2, but its"):
        read_deepspeed(folder)


def test_layouts_of_deepspeed_that_are_not_known_are_refused(tmp_path: Path) -> None:
    folder = copied(2, tmp_path)
    (folder / "layer_01-model_states.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="pipeline stages, experts or tensor parallelism"):
        read_deepspeed(folder)


def test_a_vector_of_deepspeed_of_another_length_is_refused(tmp_path: Path) -> None:
    folder = copied(2, tmp_path)
    path = folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    state = _without_classes(folder, path.name)
    state["optimizer_state_dict"]["single_partition_of_fp32_groups"][0] = torch.zeros(80)
    torch.save(state, path)
    with pytest.raises(CheckpointDamagedError, match="has 128 elements, its parameters 96"):
        read_deepspeed(folder)


def _without_classes(folder: Path, name: str) -> dict[str, Any]:
    """A file of DeepSpeed as torch can write it again, without DeepSpeed."""
    found = torch_file(Folder(folder), name, lambda name: as_record(name) if name.startswith("deepspeed.") else None)
    kept = found["optimizer_state_dict"]
    return {
        "optimizer_state_dict": {
            "zero_stage": 2,
            "partition_count": kept["partition_count"],
            "single_partition_of_fp32_groups": [read(t) for t in kept["single_partition_of_fp32_groups"]],
        }
    }


# -- safetensors and Hugging Face


def hugging_face_folder(folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir(parents=True)
    tensors = {"a.weight": torch.randn(3, 2), "b.weight": torch.randn(5).to(torch.bfloat16)}
    save_file({"a.weight": tensors["a.weight"]}, folder / "model-00001-of-00002.safetensors")
    save_file({"b.weight": tensors["b.weight"]}, folder / "model-00002-of-00002.safetensors")
    write_index(
        folder, {"a.weight": "model-00001-of-00002.safetensors", "b.weight": "model-00002-of-00002.safetensors"}
    )
    return tensors


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    text = ", ".join(f'"{name}": "{file}"' for name, file in weight_map.items())
    (folder / INDEX).write_text(f'{{"metadata": {{}}, "weight_map": {{{text}}}}}')


def test_folders_of_hugging_face_are_read_bit_by_bit(tmp_path: Path) -> None:
    tensors = hugging_face_folder(tmp_path / "hf")
    with read_safetensors(tmp_path / "hf") as source:
        assert source.tensors.keys() == tensors.keys()
        assert all(same(read(source.tensors[name]), tensor) for name, tensor in tensors.items())
    with read_safetensors(tmp_path / "hf" / "model-00002-of-00002.safetensors") as source:
        assert same(read(source.tensors["b.weight"]), tensors["b.weight"])


def test_a_file_that_does_not_hold_what_the_index_says_is_named(tmp_path: Path) -> None:
    hugging_face_folder(tmp_path / "hf")
    write_index(tmp_path / "hf", {"a.weight": "model-00002-of-00002.safetensors"})
    with pytest.raises(CheckpointDamagedError, match=r"00002.safetensors does not hold 'a.weight'"):
        read_safetensors(tmp_path / "hf")


def test_links_of_the_hubs_cache_are_followed_to_its_blobs_only(tmp_path: Path) -> None:
    """B115: any other link is refused."""
    snapshot = tmp_path / "models--x" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    blobs = tmp_path / "models--x" / "blobs"
    blobs.mkdir()
    save_file({"w": torch.ones(3)}, blobs / "1234")
    (snapshot / "model.safetensors").symlink_to("../../blobs/1234")
    with read_safetensors(snapshot) as source:
        assert torch.equal(read(source.tensors["w"]), torch.ones(3))
    (snapshot / "model.safetensors").unlink()
    save_file({"w": torch.ones(3)}, tmp_path / "elsewhere")
    (snapshot / "model.safetensors").symlink_to("../../../elsewhere")
    with pytest.raises(CheckpointError, match="symbolic link"):
        read_safetensors(snapshot)


# -- files from someone else


@dataclass
class Bomb:
    """Touches a marker when it is unpickled."""

    marker: Path
    how: str

    def __reduce__(self) -> tuple[Any, ...]:
        if self.how == "system":
            return os.system, (f"touch {self.marker}",)
        if self.how == "exec":
            return exec, (f"open({str(self.marker)!r}, 'w').close()",)
        return getattr, (Path(self.marker), "touch")


def _dcp(path: Path, bomb: Bomb) -> Callable[[], Any]:
    save_dcp(path)
    metadata = FileSystemReader(path).read_metadata()
    metadata.planner_data = bomb
    (path / METADATA).write_bytes(pickle.dumps(metadata))
    return lambda: open_dcp(path)


def _dcp_file(path: Path, bomb: Bomb, name: str) -> Callable[[], Any]:
    """In the file of a rank: what lies in the place of a tensor or of a value."""
    save_dcp(path)
    torch.save(bomb, path / "bomb.distcp")
    length = (path / "bomb.distcp").stat().st_size

    def change(metadata: Any) -> None:
        index = next(index for index in metadata.storage_data if index.fqn == name)
        metadata.storage_data[index] = replace(
            metadata.storage_data[index], relative_path="bomb.distcp", offset=0, length=length
        )

    edit_metadata(path, change)
    found = open_dcp(path)
    return lambda: read(found.tensors[name]) if name in found.tensors else found.value(name)


def _torch(path: Path, bomb: Bomb, zipped: bool = True) -> Callable[[], Any]:
    torch.save({"w": torch.ones(2), "more": bomb}, path, _use_new_zipfile_serialization=zipped)
    return lambda: read_torch(path)


def _deepspeed(path: Path, bomb: Bomb, name: str) -> Callable[[], Any]:
    path.mkdir()
    folder = copied(2, path)
    torch.save({"module": {}, "optimizer_state_dict": {}, "args": bomb}, folder / name)
    return lambda: read_deepspeed(folder)


ENTRIES: dict[str, Callable[[Path, Bomb], Callable[[], Any]]] = {
    "dcp metadata": _dcp,
    "dcp tensor": lambda path, bomb: _dcp_file(path, bomb, "model.0.weight"),
    "dcp value": lambda path, bomb: _dcp_file(path, bomb, "step"),
    "torch": _torch,
    "torch legacy": lambda path, bomb: _torch(path, bomb, zipped=False),
    "deepspeed model": lambda path, bomb: _deepspeed(path, bomb, "mp_rank_00_model_states.pt"),
    "deepspeed optimizer": lambda path, bomb: _deepspeed(path, bomb, "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
}


@pytest.mark.parametrize("how", ["system", "exec", "getattr"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_no_file_runs_code(tmp_path: Path, entry: str, how: str) -> None:
    """B115: a pickle that calls something, in every place where one is read."""
    marker = tmp_path / "marker"
    attempt = ENTRIES[entry](tmp_path / "checkpoint", Bomb(marker, how))
    marker.unlink(missing_ok=True)  # what made the file may have set it off
    with pytest.raises(CheckpointError) as caught:
        attempt()
    assert not marker.exists()
    if entry != "torch legacy":  # there torch itself refuses
        assert isinstance(caught.value, UnsafePickleError)
        assert "Nothing of it was run" in str(caught.value)


def test_the_bomb_is_one(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    pickle.loads(pickle.dumps(Bomb(marker, "exec")))
    assert marker.exists()


OUTSIDE = ["../secret", "/etc/hostname", "a/b", "..", ".", "", "a\0b", "..\\x"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_no_file_leads_out_of_its_folder(tmp_path: Path, name: str) -> None:
    """B115: names of files in DCP's metadata, in an index of Hugging Face, in DeepSpeed's `latest`."""
    (tmp_path / "secret").write_text("secret")
    save_dcp(tmp_path / "dcp")
    edit_metadata(tmp_path / "dcp", lambda metadata: _move(metadata, relative_path=name))
    with pytest.raises(CheckpointError, match="its own folder"):
        open_dcp(tmp_path / "dcp")
    if "\\" not in name and "\0" not in name:
        hugging_face_folder(tmp_path / "hf")
        write_index(tmp_path / "hf", {"a.weight": name})
        with pytest.raises(CheckpointError, match="its own folder"):
            read_safetensors(tmp_path / "hf")
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "latest").write_text(name)
    with pytest.raises(CheckpointError, match="its own folder"):
        read_deepspeed(tmp_path / "deepspeed")


def test_links_in_folders_are_refused(tmp_path: Path) -> None:
    """B115."""
    save_dcp(tmp_path / "dcp")
    (tmp_path / "dcp" / "__0_0.distcp").rename(tmp_path / "moved")
    (tmp_path / "dcp" / "__0_0.distcp").symlink_to(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="symbolic link"):
        open_dcp(tmp_path / "dcp")
    folder = copied(2, tmp_path)
    (folder / "mp_rank_00_model_states.pt").unlink()
    (folder / "mp_rank_00_model_states.pt").symlink_to(DATA / "deepspeed-zero2/global_step2/mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="symbolic link"):
        read_deepspeed(folder)


def program(*parts: bytes) -> bytes:
    return b"\x80\x02" + b"".join(parts) + b"."


@pytest.mark.parametrize(
    "data",
    [
        program(b"N", b"r\xff\xff\xff\xff"),  # the memo of the standard library would take 32 GiB for this
        program(b"\x8e" + struct.pack("<Q", 1 << 60)),  # text that is not there
        program(b"B\xff\xff\xff\xff"),
        program(b")" + b"\x85" * 100_000 + b"}N", b"s"),
        program(b"}" + b")" + b"\x85" * 100_000 + b"Ns"),  # a key whose hash would take as many levels of the C stack
        program(b"(" * 1000 + b"u"),
        program(b"ccollections\nOrderedDict\n", b"}b"),  # attributes of a class
        program(b"ccollections\nOrderedDict\n", b"N}q\x00\x86b"),
        program(b"ccollections\nOrderedDict\n", b"NR"),
        program(b"K\x01K\x02R"),
        program(b"h\x05"),
        program(b"icollections\nOrderedDict\n"),  # instructions that no checkpoint has
        program(b"\x82\x01"),
        program(b"Pid\n"),
        program(b"I12\n"),
        b"",
        b".",
        b"\x80\x02",
        b"\xff" * 100,
    ],
    ids=lambda data: repr(data)[:40],
)
def test_programs_that_no_checkpoint_has_end_with_an_error_or_plain_data(data: bytes) -> None:
    def lookup(name: str) -> Any:
        return (lambda args: dict(*args)) if name == "collections.OrderedDict" else None

    try:
        value = read_pickle(data, lookup, lambda identity: identity, "it")
    except CheckpointDamagedError:
        return
    assert value is None


@pytest.fixture(scope="module")
def foreign_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    root = tmp_path_factory.mktemp("fuzz")
    save_dcp(root / "dcp")
    torch.save(state_dict(), root / "model.pt")
    copied(3, root)
    names = ("dcp/.metadata", "model.pt", "zero3/zero_pp_rank_0_mp_rank_00_model_states.pt")
    return root, {name: (root / name).read_bytes() for name in names}


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_files_end_with_an_error_or_with_tensors(
    foreign_files: tuple[Path, dict[str, bytes]], data: st.DataObject
) -> None:
    """Bytes are changed, cut and added; whatever becomes of it, only our own errors come out."""
    root, originals = foreign_files
    name = data.draw(st.sampled_from(sorted(originals)))
    changed = bytearray(originals[name])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(changed) - 1))
        kind = data.draw(st.sampled_from(["flip", "cut", "insert"]))
        if kind == "flip":
            changed[at] = data.draw(st.integers(0, 255))
        elif kind == "cut":
            del changed[at : at + data.draw(st.integers(1, 40))]
        else:
            changed[at:at] = data.draw(st.binary(min_size=1, max_size=9))
    (root / name).write_bytes(changed)
    try:
        if name == "dcp/.metadata":
            found = open_dcp(root / "dcp")
            total = [read(tensor) for tensor in found.tensors.values()]
            found.folder.close()
        else:
            with read_torch(root / name) if name == "model.pt" else read_deepspeed(root / "zero3") as source:
                total = [read(tensor) for tensor in source.tensors.values()]
    except CheckpointError:
        return
    finally:
        (root / name).write_bytes(originals[name])
    assert sum(t.numel() for t in total) < 10_000


def test_compressed_archives_are_refused(tmp_path: Path) -> None:
    """A small file that unfolds to a huge one is never unfolded."""
    torch.save({"w": torch.zeros(1000)}, tmp_path / "model.pt")
    with zipfile.ZipFile(tmp_path / "model.pt") as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    with pytest.raises(CheckpointError, match="is compressed or encrypted"):
        read_torch(tmp_path / "bomb.pt")


def test_an_entry_that_reaches_out_of_its_archive_is_damage(tmp_path: Path) -> None:
    """What follows in the file belongs to other tensors."""
    save_dcp(tmp_path / "dcp")
    found = open_dcp(tmp_path / "dcp")
    _, where = found.tensors["model.0.weight"].chunks[0]
    path = tmp_path / "dcp" / where.name
    content = bytearray(path.read_bytes())
    header = content.index(b"data/0", where.offset) - len("archive/") - 30
    assert content[header : header + 4] == b"PK\x03\x04"
    content[header + 28 : header + 30] = (2000).to_bytes(2, "little")  # the length of its extra field
    path.write_bytes(content)
    with pytest.raises(CheckpointDamagedError, match="not where the archive says"):
        read(found.tensors["model.0.weight"])


def test_big_endian_files_are_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(3)}, tmp_path / "model.pt")
    content = (tmp_path / "model.pt").read_bytes()
    (tmp_path / "model.pt").write_bytes(content.replace(b"little", b"bigbig"))
    with pytest.raises(CheckpointError, match="byte order"):
        read_torch(tmp_path / "model.pt")


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_source_closes_its_files(tmp_path: Path) -> None:
    torch.save(state_dict(), tmp_path / "model.pt")
    before = open_files()
    with read_torch(tmp_path / "model.pt") as source:
        assert isinstance(source, Source)
        assert open_files() > before
    assert open_files() == before


def test_pieces_are_filled_in_any_portions() -> None:
    tensor = torch.arange(210, dtype=torch.int32).view(5, 6, 7)
    stored = StoredTensor.contiguous(InMemory(tensor.flatten()), tensor.shape)
    box = Box((1, 2, 3), (3, 4, 2))
    expected = tensor[1:4, 2:6, 3:5].contiguous().view(-1).view(torch.uint8)
    piece = Stream().piece("it", stored, box)
    assert (piece.shape, piece.dtype, piece.nbytes) == ((3, 4, 2), "I32", 96)
    for portion in (4, 12, 20, 96):
        out = torch.zeros(96, dtype=torch.uint8)
        for offset in range(0, 96, portion):
            piece.fill(offset, out[offset : offset + portion])
        assert torch.equal(out, expected)
