"""The command line of `fullshard ckpt`. What a verb needs is imported when it runs: other commands start sooner.

Exit codes: 0 done, 1 damaged or not possible, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from fullshard.tools.ckpt.convert import Wish
    from fullshard.tools.ckpt.own import Layout

MAX_RANKS = 100_000
DTYPES = ("float32", "bfloat16", "float16", "float64")


def add_verbs(ckpt: argparse.ArgumentParser) -> None:
    """Add the verbs to the parser of `fullshard ckpt`; each sets `action`, a function of the options."""
    verbs = ckpt.add_subparsers(required=True, metavar="ACTION")
    _add_looking(verbs)
    _add_converting(verbs)


def _add_looking(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    ls = verbs.add_parser("ls", help="checkpoints in a folder, and what interrupted jobs have left", allow_abbrev=False)
    ls.add_argument("root", type=Path, help="folder of checkpoints")
    ls.add_argument("--json", action="store_true", help="as one JSON document")
    ls.set_defaults(action=_ls)
    inspect = verbs.add_parser("inspect", help="what a checkpoint holds", allow_abbrev=False)
    _add_checkpoint(inspect)
    inspect.add_argument("--tensors", action="store_true", help="also each tensor, and where its rows are")
    inspect.add_argument("--json", action="store_true", help="everything, as one JSON document")
    inspect.set_defaults(action=_inspect)
    verify = verbs.add_parser(
        "verify",
        help="compare every byte with its checksum; exit code 1 names the damage",
        allow_abbrev=False,
    )
    _add_checkpoint(verify)
    verify.set_defaults(action=_verify)


def _add_converting(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    merge = verbs.add_parser("merge", help="the weights as one safetensors file", allow_abbrev=False)
    _add_checkpoint(merge)
    merge.add_argument("out", type=Path, metavar="OUT.safetensors", help="new file")
    merge.add_argument("--optimizer", action="store_true", help="also all that is not the model, under its full names")
    merge.set_defaults(action=_merge)
    reshard = verbs.add_parser("reshard", help="the same checkpoint, as other ranks would save it", allow_abbrev=False)
    _add_checkpoint(reshard)
    reshard.add_argument("out", type=Path, help="folder of checkpoints; step-N is made in it")
    reshard.set_defaults(action=_reshard)
    export = verbs.add_parser("export", help="in the form of another program", allow_abbrev=False)
    _add_checkpoint(export)
    export.add_argument("out", type=Path, help="new folder (hf, dcp) or file (torch)")
    export.add_argument("--to", choices=("hf", "dcp", "torch"), required=True, dest="form", help="which form")
    export.add_argument("--config", type=Path, metavar="FILE", help="hf: the config.json to use")
    export.add_argument(
        "--max-shard-bytes",
        type=size_in_bytes,
        default=5_000_000_000,
        metavar="N",
        help="hf: size of a file, such as 2GB; default: 5GB",
    )
    export.set_defaults(action=_export)
    imported = verbs.add_parser("import", help="a checkpoint of another program as one of ours", allow_abbrev=False)
    imported.add_argument("source", type=Path, help="file (torch, safetensors) or folder (dcp, deepspeed, hf)")
    imported.add_argument("out", type=Path, help="folder of checkpoints; step-N is made in it")
    forms = ("dcp", "deepspeed", "torch", "safetensors", "hf")
    imported.add_argument("--from", choices=forms, required=True, dest="form", help="which form")
    imported.add_argument(
        "--member", metavar="NAME", help="torch: path of the state dict in the file, such as ema.model"
    )
    imported.add_argument("--step", type=_Within(0, 10**17), metavar="N", help="default: as the source says, or 0")
    imported.set_defaults(action=_import)
    for verb in (merge, export, imported):
        verb.add_argument("--key", metavar="NAME", help="key of the model; default: the only one, or model")
        verb.add_argument("--dtype", choices=DTYPES, help="of floating-point weights; default: as they are stored")
    for verb in (reshard, imported):
        verb.add_argument(
            "--ranks", type=_Within(1, MAX_RANKS), metavar="N", help="files to divide it over; default: 1"
        )
        verb.add_argument(
            "--mesh", type=mesh, metavar="RxS", help="instead: R replicas of S shards, such as 2x4 (HSDP)"
        )
    for verb in (merge, reshard, export, imported):
        verb.add_argument("--overwrite", action="store_true", help="replace what is in the way")


def _add_checkpoint(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("checkpoint", type=Path, help="a checkpoint, or a folder of them: then the newest complete one")


def size_in_bytes(text: str) -> int:
    """A size such as 500MB or 2GB, in bytes."""
    found = re.fullmatch(r"(\d+)\s*(?:([kMGT])?B?)", text)
    if found is None or not int(found[1]):
        raise argparse.ArgumentTypeError(f"expected bytes, such as 5000000000 or 5GB, found {text!r}")
    thousands: int = 1000 ** " kMGT".index(found[2] or " ")
    return int(found[1]) * thousands


def mesh(text: str) -> tuple[int, int]:
    """(replicas, shards) of RxS."""
    found = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", text)
    if found is None or int(found[1]) * int(found[2]) > MAX_RANKS:
        raise argparse.ArgumentTypeError(f"expected replicas x shards, such as 2x4, found {text!r}")
    return int(found[1]), int(found[2])


class _Within:
    """Reads an integer of a range."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most

    def __call__(self, text: str) -> int:
        if not text.isdecimal() or len(text) > 18 or not self._least <= int(text) <= self._most:
            raise argparse.ArgumentTypeError(f"expected an integer from {self._least} to {self._most}, found {text!r}")
        return int(text)


def _ls(options: argparse.Namespace) -> int:
    from fullshard.tools.ckpt.look import list_root, show_root

    listing = list_root(options.root)
    _say(json.dumps(listing, indent=2) if options.json else show_root(listing))
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from fullshard.runtime.checkpoint.publish import find
    from fullshard.tools.ckpt.look import describe, show_checkpoint

    path = find(options.checkpoint)
    _say(json.dumps(describe(path)) if options.json else show_checkpoint(path, options.tensors))
    return 0


def _verify(options: argparse.Namespace) -> int:
    from fullshard.runtime.checkpoint.publish import find
    from fullshard.tools.ckpt.look import byte_text, verify

    path = find(options.checkpoint)
    verdict = verify(path)
    if verdict.problems:
        _say("\n".join(f"DAMAGED: {problem}" for problem in verdict.problems))
        return 1
    _say(f"{path} is as it was written: {byte_text(verdict.nbytes)} of tensors verified")
    return 0


def _merge(options: argparse.Namespace) -> int:
    from fullshard.runtime.checkpoint.publish import find
    from fullshard.tools.ckpt.convert import merge

    notes = merge(find(options.checkpoint), options.out, _wish(options), options.optimizer)
    return _done(options.out, notes)


def _reshard(options: argparse.Namespace) -> int:
    from fullshard.runtime.checkpoint.publish import find
    from fullshard.tools.ckpt.convert import reshard

    layout = _layout(options)
    path, notes = reshard(find(options.checkpoint), options.out, layout, options.overwrite)
    return _done(path, notes)


def _export(options: argparse.Namespace) -> int:
    from fullshard.runtime.checkpoint.publish import find
    from fullshard.tools.ckpt.convert import export

    return _done(options.out, export(find(options.checkpoint), options.out, options.form, _wish(options)))


def _import(options: argparse.Namespace) -> int:
    from fullshard.tools.ckpt.convert import Origin, import_foreign

    origin = Origin(
        options.source, options.form, options.key or "model", options.member, options.step, _dtype(options.dtype)
    )
    path, notes = import_foreign(origin, options.out, _layout(options), options.overwrite)
    return _done(path, notes)


def _wish(options: argparse.Namespace) -> Wish:
    from fullshard.tools.ckpt.convert import Wish

    given = vars(options)
    return Wish(
        options.key,
        _dtype(options.dtype),
        given.get("config"),
        given.get("max_shard_bytes", 0),
        options.overwrite,
    )


def _layout(options: argparse.Namespace) -> Layout:
    from fullshard.errors import CheckpointError
    from fullshard.tools.ckpt.own import Layout

    if options.mesh is not None and options.ranks is not None and options.ranks != options.mesh[0] * options.mesh[1]:
        raise CheckpointError(f"--mesh {options.mesh[0]}x{options.mesh[1]} does not have --ranks {options.ranks}")
    return Layout(*(options.mesh or (1, options.ranks or 1)))


def _dtype(name: str | None) -> torch.dtype | None:
    import torch

    return None if name is None else getattr(torch, name)


def _done(path: Path, notes: Iterable[str]) -> int:
    _say("\n".join([f"wrote {path}", *(f"note: {note}" for note in notes)]))
    return 0


def _say(text: str) -> None:
    """Print; names may come from anyone, so nothing in them may move the cursor or change the terminal."""
    shown = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
    sys.stdout.write(shown + "\n")
    sys.stdout.flush()
