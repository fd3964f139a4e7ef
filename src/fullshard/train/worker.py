"""One rank of a training run: join the others, build model and data, train, sum up."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import nn

from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.checkpoint import CheckpointError, latest
from fullshard.train.checkpoint import Progress, TrainState, load_checkpoint
from fullshard.train.config import Config
from fullshard.train.corpus import INDEX_FILE, build_corpus, open_corpus
from fullshard.train.folder import RunFolder, choose_folder
from fullshard.train.generate import generate
from fullshard.train.llama import build_llama
from fullshard.train.lock import RunLock
from fullshard.train.optim import build_optimizer
from fullshard.train.progress import ProgressView, SilentProgress, make_progress
from fullshard.train.stop import StopRequest, listening
from fullshard.train.summary import make_summary, print_summary
from fullshard.train.trainer import Parts, Result, Trainer
from fullshard.train.windows import TrainStream, ValidationWindows
from fullshard.train.world import Place, World, joined

EXIT_CODES = {"finished": 0, "preempted": 75, "interrupted": 128 + signal.SIGINT}
RNG_STRIDE = 1_000_003  # ranks draw from different streams (dropout, sampling), the weights from train.seed alone


@dataclass(frozen=True)
class Output:
    """How a rank talks: set by the command line."""

    as_json: bool = False
    plain: bool = False
    launched: bool = False  # by our own launcher
    status_file: Path | None = None  # where rank 0 tells the launcher how the run ended

    def console(self) -> Console:
        """Where people read; with --json the summary has stdout for itself."""
        return Console(stderr=self.as_json)


def run_worker(config: Config, place: Place, output: Output) -> int:
    """Train as rank `place.rank` and return the exit code; errors are raised, the same on every rank."""
    console = output.console()
    view: ProgressView = SilentProgress()
    if place.rank == 0:
        view = make_progress(console, output.plain, config.run.log_interval)
    with listening(output.launched) as stop, RunLock() as lock, joined(config, place) as world, view:
        stop.listen()
        parts, progress = prepare(config, world, view, lock)
        result, summary = train(parts, progress, view, stop)
    if place.rank == 0:
        print_summary(console, summary)
        if result.profile is not None:
            console.print(Text(f"\nprofile: {result.profile.summary()}"), soft_wrap=True)
        if output.as_json:
            sys.stdout.write(json.dumps(summary, indent=2) + "\n")
            sys.stdout.flush()
        if output.status_file is not None:
            output.status_file.write_text(json.dumps({"exit_code": EXIT_CODES[result.ending]}), encoding="utf-8")
    return EXIT_CODES[result.ending]


def prepare(config: Config, world: World, view: ProgressView, lock: RunLock) -> tuple[Parts, Progress]:
    """Run folder, corpus, sharded model, optimizer, and where to start. Rank 0 then holds `lock` of the folder."""
    folder = world.on_first(lambda: choose_folder(config, lock))
    if not lock.works:
        view.note(f"warning: the file system of {folder.path} has no locks: nothing keeps a second run out of it.")
    try:
        return _prepare_in(folder, config, world, view)
    except BaseException:  # also Ctrl-C
        if world.rank == 0:
            folder.discard()
        raise


def _prepare_in(folder: RunFolder, config: Config, world: World, view: ProgressView) -> tuple[Parts, Progress]:
    world.on_first(lambda: _provide(folder, config, view))
    corpus = world.on_all(lambda: open_corpus(folder.corpus))[world.rank]
    model = build_sharded(config, world)
    state = TrainState(model, build_optimizer(model, config.optim), world, config, corpus.fingerprint)
    torch.manual_seed(config.train.seed + RNG_STRIDE * (world.rank + 1))
    progress = Progress(step=0, position=0, step_windows=config.train.step_windows(world.size))
    if folder.resumes:
        progress = resume(folder, state, view)
    batch, length = config.train.micro_batch_size, config.data.seq_len
    seed, windows = config.train.seed, progress.step_windows
    stream = TrainStream(corpus.train, length, batch, world.rank, world.size, seed, windows)
    validation = ValidationWindows(corpus.valid, length, batch, world.rank, world.size, config.eval.windows)
    parts = Parts(config, world, model, state.optimizer, stream, validation, corpus.fingerprint, folder)
    view.note(_headline(parts, corpus.files))
    view.note(_numerics(parts))
    return parts, progress


def _provide(folder: RunFolder, config: Config, view: ProgressView) -> None:
    """On one rank: the folder and the text. What is there already only it may ask, since it is about to change that."""
    folder.create(config)
    # A resumed run reads the text it began with, even when the files it came from have changed since.
    if not (folder.resumes and (folder.corpus / INDEX_FILE).exists()):
        view.note(f"reading text from {', '.join(config.data.paths)}")
        build_corpus(config.data, folder.corpus)


def build_sharded(config: Config, world: World) -> nn.Module:
    """The model, each block a unit and the rest in the root unit; weights depend on train.seed alone."""
    model = build_llama(config.model, config.train.seed, config.train.activation_checkpointing == "full")
    options: dict[str, Any] = {
        "mesh": world.mesh,
        "mp_policy": _precision(config),
        "transport": config.parallel.transport,
    }
    parallel = config.parallel
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward="auto" if parallel.reshard_after_forward else False, **options)
    # Not for the root: backward begins with its head right after forward, so freeing it would only cost a gather.
    root: Any = fully_shard(model, **options)
    root.set_keep_bytes(parallel.keep_bytes)
    root.set_prefetch_bytes(parallel.prefetch_bytes if parallel.prefetch_bytes >= 0 else None)
    return model


def _precision(config: Config) -> MixedPrecisionPolicy:
    if config.train.precision == "bf16":
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return MixedPrecisionPolicy()


def resume(folder: RunFolder, state: TrainState, view: ProgressView) -> Progress:
    """Load the newest checkpoint of the run folder."""
    path = state.world.on_first(lambda: latest(folder.checkpoints))
    if path is None:
        raise CheckpointError(f"nothing to resume: no complete checkpoint in {folder.checkpoints}.")
    progress, changes = load_checkpoint(path, state)
    for change in changes:
        view.note(f"warning: {change}; the losses will differ from those of an uninterrupted run.")
    view.note(f"resumed from {path}: step {progress.step}")
    return replace(progress, step_windows=_step_windows(progress.step_windows, state, view))


def _step_windows(before: int, state: TrainState, view: ProgressView) -> int:
    """Windows of a step of a resumed run: as many as before, whatever ranks there are now, unless told otherwise."""
    asked, begun = state.config.train.global_batch_size, state.config.train.step_windows(state.world.size)
    if asked and asked != before:
        view.note(
            f"warning: a step took {before} windows, train.global_batch_size is {asked}; the losses will differ from "
            f"those of an uninterrupted run."
        )
    elif begun != before:
        view.note(
            f"a step takes {before} windows as before, not the {begun} of a new run with these ranks, "
            f"train.micro_batch_size and train.gradient_accumulation; train.global_batch_size sets another number."
        )
    return asked or before


def train(parts: Parts, progress: Progress, view: ProgressView, stop: StopRequest) -> tuple[Result, dict[str, Any]]:
    """Run the loop, sample, sum up."""
    trainer = Trainer(parts, progress, view, stop)
    result = trainer.run()
    run = parts.config.run
    sample = b""
    if run.sample_bytes and result.ending == "finished":
        prompt = run.sample_prompt.encode()
        sample = generate(parts.model, prompt, run.sample_bytes, run.sample_temperature, parts.config.train.seed)
    summary = make_summary(parts, result, sample)
    parts.world.on_first(lambda: parts.folder.write_summary(summary))
    return result, summary


def _numerics(parts: Parts) -> str:
    """Where engines differ, and losses with them, when a run moves from one to another."""
    stored = next(parts.model.parameters()).dtype
    policy = _precision(parts.config)
    name = {None: str(stored)} | {dtype: str(dtype) for dtype in (policy.param_dtype, policy.reduce_dtype) if dtype}
    return (
        f"numbers: parameters and optimizer state {stored}, computed in {name[policy.param_dtype]}, gradients summed "
        f"over ranks in {name[policy.reduce_dtype]}; the loss is the mean over the tokens of a step, of all ranks and "
        "microbatches alike, so the learning rate does not depend on the number of ranks"
    ).replace("torch.", "")


def _headline(parts: Parts, files: int) -> str:
    config, world = parts.config, parts.world
    count = sum(parameter.numel() for parameter in parts.model.parameters())
    stream = parts.stream
    places = stream.micro_batches * stream.batch_size * world.size
    shape = f"{stream.micro_batches} x {world.size} x {stream.batch_size}"
    padded = f", {places - stream.step_windows} of them filled up" if places > stream.step_windows else ""
    return (
        f"{count / 1e6:.2f} M parameters over {world.size} ranks ({world.device.type}, {config.train.precision}, "
        f"{torch.get_num_threads()} threads each); {len(parts.stream.text):,} bytes of text from {files} files, "
        f"{len(parts.validation.text):,} held out; a step takes {stream.step_windows} windows of "
        f"{config.data.seq_len} (micro batches x ranks x windows: {shape}{padded}); run folder {parts.folder.path}"
    )
