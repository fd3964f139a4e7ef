"""Checkpoints in a plain form: one safetensors file per rank and one JSON file, for the same number of ranks.

    checkpoint/latest                  the name of the newest complete checkpoint, written last
    checkpoint/step-40/rank-00000.safetensors
        model/NAME                     this rank's rows of a parameter
        optim/NAME/KEY                 this rank's rows of an optimizer state (or a scalar)
        rng/cpu, rng/device            states of the random generators
    checkpoint/step-40/checkpoint.json step, data position, shapes, and size and sha256 of every rank's file

A checkpoint is built under a temporary name and renamed when all files are on disk, and renamed again before it is
deleted, so a folder named `step-N` is complete, whatever was killed when. One that is replaced (a run that was resumed
from an earlier step) is kept as `.step-N.old` until the new one is in place. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.train.config import Config
from fullshard.train.errors import CheckpointError
from fullshard.train.settings import to_dict
from fullshard.train.world import World

CHECKPOINT_FOLDER, LATEST_FILE, MANIFEST_FILE = "checkpoint", "latest", "checkpoint.json"
FORMAT = "fullshard-plain-1"
PREFIX, TEMPORARY = "step-", ".tmp"
REPLACED, DOOMED = ".old", ".gone"  # ends of hidden names: a checkpoint that is being replaced, one being deleted
# How the windows of a step are spread; a resumed run takes as many as before, unless it is told how many.
SHAPE_OF_STEP = ("train.micro_batch_size", "train.gradient_accumulation", "train.global_batch_size")
MANIFEST_TYPES = {
    "step": int,
    "position": int,
    "step_windows": int,
    "world_size": int,
    "mesh": list,
    "config": dict,
    "corpus": str,
    "parameters": dict,
    "ranks": list,
}


@dataclass(frozen=True)
class Progress:
    """How far a run is: optimizer steps done, the place in the data, and how much of it a step takes."""

    step: int
    position: int  # windows that all ranks have consumed
    step_windows: int  # of all ranks


@dataclass(frozen=True)
class TrainState:
    """What a checkpoint holds besides the progress."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    world: World
    config: Config
    corpus: str  # fingerprint of the text


def save_checkpoint(folder: Path, state: TrainState, progress: Progress, keep: int) -> Path:
    """Write `folder/step-N`; all ranks call it, and all return or all raise."""
    final, temporary = folder / f"{PREFIX}{progress.step}", folder / f".{PREFIX}{progress.step}{TEMPORARY}"
    world = state.world
    world.on_first(lambda: _fresh_folder(temporary))
    own_file = temporary / rank_file(world.rank)
    files = world.on_all(lambda: _write_rank(own_file, _local_tensors(state)))
    world.on_first(lambda: _publish(temporary, final, _manifest(state, progress, files)))
    world.on_first(lambda: _prune(folder, keep))
    return final


def load_checkpoint(folder: Path, state: TrainState) -> Progress:
    """Fill model, optimizer and random generators from `folder`; all ranks return, or all raise the same error."""
    manifest = state.world.on_first(lambda: read_manifest(folder, state))
    own = manifest["ranks"][state.world.rank]
    tensors: dict[str, Tensor] = {}
    # Every file is read and checked before any rank changes a parameter.
    state.world.on_all(lambda: tensors.update(_read_rank(folder / rank_file(state.world.rank), own, state)))
    state.world.on_all(lambda: _fill(state, tensors))
    return Progress(manifest["step"], manifest["position"], manifest["step_windows"])


def find_latest(folder: Path) -> tuple[Path | None, list[str]]:
    """The checkpoint to resume from, and warnings about folders that are not complete ones."""
    complete: dict[str, Path] = {}
    warnings = []
    # Hidden names sort first, so a replaced checkpoint counts only where its successor is not in place.
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not path.is_dir():
            continue
        name = path.name
        if name.startswith(".") and name.endswith(REPLACED):
            name = name[1:].removesuffix(REPLACED)
        if _is_step(name) and (path / MANIFEST_FILE).is_file():
            complete[name] = path
        else:
            warnings.append(f"ignored {path}: it is not a complete checkpoint (saving or deleting was interrupted).")
    latest = folder / LATEST_FILE
    named = latest.read_text(encoding="utf-8", errors="replace").strip() if latest.is_file() else ""
    if named in complete:
        return complete[named], warnings
    if named and complete:
        warnings.append(f"{latest} names {named}, which is not there; taking the newest complete one instead.")
    return (complete[max(complete, key=_step_number)] if complete else None), warnings


def _is_step(name: str) -> bool:
    return name.startswith(PREFIX) and name.removeprefix(PREFIX).isdecimal()


def _step_number(name: str) -> int:
    return int(name.removeprefix(PREFIX))


def read_manifest(folder: Path, state: TrainState) -> dict[str, Any]:
    """The JSON of a checkpoint, checked against this run."""
    path = folder / MANIFEST_FILE
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}). Resume from another checkpoint.") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path}: expected a checkpoint of format {FORMAT!r}, found something else.")
    missing = MANIFEST_TYPES.keys() - manifest.keys()
    if missing:
        raise CheckpointError(f"{path} lacks {', '.join(sorted(missing))}: the file is damaged.")
    _check_form(path, manifest)
    _check_fits(path, manifest, state)
    return manifest


def belongs_to(folder: Path, config: Config) -> bool:
    """Whether the newest checkpoint in a folder is of a run with this model, data and seed, as far as can be read."""
    newest, _ = find_latest(folder)
    if newest is None:
        return False
    try:
        saved = json.loads((newest / MANIFEST_FILE).read_text(encoding="utf-8"))["config"]
        return not changed_settings(saved, config)[0]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return True  # damaged: loading it says how


def rank_file(rank: int) -> str:
    """File name of a rank. It is computed, never read from a checkpoint, so no path in a file is trusted."""
    return f"rank-{rank:05d}.safetensors"


def changed_settings(saved: Mapping[str, Any], config: Config) -> tuple[list[str], list[str]]:
    """Settings that differ from the checkpoint's: (those that make it unusable, those that only bend the run)."""
    fatal: list[str] = []
    bending: list[str] = []
    current = to_dict(config)
    for section in ("model", "data", "train", "optim"):
        for key, value in current[section].items():
            if f"{section}.{key}" not in SHAPE_OF_STEP and saved.get(section, {}).get(key) != value:
                text = f"{section}.{key} was {saved.get(section, {}).get(key)!r}, is {value!r}"
                pinned = section in ("model", "data") or key == "seed"
                (fatal if pinned else bending).append(text)
    return fatal, bending


def _check_form(path: Path, manifest: Mapping[str, Any]) -> None:
    """Whatever is used below has the type it is used as."""
    wrong = [key for key, kind in MANIFEST_TYPES.items() if not isinstance(manifest[key], kind)]
    if not wrong:
        sections_fit = all(isinstance(section, dict) for section in manifest["config"].values())
        wrong += [] if sections_fit else ["config"]
        entries = manifest["ranks"]
        entries_fit = all(isinstance(entry, dict) and {"bytes", "sha256"} <= entry.keys() for entry in entries)
        wrong += [] if entries_fit and len(entries) == manifest["world_size"] else ["ranks"]
        wrong += [] if len(manifest["mesh"]) in (1, 2) else ["mesh"]
    if wrong:
        raise CheckpointError(f"{path}: {', '.join(wrong)} is not as it was written: the file is damaged.")


def _check_fits(path: Path, manifest: Mapping[str, Any], state: TrainState) -> None:
    saved_size, size = manifest["world_size"], state.world.size
    if saved_size != size:
        raise CheckpointError(
            f"{path} was written by {saved_size} ranks, this run has {size}. Checkpoints of this form fit only the "
            f"same number of ranks: resume with --nproc {saved_size}."
        )
    saved_replicas, replicas = (_replicas(mesh) for mesh in (manifest["mesh"], state.world.mesh.shape))
    if saved_replicas != replicas:
        raise CheckpointError(
            f"{path} was written with parallel.dp_replicate = {saved_replicas}, this run has {replicas}, so each rank "
            f"holds other rows: resume with --parallel.dp_replicate {saved_replicas}."
        )
    fatal, _ = changed_settings(manifest["config"], state.config)
    if fatal:
        raise CheckpointError(
            f"{path} belongs to a different run: {'; '.join(fatal)}. Resume with the settings it had."
        )
    if manifest["corpus"] != state.corpus:
        raise CheckpointError(f"{path} was trained on other text than the corpus in this run folder.")
    if manifest["parameters"] != _parameter_shapes(state.model):
        names = _parameter_shapes(state.model).keys() ^ manifest["parameters"].keys()
        raise CheckpointError(
            f"{path}: the parameters differ from the model's: {', '.join(sorted(names)) or 'shapes'}."
        )


def _replicas(mesh: Sequence[int]) -> int:
    """Copies of each shard in a mesh of shape (shards,) or (replicas, shards)."""
    return mesh[0] if len(mesh) == 2 else 1


def _parameter_shapes(model: nn.Module) -> dict[str, Any]:
    return {
        name: {"shape": list(parameter.shape), "dtype": str(parameter.dtype).removeprefix("torch.")}
        for name, parameter in model.named_parameters()
    }


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded; shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def _local_tensors(state: TrainState) -> dict[str, Tensor]:
    tensors = {f"model/{name}": local_part(parameter) for name, parameter in state.model.named_parameters()}
    for name, parameter in state.model.named_parameters():
        for key, value in state.optimizer.state.get(parameter, {}).items():
            tensors[f"optim/{name}/{key}"] = local_part(torch.as_tensor(value))
    tensors["rng/cpu"] = torch.get_rng_state()
    if state.world.device.type != "cpu":
        tensors["rng/device"] = torch.get_device_module(state.world.device).get_rng_state(state.world.device)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _write_rank(path: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    try:
        save_file(tensors, path)
        _fsync(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot write {path}: {error}. Free space or name another --run.folder.") from None
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _manifest(state: TrainState, progress: Progress, files: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "step": progress.step,
        "position": progress.position,
        "step_windows": progress.step_windows,
        "world_size": state.world.size,
        "mesh": list(state.world.mesh.shape),
        "config": to_dict(state.config),
        "corpus": state.corpus,
        "parameters": _parameter_shapes(state.model),
        "ranks": files,
    }


def _fresh_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _publish(temporary: Path, final: Path, manifest: Mapping[str, Any]) -> None:
    """Make the checkpoint visible: manifest, rename, and only then `latest`."""
    _write_durably(temporary / MANIFEST_FILE, json.dumps(manifest, indent=1) + "\n")
    _fsync(temporary)
    if final.exists():  # saved by a run that was resumed from an earlier step
        aside = final.with_name(f".{final.name}{REPLACED}")
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)  # not deleted yet: it may be the only checkpoint there is
    temporary.rename(final)
    _fsync(final.parent)
    pointer = final.parent / (LATEST_FILE + TEMPORARY)
    _write_durably(pointer, final.name + "\n")
    pointer.replace(final.parent / LATEST_FILE)
    _fsync(final.parent)


def _prune(folder: Path, keep: int) -> None:
    """Delete all but the newest checkpoints, and what interrupted saves have left. `latest` is in place by now."""
    complete = sorted((path.name for path in folder.iterdir() if _is_step(path.name)), key=_step_number)
    latest = (folder / LATEST_FILE).read_text(encoding="utf-8").strip()
    for name in complete[:-keep]:
        if name != latest:
            # Deleting takes many steps; a kill in between must not leave half a folder with a valid name.
            (folder / name).rename(folder / f".{name}{DOOMED}")
    for leftover in folder.glob(f".{PREFIX}*"):
        shutil.rmtree(leftover)


def _write_durably(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    _fsync(path)


def _fsync(path: Path) -> None:
    """Ask the disk to keep a file or the entries of a folder; without it a power cut can leave an empty file."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_rank(path: Path, entry: Mapping[str, Any], state: TrainState) -> dict[str, Tensor]:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing. Resume from another checkpoint.")
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise CheckpointError(
            f"{path} has {size} bytes, expected {entry['bytes']}: it is cut short or damaged. "
            f"Resume from another checkpoint."
        )
    if _sha256(path) != entry["sha256"]:
        raise CheckpointError(f"{path} is damaged: its content does not match its checksum. Resume from another one.")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    _check_tensors(path, tensors, state)
    return tensors


def _check_tensors(path: Path, tensors: Mapping[str, Tensor], state: TrainState) -> None:
    for name, parameter in state.model.named_parameters():
        found = tensors.get(f"model/{name}")
        expected = local_part(parameter.detach())
        if found is None or found.shape != expected.shape or found.dtype != expected.dtype:
            what = "nothing" if found is None else f"{tuple(found.shape)} {found.dtype}"
            raise CheckpointError(
                f"{path}: parameter {name}: expected {tuple(expected.shape)} {expected.dtype}, found {what}."
            )
    if "rng/cpu" not in tensors:
        raise CheckpointError(f"{path}: the state of the random generator (rng/cpu) is missing.")


@torch.no_grad()
def _fill(state: TrainState, tensors: Mapping[str, Tensor]) -> None:
    for name, parameter in state.model.named_parameters():
        local_part(parameter).copy_(tensors[f"model/{name}"])
        entries = dict(_optimizer_entries(tensors, name))
        if entries:
            fused = bool(state.optimizer.defaults.get("fused"))
            state.optimizer.state[parameter] = {
                key: _state_like(parameter, saved, fused) for key, saved in entries.items()
            }
    torch.set_rng_state(tensors["rng/cpu"])
    if state.world.device.type != "cpu" and "rng/device" in tensors:
        torch.get_device_module(state.world.device).set_rng_state(tensors["rng/device"], state.world.device)


def _optimizer_entries(tensors: Mapping[str, Tensor], name: str) -> Iterator[tuple[str, Tensor]]:
    prefix = f"optim/{name}/"
    for key, saved in tensors.items():
        if key.startswith(prefix):
            yield key.removeprefix(prefix), saved


def _state_like(parameter: Tensor, saved: Tensor, fused: bool) -> Tensor:
    """A state tensor: sharded like its parameter, or a plain scalar such as AdamW's step."""
    if saved.ndim == 0 and parameter.ndim != 0:
        # A fused kernel reads the step on the device; every other implementation wants it on the CPU.
        return saved.to(parameter.device) if fused else saved.clone()
    state = torch.zeros_like(parameter, dtype=saved.dtype)
    local_part(state).copy_(saved)
    return state
