"""Weights in the folders of DeepSpeed, ZeRO stages 0 to 3.

A step is a folder. `mp_rank_00_model_states.pt` (stage 3: `zero_pp_rank_R_mp_rank_00_model_states.pt` of each rank) has
the names and shapes of the parameters, group by group, the buffers, frozen parameters, and which names share one
parameter. `zero_pp_rank_R_mp_rank_00_optim_states.pt` (or `bf16_zero_...`) has rank R's part of the float32 masters,
which are what training goes on with; the model itself has them rounded.

- Stages 1 and 2: all parameters of a group, one after the other, are one vector; rank R has the R-th part of it.
- Stage 3: rank R has the R-th part of each parameter (of ceil(numel / ranks) elements, the last one padded), those of
  all parameters one after the other, cut at places that have no meaning.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from fullshard.errors import CheckpointDamagedError, CheckpointError
from fullshard.tools.ckpt.foreign.pickles import Made, Maker, as_record
from fullshard.tools.ckpt.foreign.stored import Folder, Joined, Part, StoredTensor, plain_name
from fullshard.tools.ckpt.foreign.torch_files import torch_file
from fullshard.tools.ckpt.sources import Readable, Source

_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_UNKNOWN = re.compile(r"layer_.*model_states\.pt|expp_rank.*\.pt|.*expert.*\.pt")  # pipeline stages, experts
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class _Zero:
    """A folder, opened: what each rank's files say."""

    path: Path
    models: list[dict[str, Any]]  # one, or one of each rank in stage 3
    optimizers: list[dict[str, Any]]  # by rank

    @property
    def ranks(self) -> int:
        return len(self.optimizers)


def read_deepspeed(path: Path) -> Source:
    """The weights of a DeepSpeed checkpoint.

    Args:
        path: Folder of a step, or the one above, whose file `latest` names it.

    Raises:
        CheckpointError: It has a layout that is not known here (pipeline, experts, tensor parallelism).
        CheckpointDamagedError: A file is missing or damaged.
    """
    path = _step_folder(path)
    folder = Folder(path)
    try:
        zero = _open(folder)
        source = Source({}, step=_step(zero.models[0]), on_close=folder.close)
        if zero.optimizers:
            stage = _stage(zero)
            _add_frozen(zero, stage, source)
            (_add_whole_groups if stage < 3 else _add_parts)(zero, source)
            _add_buffers(zero, source)
        else:
            _check_unsharded(zero)
        _add_shared(zero, source)
        _add_rest(zero, source)
    except (TypeError, KeyError, ValueError, IndexError, AttributeError) as error:
        raise CheckpointDamagedError(
            f"{path} is not as DeepSpeed writes it ({type(error).__name__}: {error})"
        ) from None
    return source


def _step_folder(path: Path) -> Path:
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder")
    if not any(_MODEL.fullmatch(entry.name) for entry in path.iterdir()) and (path / "latest").exists():
        above = Folder(path)
        name = above.bytes("latest", 0, min(above.size("latest"), 4096)).decode(errors="replace").strip()
        above.close()
        return path / plain_name(name, str(path / "latest"))
    return path


def _open(folder: Folder) -> _Zero:
    names = sorted(entry.name for entry in folder.path.iterdir())
    foreign = [name for name in names if _UNKNOWN.fullmatch(name)]
    models = {name: match for name in names if (match := _MODEL.fullmatch(name))}
    optimizers = {name: match for name in names if (match := _OPTIMIZER.fullmatch(name))}
    foreign += [name for name, match in {**models, **optimizers}.items() if int(match[2])]
    if foreign:
        raise CheckpointError(
            f"{folder.path} holds {foreign[0]}: it was written with pipeline stages, experts or tensor parallelism. "
            f"Only plain ZeRO checkpoints are read; convert it with DeepSpeed's own scripts first."
        )
    if not models:
        raise CheckpointDamagedError(f"{folder.path} holds no mp_rank_00_model_states.pt: no DeepSpeed checkpoint")

    def read(found: dict[str, re.Match[str]]) -> list[dict[str, Any]]:
        by_rank = {int(match[1] or 0): name for name, match in found.items()}
        if sorted(by_rank) != list(range(len(found))):
            raise CheckpointDamagedError(f"{folder.path} has the files of ranks {sorted(by_rank)}: some are missing")
        return [_mapping(torch_file(folder, by_rank[rank], _of_deepspeed), by_rank[rank]) for rank in sorted(by_rank)]

    optimizer_files = [_mapping(state["optimizer_state_dict"], "optimizer_state_dict") for state in read(optimizers)]
    return _Zero(folder.path, read(models), optimizer_files)


def _of_deepspeed(name: str) -> Maker | None:
    """Loss scalers, enums, addresses: classes of DeepSpeed are kept as records."""
    return as_record(name) if name.startswith("deepspeed.") else None


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{what} is no dictionary")
    return value


def _step(model: dict[str, Any]) -> int:
    step = model.get("global_steps", 0)
    return step if isinstance(step, int) and step >= 0 else 0


def _stage(zero: _Zero) -> int:
    # The optimizer that DeepSpeed takes for bfloat16 with float32 gradients divides as stage 1, and does not say so.
    found = zero.optimizers[0].get("zero_stage", 1)
    stage = found.args[0] if isinstance(found, Made) else found  # an enum's record has its number as argument
    counts = zero.optimizers[0]["partition_count"]
    expected = max(counts) if isinstance(counts, list) else counts
    if zero.ranks != expected:
        raise CheckpointDamagedError(
            f"{zero.path} has the optimizer files of {zero.ranks} ranks, but {expected} ranks wrote it"
        )
    if stage not in (1, 2, 3):
        raise CheckpointError(f"{zero.path} was written by ZeRO stage {stage}; only stages 0 to 3 are known")
    if stage == 3 and len(zero.models) != zero.ranks:
        raise CheckpointDamagedError(
            f"{zero.path} has {len(zero.models)} *_model_states.pt files, expected one of each of {zero.ranks} ranks"
        )
    return int(stage)


def _groups(zero: _Zero, key: str) -> list[list[Part]]:
    """By rank: the flat vectors of its groups."""
    return [[_flat(vector) for vector in state[key]] for state in zero.optimizers]


def _flat(tensor: StoredTensor) -> Part:
    numel = prod(tensor.shape)
    if tensor != StoredTensor.contiguous(tensor.elements, tensor.shape, tensor.offset):
        raise ValueError("a flat vector is not contiguous")
    return Part(tensor.elements, tensor.offset, numel)


def _shapes(zero: _Zero, key: str) -> list[Shapes]:
    found = zero.models[0].get(key) or []
    groups = found if isinstance(found, list) else [found]
    return [{name: tuple(shape) for name, shape in group.items()} for group in groups]


def _add_whole_groups(zero: _Zero, source: Source) -> None:
    """Stages 1 and 2."""
    groups = _groups(zero, "single_partition_of_fp32_groups")
    paddings = zero.optimizers[0].get("param_alignment_paddings")
    for number, shapes in enumerate(_shapes(zero, "param_shapes")):
        vector = Joined([parts[number] for parts in groups])
        gaps = paddings[number] if paddings is not None else [0] * len(shapes)
        offset = 0
        for gap, (name, shape) in zip(gaps, shapes.items(), strict=True):
            source.tensors[name] = StoredTensor.contiguous(vector, shape, offset).checked(str(zero.path))
            offset += prod(shape) + gap
        # The vector is padded so that it divides by twice the ranks. Anything else is a layout that is not known here.
        unit = 2 * zero.ranks
        if -(-offset // unit) != -(-vector.numel // unit):
            raise ValueError(f"group {number} has {vector.numel} elements, its parameters {offset}")


def _add_parts(zero: _Zero, source: Source) -> None:
    """Stage 3."""
    vectors = [_Sliced(parts) for parts in _groups(zero, "fp32_flat_groups")]
    offset = 0
    for shapes in _shapes(zero, "param_shapes"):
        for name, shape in shapes.items():
            count = -(-prod(shape) // zero.ranks)
            source.tensors[name] = _joined([p for v in vectors for p in v.slice(offset, count)], shape, zero)
            offset += count
    if offset != vectors[0].numel:
        raise ValueError(f"a rank has {vectors[0].numel} elements, its parts of the parameters {offset}")


class _Sliced:
    """Vectors one after the other, of which pieces are taken."""

    def __init__(self, parts: list[Part]) -> None:
        self._parts = parts
        self.numel = sum(part.numel for part in parts)

    def slice(self, start: int, count: int) -> list[Part]:
        found, begin = [], 0
        for part in self._parts:
            low, high = max(start, begin), min(start + count, begin + part.numel)
            if low < high:
                found.append(Part(part.elements, part.start + low - begin, high - low))
            begin += part.numel
        return found


def _joined(parts: list[Part], shape: tuple[int, ...], zero: _Zero) -> Readable:
    if not parts:  # a tensor without elements
        parts = [Part(_groups(zero, "fp32_flat_groups")[0][0].elements, 0, 0)]
    return StoredTensor.contiguous(Joined(parts), shape).checked(str(zero.path))


def _add_frozen(zero: _Zero, stage: int, source: Source) -> None:
    for shapes in _shapes(zero, "frozen_param_shapes"):
        for name, shape in shapes.items():
            fragments = [model["frozen_param_fragments"][name] for model in zero.models]
            parts = [_flat(fragment) for fragment in (fragments if stage == 3 else fragments[:1])]
            source.tensors[name] = StoredTensor.contiguous(Joined(parts), shape).checked(str(zero.path))


def _add_buffers(zero: _Zero, source: Source) -> None:
    model = zero.models[0]
    for name in model["buffer_names"]:
        if isinstance(value := model["module"].get(name), StoredTensor):
            source.tensors[name] = value


def _check_unsharded(zero: _Zero) -> None:
    """Stage 0 has no masters; the weights are those of the model."""
    stage = zero.models[0].get("ds_config", {}).get("zero_optimization", {}).get("stage", 0)
    if stage != 0:
        raise CheckpointDamagedError(
            f"{zero.path} is of ZeRO stage {stage}, but its *_optim_states.pt files are missing: they hold the weights"
        )


def _add_shared(zero: _Zero, source: Source) -> None:
    """Names that share a parameter with another."""
    shared = _mapping(zero.models[0].get("shared_params") or {}, "shared_params")
    for name, other in shared.items():
        target = shared.get(other, other)
        if name not in source.tensors and target in source.tensors:
            source.aliases[name] = target


def _add_rest(zero: _Zero, source: Source) -> None:
    """What only the model has: all of it in stage 0, frozen parameters in stage 1. In stage 3 it has no values."""
    lost = []
    seen: dict[StoredTensor, str] = {}
    for name, value in _mapping(zero.models[0].get("module") or {}, "module").items():
        if name in source.tensors or name in source.aliases or not isinstance(value, StoredTensor):
            continue
        if len(zero.models) > 1:
            lost.append(name)
        elif seen.setdefault(value, name) != name:
            source.aliases[name] = seen[value]
        else:
            source.tensors[name] = value
    if lost:
        source.notes.append(f"the checkpoint has no values of {', '.join(sorted(lost)[:5])} ({len(lost)} names)")
