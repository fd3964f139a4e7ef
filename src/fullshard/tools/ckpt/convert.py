"""`fullshard ckpt merge`, `reshard`, `export` and `import`: from one form to another, through a few buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fullshard.errors import CheckpointError
from fullshard.runtime.checkpoint.files.folder import Checkpoint
from fullshard.runtime.checkpoint.files.writing import Piece
from fullshard.runtime.checkpoint.state.values import decode, encode
from fullshard.tools.ckpt.foreign import hugging_face
from fullshard.tools.ckpt.foreign.dcp import open_dcp
from fullshard.tools.ckpt.foreign.dcp_out import write_dcp
from fullshard.tools.ckpt.foreign.dcp_state import from_torch
from fullshard.tools.ckpt.foreign.deepspeed import read_deepspeed
from fullshard.tools.ckpt.foreign.state_dicts import read_torch
from fullshard.tools.ckpt.foreign.torch_out import write_torch_file
from fullshard.tools.ckpt.outputs import new_path, write_safetensors
from fullshard.tools.ckpt.own import Layout, Target, own_source, rank_of, write_own
from fullshard.tools.ckpt.pieces import Stream
from fullshard.tools.ckpt.sources import Cast, Source


@dataclass(frozen=True)
class Weights:
    """The weights of one model, by plain names.

    Attributes:
        key: Under which they are saved.
        source: Of their tensors and aliases, named without the key.
    """

    key: str
    source: Source


@dataclass(frozen=True)
class Wish:
    """What is asked of an export.

    Attributes:
        key: Key of the model; None: the only one.
        dtype: Of its floating-point tensors; None: as they are stored.
        config: config.json to use.
        max_shard_bytes: Bytes of tensors in one file of a Hugging Face folder.
        overwrite: Replace what is in the way.
    """

    key: str | None = None
    dtype: torch.dtype | None = None
    config: Path | None = None
    max_shard_bytes: int = 5_000_000_000
    overwrite: bool = False


def weights_of(source: Source, key: str | None, dtype: torch.dtype | None) -> Weights:
    """The model in a checkpoint.

    Raises:
        CheckpointError: There is none, or several and no key.
    """
    keys = [name for name, value in source.values.items() if isinstance(value, dict) and value.get("kind") == "module"]
    if key is None and len(keys) != 1:
        found = f"several models: {', '.join(keys)}" if keys else "no model"
        raise CheckpointError(f"the checkpoint holds {found}; say which key with --key")
    chosen = key or keys[0]
    prefix = f"{chosen}/"
    tensors = {name.removeprefix(prefix): t for name, t in source.tensors.items() if name.startswith(prefix)}
    if not tensors:
        raise CheckpointError(f"the checkpoint has no tensors under the key {chosen!r}; it has {', '.join(keys)}")
    cast = {name: Cast.of(tensor, dtype) for name, tensor in tensors.items()}
    aliases = {
        alias.removeprefix(prefix): name.removeprefix(prefix)
        for alias, name in source.aliases.items()
        if alias.startswith(prefix) and name.startswith(prefix)
    }
    return Weights(chosen, Source(dict(cast), aliases))


def _pieces(source: Source) -> dict[str, Piece]:
    stream = Stream()
    return {name: stream.piece(name, tensor) for name, tensor in source.tensors.items()}


def merge(checkpoint: Path, out: Path, wish: Wish, with_optimizer: bool) -> list[str]:
    """Write the weights as one safetensors file; returns notes.

    Tied names are written once; the file's metadata name the others, as the library safetensors does it.
    """
    with Checkpoint(checkpoint) as opened:
        source = own_source(opened)
        weights = weights_of(source, wish.key, wish.dtype)
        pieces = _pieces(weights.source)
        if with_optimizer:
            others = [n for n in source.tensors if n.partition("/")[0] != weights.key and rank_of(n) is None]
            pieces.update(_pieces(Source({name: source.tensors[name] for name in others})))
        with new_path(out, wish.overwrite) as path:
            write_safetensors(path, list(pieces.values()), {"format": "pt", **weights.source.aliases})
    return []


def reshard(checkpoint: Path, root: Path, layout: Layout, overwrite: bool) -> tuple[Path, list[str]]:
    """Write a checkpoint again as other ranks would have saved it; returns its folder and notes."""
    with Checkpoint(checkpoint) as opened:
        manifest = opened.manifest
        source = own_source(opened)
        rank_state, notes = manifest.rank_state, []
        if layout.world_size != manifest.world_size:
            rank_state, lost = _of_other_ranks(rank_state, layout.world_size)
            for name in list(source.tensors):
                rank, key = rank_of(name), name.partition("/")[0].rpartition("@")[0]
                if rank is not None and (rank >= layout.world_size or key in lost):
                    del source.tensors[name]
            if lost:
                notes.append(
                    f"{', '.join(lost)}: what each rank has for itself is left out, since there are "
                    f"{layout.world_size} ranks instead of {manifest.world_size}"
                )
        target = Target(root, manifest.step, overwrite, layout)
        return write_own(source, target, rank_state), notes


def _of_other_ranks(
    rank_state: tuple[Mapping[str, Any], ...], world_size: int
) -> tuple[tuple[Mapping[str, Any], ...], list[str]]:
    """(what another number of ranks has for itself, keys that it cannot have).

    Random generators: a rank that there was before has its own, and loading seeds the others, as it would from the
    checkpoint itself. Anything else, such as the place of a data loader, is not divided by cutting a list.
    """
    found = [(key, value) for values in rank_state for key, value in values.items()]
    lost = sorted({key for key, value in found if not isinstance(value, dict) or value.get("kind") != "random"})
    kept = [{key: value for key, value in values.items() if key not in lost} for values in rank_state[:world_size]]
    kept += [{}] * (world_size - len(kept))
    return (tuple(kept) if any(kept) else ()), lost


def export(checkpoint: Path, out: Path, to: str, wish: Wish) -> list[str]:
    """Write a checkpoint in the form of another program; returns notes."""
    with Checkpoint(checkpoint) as opened, new_path(out, wish.overwrite) as path:
        if to == "dcp":
            return write_dcp(path, opened, wish.dtype)
        source = own_source(opened)
        weights = weights_of(source, wish.key, wish.dtype).source
        pieces = _pieces(weights)
        if to == "torch":
            write_torch_file(path, pieces, weights.aliases)
            return []
        config = _config(opened, wish, hugging_face.dtype_word(list(pieces.values())), bool(weights.aliases))
        if config.get("tie_word_embeddings") is not True:
            # Whoever loads this does not know that they are tied, and would leave what is absent at random values.
            tied = {alias: weights.tensors[name] for alias, name in weights.aliases.items()}
            pieces.update(_pieces(Source(tied)))
        hugging_face.write_folder(path, list(pieces.values()), config, wish.max_shard_bytes)
        return []


def _config(checkpoint: Checkpoint, wish: Wish, dtype: str, tied: bool) -> dict[str, Any]:
    """config.json: what the user gave, or what the checkpoint says of its model."""
    if wish.config is not None:
        return hugging_face.read_config(wish.config)
    found = _value(checkpoint, "hf_config")
    if isinstance(found, dict):
        return {**found, "torch_dtype": dtype}
    # The trainer's settings are among its values of a run.
    for value in [_value(checkpoint, key) for key in checkpoint.manifest.state]:
        for settings in (value, value.get("config")) if isinstance(value, dict) else ():
            section = settings.get("model") if isinstance(settings, dict) else None
            if isinstance(section, dict) and "num_hidden_layers" in section:
                return {**hugging_face.llama_config(section, dtype), "tie_word_embeddings": tied}
    raise CheckpointError(
        "the checkpoint does not say what its model is: give a config.json with --config, or save one as "
        'state["hf_config"] = model.config.to_dict()'
    )


def _value(checkpoint: Checkpoint, key: str) -> Any:
    """The plain value that is saved under a key, or None."""
    value = checkpoint.manifest.state.get(key)
    if not isinstance(value, dict) or value.get("kind") != "value" or "value" not in value:
        return None
    try:
        return decode(value["value"], key, _get_nothing)
    except ValueError:
        return None  # it has tensors, or is damaged: no configuration


def _get_nothing(_name: str) -> torch.Tensor:
    raise ValueError("a tensor")


@dataclass(frozen=True)
class Origin:
    """What is imported.

    Attributes:
        path: File or folder.
        form: "dcp", "deepspeed", "torch", "safetensors" or "hf".
        key: Under which the model is saved.
        member: Dots lead to the state dict in a file of torch; None: found by itself.
        step: Its number; None: what the source says, or 0.
        dtype: Of floating-point weights; None: as they are stored.
    """

    path: Path
    form: str
    key: str = "model"
    member: str | None = None
    step: int | None = None
    dtype: torch.dtype | None = None


def import_foreign(origin: Origin, root: Path, layout: Layout, overwrite: bool) -> tuple[Path, list[str]]:
    """Write a checkpoint of another program in our form; returns its folder and notes."""
    if not origin.path.exists():
        raise CheckpointError(f"there is no {origin.path}")
    with _open(origin) as source:
        if not source.tensors:
            raise CheckpointError(f"{origin.path} holds no tensors")
        modules = {key for key, value in source.values.items() if value.get("kind") == "module"}
        for name, tensor in source.tensors.items():
            if name.partition("/")[0] in modules:
                source.tensors[name] = Cast.of(tensor, origin.dtype)
        step = source.step if origin.step is None else origin.step
        return write_own(source, Target(root, step, overwrite, layout)), source.notes


def _open(origin: Origin) -> Source:
    if origin.form == "dcp":
        return _from_dcp(origin)
    if origin.form == "deepspeed":
        plain = read_deepspeed(origin.path)
    elif origin.form == "torch":
        plain = read_torch(origin.path, origin.member)
    else:
        plain = hugging_face.read_safetensors(origin.path)
    key = origin.key
    values: Mapping[str, Any] = {key: {"kind": "module", "extra": {}}}
    kept = {name: {"kind": "value", "value": encode(v, (name,), _no_tensor)} for name, v in plain.values.items()}
    plain.tensors = {f"{key}/{name}": tensor for name, tensor in plain.tensors.items()}
    plain.aliases = {f"{key}/{alias}": f"{key}/{name}" for alias, name in plain.aliases.items()}
    plain.values = {**values, **kept}
    return plain


def _no_tensor(_tensor: torch.Tensor, _path: Any) -> str:
    raise AssertionError("what a JSON file holds is no tensor")


def _from_dcp(origin: Origin) -> Source:
    found = open_dcp(origin.path)
    values = {found.paths[name]: found.value(name) for name in found.values}
    state = from_torch({name: found.paths[name] for name in found.tensors}, values, origin.key)
    tensors: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    seen: dict[Any, str] = {}
    for own, name in state.tensors.items():
        tensor = found.tensors[name]
        # Names of one tensor have the same bytes of the same files.
        identity = tuple((where.name, where.offset) for _, where in tensor.chunks) or own
        if seen.setdefault(identity, own) != own:
            aliases[own] = seen[identity]
        else:
            tensors[own] = tensor
    return Source(tensors, aliases, state.values, notes=state.notes, on_close=found.folder.close)
