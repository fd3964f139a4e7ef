"""The command `fullshard`. The only file that reads the environment.

Exit codes: 0 done, 1 error, 2 wrong usage or configuration, 4 training diverged, 75 stopped by SIGTERM after saving,
130 stopped by Ctrl-C (after saving, if it had begun to train), 143 stopped by SIGTERM before it had begun to train.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch
from rich.console import Console
from rich.text import Text
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

import fullshard
from fullshard.errors import CheckpointError, FullshardError
from fullshard.tools.bench.subject import Subject
from fullshard.tools.ckpt.commands import add_verbs as add_ckpt_verbs
from fullshard.train.config import ModelConfig
from fullshard.train.errors import ConfigError, TrainError
from fullshard.train.launch import launch, lost_peer
from fullshard.train.llama import LlamaDecoderLayer, build_llama, parameter_count
from fullshard.train.plan import describe_run
from fullshard.train.settings import Settings, load_settings, split_overrides, to_dict, to_toml
from fullshard.train.stop import EarlyStopError
from fullshard.train.worker import Output, run_worker
from fullshard.train.world import Place, joined

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
Override = tuple[str, str]


def run() -> NoReturn:
    """The command `fullshard`."""
    code = main()
    if code:
        # Network threads of a process group that failed may abort the interpreter while it shuts down, and so replace
        # the exit code, and hide the message, by their own. All that matters is written: leave without them.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        rest, overrides = split_overrides(words)
        options = _parser().parse_args(rest)
        verb: Callable[[argparse.Namespace, list[Override]], int] = options.verb
        return verb(options, overrides)
    except TrainError as error:
        _print_error(str(error))
        return error.exit_code
    except FullshardError as error:
        _print_error(str(error))
        return 1
    except EarlyStopError as stop:
        _print_error(str(stop))
        return stop.exit_code
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fullshard", description="Fully Sharded Data Parallel for PyTorch.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"fullshard {fullshard.__version__}")
    verbs = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_train(verbs)
    _add_config(verbs)
    _add_bench(verbs)
    ckpt = verbs.add_parser("ckpt", help="look at checkpoints, verify and convert them", allow_abbrev=False)
    add_ckpt_verbs(ckpt)
    ckpt.set_defaults(verb=_ckpt)
    env = verbs.add_parser("env", help="print versions and hardware, for a bug report", allow_abbrev=False)
    env.add_argument("--json", action="store_true", help="as one JSON document")
    env.set_defaults(verb=_env)
    return parser


def _add_train(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    train = verbs.add_parser(
        "train",
        help="train a sharded language model",
        description="Train a Llama-architecture language model on the bytes of text files, sharded over the ranks. "
        "Starts its own ranks, or runs as one of torchrun's.",
        epilog="Any setting can be given as --section.key VALUE; `fullshard config show` lists them.",
        allow_abbrev=False,
    )
    train.add_argument("config", nargs="?", type=Path, help="TOML or YAML file; without it, all defaults")
    train.add_argument("--nproc", metavar="N", help="ranks to start on this host (parallel.nproc)")
    train.add_argument("--resume", action="store_true", help="continue from the newest checkpoint of the run")
    train.add_argument("--profile", action="store_true", help="record some steps (profile.*): a summary and a trace")
    train.add_argument("--dry-run", action="store_true", help="show what would be trained, and stop")
    train.add_argument("--json", action="store_true", help="summary as one JSON document on stdout, the rest on stderr")
    train.add_argument("--status-file", type=Path, help=argparse.SUPPRESS)  # set by our launcher for its ranks
    train.set_defaults(verb=_train)


def _add_config(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    config = verbs.add_parser("config", help="show or validate a configuration", allow_abbrev=False)
    actions = config.add_subparsers(required=True, metavar="ACTION")
    show = actions.add_parser("show", help="print the merged configuration as TOML, with the origin of each value")
    validate = actions.add_parser("validate", help="check a configuration; exit code 2 if it is wrong")
    for action, verb in ((show, _config_show), (validate, _config_validate)):
        action.add_argument("config", nargs="?", type=Path, help="TOML or YAML file; without it, all defaults")
        action.add_argument("--json", action="store_true", help="as one JSON document")
        action.set_defaults(verb=verb)


def _add_bench(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = verbs.add_parser(
        "bench",
        help="measure this machine: link, matrices, memory, whole steps",
        description="Measure the link between ranks (gather and reduce by size and transport), matrix products and "
        "copies, and write the numbers to a calibration file. Starts its own ranks, or runs as one of torchrun's.",
        epilog="Settings of the section runtime can be given as --runtime.key VALUE; see `fullshard config show`.",
        allow_abbrev=False,
    )
    bench.add_argument("--ranks", metavar="N", help="ranks to start on this host; default: accelerators, or 2 without")
    bench.add_argument("--quick", action="store_true", help="fewer and smaller sizes: a few seconds")
    bench.add_argument(
        "--step",
        metavar="BLOCKSxWIDTH",
        help="also time a step of a Llama of this size under fullshard, torch's FSDP2 and DDP, such as 8x512",
    )
    bench.add_argument("--out", type=Path, default=Path("fullshard-calibration.json"), help="default: %(default)s")
    bench.add_argument("--json", action="store_true", help="the calibration on stdout, the tables on stderr")
    bench.add_argument("--launched", action="store_true", help=argparse.SUPPRESS)  # set by our launcher for its ranks
    bench.set_defaults(verb=_bench)


def _train(options: argparse.Namespace, overrides: list[Override]) -> int:
    if options.nproc is not None:
        overrides = [*overrides, ("parallel.nproc", options.nproc)]
    if options.resume:
        overrides = [*overrides, ("checkpoint.resume", "yes")]
    if options.profile:
        overrides = [*overrides, ("profile.enabled", "true")]
    settings = load_settings(options.config, overrides)
    place = _place()
    if options.dry_run:
        return _show_plan(settings, options.json, place)
    output = Output(options.json, _wants_plain(), options.status_file is not None, options.status_file)
    if place is not None:
        return _run_rank(settings, place, output)
    settings.config.parallel.mesh_shape(settings.config.parallel.nproc)  # wrong sizes fail before anything starts
    if settings.config.parallel.nproc == 1:
        return run_worker(settings.config, Place(), output)
    _use_loopback()
    return launch(settings.config, lambda status: _rank_command(options, overrides, status))


def _run_rank(settings: Settings, place: Place, output: Output) -> int:
    """One rank of a training run under a launcher."""
    return _under_launcher(lambda: run_worker(settings.config, place, output), place, output.launched)


def _under_launcher(action: Callable[[], int], place: Place, launched: bool) -> int:
    """Run `action`; an error also goes into the file where the launcher looks for it."""
    handler = get_error_handler()
    try:
        return action()
    except EarlyStopError as stop:
        if launched:  # our own launcher says it, once for all ranks
            return stop.exit_code
        raise
    except Exception as error:  # noqa: BLE001  whatever it is, the launcher must hear of it
        lost = lost_peer(error)
        cause = lost or error
        handler.record_exception(cause)
        if lost is None and not isinstance(error, FullshardError):
            traceback.print_exc()
        elif not launched:  # our own launcher prints what is in the file, once for all ranks
            _print_error(f"rank {place.rank}: {cause}")
        return error.exit_code if isinstance(error, TrainError) else 1


def _rank_command(options: argparse.Namespace, overrides: list[Override], status: Path) -> list[str]:
    command = ["-m", "fullshard", "train", "--status-file", str(status)]
    command += [str(options.config)] if options.config is not None else []
    command += ["--json"] if options.json else []
    return command + [f"--{key}={value}" for key, value in overrides]


def _show_plan(settings: Settings, as_json: bool, place: Place | None) -> int:
    plan = describe_run(settings.config, place.size if place is not None else settings.config.parallel.nproc)
    if as_json:
        _say(json.dumps(plan, indent=2))
    else:
        for key, value in plan.items():
            _say(f"{key.replace('_', ' '):<28}{value:,}" if isinstance(value, int) else f"{key:<28}{value}")
    return 0


def _config_show(options: argparse.Namespace, overrides: list[Override]) -> int:
    settings = load_settings(options.config, overrides)
    if options.json:
        _say(json.dumps({"config": to_dict(settings.config), "origins": dict(settings.origins)}, indent=2))
    else:
        sys.stdout.write(to_toml(settings.config, settings.origins))
    return 0


def _config_validate(options: argparse.Namespace, overrides: list[Override]) -> int:
    config = load_settings(options.config, overrides).config
    config.parallel.mesh_shape(config.parallel.nproc)
    if options.json:
        _say(json.dumps({"valid": True}))
    else:
        _say(f"{options.config or 'the default configuration'} is valid.")
    return 0


def _bench(options: argparse.Namespace, overrides: list[Override]) -> int:
    if foreign := [key for key, _ in overrides if not key.startswith("runtime.")]:
        raise ConfigError(f"`fullshard bench` takes settings of the section runtime only, found --{foreign[0]}.")
    ranks = options.ranks or str(torch.accelerator.device_count() if torch.accelerator.is_available() else 2)
    settings = load_settings(None, [*overrides, ("parallel.nproc", ranks)])
    subject = _subject(options.step) if options.step else None
    if not options.out.parent.is_dir():
        raise ConfigError(f"--out {options.out} is not possible: there is no folder {options.out.parent}.")
    if options.out.is_dir():
        raise ConfigError(f"--out {options.out} is not possible: expected a file, found a folder.")
    place = _place()
    if place is not None:
        where = place
        return _under_launcher(lambda: _bench_rank(settings, where, options, subject), place, options.launched)
    if settings.config.parallel.nproc == 1:
        return _bench_rank(settings, Place(), options, subject)
    _use_loopback()
    command = ["-m", "fullshard", "bench", "--launched", "--out", str(options.out)]
    command += [flag for flag, given in (("--quick", options.quick), ("--json", options.json)) if given]
    command += ["--step", options.step] if options.step else []
    command += [f"--{key}={value}" for key, value in overrides]
    return launch(settings.config, lambda _: command, saves=False)


def _bench_rank(settings: Settings, place: Place, options: argparse.Namespace, subject: Subject | None) -> int:
    from fullshard.tools.bench.run import Plan, quick_plan, run_bench
    from fullshard.tools.bench.show import print_finding

    plan = quick_plan(subject) if options.quick else Plan(subject=subject)
    if place.rank == 0:
        what = "links, matrices and copies" + ("" if subject is None else f", and steps of {subject.title}")
        Console(stderr=True).print(f"measuring {what} ...", markup=False, soft_wrap=True)
    with joined(settings.config, place) as world:
        finding = run_bench(plan, world.device, place.local_size)
    if place.rank == 0:
        console = Console(stderr=options.json)
        print_finding(console, finding)  # first: what was measured is seen, whatever becomes of the file
        try:
            options.out.write_text(finding.document, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--out {options.out} cannot be written: {error.strerror}.") from None
        console.print(f"\ncalibration: {options.out}", markup=False, soft_wrap=True)
        if options.json:
            sys.stdout.write(finding.document)
            sys.stdout.flush()
    return 0


def _subject(size: str) -> Subject:
    """The Llama that --step names, in the proportions of Llama 2."""
    blocks, _, width = size.partition("x")
    if not (blocks.isdecimal() and width.isdecimal()):
        raise ConfigError(f"--step {size} is not possible: expected BLOCKSxWIDTH, such as 8x512.")
    hidden = -(-int(width) * 8 // (3 * 128)) * 128
    model = ModelConfig(int(width), int(blocks), num_key_value_heads=8, intermediate_size=hidden)
    title = f"Llama {size}, {parameter_count(model) / 1e6:.1f} M"
    return Subject(title, lambda: build_llama(model, seed=0), LlamaDecoderLayer, model.vocab_size, positions=128)


def _ckpt(options: argparse.Namespace, overrides: list[Override]) -> int:
    if overrides:
        raise ConfigError(f"`fullshard ckpt` takes no settings, found --{overrides[0][0]}.")
    try:
        return int(options.action(options))
    except BrokenPipeError:  # `| head` has seen enough; nothing may be written at the end either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (CheckpointError, OSError) as error:
        _print_error(str(error))
        return 1


def _env(options: argparse.Namespace, overrides: list[Override]) -> int:
    if overrides:
        raise ConfigError(f"`fullshard env` takes no settings, found --{overrides[0][0]}.")
    accelerator = torch.accelerator.current_accelerator()
    facts = {
        "fullshard": fullshard.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "accelerators": f"{torch.accelerator.device_count()} x {accelerator.type}" if accelerator else "none",
        "backends": ", ".join(name for name in ("gloo", "nccl", "mpi") if _has_backend(name)),
        **{name: _version(name) for name in ("torch", "numpy", "safetensors", "rich", "psutil", "PyYAML")},
    }
    if options.json:
        _say(json.dumps(facts, indent=2))
    else:
        _say("\n".join(f"{name:<14}{value}" for name, value in facts.items()))
    return 0


def _has_backend(name: str) -> bool:
    return bool(getattr(torch.distributed, f"is_{name}_available")())


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _say(text: str) -> None:
    """The result of a command, on stdout."""
    sys.stdout.write(text + "\n")


def _print_error(message: str) -> None:
    console = Console(stderr=True)
    console.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)


def _place() -> Place | None:
    """The rank a launcher (torchrun or ours) made this process, or None."""
    found = {name: os.environ.get(name) for name in RANK_VARIABLES}
    if found["RANK"] is None and found["WORLD_SIZE"] is None:
        return None
    missing = [name for name, value in found.items() if value is None]
    if missing:
        raise ConfigError(
            f"the environment has some but not all of {', '.join(RANK_VARIABLES)}: {', '.join(missing)} "
            f"is missing. Start with torchrun, or unset the others."
        )
    rank, size, local_rank, local_size = (int(found[name] or 0) for name in RANK_VARIABLES)
    return Place(rank, size, local_rank, local_size)


def _wants_plain() -> bool:
    """Plain lines instead of a live panel."""
    return any(os.environ.get(name) for name in ("NO_COLOR", "CI")) or os.environ.get("TERM") == "dumb"


def _use_loopback() -> None:
    """Ranks of one host talk over loopback: the host's name may not resolve, or only to an interface that is down."""
    for interface in ("lo", "lo0"):
        if interface in (name for _, name in socket.if_nameindex()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
