"""Folders and files of safetensors, as Hugging Face's libraries write and read them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from fullshard.core.ckpt.manifest import ManifestError, strict_json
from fullshard.errors import CheckpointDamagedError, CheckpointError
from fullshard.runtime.checkpoint.files.memory import torch_dtype
from fullshard.runtime.checkpoint.files.reading import PORTION_BYTES, Buffer, TensorFile
from fullshard.runtime.checkpoint.files.stretches import Stretch
from fullshard.runtime.checkpoint.files.writing import Piece
from fullshard.tools.ckpt.foreign.stored import Folder, StoredTensor, plain_name
from fullshard.tools.ckpt.outputs import write_json, write_safetensors
from fullshard.tools.ckpt.sources import Source

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
_MAX_JSON_BYTES = 256 << 20
_TIED = ("lm_head.weight", "model.embed_tokens.weight")


@dataclass(frozen=True, slots=True)
class _InFile:
    """A tensor of a safetensors file, whose bytes the file reads in portions."""

    file: TensorFile
    name: str
    buffer: Buffer

    @property
    def shape(self) -> tuple[int, ...]:
        return self.file.spans[self.name].shape

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self.file.spans[self.name].dtype)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def read(self, start: int, out: torch.Tensor) -> None:
        """Of the tensor's elements in order; see `stored.Elements`."""
        size = self.dtype.itemsize
        for part in out.split(PORTION_BYTES // size):
            portion = self.file.portion(self.name, start * size, (start + part.numel()) * size)
            stretch = Stretch(self.file, portion, None)
            stretch.fetch(self.buffer)
            part.copy_(stretch.data(portion))
            start += part.numel()


def read_safetensors(path: Path) -> Source:
    """The tensors of a safetensors file, or of a folder of Hugging Face with one or many.

    Raises:
        CheckpointDamagedError: A file is missing or damaged.
        CheckpointError: It names files elsewhere.
    """
    if not path.is_dir():
        return _files({path: None}, path)
    index = path / INDEX
    if not index.exists():
        return _with_tied(_files({_regular(path, SINGLE): None}, path), path)
    weight_map = _read_json(path, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointDamagedError(f"{index} has no weight_map of names")
    names: dict[str, list[str]] = {}
    for tensor, file in weight_map.items():
        names.setdefault(plain_name(file, str(index)), []).append(tensor)
    return _with_tied(_files({_regular(path, file): tensors for file, tensors in names.items()}, path), path)


def _files(expected: Mapping[Path, Sequence[str] | None], path: Path) -> Source:
    """All tensors of files; each file must have the tensors that are expected of it."""
    buffer = Buffer()
    files: list[TensorFile] = []

    def close() -> None:
        for file in files:
            file.close()

    source = Source({}, on_close=close)
    for place, names in expected.items():
        files.append(TensorFile(place, None))
        spans = files[-1].spans
        missing = [name for name in names or () if name not in spans]
        if missing:
            raise CheckpointDamagedError(f"{place} does not hold {missing[0]!r}, though {path / INDEX} says so")
        for name in spans if names is None else names:
            inside = _InFile(files[-1], name, buffer)
            source.tensors[name] = StoredTensor.contiguous(inside, inside.shape)
    return source


def _regular(folder: Path, name: str) -> Path:
    """A file in a folder. In a snapshot of the hub's cache files are links to blobs of the same model: only those."""
    path = folder / name
    if path.is_symlink() and folder.parent.name == "snapshots":
        target = Path(os.path.realpath(path))
        if target.parent == Path(os.path.realpath(folder.parent.parent / "blobs")):
            return target
    return path


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    path = _regular(folder, name)
    files = Folder(path.parent)
    try:
        if files.size(path.name) > _MAX_JSON_BYTES:
            raise CheckpointDamagedError(f"{path} is larger than any real one")
        value = strict_json(files.bytes(path.name, 0, files.size(path.name)))
    except ManifestError as error:
        raise CheckpointDamagedError(f"{path}: {error}") from None
    finally:
        files.close()
    if not isinstance(value, dict):
        raise CheckpointDamagedError(f"{path} is no JSON object")
    return value


def _with_tied(source: Source, folder: Path) -> Source:
    """The configuration of the model is kept, and the output layer that it says is the input layer."""
    if not (folder / CONFIG).exists():
        return source
    config = _read_json(folder, CONFIG)
    source.values = {"hf_config": config}
    head, embedding = _TIED
    if config.get("tie_word_embeddings") is True and head not in source.tensors and embedding in source.tensors:
        source.aliases[head] = embedding
    return source


def write_folder(folder: Path, pieces: Sequence[Piece], config: Mapping[str, Any], max_shard_bytes: int) -> None:
    """Write a folder that `from_pretrained` reads.

    Args:
        folder: New.
        pieces: Whole tensors.
        config: For config.json.
        max_shard_bytes: Bytes of tensors in a file, if no single one is larger.
    """
    folder.mkdir()
    shards: list[list[Piece]] = [[]]
    filled = 0
    for piece in pieces:
        if shards[-1] and filled + piece.nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(piece)
        filled += piece.nbytes
    many = len(shards) > 1
    names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" if many else SINGLE for n in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(folder / name, shard, {"format": "pt"})  # transformers refuses files that do not say so
    if many:
        weight_map = {piece.name: name for name, shard in zip(names, shards, strict=True) for piece in shard}
        total = sum(piece.nbytes for piece in pieces)
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    write_json(folder / CONFIG, dict(config))


def llama_config(model: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """config.json of the trainer's Llama, of its section `model`.

    Raises:
        CheckpointError: It is no such section.
    """
    names = {
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"),
        *("vocab_size", "max_position_embeddings", "rope_theta", "rms_norm_eps", "initializer_range"),
        "tie_word_embeddings",
    }
    missing = sorted(names - model.keys())
    if missing:
        raise CheckpointError(f"the model's configuration in the checkpoint lacks {', '.join(missing)}: give --config")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{name: model[name] for name in sorted(names)},
        "head_dim": model["hidden_size"] // model["num_attention_heads"],
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "rope_scaling": None,
        "use_cache": True,
        "bos_token_id": None,  # tokens are bytes; none of them is special
        "eos_token_id": None,
        "pad_token_id": None,
        "torch_dtype": dtype,
    }


def dtype_word(pieces: Sequence[Piece]) -> str:
    """The dtype of most of the bytes, as config.json names it."""
    sizes: dict[str, int] = {}
    for piece in pieces:
        sizes[piece.dtype] = sizes.get(piece.dtype, 0) + piece.nbytes
    most = max(sizes, key=sizes.__getitem__, default="F32")
    return str(torch_dtype(most)).removeprefix("torch.")


def read_config(path: Path) -> dict[str, Any]:
    """A config.json that the user names."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is no JSON object")
    return value
