"""Small parts of the trainer: learning rate, optimizer groups, run folders, metrics, output, blame."""

from __future__ import annotations

import io
import json
import math
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from fullshard.train.checkpoint import find_latest
from fullshard.train.config import CheckpointConfig, Config, OptimConfig, RunConfig
from fullshard.train.errors import CheckpointError, RankFailedError
from fullshard.train.folder import MetricsLog, choose_folder
from fullshard.train.launch import _explain
from fullshard.train.optim import build_optimizer, learning_rate
from fullshard.train.progress import LiveProgress, PlainProgress, StepReport, format_bytes, format_seconds
from fullshard.train.stop import listening


def test_learning_rate_warms_up_then_follows_a_cosine() -> None:
    config = OptimConfig(lr=1.0, warmup_steps=4, min_lr_ratio=0.1)
    rates = [learning_rate(step, 11, config) for step in range(11)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert math.isclose(rates[7], 0.55)
    assert math.isclose(rates[10], 0.1)
    assert all(later <= earlier for earlier, later in pairwise(rates[4:]))
    assert learning_rate(0, 1, OptimConfig(lr=1.0, warmup_steps=0)) == 1.0


def test_weight_decay_is_on_matrices_only() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    matrices, vectors = build_optimizer(model, OptimConfig(weight_decay=0.5)).param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.5, 0.0)
    assert [p.ndim for p in matrices["params"]] == [2]
    assert [p.ndim for p in vectors["params"]] == [1, 1, 1]


# -- run folder --------------------------------------------------------------------------------------------------------


def run_config(folder: Path, resume: str = "no") -> Config:
    return Config(run=RunConfig(folder=str(folder), name="a"), checkpoint=CheckpointConfig(resume=resume))  # type: ignore[arg-type]


def make_run(folder: Path, *, saved: bool = False) -> None:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").touch()
    if saved:
        (folder / "checkpoint").mkdir()
        (folder / "checkpoint" / "latest").write_text("step-1\n")


def test_new_run_never_takes_the_folder_of_an_old_one(tmp_path: Path) -> None:
    assert choose_folder(run_config(tmp_path)).path.name == "a"
    (tmp_path / "a").mkdir()  # failed before its first step
    assert choose_folder(run_config(tmp_path)).path.name == "a"
    make_run(tmp_path / "a-2")
    make_run(tmp_path / "ab")
    assert choose_folder(run_config(tmp_path)).path.name == "a-3"


def test_resume_takes_the_run_that_saved_last(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing to resume"):
        choose_folder(run_config(tmp_path, "yes"))
    assert not choose_folder(run_config(tmp_path, "auto")).resumes
    for number, name in enumerate(("a", "a-2")):
        make_run(tmp_path / name, saved=True)
        os.utime(tmp_path / name / "checkpoint" / "latest", ns=(number, number))
    make_run(tmp_path / "a-3")
    chosen = choose_folder(run_config(tmp_path, "yes"))
    assert (chosen.path.name, chosen.resumes) == ("a-2", True)


def test_metrics_after_the_resumed_step_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 0)
    for step in range(1, 6):
        log.write({"step": step})
    log.close()
    with path.open("a") as file:
        file.write('{"step": 3, "cut sho')
    MetricsLog(path, 3).close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_incomplete_checkpoints_are_ignored_with_a_warning(tmp_path: Path) -> None:
    for name, complete in (("step-2", True), ("step-10", True), ("step-30", False), (".step-40.tmp", True)):
        (tmp_path / name).mkdir()
        if complete:
            (tmp_path / name / "checkpoint.json").write_text("{}")
    path, warnings = find_latest(tmp_path)
    assert path == tmp_path / "step-10"
    assert len(warnings) == 2
    (tmp_path / "latest").write_text("step-2\n")
    assert find_latest(tmp_path)[0] == tmp_path / "step-2"
    (tmp_path / "latest").write_text("step-99\n")
    path, warnings = find_latest(tmp_path)
    assert path == tmp_path / "step-10"
    assert any("step-99, which is not there" in warning for warning in warnings)
    assert find_latest(tmp_path / "nothing") == (None, [])


# -- what people see ---------------------------------------------------------------------------------------------------

REPORT = StepReport(
    step=1,
    steps=20,
    loss=math.log(2),
    max_loss=1.0,
    grad_norm=0.5,
    lr=1e-3,
    seconds=0.5,
    data_seconds=0.01,
    tokens=1000,
    tokens_seen=1000,
    memory=(2**20, 2**21),
    peak_memory=(2**22, 2**21),
    seconds_left=65.0,
)


def test_plain_lines_come_at_the_interval() -> None:
    out = io.StringIO()
    view = PlainProgress(Console(file=out, width=40), interval=10)
    for step in range(1, 21):
        view.step(replace(REPORT, step=step))
    view.note("a [bracket] stays")
    lines = out.getvalue().splitlines()
    assert [line.split("/")[0].split()[-1] for line in lines[:-1]] == ["1", "10", "20"]
    for part in ("loss 0.6931", "bits/byte 1.000", "2,000 tokens/s", "2.00 MiB", "lr 1.00e-03", "1:05 left"):
        assert part in lines[0]
    assert lines[-1] == "a [bracket] stays"


def test_live_panel_shows_the_same_numbers() -> None:
    out = io.StringIO()
    with LiveProgress(Console(file=out, force_terminal=True, width=200)) as view:
        view.step(REPORT)
        view.note("hello")
    for part in ("0.6931", "2,000 tokens/s", "1.00 MiB, 2.00 MiB", "1:05 left", "hello"):
        assert part in out.getvalue()


def test_metrics_have_the_usual_names() -> None:
    metrics = REPORT.metrics()
    assert metrics["loss_metrics/global_avg_loss"] == math.log(2)
    assert metrics["throughput(tps)"] == 1000  # per rank
    assert metrics["time_metrics/data_loading(%)"] == 2.0
    json.dumps(metrics)


def test_units() -> None:
    assert [format_bytes(n) for n in (5, 2048, 3 * 2**20, 50 * 2**30)] == ["5 B", "2.00 KiB", "3.00 MiB", "50 GiB"]
    assert [format_seconds(n) for n in (5, 65, 7209)] == ["0:05", "1:05", "2:00:09"]


# -- stopping and blame ------------------------------------------------------------------------------------------------


def test_signals_are_noted_not_obeyed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with listening(launched=False) as stop:
        assert stop.pending() == 0
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.pending() == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_orphan_asks_to_stop() -> None:
    with listening(launched=True) as stop:
        assert stop.pending() == 0
        stop.parent = -1
        assert stop.pending() == signal.SIGTERM


@pytest.fixture
def failure(tmp_path: Path) -> Callable[..., ProcessFailure]:
    def make(exitcode: int, message: str = "", time: int = 1) -> ProcessFailure:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        if message:
            path.write_text(json.dumps({"message": {"message": message, "extraInfo": {"timestamp": str(time)}}}))
        return ProcessFailure(local_rank=0, pid=77, exitcode=exitcode, error_file=str(path))

    return make


def test_the_killed_rank_is_blamed_not_its_victims(failure: Callable[..., ProcessFailure]) -> None:
    failures = {
        0: failure(1, "RuntimeError: Connection closed by peer", time=1),
        1: failure(-signal.SIGKILL),
        2: failure(-signal.SIGTERM),
    }
    with pytest.raises(RankFailedError, match=r"rank 1 \(pid 77\) was killed by SIGKILL") as caught:
        _explain(ChildFailedError("x", failures))
    assert caught.value.exit_code == 1


def test_an_error_of_its_own_is_blamed_before_a_lost_peer(failure: Callable[..., ProcessFailure]) -> None:
    failures = {
        0: failure(1, "PeerLostError: rank 1 is gone", time=1),
        1: failure(1, "ZeroDivisionError: oh", time=2),
        2: failure(-signal.SIGTERM),
    }
    with pytest.raises(RankFailedError, match="rank 1: ZeroDivisionError: oh"):
        _explain(ChildFailedError("x", failures))


def test_exit_codes_of_the_ranks_come_through(failure: Callable[..., ProcessFailure]) -> None:
    with pytest.raises(RankFailedError, match=r"^training diverged") as caught:
        _explain(ChildFailedError("x", {0: failure(4, "DivergedError: training diverged")}))
    assert caught.value.exit_code == 4
    assert _explain(ChildFailedError("x", {0: failure(75)})) == 75
