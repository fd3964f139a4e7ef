"""Small parts of the trainer: learning rate, optimizer groups, run folders, metrics, output, blame."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from fullshard import checkpoint
from fullshard.checkpoint import CheckpointError
from fullshard.train.config import CheckpointConfig, Config, OptimConfig, RunConfig
from fullshard.train.errors import FolderInUseError, RankFailedError
from fullshard.train.folder import MetricsLog, RunFolder, _make_folder, choose_folder
from fullshard.train.launch import _explain
from fullshard.train.lock import LOCK_FILE, RunLock
from fullshard.train.optim import build_optimizer, learning_rate
from fullshard.train.progress import LiveProgress, PlainProgress, StepReport, format_bytes, format_seconds
from fullshard.train.stop import EarlyStopError, listening, passing_on


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
        checkpoint.save(folder / "checkpoint", {"run": {}}, step=1)


def choose(config: Config) -> RunFolder:
    """The folder that a run would get that ends at once."""
    with RunLock() as lock:
        return choose_folder(config, lock)


def test_new_run_never_takes_the_folder_of_an_old_one(tmp_path: Path) -> None:
    first = choose(run_config(tmp_path))
    assert first.path == tmp_path / "a"
    make_run(tmp_path / "ab")
    make_run(tmp_path / "a-3")
    assert choose(run_config(tmp_path)).path.name == "a-4"


def test_run_that_is_still_preparing_owns_its_folder(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    first, second = choose(config), choose(config)
    assert [first.path.name, second.path.name] == ["a", "a-2"]
    # Both have seen the same folders, and only then does one make its own: the other takes the next number.
    with RunLock() as lock:
        assert _make_folder(tmp_path, "a", 2, lock) == tmp_path / "a-3"


def test_run_that_failed_while_preparing_does_not_use_up_its_name(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    failed = choose(config)
    failed.create(config)
    failed.corpus.mkdir()
    failed.discard()
    assert not failed.path.exists()
    make_run(tmp_path / "a")
    RunFolder(tmp_path / "a", resumes=False).discard()
    RunFolder(tmp_path / "a", resumes=True).discard()
    assert (tmp_path / "a" / "metrics.jsonl").exists()


def test_resume_takes_the_run_that_saved_last(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing to resume"):
        choose(run_config(tmp_path, "yes"))
    fresh = choose(run_config(tmp_path, "auto"))
    assert not fresh.resumes
    fresh.discard()
    for number, name in enumerate(("a", "a-2")):
        make_run(tmp_path / name, saved=True)
        os.utime(tmp_path / name / "checkpoint" / "step-1", ns=(number, number))
    make_run(tmp_path / "a-3")
    chosen = choose(run_config(tmp_path, "yes"))
    assert (chosen.path.name, chosen.resumes) == ("a-2", True)


def test_resume_passes_over_an_experiment_with_another_model(tmp_path: Path) -> None:
    """The experiment saved last, but it is not what the settings describe."""
    config = run_config(tmp_path, "yes")
    other = replace(config, model=replace(config.model, hidden_size=2 * config.model.hidden_size))
    for number, (name, settings) in enumerate((("a", config), ("a-2", other))):
        make_run(tmp_path / name, saved=True)
        RunFolder(tmp_path / name, resumes=False).create(settings)
        os.utime(tmp_path / name / "checkpoint" / "step-1", ns=(number, number))
    assert choose(config).path.name == "a"
    assert choose(other).path.name == "a-2"
    third = replace(config, train=replace(config.train, seed=config.train.seed + 1))
    assert choose(third).path.name == "a-2"  # none fits: the newest, whose loading says what differs


@pytest.mark.parametrize("resume", ["yes", "auto"])
def test_checkpoint_of_an_earlier_version_is_not_passed_over(tmp_path: Path, resume: str) -> None:
    make_run(tmp_path / "a")
    (tmp_path / "a" / "checkpoint" / "step-3").mkdir(parents=True)
    (tmp_path / "a" / "checkpoint" / "step-3" / "checkpoint.json").write_text('{"format": "fullshard-plain-1"}')
    with pytest.raises(CheckpointError, match=r"step-3 was written by an earlier version of fullshard.*--run\.name"):
        choose(run_config(tmp_path, resume))


@pytest.mark.parametrize("resume", ["yes", "auto"])
def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(tmp_path: Path, resume: str) -> None:
    make_run(tmp_path / "a", saved=True)
    (tmp_path / "a" / "checkpoint" / "step-1" / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"none of the checkpoints in .*a/checkpoint can be used"):
        choose(run_config(tmp_path, resume))


def test_second_run_that_resumes_in_one_folder_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path / "a", saved=True)
    for resume in ("yes", "auto"):
        config = run_config(tmp_path, resume)
        with RunLock() as first, RunLock() as second:
            assert choose_folder(config, first).resumes
            with pytest.raises(
                FolderInUseError, match=rf"a is in use by process {os.getpid()} on .*another --run\.name"
            ):
                choose_folder(config, second)
        assert choose(config).resumes  # the first has ended


def test_a_process_that_is_killed_lets_go_of_its_folder(tmp_path: Path) -> None:
    code = "import os, sys, fcntl; fcntl.flock(os.open(sys.argv[1], 66), fcntl.LOCK_EX); print(flush=True); input()"
    command = [sys.executable, "-c", code, str(tmp_path / LOCK_FILE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder, RunLock() as lock:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert not lock.take(tmp_path)
        holder.kill()
        holder.wait()
        assert lock.take(tmp_path)


@pytest.mark.parametrize("how", ["at once", "before its text", "before it saved"])
def test_restart_of_a_run_without_a_checkpoint_goes_on_in_its_folder(tmp_path: Path, how: str) -> None:
    """torchrun starts its ranks again: they must not end up in NAME-2."""
    config = run_config(tmp_path, "auto")
    begun = choose(config)
    if how != "at once":
        begun.create(config)
    if how == "before it saved":
        begun.corpus.mkdir()
        log = MetricsLog(begun.path / "metrics.jsonl", 0)
        log.write({"step": 1})
        log.close()
    with RunLock() as lock:
        again = choose_folder(config, lock)
        assert (again.path, again.resumes) == (begun.path, False)
        with pytest.raises(FolderInUseError):
            choose(config)
    MetricsLog(begun.path / "metrics.jsonl", 0).close()
    assert (begun.path / "metrics.jsonl").read_text() == ""


@pytest.mark.parametrize("change", ["settings", "finished", "not auto"])
def test_only_a_run_that_was_cut_short_is_begun_again(tmp_path: Path, change: str) -> None:
    config = run_config(tmp_path, "auto")
    begun = choose(config)
    begun.create(config)
    if change == "settings":
        config = replace(config, optim=OptimConfig(lr=0.5))
    elif change == "finished":
        begun.write_summary({})
    else:
        config = run_config(tmp_path, "no")
    assert choose(config).path.name == "a-2"


def test_a_file_system_without_locks_is_used_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_handle: int, _how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with RunLock() as lock:
        assert lock.take(tmp_path)
        assert not lock.works


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


def test_metrics_are_not_lost_when_resuming_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')

    def killed(self: Path, text: str, encoding: str) -> None:
        self.write_bytes(text[:5].encode())
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        MetricsLog(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


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
        assert signal.getsignal(signal.SIGTERM) is before  # nothing to lose yet
        stop.listen()
        stop.begin()
        assert stop.pending() == 0
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # schedulers signal every process, and launchers pass theirs on
        assert stop.pending() == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"])
def test_signal_before_training_ends_at_once(number: signal.Signals, code: int) -> None:
    with listening(False) as stop:
        stop.listen()
        with pytest.raises(EarlyStopError, match=f"{number.name} before training started") as caught:
            os.kill(os.getpid(), number)
    assert caught.value.exit_code == code


def test_second_ctrl_c_ends_at_once() -> None:
    """The system's own action, which works inside a collective too; SIGTERM: what the launcher then sends."""
    with listening(launched=True) as stop:
        stop.listen()
        stop.begin()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.pending() == signal.SIGINT
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_to_save_is_noted_once_even_before_training() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with listening(launched=True) as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.pending() == 0
        assert [stop.take_save(), stop.take_save()] == [True, False]
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_launcher_passes_the_signal_to_save_on_and_lives() -> None:
    """Ranks that have not come to listen yet are started with it blocked: it waits for them."""
    sent: queue.Queue[int] = queue.Queue()
    with passing_on(sent.put):
        os.kill(os.getpid(), signal.SIGUSR1)
        for _ in range(100):  # short waits: if a thread of a library gets the signal, the handler runs between them
            with suppress(queue.Empty):
                assert sent.get(timeout=0.1) == signal.SIGUSR1
                break
        else:
            pytest.fail("nothing was passed on")
        ask = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))"
        shown = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout
    assert "SIGUSR1" in shown
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


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
        _explain(ChildFailedError("x", failures), saves=True)
    assert caught.value.exit_code == 1


def test_an_error_of_its_own_is_blamed_before_a_lost_peer(failure: Callable[..., ProcessFailure]) -> None:
    failures = {
        0: failure(1, "PeerLostError: rank 1 is gone", time=1),
        1: failure(1, "ZeroDivisionError: oh", time=2),
        2: failure(-signal.SIGTERM),
    }
    with pytest.raises(RankFailedError, match="rank 1: ZeroDivisionError: oh"):
        _explain(ChildFailedError("x", failures), saves=True)


def test_exit_codes_of_the_ranks_come_through(failure: Callable[..., ProcessFailure]) -> None:
    with pytest.raises(RankFailedError, match=r"^training diverged") as caught:
        _explain(ChildFailedError("x", {0: failure(4, "DivergedError: training diverged")}), saves=True)
    assert caught.value.exit_code == 4
    for code in (75, 130, 143):
        assert _explain(ChildFailedError("x", {0: failure(code)}), saves=True) == code
