"""Modules that save in their own way, tied tensors, objects with a state: in one process, files in memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_checkpoint import Stored, load, save
from torch import nn

from fullshard import checkpoint
from fullshard.errors import CheckpointError, CheckpointMismatchError
from fullshard.runtime.checkpoint.state.collect import collect
from fullshard.runtime.checkpoint.state.special import only, per_rank


def names(stored: Stored) -> set[str]:
    return {*stored.manifest.tensors, *stored.manifest.aliases}


def round_trip(model: nn.Module, again: nn.Module) -> Stored:
    stored = save({"model": model})
    load(stored, {"model": again})
    return stored


class Transposes(nn.Module):
    """Its hooks save the weight the other way round under another name, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3))
        self.other = nn.Linear(2, 2)
        self._register_state_dict_hook(self._write)
        self.register_load_state_dict_pre_hook(self._read)
        self.copies = torch.empty(0)

    @staticmethod
    def _write(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        state[f"{prefix}turned"] = state.pop(f"{prefix}weight").t().contiguous()

    @staticmethod
    def _read(_module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if f"{prefix}turned" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}turned").t()


def test_hooks_that_make_other_tensors_get_them_back() -> None:
    model, again = nn.Sequential(Transposes()), nn.Sequential(Transposes())
    stored = round_trip(model, again)
    assert names(stored) == {"model/0.turned", "model/0.other.weight", "model/0.other.bias"}
    assert torch.equal(again[0].weight, model[0].weight)
    assert torch.equal(again[0].other.weight, model[0].other.weight)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    assert "model/0.weight" in str(collect({"model": model, "optimizer": optimizer}).values)


class Renames(nn.Module):
    """Saves a parameter under another name, in its own memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:  # noqa: ARG002
        destination[f"{prefix}w"] = self.weight.detach()

    def _load_from_state_dict(self, *_: Any) -> None:
        raise AssertionError("what is read in place needs no loading")


def test_views_of_parameters_are_read_in_place() -> None:
    model, again = Renames(), Renames()
    assert names(round_trip(model, again)) == {"model/w"}
    assert torch.equal(again.weight, model.weight)


class Counts(nn.Module):
    """An extra state, with a tensor, and a count of loads."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.table = torch.arange(count)
        self.loads = 0
        self.register_load_state_dict_post_hook(self._loaded)

    def _loaded(self, _module: nn.Module, _keys: Any) -> None:
        self.loads += 1

    def get_extra_state(self) -> dict[str, Any]:
        return {"count": self.count, "table": self.table}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.count, self.table = state["count"], state["table"]


def test_extra_states_and_hooks_after_loading() -> None:
    model, again = nn.ModuleDict({"counts": Counts(5)}), nn.ModuleDict({"counts": Counts(2)})
    stored = round_trip(model, again)
    assert names(stored) == {"model/counts._extra_state.table"}
    assert (again["counts"].count, again["counts"].table.tolist()) == (5, [0, 1, 2, 3, 4])
    assert again["counts"].loads == 1
    with pytest.raises(CheckpointMismatchError, match=r"in the checkpoint, but not wanted: model/counts._extra_state"):
        load(stored, {"model": nn.ModuleDict({"counts": nn.Identity()})})
    with pytest.raises(CheckpointMismatchError, match=r"not in the checkpoint: model/0._extra_state"):
        load(save({"model": nn.Sequential()}), {"model": nn.Sequential(Counts(1))})
    model["counts"].table = print  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"^model\['counts._extra_state'\].table cannot be saved"):
        collect({"model": model})


class Metric(nn.Module):
    """Has a `state_dict` of its own, as those of torchmetrics."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.tensor(0.0)
        self.scale = nn.Parameter(torch.ones(1))

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:  # type: ignore[override]
        made: Any = super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        made[f"{prefix}total"] = self.total.clone()
        return made

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}total" in state:
            self.total = state.pop(f"{prefix}total")
        super()._load_from_state_dict(state, prefix, *args)


def test_modules_with_a_state_dict_of_their_own() -> None:
    model, again = nn.Sequential(Metric()), nn.Sequential(Metric())
    model[0].total = torch.tensor(3.0)
    nn.init.zeros_(model[0].scale)
    assert names(round_trip(model, again)) == {"model/0.scale", "model/0.total"}
    assert (again[0].total, again[0].scale) == (3, 0)


def test_tied_parameters_are_saved_once_and_loaded_by_either_name() -> None:
    def make(tied: bool) -> nn.Module:
        model = nn.ModuleDict({"embedding": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
        if tied:
            model["head"].weight = model["embedding"].weight
        return model

    def weights(model: Any) -> list[torch.Tensor]:
        return [model["embedding"].weight, model["head"].weight]

    model = make(True)
    stored = save({"model": model})
    assert stored.manifest.aliases == {"model/head.weight": "model/embedding.weight"}
    for tied in (True, False):
        again = make(tied)
        load(stored, {"model": again})
        assert all(torch.equal(weight, model["embedding"].weight) for weight in weights(again))
    only_head = save({"model": only(model, "head.*")})
    assert names(only_head) == {"model/head.weight"}
    again = make(True)
    load(only_head, {"model": again})
    assert torch.equal(again["embedding"].weight, model["embedding"].weight)
    with pytest.warns(UserWarning, match=r"embedding.weight, head.weight are one parameter in 'model', but several"):
        load(save({"model": make(False)}), {"model": again})


class Position:
    """An object with a state."""

    def __init__(self, step: int) -> None:
        self.step = step

    def state_dict(self) -> dict[str, Any]:
        return OrderedDict(step=self.step, best=float("inf"))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert type(state) is OrderedDict
        assert state["best"] == float("inf")
        self.step = state["step"]


def test_objects_and_values() -> None:
    state = {"position": Position(3), "run": {"name": "a", "betas": (0.9, 0.95)}, "table": torch.arange(3)}
    stored = save(state)
    position = Position(0)
    done = load(stored, {"position": position, "run": None, "table": None})
    assert position.step == 3
    assert done.values["run"] == {"name": "a", "betas": (0.9, 0.95)}
    assert torch.equal(done.values["table"], torch.arange(3))
    assert load(stored, {"position": position}).skipped == ("run", "table")
    assert load(stored, {"position": None}).values["position"] == OrderedDict(step=3, best=float("inf"))
    missing = load(stored, {"position": position, "more": Position(7)}, strict={"more": False})
    assert missing.missing == ("more",)
    with pytest.raises(ValueError, match=r"strict names keys that are not loaded: \['other'\]"):
        load(stored, {"position": position}, strict={"other": False})


class OnlySaves:
    """Cannot be loaded."""

    def state_dict(self) -> dict[str, Any]:
        return {}


def test_objects_that_could_not_be_loaded_are_refused() -> None:
    with pytest.raises(TypeError, match="OnlySaves with state_dict"):
        collect({"object": OnlySaves()})
    with pytest.raises(TypeError, match=r"per_rank\(Linear\)"):
        collect({"model": per_rank(nn.Linear(1, 1))})
    with pytest.raises(TypeError, match=r"^models\[0\] cannot be saved.*a key of its own"):
        collect({"models": [nn.Linear(1, 1)]})
    with pytest.raises(TypeError, match=r"only\(...\) takes a module or an optimizer, got int"):
        only(3, "*")
    with pytest.raises(ValueError, match="needs patterns"):
        only(nn.Linear(1, 1))


def test_keys_with_dots_do_not_meet() -> None:
    value = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, "a b": torch.full((1,), 2.0)}
    stored = save({"value": value})
    assert names(stored) == {"value/a.b", "value/a.b~1", "value/a_b"}
    back = load(stored, {"value": None}).values["value"]
    assert [back["a.b"].item(), back["a"]["b"].item(), back["a b"].item()] == [0, 1, 2]


def _damaged(stored: Stored, change: Any) -> Stored:
    state = {**stored.manifest.state}
    change(state)
    return Stored(type(stored.manifest)(**{**_fields(stored.manifest), "state": state}), stored.files)


def _fields(manifest: Any) -> dict[str, Any]:
    return {name: getattr(manifest, name) for name in manifest.__dataclass_fields__}


def _of_optimizer(**members: Any) -> Any:
    return lambda state: state.update(optimizer={**state["optimizer"], **members})


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.update(optimizer=3),
        lambda state: state.update(optimizer={"kind": "optimizer"}),
        _of_optimizer(groups=[{}]),
        _of_optimizer(groups=[{"params": ["model/weight"], "state": [5], "settings": {}}]),
        _of_optimizer(groups=[{"params": ["model/weight"], "state": [], "settings": {}}]),
        _of_optimizer(groups=[{"params": ["model/weight", "model/bias"], "state": [0, 0], "settings": {"$x": 1}}]),
        _of_optimizer(groups=[{"params": ["model/weight"] * 2, "state": [0, 0], "settings": {}}]),
        _of_optimizer(kinds=[[3]]),
        _of_optimizer(kinds=[["step", "nothing"]]),
        _of_optimizer(values={"model/weight": {"$tensor": "model/weight"}}),
        _of_optimizer(values={"model/weight": {"$tensor": "absent"}}),
        _of_optimizer(values={"model/weight": 3}),
        _of_optimizer(others=3),
        _of_optimizer(others={"state": {"$set": []}}),
        _of_optimizer(groups=[{"params": ["model/weight", "model/bias"], "state": [0, 0], "settings": 3}]),
        lambda state: state.update(position={"kind": "object", "value": {"$tensor": "model/weight"}}),
        lambda state: state.update(position={"kind": "object", "value": {"$nothing": 1}}),
        lambda state: state.update(model={"kind": "module", "extra": {"_extra_state": {"$nothing": 1}}}),
    ],
)
def test_damaged_descriptions_are_refused_before_anything_is_changed(change: Any) -> None:
    """B115: values that come from anyone."""
    model = Counted()
    optimizer = torch.optim.Adam(model.parameters())
    model.weight.sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "position": Position(1)}
    stored = save(state)
    load(stored, state)
    before = model.weight.detach().clone()
    with pytest.raises(CheckpointMismatchError, match="nothing was changed"):
        load(_damaged(stored, change), state)
    assert torch.equal(model.weight, before)


class Counted(nn.Linear):
    """With an extra state."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.extra = 1

    def get_extra_state(self) -> int:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_an_optimizer_of_another_class_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path, {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}, 1)
    checkpoint.load(tmp_path, {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
    assert "was saved by" not in caplog.text
    checkpoint.load(tmp_path, {"model": model, "optimizer": torch.optim.SGD(model.parameters())})
    assert "'optimizer' was saved by AdamW and is loaded into SGD" in caplog.text


def test_what_there_is_instead_of_a_checkpoint_is_told(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for step in (5, 10):
        checkpoint.save(tmp_path / "own", {"model": model}, step)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors").touch()
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").touch()
    for name, text in {
        "own/step-7": rf"no such folder; {tmp_path}/own has steps 5, 10",
        "nowhere/step-7": r"no such folder$",
        "hf": r"ckpt import .*hf OUT --from hf",
        "dcp": r"ckpt import .*dcp OUT --from dcp",
        "hf/model.safetensors": "it is a file",
    }.items():
        with pytest.raises(CheckpointError, match=text):
            checkpoint.load(tmp_path / name, {"model": model})
    with pytest.raises(
        CheckpointMismatchError, match=r"not in the checkpoint: net\n.*the checkpoint has the keys model"
    ):
        checkpoint.load(tmp_path / "own", {"net": model})
