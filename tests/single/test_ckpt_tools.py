"""`fullshard ckpt`: round trips between all forms, bit by bit; what the verbs say and return; bounded memory."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from cluster import Cluster
from fullshard import checkpoint
from fullshard.cli import main
from fullshard.core.ckpt.boxes import Box
from fullshard.errors import CheckpointExistsError
from fullshard.runtime.checkpoint.files.folder import Checkpoint, read_manifest
from fullshard.tools.ckpt.convert import Origin, import_foreign
from fullshard.tools.ckpt.foreign.stored import InMemory, StoredTensor
from fullshard.tools.ckpt.outputs import new_path
from fullshard.tools.ckpt.own import Layout, Target, write_own
from fullshard.tools.ckpt.sources import Source
from fullshard.train.config import ModelConfig
from fullshard.train.llama import LlamaForCausalLM, build_llama

DATA = Path(__file__).parents[1] / "data"
TOKENS = torch.arange(14).view(2, 7) * 17 % 256
SOME = (slice(None), slice(None, None, 3), slice(None, None, 8))  # of the logits
MODULE = {"kind": "module", "extra": {}}

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equal bit by bit."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(*(t.detach().contiguous().view(-1).view(torch.uint8) for t in (first, second)))


def stored(tensor: torch.Tensor) -> StoredTensor:
    return StoredTensor.contiguous(InMemory(tensor.detach().flatten()), tuple(tensor.shape))


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "embed.weight": torch.randn(11, 6),
        "half": torch.randn(5, 4, 3).to(torch.bfloat16),
        "row": torch.randn(1, 9),
        "scalar": torch.tensor(2.5),
        "count": torch.tensor(7),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 4),
        "double": torch.randn(3, dtype=torch.float64),
    }


def own(root: Path, tensors: dict[str, torch.Tensor], ranks: int = 3, **values: Any) -> Path:
    """A checkpoint of ours with a model."""
    source = Source({f"model/{name}": stored(tensor) for name, tensor in tensors.items()})
    source.values = {"model": MODULE, **{key: {"kind": "value", "value": value} for key, value in values.items()}}
    return write_own(source, Target(root, 4, False, Layout(1, ranks)))


def contents(path: Path) -> dict[str, torch.Tensor]:
    with Checkpoint(path) as checkpoint:
        names = (*checkpoint.manifest.tensors, *checkpoint.manifest.aliases)
        return {name: checkpoint.tensor(name) for name in names}


def run(*words: object, code: int = 0) -> None:
    assert main(["ckpt", *map(str, words)]) == code


def assert_model(path: Path, expected: dict[str, torch.Tensor]) -> None:
    found = contents(path)
    assert found.keys() == {f"model/{name}" for name in expected}
    for name, tensor in expected.items():
        assert same(found[f"model/{name}"], tensor), name


# -- round trips


@pytest.mark.parametrize("form", ["dcp", "torch", "safetensors"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_round_trips_are_equal_bit_by_bit(tmp_path: Path, form: str, ranks: int) -> None:
    tensors = weights()
    path = own(tmp_path / "own", tensors)
    if form == "safetensors":
        run("merge", path, tmp_path / "out")
    else:
        run("export", path, tmp_path / "out", "--to", form)
    run("import", tmp_path / "out", tmp_path / "back", "--from", form, "--ranks", ranks, "--step", 9)
    assert_model(tmp_path / "back" / "step-9", tensors)
    assert read_manifest(tmp_path / "back" / "step-9").world_size == ranks


@pytest.mark.parametrize(
    "words", [("--ranks", 1), ("--ranks", 2), ("--ranks", 7), ("--mesh", "2x2"), ("--mesh", "3x1")]
)
def test_resharding_changes_the_files_and_nothing_else(tmp_path: Path, words: tuple[object, ...]) -> None:
    """B105, B106: more ranks than rows, fewer, replicas."""
    tensors = weights() | {"large": torch.randn(400, 101)}  # replicas share the writing of it
    path = own(tmp_path / "own", tensors, note={"a": [1, None]})
    run("reshard", path, tmp_path / "other", *words)
    made = tmp_path / "other" / "step-4"
    run("verify", made)
    assert_model(made, tensors)
    before, after = read_manifest(path), read_manifest(made)
    assert after.state == before.state
    assert list(after.tensors) == list(before.tensors)
    if words == ("--mesh", "2x2"):
        sizes = [box.numel for box in (after.box("model/large", rank) for rank in range(4)) if box is not None]
        assert sizes == [100 * 101] * 4


def test_resharding_keeps_what_each_rank_has_as_far_as_other_ranks_can_have_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = {"model/w": torch.ones(4), "rng@0/cpu": torch.ones(2), "rng@1/cpu": torch.zeros(2)}
    source = Source({name: stored(tensor) for name, tensor in {**numbers, "loader@1/at": torch.ones(1)}.items()})
    source.values = {"model": MODULE}
    random, loader = {"kind": "random", "value": {}}, {"kind": "object", "value": 3}
    rank_state = ({"rng": random, "loader": loader}, {"rng": {**random, "other": 1}, "loader": loader})
    path = write_own(source, Target(tmp_path / "own", 1, False, Layout(1, 2)), rank_state)
    run("reshard", path, tmp_path / "two", "--mesh", "2x1")
    assert read_manifest(tmp_path / "two" / "step-1").rank_state == rank_state
    assert contents(tmp_path / "two" / "step-1").keys() == source.tensors.keys()
    assert "note" not in capsys.readouterr().out
    run("reshard", path, tmp_path / "three", "--ranks", 3)
    assert read_manifest(tmp_path / "three" / "step-1").rank_state == (
        {"rng": random},
        {"rng": rank_state[1]["rng"]},
        {},
    )
    assert contents(tmp_path / "three" / "step-1").keys() == numbers.keys()
    assert "note: loader: what each rank has for itself is left out" in capsys.readouterr().out
    run("reshard", path, tmp_path / "one", "--ranks", 1)
    assert read_manifest(tmp_path / "one" / "step-1").rank_state == ({"rng": random},)
    assert contents(tmp_path / "one" / "step-1").keys() == {"model/w", "rng@0/cpu"}


def _random_after_loading(rank: int, paths: list[str]) -> list[torch.Tensor]:
    found = []
    for path in paths:
        torch.manual_seed(rank)
        checkpoint.load(path, {"rng": checkpoint.RandomState()})
        found.append(torch.rand(3))
    return found


def test_random_generators_are_the_same_after_resharding(tmp_path: Path, cluster: Cluster) -> None:
    """Two ranks load what one has saved: themselves, or after it was made one of two ranks."""
    torch.manual_seed(3)
    checkpoint.save(tmp_path / "one", {"rng": checkpoint.RandomState(), "w": torch.ones(4)}, step=1)
    run("reshard", tmp_path / "one", tmp_path / "two", "--ranks", 2)
    found = cluster.run(_random_after_loading, [str(tmp_path / "one"), str(tmp_path / "two")], world_size=2)
    assert all(same(first, second) for first, second in found)
    assert not same(found[0][0], found[1][0])
    torch.manual_seed(3)
    assert same(found[0][0], torch.rand(3))


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return model, optimizer, {"model": model_state, "optim": optimizer_state, "sizes": {"a": 1, "b": [2, 3]}, "step": 5}


def test_folders_of_dcp_come_back_as_torch_wrote_them(tmp_path: Path) -> None:
    """Model, optimizer and values: dcp -> ours on 3 ranks -> dcp, loaded by torch into objects of its own."""
    model, optimizer, state = trained()
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    run("import", tmp_path / "dcp", tmp_path / "own", "--from", "dcp", "--ranks", 3)
    run("export", tmp_path / "own", tmp_path / "again", "--to", "dcp")
    loaded_model, loaded_optimizer, loaded = trained()
    for tensor in (*loaded_model.parameters(), *(t for s in loaded_optimizer.state.values() for t in s.values())):
        tensor.data.zero_()
    loaded["step"], loaded["sizes"] = 0, {"a": 0, "b": []}
    for group in loaded_optimizer.param_groups:
        group["lr"] = 0.0
    loaded["model"], loaded["optim"] = get_state_dict(loaded_model, loaded_optimizer)
    dcp.load(loaded, checkpoint_id=tmp_path / "again", no_dist=True)
    set_state_dict(loaded_model, loaded_optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
    assert loaded["step"] == 5
    assert loaded["sizes"] == {"a": 1, "b": [2, 3]}
    assert [group["lr"] for group in loaded_optimizer.param_groups] == [0.5, 1e-2]
    for before, after in zip(model.parameters(), loaded_model.parameters(), strict=True):
        assert same(before, after)
        for kind, value in optimizer.state[before].items():
            assert same(value, loaded_optimizer.state[after][kind]), kind


def test_the_flat_form_of_dcps_optimizers_is_read(tmp_path: Path) -> None:
    """`flatten_optimizer_state_dict=True` gives the same checkpoint of ours as the nested form."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    model, optimizer, state = trained()
    flat = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))[1]
    found = []
    for name, optim in (("nested", state["optim"]), ("flat", flat)):
        dcp.save({"model": state["model"], "optim": optim}, checkpoint_id=tmp_path / name, no_dist=True)
        run("import", tmp_path / name, tmp_path / f"own-{name}", "--from", "dcp")
        found.append(tmp_path / f"own-{name}" / "step-0")
    nested, other = (contents(path) for path in found)
    assert nested.keys() == other.keys()
    assert all(same(nested[name], other[name]) for name in nested)
    groups = [
        [
            (group["params"], group["settings"]["lr"], group["state"])
            for group in read_manifest(p).state["optim"]["groups"]
        ]
        for p in found
    ]
    assert groups[0] == groups[1]
    assert groups[0][0] == (["model/0.weight", "model/0.bias"], 0.5, [0, 0])


def test_a_state_dict_of_a_model_alone_comes_under_the_key_model(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.randn(3, 2), "b": torch.randn(4)}
    dcp.save(tensors, checkpoint_id=tmp_path / "dcp", no_dist=True)
    run("import", tmp_path / "dcp", tmp_path / "own", "--from", "dcp")
    assert_model(tmp_path / "own" / "step-0", tensors)


def _through_torch(rank: int, folder: str, expected: dict[str, torch.Tensor]) -> None:
    """Load a folder into a sharded model as torch does, and save it again, each rank its rows."""
    from fullshard import fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    fully_shard(model)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=f"{folder}/dcp")
    for name, tensor in expected.items():
        assert same(state["model"][name].full_tensor(), tensor), name
    dcp.save(state, checkpoint_id=f"{folder}/again")


@pytest.mark.parametrize("world_size", [2, 3])
def test_torch_loads_an_exported_folder_on_any_number_of_ranks(
    tmp_path: Path, cluster: Cluster, world_size: int
) -> None:
    """And what it saves there, in chunks of rows, comes back."""
    torch.manual_seed(0)
    expected = dict(torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)).state_dict())
    run("export", own(tmp_path / "own", expected, ranks=4), tmp_path / "dcp", "--to", "dcp")
    cluster.run(_through_torch, str(tmp_path), expected, world_size=world_size)
    run("import", tmp_path / "again", tmp_path / "back", "--from", "dcp", "--ranks", 2)
    assert_model(tmp_path / "back" / "step-0", expected)


def test_what_was_saved_loads_after_going_through_every_kind_of_rank_and_torch(tmp_path: Path) -> None:
    """`checkpoint.save` -> 3 ranks -> dcp -> 2 ranks -> `checkpoint.load`: model, optimizer, schedule and values."""

    def made() -> dict[str, Any]:
        model, optimizer, _ = trained()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "position": (1, {"epoch": 2})}

    state = made()
    state["optimizer"].step()
    state["scheduler"].step()
    checkpoint.save(tmp_path / "a", {**state, "rng": checkpoint.RandomState()}, step=5)
    run("reshard", tmp_path / "a", tmp_path / "b", "--ranks", 3)
    run("export", tmp_path / "b", tmp_path / "dcp", "--to", "dcp")
    run("import", tmp_path / "dcp", tmp_path / "c", "--from", "dcp", "--ranks", 2, "--step", 5)
    for root in ("b", "c"):
        other = made()
        with torch.no_grad():
            for parameter in other["model"].parameters():
                parameter.zero_()
        loaded = checkpoint.load(tmp_path / root, other)
        assert (loaded.step, loaded.values) == (5, {"position": (1, {"epoch": 2})})
        assert other["scheduler"].state_dict() == state["scheduler"].state_dict()
        rates = [[group["lr"] for group in each["optimizer"].param_groups] for each in (state, other)]
        assert rates[0] == rates[1] == [0.25, 0.005]
        for before, after in zip(state["model"].parameters(), other["model"].parameters(), strict=True):
            assert same(before, after)
            for kind, value in state["optimizer"].state[before].items():
                assert same(value, other["optimizer"].state[after][kind]), kind


# -- tied weights


def test_tied_weights_are_one_tensor_in_every_form(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(4, 3))
    torch.save({"a": weight, "b": weight, "c": torch.ones(1)}, tmp_path / "model.pt")
    run("import", tmp_path / "model.pt", tmp_path / "own", "--from", "torch", "--ranks", 2)
    path = tmp_path / "own" / "step-0"
    assert read_manifest(path).aliases == {"model/b": "model/a"}
    run("export", path, tmp_path / "out.pt", "--to", "torch")
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
    run("merge", path, tmp_path / "out.safetensors")
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["a", "c"]
        assert file.metadata() == {"format": "pt", "b": "a"}
    run("export", path, tmp_path / "dcp", "--to", "dcp")
    state = {"model": {name: torch.zeros(4, 3) for name in ("a", "b")}}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert same(state["model"]["a"], weight)
    assert same(state["model"]["b"], weight)
    run("import", tmp_path / "dcp", tmp_path / "again", "--from", "dcp")
    assert read_manifest(tmp_path / "again" / "step-0").aliases == {"model/b": "model/a"}


# -- Hugging Face


def exact_llama(tied: bool) -> LlamaForCausalLM:
    """A model whose weights are the same on every machine."""
    config = ModelConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        tie_word_embeddings=tied,
    )
    model = build_llama(config, seed=0)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            numbers = (torch.arange(parameter.numel()) * 7919 + number * 31) % 1009
            parameter.copy_(((numbers - 504) / 2048).view(parameter.shape))
    return model


def exported_llama(folder: Path, tied: bool) -> Path:
    """The model of `exact_llama`, as `fullshard train` would save it, exported."""
    model = exact_llama(tied)
    source = Source({f"model/{name}": stored(parameter) for name, parameter in model.named_parameters()})
    source.aliases = {"model/lm_head.weight": "model/model.embed_tokens.weight"} if tied else {}
    config = {"model": asdict(ModelConfig(32, 2, 4, 2, 48, tie_word_embeddings=tied))}
    source.values = {"model": MODULE, "run": {"kind": "value", "value": {"config": config, "position": 3}}}
    path = write_own(source, Target(folder / "own", 1, False, Layout(1, 3)))
    run("export", path, folder / "hf", "--to", "hf", "--max-shard-bytes", "50kB")
    return folder / "hf"


def digest_of(folder: Path) -> str:
    """Of the tensors and the configuration in an exported folder."""
    digest = hashlib.sha256()
    for name, tensor in sorted(loaded_folder(folder).items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    digest.update(json.dumps(json.loads((folder / "config.json").read_text()), sort_keys=True).encode())
    return digest.hexdigest()


def loaded_folder(folder: Path) -> dict[str, torch.Tensor]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {name: load_file(folder / file)[name] for name, file in index["weight_map"].items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values()))
    assert sum(len(load_file(folder / file)) for file in files) == len(found), "a tensor is in two files"
    for file in files:
        assert (folder / file).stat().st_size < 60_000
        with safe_open(folder / file, "pt") as opened:
            assert opened.metadata()["format"] == "pt"
    return found


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_transformers_gives_the_same_logits_for_an_exported_folder(tmp_path: Path, tied: bool) -> None:
    """What it said of this very folder is kept in tests/data, see make_llama_logits.py there."""
    folder = exported_llama(tmp_path, tied)
    golden = json.loads((DATA / "llama-logits.json").read_text())["tied" if tied else "untied"]
    assert digest_of(folder) == golden["digest"]
    with torch.no_grad():
        logits = exact_llama(tied)(TOKENS)[SOME]
    torch.testing.assert_close(logits, torch.tensor(golden["logits"]), atol=1e-4, rtol=1e-5)
    state = exact_llama(tied).state_dict()
    found = loaded_folder(folder)
    assert found.keys() == state.keys() - ({"lm_head.weight"} if tied else set())
    assert all(same(tensor, state[name]) for name, tensor in found.items())


def test_a_folder_of_hugging_face_comes_in_with_its_configuration_and_tied_weights(tmp_path: Path) -> None:
    folder = exported_llama(tmp_path, tied=True)
    run("import", folder, tmp_path / "in", "--from", "hf", "--ranks", 2)
    path = tmp_path / "in" / "step-0"
    state = exact_llama(tied=True).state_dict()
    assert_model(path, state)
    assert read_manifest(path).aliases == {"model/lm_head.weight": "model/model.embed_tokens.weight"}
    run("export", path, tmp_path / "out", "--to", "hf")  # its config.json is in the checkpoint
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True


def test_tied_weights_are_written_twice_where_the_configuration_does_not_tie_them(tmp_path: Path) -> None:
    """Whoever loads such a folder would leave the absent one at random values."""
    weight = torch.nn.Parameter(torch.randn(4, 3))
    torch.save({"a": weight, "b": weight}, tmp_path / "model.pt")
    run("import", tmp_path / "model.pt", tmp_path / "own", "--from", "torch")
    (tmp_path / "config.json").write_text('{"model_type": "mine"}')
    run("export", tmp_path / "own", tmp_path / "hf", "--to", "hf", "--config", tmp_path / "config.json")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert sorted(found) == ["a", "b"]
    assert same(found["b"], weight)
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == {"model_type": "mine"}


def test_without_a_configuration_the_export_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = own(tmp_path / "own", weights())
    run("export", path, tmp_path / "hf", "--to", "hf", code=1)
    assert "give a config.json with --config" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["own"], "something half-written was left"


@pytest.mark.parametrize("form", ["hf", "torch", "dcp"])
def test_weights_are_written_as_another_dtype(tmp_path: Path, form: str) -> None:
    tensors = weights()
    path = own(tmp_path / "own", tensors)
    (tmp_path / "config.json").write_text("{}")
    words = ["--config", tmp_path / "config.json"] if form == "hf" else []
    run("export", path, tmp_path / "out", "--to", form, "--dtype", "bfloat16", *words)
    run("import", tmp_path / "out", tmp_path / "back", "--from", form)
    cast = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in tensors.items()}
    assert_model(tmp_path / "back" / "step-0", cast)


# -- looking


def test_ls_says_what_is_complete_what_is_latest_and_what_was_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """B108."""
    own(tmp_path, {"w": torch.ones(3)})
    (tmp_path / "step-9").mkdir()
    (tmp_path / ".step-5.0123abcd.tmp").mkdir()
    run("ls", tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert "3 ranks  <- latest" in lines[0]
    assert "step 9" in lines[1]
    assert "NOT COMPLETE" in lines[1]
    assert lines[2] == ".step-5.0123abcd.tmp: left by an interrupted job"
    run("ls", tmp_path, "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["latest"] == 4
    assert [row["complete"] for row in found["checkpoints"]] == [True, False]
    run("ls", tmp_path / "nowhere", code=1)
    run("ls", tmp_path / "step-4", code=1)
    assert "is a checkpoint itself" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    run("ls", tmp_path / "empty")
    assert "no checkpoints in" in capsys.readouterr().out


def test_inspect_says_what_a_checkpoint_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own(tmp_path, weights(), note="hello")
    run("inspect", tmp_path)
    text = capsys.readouterr().out
    for expected in (
        "step        4",
        "ranks       3",
        "key         model: 8 tensors",
        "dim 0 over 3 ranks",
        'note: "hello"',
    ):
        assert expected in text
    run("inspect", tmp_path / "step-4", "--tensors")
    assert (
        "model/embed.weight  F32 [11, 6]  rank 0 [0:4, 0:6], rank 1 [4:8, 0:6], rank 2 [8:11, 0:6]"
        in capsys.readouterr().out
    )
    run("inspect", tmp_path, "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["tensors"]["model/embed.weight"]["ranges"][2] == {"rank": 2, "offsets": [8, 0], "sizes": [3, 6]}
    assert found["state"]["note"] == {"kind": "value", "value": "hello"}


def test_names_cannot_change_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint may come from anyone."""
    own(tmp_path, {"\x1b[31mred\r\u202e": torch.ones(2)}, note="\x1b[2J")
    run("inspect", tmp_path, "--tensors")
    text = capsys.readouterr().out
    assert "model/\\x1b[31mred\\r\\u202e  F32 [2]" in text
    assert text.replace("\n", "").isprintable()


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def test_verify_names_all_that_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A flipped bit, a short file, a missing one, one too many: each is named, and the exit code is 1."""
    path = own(tmp_path, {"a": torch.randn(8, 400), "b": torch.randn(4, 4)}, ranks=4)
    run("verify", tmp_path)
    assert "as it was written: 12.9 kB of tensors verified" in capsys.readouterr().out
    _flip(path / "rank-00001.safetensors", 4096)
    _cut(path / "rank-00002.safetensors")
    (path / "rank-00003.safetensors").unlink()
    (path / "notes.txt").write_text("mine")
    run("verify", tmp_path, code=1)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert "rank-00001.safetensors: tensor 'model/a' is damaged" in lines[0]
    assert "[2:4, 0:400]" in lines[0]
    assert "rank-00002.safetensors is damaged: it has" in lines[1]
    assert "rank-00003.safetensors is missing" in lines[2]
    assert "notes.txt is no part of the checkpoint" in lines[3]


def test_verify_notices_a_bit_anywhere(tmp_path: Path) -> None:
    path = own(tmp_path, {"a": torch.randn(3, 4)}, ranks=1)
    for name in ("manifest.json", "rank-00000.safetensors"):
        original = (path / name).read_bytes()
        for at in range(0, len(original), 97):
            _flip(path / name, at)
            run("verify", path, code=1)
            (path / name).write_bytes(original)
    run("verify", path)


@pytest.mark.parametrize("verb", ["merge", "reshard", "export"])
def test_damage_stops_a_conversion_and_leaves_nothing(
    tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = own(tmp_path / "own", {"a": torch.randn(8, 400)})
    _flip(path / "rank-00001.safetensors", 4096)
    words = {"merge": [], "reshard": ["--ranks", 2], "export": ["--to", "dcp"]}[verb]
    run(verb, path, tmp_path / "out", *words, code=1)
    assert "tensor 'model/a' is damaged" in capsys.readouterr().err
    left = [p for p in tmp_path.rglob("*") if p.is_file() and "own" not in p.parts]
    assert left == []


# -- usage


def test_nothing_is_replaced_unless_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = own(tmp_path / "own", {"a": torch.ones(2)})
    (tmp_path / "out").write_text("mine")
    run("merge", path, tmp_path / "out", code=1)
    assert "give --overwrite" in capsys.readouterr().err
    assert (tmp_path / "out").read_text() == "mine"
    run("merge", path, tmp_path / "out", "--overwrite")
    assert load_file(tmp_path / "out").keys() == {"a"}
    run("export", path, tmp_path / "dcp", "--to", "dcp")
    run("export", path, tmp_path / "dcp", "--to", "dcp", "--overwrite")
    run("reshard", path, tmp_path / "own", "--ranks", 2, code=1)
    run("reshard", path, tmp_path / "own", "--ranks", 2, "--overwrite")
    assert read_manifest(path).world_size == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dcp", "out", "own"]


def test_what_these_commands_do_not_write_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    for name in ("pipe", "run"):
        with pytest.raises(CheckpointExistsError, match="not replaced"), new_path(tmp_path / name, overwrite=True):
            pass
    assert (tmp_path / "run" / "metrics.jsonl").exists()
    assert (tmp_path / "pipe").is_fifo()


def test_what_is_replaced_comes_back_if_it_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").touch()
    with pytest.raises(CheckpointExistsError), new_path(tmp_path / "folder", overwrite=False):
        pass

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(RuntimeError, match="No space left"), new_path(tmp_path / "folder", overwrite=True) as path:
        path.mkdir()
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]
    assert (tmp_path / "folder" / "config.json").exists()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["inspect", "{}/nowhere"], 1, "there is no such folder"),
        (["inspect", "{}"], 1, "no step-N in it has"),
        (["import", "{}/nowhere", "{}/out", "--from", "hf"], 1, "there is no"),
        (["import", "{}", "{}/out", "--from", "dcp"], 1, "no file .metadata"),
        (["verify", "{}", "--train.steps=3"], 2, "takes no settings"),
    ],
)
def test_what_is_not_possible_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, message: str
) -> None:
    assert main(["ckpt", *(word.format(tmp_path) for word in words)]) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["export", "a", "b"],
        ["export", "a", "b", "--to", "word"],
        ["export", "a", "b", "--to", "hf", "--max-shard-bytes", "0"],
        ["reshard", "a", "b", "--ranks", "0"],
        ["reshard", "a", "b", "--mesh", "2"],
        ["reshard", "a", "b", "--mesh", "99999x99999"],
        ["merge", "a", "b", "--dtype", "int8"],
        [],
    ],
)
def test_wrong_usage_exits_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["ckpt", *words])
    assert caught.value.code == 2
    assert "usage: fullshard ckpt" in capsys.readouterr().err


def test_several_models_need_a_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = Source({"actor/w": stored(torch.ones(2)), "critic/v": stored(torch.zeros(3))})
    source.values = {"actor": MODULE, "critic": MODULE}
    path = write_own(source, Target(tmp_path / "own", 1, False, Layout(1, 2)))
    run("merge", path, tmp_path / "out", code=1)
    assert "several models: actor, critic; say which key with --key" in capsys.readouterr().err
    run("merge", path, tmp_path / "out", "--key", "critic")
    assert load_file(tmp_path / "out").keys() == {"v"}
    run("merge", path, tmp_path / "all", "--key", "critic", "--optimizer")
    assert load_file(tmp_path / "all").keys() == {"v", "actor/w"}


def test_dtypes_that_our_format_lacks_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"w": torch.zeros(2, dtype=torch.complex128)}, tmp_path / "model.pt")
    run("import", tmp_path / "model.pt", tmp_path / "own", "--from", "torch", code=1)
    assert "'model/w'" in capsys.readouterr().err


# -- memory


MIB = 1 << 20


def resident_mib(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def within_mib(limit_mib: float, act: Callable[[], Any]) -> Any:
    """Act; meanwhile this process must not have more than `limit_mib` more memory than before."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        pytest.skip(f"the peak of memory cannot be reset here: {error}")
    before = resident_mib("VmRSS:")
    made = act()
    grown = resident_mib("VmHWM:") - before
    assert grown < limit_mib, "a whole tensor was in memory"
    return made


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """One tensor of 160 MiB, or 80 in a lower dtype, goes through every form, in a few buffers."""
    save_file({"w": torch.zeros(4)}, tmp_path / "small.safetensors")  # so that libraries are loaded before
    run("import", tmp_path / "small.safetensors", tmp_path / "small", "--from", "safetensors")
    rows, header = 4096, {"w": {"dtype": "F32", "shape": [4096, 10240], "data_offsets": [0, 160 * MIB]}}
    text = json.dumps(header).encode()
    with (tmp_path / "big.safetensors").open("wb") as file:  # sparse: nothing is on the disk but its header
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 160 * MIB)
    origin = Origin(tmp_path / "big.safetensors", "safetensors")
    path, _ = within_mib(60, lambda: import_foreign(origin, tmp_path / "a", Layout(1, 2), False))
    assert read_manifest(path).box("model/w", 1) == Box((rows // 2, 0), (rows // 2, 10240))
    (tmp_path / "big.safetensors").unlink()
    for arguments in (
        ("reshard", path, tmp_path / "b", "--mesh", "2x2"),
        ("export", tmp_path / "b", tmp_path / "dcp", "--to", "dcp", "--dtype", "bfloat16"),
        ("import", tmp_path / "dcp", tmp_path / "c", "--from", "dcp", "--ranks", 3),
        ("export", tmp_path / "c", tmp_path / "model.pt", "--to", "torch"),
        ("import", tmp_path / "model.pt", tmp_path / "d", "--from", "torch"),
        ("merge", tmp_path / "d", tmp_path / "w.safetensors"),
        ("verify", tmp_path / "d"),
    ):
        within_mib(60, partial(run, *arguments))
