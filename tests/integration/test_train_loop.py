"""The trainer on a few ranks: losses, resuming, accumulation, checkpoints that must be refused."""

from __future__ import annotations

import json
import runpy
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from cluster import Cluster
from fullshard import checkpoint
from fullshard.checkpoint import CheckpointError
from fullshard.train.checkpoint import Progress, Saver, load_checkpoint, local_part
from fullshard.train.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    ProfileConfig,
    RunConfig,
    TrainConfig,
)
from fullshard.train.errors import DivergedError, TrainError
from fullshard.train.generate import generate
from fullshard.train.llama import build_llama
from fullshard.train.lock import RunLock
from fullshard.train.loss import backward_window, token_loss_sum
from fullshard.train.progress import SilentProgress, StepReport
from fullshard.train.stop import StopRequest
from fullshard.train.trainer import Parts, Trainer
from fullshard.train.windows import IGNORED_LABEL, Batch
from fullshard.train.worker import build_sharded, prepare, train
from fullshard.train.world import Place, World

SMALL = ModelConfig(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48
)
STEPS = 8


def make_config(folder: Path, **train_options: Any) -> Config:
    text = folder / "text"
    if not text.exists():
        text.mkdir()
        for number in range(30):
            (text / f"{number}.txt").write_text(f"{number} is what this line says. " * 40)
    return Config(
        model=SMALL,
        data=DataConfig(paths=(str(text),), seq_len=16, validation_fraction=0.2),
        train=TrainConfig(**{"steps": STEPS, "micro_batch_size": 2, **train_options}),
        optim=OptimConfig(lr=1e-2, warmup_steps=2),
        eval=EvalConfig(windows=7),
        run=RunConfig(folder=str(folder / "runs"), name="a", sample_bytes=0),
    )


def make_world(rank: int, replicas: int = 1) -> World:
    size = dist.get_world_size()
    if replicas > 1:
        names = ("dp_replicate", "dp_shard")
        mesh = init_device_mesh("cpu", (replicas, size // replicas), mesh_dim_names=names)
    else:
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp_shard",))
    return World(Place(rank, size, rank, size), torch.device("cpu"), mesh)


def prepared(rank: int, config: Config) -> tuple[Parts, Progress]:
    """A run that is about to begin, without a lock on its folder."""
    with RunLock() as lock:
        return prepare(config, make_world(rank), SilentProgress(), lock)


class StopAfter(SilentProgress):
    """Asks to stop when a step is done, as a signal to one rank would."""

    def __init__(self, stop: StopRequest, step: int) -> None:
        self.stop, self.at = stop, step

    def step(self, report: StepReport) -> None:
        if report.step == self.at:
            self.stop.note(signal.SIGTERM)


@dataclass(frozen=True)
class Trained:
    ending: str
    validation: tuple[float, float | None]
    parameters: dict[str, Tensor]  # this rank's shards


def train_once(rank: int, config: Config, stop_at: int = -1, replicas: int = 1) -> Trained:
    """A whole run on the ranks of the pool. `stop_at`: the LAST rank alone is told to stop after this step."""
    stop = StopRequest()
    world = make_world(rank, replicas)
    with RunLock() as lock:
        parts, progress = prepare(config, world, SilentProgress(), lock)
        view = StopAfter(stop, stop_at) if rank == world.size - 1 else SilentProgress()
        result, _ = train(parts, progress, view, stop)
    with torch.no_grad():
        shards = {name: local_part(p).clone() for name, p in parts.model.named_parameters()}
    return Trained(result.ending, result.validation_loss, shards)


def rows(folder: Path, name: str = "a") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path, name: str = "a") -> dict[int, float]:
    return {row["step"]: row["loss_metrics/global_avg_loss"] for row in rows(folder, name) if "grad_norm" in row}


def named(config: Config, name: str, **changes: Any) -> Config:
    return replace(config, run=replace(config.run, name=name), **changes)


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "bf16", "activation_checkpointing": "full"},
        {"gradient_accumulation": 2, "gradient_sync": "last"},
    ],
    ids=["fp32", "bf16-recomputed", "accumulated"],
)
def test_loss_falls(cluster: Cluster, tmp_path: Path, options: dict[str, Any]) -> None:
    first, second = cluster.run(train_once, make_config(tmp_path, steps=30, **options))
    seen = losses(tmp_path)
    assert list(seen) == list(range(1, 31))
    assert seen[30] < seen[1] - 1.5
    assert first.ending == second.ending == "finished"
    assert first.validation == second.validation
    assert first.validation[1] < first.validation[0] - 1.5


def test_number_of_ranks_does_not_change_the_training(cluster: Cluster, tmp_path: Path) -> None:
    config = make_config(tmp_path, micro_batch_size=4)
    (alone,) = cluster.run(train_once, named(config, "one"), world_size=1)
    two = cluster.run(train_once, named(make_config(tmp_path), "two"), world_size=2)
    assert losses(tmp_path, "two") == pytest.approx(losses(tmp_path, "one"), abs=1e-5)
    assert two[0].validation == pytest.approx(alone.validation, abs=1e-5)


def test_a_global_batch_that_does_not_divide_trains_like_one_batch(cluster: Cluster, tmp_path: Path) -> None:
    """7 windows a step on 3 ranks of 2: the second micro batch has one window, and one rank has nothing in it."""
    cluster.run(train_once, named(make_config(tmp_path, micro_batch_size=7), "one"), world_size=1)
    cluster.run(train_once, named(make_config(tmp_path, global_batch_size=7), "three"), world_size=3)
    assert losses(tmp_path, "three") == pytest.approx(losses(tmp_path, "one"), abs=1e-5)
    (last,) = (row for row in rows(tmp_path, "three") if row["step"] == STEPS and "grad_norm" in row)
    assert last["n_tokens_seen"] == 7 * 16 * STEPS
    assert last["loss_metrics/global_avg_loss"] <= last["loss_metrics/global_max_loss"] < 6


def test_replicas_of_shards_train_alike(cluster: Cluster, tmp_path: Path) -> None:
    config = make_config(tmp_path, micro_batch_size=1)
    mixed = replace(config, parallel=ParallelConfig(dp_replicate=2))
    cluster.run(train_once, named(config, "flat"), world_size=4)
    results = cluster.run(train_once, named(mixed, "mixed"), -1, 2, world_size=4)
    assert losses(tmp_path, "mixed") == pytest.approx(losses(tmp_path, "flat"), abs=1e-5)
    for name, shard in results[0].parameters.items():
        assert torch.equal(shard, results[2].parameters[name])


@pytest.mark.parametrize("sync", ["every", "last"])
def test_accumulation_equals_a_big_batch(cluster: Cluster, tmp_path: Path, sync: str) -> None:
    big = cluster.run(train_once, named(make_config(tmp_path, micro_batch_size=4), "big"))
    config = make_config(tmp_path, micro_batch_size=1, gradient_accumulation=4, gradient_sync=sync)
    small = cluster.run(train_once, named(config, "small"))
    assert losses(tmp_path, "small") == pytest.approx(losses(tmp_path, "big"), abs=1e-5)
    for name, shard in big[0].parameters.items():
        torch.testing.assert_close(small[0].parameters[name], shard, atol=2e-4, rtol=1e-3)


def ragged_batches(valid: tuple[int, ...]) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    batches = []
    for count in valid:
        ids = torch.randint(0, 256, (1, 9), generator=generator)
        labels = ids[:, 1:].clone()
        labels[:, count:] = IGNORED_LABEL
        batches.append(Batch(ids[:, :-1].contiguous(), labels))
    return batches


def ragged_gradients(rank: int, valid: tuple[tuple[int, ...], ...], sync: Any) -> dict[str, Tensor]:
    world = make_world(rank)
    config = Config(model=SMALL)
    model = build_sharded(config, world)
    batches = ragged_batches(sum(valid, ()))
    own = [batches[sum(map(len, valid[:rank])) + index] for index in range(len(valid[rank]))]
    total = backward_window(model, own, sum(map(sum, valid)), world.size, sync)
    assert total > 0 or not any(valid[rank])
    return {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}  # type: ignore[attr-defined]


@pytest.mark.parametrize("valid", [((1, 7), (3, 5)), ((8, 8), (0, 0))], ids=str)
@pytest.mark.parametrize("sync", ["every", "last"])
def test_every_valid_token_weighs_the_same(cluster: Cluster, valid: tuple[tuple[int, ...], ...], sync: str) -> None:
    """FIELD_CASES B73: no mean of means, and no NaN from a rank without a valid token."""
    model = build_llama(SMALL, seed=0)
    batches = ragged_batches(sum(valid, ()))
    for batch in batches:
        (token_loss_sum(model(batch.tokens), batch.labels) / 16).backward()
    for gradients in cluster.run(ragged_gradients, valid, sync):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-6, rtol=1e-4)


def diverge(rank: int, config: Config, how: str) -> None:
    parts, progress = prepared(rank, config)
    parameter = parts.model.get_parameter("lm_head.weight")
    if rank == 1 and how == "parameter":
        with torch.no_grad():
            local_part(parameter).fill_(float("nan"))
    elif rank == 1 and how == "loss":
        parts.model.register_forward_hook(lambda _module, _inputs, logits: logits * float("inf"))
    elif rank == 1:
        parts.model.register_forward_hook(lambda _module, _inputs, logits: Overflowing.apply(logits))
    trainer = Trainer(parts, progress, SilentProgress(), StopRequest())
    before = local_part(parameter.detach()).clone()
    try:
        trainer.train_step()
    finally:
        assert torch.equal(local_part(parameter.detach()).nan_to_num(7), before.nan_to_num(7))


class Overflowing(torch.autograd.Function):
    """The identity, with gradients that are too large for any dtype."""

    @staticmethod
    def forward(_context: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * float("inf")


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("parameter", r"Values of lm_head\.weight in the rows of rank 1 are not finite"),
        ("loss", r"The loss is not finite on rank 1 of 2\."),
        ("gradient", r"The loss is finite on every rank.*the gradients overflowed in backward"),
    ],
)
def test_nan_on_one_rank_is_an_error_on_all_that_names_it(
    cluster: Cluster, tmp_path: Path, how: str, cause: str
) -> None:
    match = rf"diverged at step 1: loss .*{cause}.*The parameters were not changed.*Lower optim\.lr"
    texts = cluster.run(diverge, make_config(tmp_path), how, expect=DivergedError, match=match)
    assert len(set(texts)) == 1


def sample(rank: int, config: Config) -> tuple[bytes, bytes]:
    model = build_sharded(config, make_world(rank))
    return generate(model, b"ab", 6, 0.0, seed=1), generate(model, b"ab", 6, 1.0, seed=1)


def test_ranks_generate_the_same_text_as_the_unsharded_model(cluster: Cluster, tmp_path: Path) -> None:
    config = make_config(tmp_path)
    plain = build_llama(config.model, config.train.seed)
    expected = generate(plain, b"ab", 6, 0.0, seed=1), generate(plain, b"ab", 6, 1.0, seed=1)
    assert cluster.run(sample, config) == [expected, expected]


# -- resuming ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resumed_run_is_the_uninterrupted_one_bit_for_bit(cluster: Cluster, tmp_path: Path, precision: str) -> None:
    config = make_config(tmp_path, precision=precision, gradient_accumulation=2)
    whole = cluster.run(train_once, named(config, "whole"))
    stopped = cluster.run(train_once, config, 3)
    assert [result.ending for result in stopped] == ["preempted", "preempted"]
    assert list(losses(tmp_path)) == [1, 2, 3, 4]  # the signal came to one rank after step 3; all saw it in step 4
    shutil.rmtree(tmp_path / "text")  # the text of the run is kept in its folder
    resumed = cluster.run(train_once, replace(config, checkpoint=CheckpointConfig(resume="yes")))
    assert losses(tmp_path) == losses(tmp_path, "whole")
    for before, after in zip(whole, resumed, strict=True):
        assert before.validation[1] == after.validation[1]
        assert all(torch.equal(shard, after.parameters[name]) for name, shard in before.parameters.items())


def save_and_load(rank: int, config: Config, folder: Path) -> list[float]:
    parts, progress = prepared(rank, config)
    Saver(folder, parts.state()).save(replace(progress, step=1, position=40), wait=True)
    expected = torch.rand(3)
    parts.optimizer.param_groups[0]["weight_decay"] = 0.5  # as if the configuration of the resumed run said so
    found, changes = load_checkpoint(folder / "step-1", parts.state())
    assert torch.equal(torch.rand(3), expected)
    assert (found, changes) == (replace(progress, step=1, position=40), [])
    return [group["weight_decay"] for group in parts.optimizer.param_groups]


def test_random_generators_and_position_are_restored_and_settings_are_the_new_ones(
    cluster: Cluster, tmp_path: Path
) -> None:
    assert cluster.run(save_and_load, make_config(tmp_path), tmp_path / "checkpoint") == [[0.5, 0.0]] * 2


def test_only_the_newest_checkpoints_are_kept(cluster: Cluster, tmp_path: Path) -> None:
    config = replace(make_config(tmp_path), checkpoint=CheckpointConfig(interval=2, keep_latest_k=2))
    cluster.run(train_once, config)
    folder = tmp_path / "runs" / "a" / "checkpoint"
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-6", "step-8"]
    assert (folder / "latest").read_text() == "step-8\n"


def elastic(config: Config, ranks: int, **parallel: Any) -> tuple[Config, int]:
    resume = CheckpointConfig(resume="auto", async_mode="async", interval=2)
    return replace(config, checkpoint=resume, parallel=ParallelConfig(nproc=ranks, **parallel)), ranks


@pytest.mark.parametrize("windows", [12, 7], ids=["even", "uneven"])
def test_run_that_fewer_and_more_ranks_go_on_with_has_the_losses_of_one(
    cluster: Cluster, tmp_path: Path, windows: int
) -> None:
    """B114, B106: 4 -> 3 -> 2 -> 4 ranks, of which the last are two replicas, with one global batch."""
    config = make_config(tmp_path, global_batch_size=windows, micro_batch_size=2)
    begun, ranks = elastic(config, 4)
    cluster.run(train_once, begun, 2, world_size=ranks)
    for number, stop_at in ((3, 4), (2, 6)):
        resumed, ranks = elastic(config, number, transport="direct")
        cluster.run(train_once, resumed, stop_at, world_size=ranks)
    last, ranks = elastic(config, 4, dp_replicate=2)
    cluster.run(train_once, last, -1, 2, world_size=ranks)
    alone = make_config(tmp_path, micro_batch_size=windows)
    cluster.run(train_once, named(alone, "alone"), world_size=1)
    assert list(losses(tmp_path)) == list(range(1, STEPS + 1))
    assert losses(tmp_path) == pytest.approx(losses(tmp_path, "alone"), abs=2e-6)
    assert [path.name for path in (tmp_path / "runs").iterdir() if path.name != "alone"] == ["a"]


def test_resumed_run_keeps_the_windows_of_a_step_unless_told(cluster: Cluster, tmp_path: Path) -> None:
    config = make_config(tmp_path, steps=1, micro_batch_size=3)
    cluster.run(train_once, config, world_size=2)
    seen = []
    for step, options in enumerate(
        ({"micro_batch_size": 4}, {"gradient_accumulation": 5}, {"global_batch_size": 5}), 2
    ):
        changed = replace(make_config(tmp_path, steps=step, **options), checkpoint=CheckpointConfig(resume="yes"))
        cluster.run(train_once, changed, world_size=1)
        seen.append(rows(tmp_path)[-2]["n_tokens_seen"] // 16)
    assert seen == [12, 18, 23]


def damage(folder: Path, how: str) -> None:
    shard = folder / "rank-00001.safetensors"
    if how == "missing":
        shard.unlink()
    elif how == "flipped":
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    elif how == "foreign":
        checkpoint.save(folder.parent, {"run": {"position": 1}}, step=1, overwrite=True)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", r"rank-00001\.safetensors.*Remove .*step-1 to go on from"),
        ("flipped", r"rank-00001\.safetensors.*Remove .*step-1 to go on from"),
        ("foreign", r"step-1 is no checkpoint of `fullshard train`: its state has no usable 'run'"),
        ("model", r"belongs to a different run: model\.num_hidden_layers was 2, is 3"),
        ("text", r"was trained on other text than the corpus in this run folder"),
    ],
)
def test_unusable_checkpoint_is_the_same_error_on_every_rank(
    cluster: Cluster, tmp_path: Path, how: str, message: str
) -> None:
    config = make_config(tmp_path, steps=1)
    cluster.run(train_once, config)
    damage(tmp_path / "runs" / "a" / "checkpoint" / "step-1", how)
    if how == "model":
        config = replace(config, model=replace(SMALL, num_hidden_layers=3))
    elif how == "text":
        shutil.rmtree(tmp_path / "runs" / "a" / "corpus")
        (tmp_path / "text" / "1.txt").write_text("another one " * 90)
    config = replace(config, checkpoint=CheckpointConfig(resume="yes"))
    texts = cluster.run(train_once, config, expect=CheckpointError, match=message)
    assert len(set(texts)) == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"mounting is not permitted here: {made.stderr.decode().strip()}")
    yield folder
    for mounted in (folder / "a" / "checkpoint", folder):
        subprocess.run(["umount", "--lazy", mounted], capture_output=True, check=False)


class FillDisk(SilentProgress):
    """Makes the disk of a run full, or its checkpoints read-only, when a step is done."""

    def __init__(self, folder: Path, how: str) -> None:
        self.folder, self.how = folder, how

    def step(self, report: StepReport) -> None:
        if report.step != 3:
            return
        if self.how == "full":
            with suppress(OSError), (self.folder / "filler").open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
        else:
            saved = self.folder / "a" / "checkpoint"
            subprocess.run(["mount", "--bind", saved, saved], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", saved], check=True)


def save_on_a_disk_that_refuses(rank: int, config: Config, how: str, mode: str) -> None:
    view = FillDisk(Path(config.run.folder), how) if rank == 0 else SilentProgress()
    config = replace(config, checkpoint=CheckpointConfig(interval=2, async_mode=mode))  # type: ignore[arg-type]
    with RunLock() as lock:
        parts, progress = prepare(config, make_world(rank), SilentProgress(), lock)
        trainer = Trainer(parts, progress, view, StopRequest())
        trainer.metrics = None  # on the same disk, and nobody's subject here
        trainer.run()


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize(("how", "reason"), [("full", "No space left on device"), ("read-only", "Read-only")])
def test_a_checkpoint_that_cannot_be_written_is_an_error_on_all_ranks_and_leaves_the_one_before(
    cluster: Cluster, tmp_path: Path, small_disk: Path, how: str, reason: str, mode: str
) -> None:
    config = make_config(tmp_path)
    config = replace(config, run=replace(config.run, folder=str(small_disk)))
    texts = cluster.run(
        save_on_a_disk_that_refuses, config, how, mode, expect=CheckpointError, match=rf"disk/a/checkpoint.*{reason}"
    )
    assert len(texts) == 2
    root = small_disk / "a" / "checkpoint"
    if how == "read-only":
        subprocess.run(["umount", root], check=True)
    assert sorted(path.name for path in root.iterdir()) == ["latest", "step-2"]
    (small_disk / "filler").unlink(missing_ok=True)
    resumed = replace(config, checkpoint=CheckpointConfig(resume="yes"))
    cluster.run(train_once, resumed)
    cluster.run(train_once, named(make_config(tmp_path), "b"))
    seen = [json.loads(line) for line in (small_disk / "a" / "metrics.jsonl").read_text().splitlines()]
    after = {row["step"]: row["loss_metrics/global_avg_loss"] for row in seen if "grad_norm" in row}
    assert after == {step: loss for step, loss in losses(tmp_path, "b").items() if step > 2}


def break_on_rank_one(rank: int, error: Exception) -> None:
    def action() -> None:
        if rank == 1:
            raise error

    make_world(rank).on_all(action)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (SafetensorError("disk trouble"), r"^SafetensorError: disk trouble \(test_train_loop\.py, line \d+\)$"),
        (KeyError("bytes"), r"^KeyError: 'bytes' \(test_train_loop\.py, line \d+\)$"),
        (OSError(28, "No space left on device"), r"^OSError: \[Errno 28\] No space left on device$"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_exception_of_one_rank_is_raised_by_all(cluster: Cluster, error: Exception, message: str) -> None:
    cluster.run(break_on_rank_one, error, expect=TrainError, match=message)


def work_on_first(rank: int, limit: float) -> float:
    world = replace(make_world(rank), control=dist.new_group(backend="gloo", timeout=timedelta(seconds=limit)))
    started = time.monotonic()
    world.on_first(lambda: threading.Event().wait(1.5))  # a slow disk: longer than a collective may take
    return time.monotonic() - started


def test_work_of_the_first_rank_may_take_longer_than_a_collective(cluster: Cluster) -> None:
    assert min(cluster.run(work_on_first, 30.0, group_timeout=1.0)) >= 1.4


# -- examples ----------------------------------------------------------------------------------------------------------


def run_example(rank: int, path: Path) -> float:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", lambda _backend: None)  # the pool has made the group
        patch.setattr(dist, "destroy_process_group", lambda: None)
        return float(runpy.run_path(str(path))["loss"].detach())


def test_ten_line_example_learns(cluster: Cluster) -> None:
    path = Path(__file__).parents[2] / "examples" / "train_ten_lines.py"
    assert max(cluster.run(run_example, path)) < 0.9


def profiled(rank: int, config: Config, stop_at: int = -1) -> tuple[Trained, list[str]]:
    notes: list[str] = []

    class View(StopAfter):
        def note(self, text: str) -> None:
            notes.append(text)

    stop = StopRequest()
    view = View(stop, stop_at)
    with RunLock() as lock:
        parts, progress = prepare(config, make_world(rank), SilentProgress(), lock)
        result, summary = train(parts, progress, view, stop)
    with torch.no_grad():
        shards = {name: local_part(p).clone() for name, p in parts.model.named_parameters()}
    assert (summary["profile"] is not None) == (stop_at < 0)
    return Trained(result.ending, result.validation_loss, shards), notes


def test_a_profiled_run_has_the_same_losses_and_tells_where_its_time_went(cluster: Cluster, tmp_path: Path) -> None:
    config = make_config(tmp_path)
    plain = cluster.run(train_once, config)
    profile = ProfileConfig(enabled=True, start=1, steps=5)
    config = replace(config, run=replace(config.run, name="b"), profile=profile, eval=EvalConfig(interval=3, windows=7))
    within = cluster.run(profiled, config)
    assert losses(tmp_path, "a") == losses(tmp_path, "b")
    for one, (other, notes) in zip(plain, within, strict=True):
        assert one.validation == other.validation
        assert all(torch.equal(value, other.parameters[name]) for name, value in one.parameters.items())
        assert any("profile/trace.json; open it in https://ui.perfetto.dev" in note for note in notes)
    folder = tmp_path / "runs" / "b" / "profile"
    numbers = json.loads((folder / "summary.json").read_text())
    assert numbers["measured_steps"] == 2
    assert len(numbers["ranks"]) == 2
    named = {"compute", "start gathers", "wait for gathers", "start reduces", "wait for reduces"}
    assert named | {"optimizer", "clip", "data", "report", "numbers of all ranks"} <= numbers["parts"].keys()
    assert sum(numbers["parts"].values()) == pytest.approx(numbers["step_seconds"])
    assert "overlap" in (folder / "summary.txt").read_text()
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {event["name"] for event in events} >= {"gather model.layers.1", "validation", "step 4 (measured)"}


def test_a_run_that_is_stopped_too_early_has_no_profile(cluster: Cluster, tmp_path: Path) -> None:
    config = replace(make_config(tmp_path), profile=ProfileConfig(enabled=True, start=2, steps=6))
    for trained, notes in cluster.run(profiled, config, 3):
        assert trained.ending == "preempted"
        assert "no profile: it is of steps 3 to 8 of a session, and this one had 4" in notes
    assert not (tmp_path / "runs" / "a" / "profile").exists()


def profiled_on_a_full_disk(rank: int, config: Config) -> tuple[Trained, list[str]]:
    with mock.patch("fullshard.Profile.write_trace", side_effect=OSError(28, "No space left on device")):
        return profiled(rank, config)


def test_a_profile_that_cannot_be_written_does_not_end_the_run(cluster: Cluster, tmp_path: Path) -> None:
    config = replace(make_config(tmp_path), profile=ProfileConfig(enabled=True, start=1, steps=4))
    for trained, notes in cluster.run(profiled_on_a_full_disk, config):
        assert trained.ending == "finished"
        assert any("cannot be written" in note and "No space left on device" in note for note in notes)
