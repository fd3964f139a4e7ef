"""`fullshard train` as a user starts it: real processes, exit codes, signals, a rank that dies."""

from __future__ import annotations

import contextlib
import io
import ipaddress
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster import Cluster
from fullshard.cli import _run_rank, main
from fullshard.train.settings import load_settings
from fullshard.train.worker import Output
from fullshard.train.world import Place

SOURCE = Path(__file__).parents[2] / "src"
CONFIG = """
[model]
hidden_size = 32
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
intermediate_size = 48
[data]
paths = ["{folder}/text"]
seq_len = 32
validation_fraction = 0.2
[train]
steps = {steps}
micro_batch_size = 2
[eval]
windows = 4
[parallel]
nproc = 2
[runtime]
timeout_seconds = 30
[run]
folder = "{folder}/runs"
name = "a"
log_interval = 1
sample_bytes = 4
"""


def write_config(folder: Path, steps: int) -> Path:
    (folder / "text").mkdir()
    for number in range(20):
        (folder / "text" / f"{number}.txt").write_text(f"{number} bottles of beer on the wall, " * 30)
    path = folder / "a.toml"
    path.write_text(CONFIG.format(folder=folder, steps=steps))
    return path


def environment() -> dict[str, str]:
    """Ours, so that the package is found whether or not it is installed; CI=1 asks for plain lines."""
    return {**os.environ, "PYTHONPATH": str(SOURCE), "CI": "1", "OMP_NUM_THREADS": "1"}


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fullshard", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err


@pytest.fixture
def training(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run of two ranks that has done three steps and would go on for long."""
    process = start("train", write_config(tmp_path, steps=100_000))
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step     3/"):
            break
    family = psutil.Process(process.pid).children(recursive=True)
    assert process.poll() is None, process.communicate()
    yield process
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(family, timeout=10)
    for child in alive:
        child.kill()
    assert not alive, "ranks outlived the command"


def checkpoints(folder: Path) -> list[str]:
    root = folder / "runs" / "a" / "checkpoint"
    return sorted(path.name for path in root.iterdir()) if root.exists() else []


def main_of_one_rank(rank: int, arguments: list[str]) -> tuple[int, str]:
    """Exit code and stdout of a run that starts no other process."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        return main(arguments), out.getvalue()


def test_json_summary_is_one_document_on_stdout(cluster: Cluster, tmp_path: Path) -> None:
    profile = ("--profile", "--profile.start=1", "--profile.steps=4")
    code, out, err = finish(start("train", write_config(tmp_path, steps=5), "--json", "--train.seed", "5", *profile))
    assert code == 0, err
    summary = json.loads(out)
    assert summary["ending"] == "finished"
    assert (summary["ranks"], summary["step"]) == (2, 5)
    assert summary["tokens"] == 5 * 2 * 2 * 32
    assert 0.45 < summary["bytes_per_rank"]["ratio"] < 0.55
    assert summary["validation_loss"]["after"] < summary["validation_loss"]["before"]
    assert summary["sample"].startswith("def ")
    assert "bytes held per rank" in err
    folder = Path(summary["run_folder"])
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert checkpoints(tmp_path) == ["latest", "step-5"]
    assert summary["profile"]["measured_steps"] == 1
    assert (folder / "profile" / "summary.txt").read_text().rstrip() in err
    arguments = ["train", str(folder / "config.toml"), "--json", "--nproc", "1", "--train.steps=1"]
    ((again, out),) = cluster.run(main_of_one_rank, arguments, world_size=1, init_group=False)
    assert again == 0
    assert json.loads(out)["run_folder"] == str(folder) + "-2"
    assert "seed = 5" in (folder / "config.toml").read_text()


def test_runs_under_torchrun(tmp_path: Path) -> None:
    """And says what its numbers are (B128)."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "-m", "fullshard", "train"]
    command += [str(write_config(tmp_path, steps=2)), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ranks"] == 2
    numbers = next(line for line in done.stderr.splitlines() if "numbers:" in line)
    assert "parameters and optimizer state float32, computed in float32" in numbers


def test_killed_rank_ends_the_command_with_its_name(training: subprocess.Popen[str], tmp_path: Path) -> None:
    listening = listening_addresses(training.pid)
    assert listening, "nobody listens: how do the ranks meet?"
    assert all(ipaddress.ip_address(address).is_loopback for address in listening), listening
    ranks = {child.environ()["RANK"]: child for child in psutil.Process(training.pid).children()}
    ranks["1"].kill()
    code, _, err = finish(training)
    assert code == 1
    assert f"rank 1 (pid {ranks['1'].pid}) was killed by SIGKILL" in err
    assert "Traceback" not in err
    assert checkpoints(tmp_path) == []


def listening_addresses(pid: int) -> set[str]:
    """Where a process and its children accept connections."""
    parent = psutil.Process(pid)
    sockets = (each for one in (parent, *parent.children(recursive=True)) for each in one.net_connections("inet"))
    return {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}


def step_of_stopped(training: subprocess.Popen[str], folder: Path, number: signal.Signals, code: int) -> int:
    """The step after which a run that got a signal has ended; it has saved a checkpoint and said so."""
    training.send_signal(number)
    found, out, err = finish(training)
    assert found == code, err
    latest, *saved = checkpoints(folder)
    step = max(int(name.removeprefix("step-")) for name in saved)
    assert f"{number.name}: stopping after step {step}; saving a checkpoint." in out
    assert (latest, step >= 3) == ("latest", True)
    return step


def test_stopped_run_saves_and_can_be_resumed(training: subprocess.Popen[str], tmp_path: Path) -> None:
    step = step_of_stopped(training, tmp_path, signal.SIGTERM, 75)
    again = start("train", tmp_path / "a.toml", "--resume", "--train.steps", step + 2, "--json")
    found, out, err = finish(again)
    assert found == 0, err
    assert json.loads(out)["step"] == step + 2
    assert f"train.steps was 100000, is {step + 2}; the losses will differ" in err


def test_a_run_that_is_asked_to_save_goes_on(training: subprocess.Popen[str], tmp_path: Path) -> None:
    """SIGUSR1 to the command, as `sbatch --signal=USR1@60` sends it; Ctrl-C then saves again and ends it."""
    assert training.stdout is not None
    training.send_signal(signal.SIGUSR1)
    asked = next(line for line in training.stdout if line.startswith("SIGUSR1"))
    step = int(asked.removeprefix("SIGUSR1: saving a checkpoint after step ").removesuffix(", and going on.\n"))
    assert f"step-{step} in" in next(training.stdout)
    for line in training.stdout:
        if line.startswith(f"step {step + 3:>5}/"):
            break
    assert checkpoints(tmp_path) == ["latest", f"step-{step}"]
    assert step_of_stopped(training, tmp_path, signal.SIGINT, 130) >= step + 3


def test_error_in_the_ranks_is_printed_once(tmp_path: Path) -> None:
    config = write_config(tmp_path, steps=3)
    code, out, err = finish(start("train", config, "--data.paths", tmp_path / "nowhere"))
    assert code == 1
    assert err.count("there is no file or folder") == 1
    assert "Traceback" not in err + out
    assert list((tmp_path / "runs").iterdir()) == []  # the name is free again


@pytest.mark.parametrize(
    ("number", "code", "ranks"), [(signal.SIGTERM, 143, 2), (signal.SIGINT, 130, 1)], ids=["SIGTERM-2", "SIGINT-1"]
)
def test_signal_while_the_text_is_read_ends_promptly(
    tmp_path: Path, number: signal.Signals, code: int, ranks: int
) -> None:
    """The text comes from a pipe that never ends; with two ranks also longer than a collective may take."""
    config = write_config(tmp_path, steps=3)
    os.mkfifo(tmp_path / "endless.pipe")
    arguments = ["--data.paths", tmp_path / "*.pipe", "--nproc", ranks, "--runtime.timeout_seconds", "2"]
    process = start("train", config, *arguments)
    with (tmp_path / "endless.pipe").open("wb"):  # returns when rank 0 reads
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=3 if ranks > 1 else 0.1)
        process.send_signal(number)
        found, out, err = finish(process)
    assert found == code, err
    assert f"stopped by {number.name} before" in err
    assert "Traceback" not in err + out
    assert list((tmp_path / "runs").iterdir()) == []


# -- in this process: nothing is started -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nothere.toml"], "there is no configuration file nothere.toml"),
        (["train", "--optim.lrr", "1"], "Did you mean optim.lr?"),
        (["train", "--nproc", "two"], "expected a whole number"),
        (["train", "--parallel.dp_replicate", "2"], "needs 2 ranks, but 1 are started"),
        (["config", "validate", "--train.steps", "0"], "expected at least 1"),
        (["train", "--profile", "--train.steps", "5"], "expected at least profile.start + profile.steps = 11, or no"),
    ],
)
def test_wrong_usage_is_exit_code_2(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "is_lost_peer"),
    [("[pair.cc:537] Read error: Connection reset by peer. GLHF!", True), ("shapes do not match", False)],
)
def test_rank_that_lost_a_peer_prints_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str, is_lost_peer: bool
) -> None:
    """Its message is the backend's own, from an exchange of the trainer; the cause is to be found at that peer."""

    def fail(*_: object) -> int:
        raise RuntimeError(text)

    monkeypatch.setattr("fullshard.cli.run_worker", fail)
    assert _run_rank(load_settings(None), Place(), Output(launched=True)) == 1
    assert ("Traceback" in capsys.readouterr().err) is not is_lost_peer


def test_missing_checkpoint_is_exit_code_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["train", "--resume", "--run.folder", str(tmp_path)]) == 1
    assert "nothing to resume" in capsys.readouterr().err


def test_dry_run_shows_sizes_and_starts_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = str(write_config(tmp_path, steps=3))
    assert main(["train", config, "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["ranks"] == 2
    assert plan["bytes_per_rank_of_ddp"] == 16 * plan["parameters"]
    assert plan["bytes_per_rank"] * 2 == plan["bytes_per_rank_of_ddp"]
    assert not (tmp_path / "runs").exists()


def test_config_show_tells_where_values_come_from(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["config", "show", str(write_config(tmp_path, steps=3)), "--optim.lr", "0.5"]) == 0
    out = capsys.readouterr().out
    for line in ("lr = 0.5  # command line", "steps = 3  # a.toml", "seed = 0  # default"):
        assert line in out


def test_env_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["backends"].startswith("gloo")
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("fullshard ")


def test_wrong_environment_of_a_launcher_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert main(["train"]) == 2
    assert "WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE is missing" in capsys.readouterr().err
