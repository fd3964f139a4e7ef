"""Ranks that die again and again under torch's elastic agent: the run ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from integration.test_train_cli import SOURCE, write_config

KILLS, STEPS = 20, 120


def run_elastic(folder: Path, runs: list[dict[str, Any]]) -> str:
    plan = folder / "plan.json"
    plan.write_text(json.dumps({"runs": runs}))
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "CI": "1", "OMP_NUM_THREADS": "1"}
    environment["GLOO_SOCKET_IFNAME"] = "lo"
    command = [sys.executable, str(Path(__file__).with_name("elastic.py")), str(plan)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path, name: str) -> list[tuple[int, float]]:
    return [(row["step"], row["loss_metrics/global_avg_loss"]) for row in rows(folder, name) if "grad_norm" in row]


def test_a_run_whose_ranks_are_killed_twenty_times_ends_with_the_losses_of_an_undisturbed_one(tmp_path: Path) -> None:
    """B108: whenever they die, also while they save."""
    config = write_config(tmp_path, steps=STEPS)
    arguments = ["train", str(config), "--checkpoint.resume=auto", "--checkpoint.interval=2", "--run.sample_bytes=0"]
    said = run_elastic(
        tmp_path,
        [
            {"arguments": [*arguments, "--run.name=calm"], "ranks": 2, "kills": 0, "seed": 0},
            {"arguments": [*arguments, "--run.name=killed"], "ranks": 2, "kills": KILLS, "seed": 3},
        ],
    )
    deaths = [line.split()[1:] for line in said.splitlines() if line.startswith("DEATH")]
    assert [int(number) for number, _, _ in deaths] == list(range(KILLS))
    assert {kind for _, _, kind in deaths} == {"start", "step", "save"}
    assert {rank for _, rank, _ in deaths} == {"0", "1"}
    calm = losses(tmp_path, "calm")
    assert [step for step, _ in calm] == list(range(1, STEPS + 1))
    assert losses(tmp_path, "killed") == calm
    assert (
        rows(tmp_path, "killed")[-1]["validation_metrics/global_avg_loss"]
        == (rows(tmp_path, "calm")[-1]["validation_metrics/global_avg_loss"])
    )
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["calm", "killed"]
    saved = sorted(path.name for path in (tmp_path / "runs" / "killed" / "checkpoint").iterdir())
    assert saved == ["latest", f"step-{STEPS - 2}", f"step-{STEPS}"]
