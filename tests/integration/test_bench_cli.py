"""`fullshard bench` as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from cluster import Cluster
from fullshard.cli import main
from fullshard.core.calibration import parse_calibration
from fullshard.tools.bench.bars import bar
from fullshard.tools.bench.run import Finding, Plan, run_bench
from fullshard.tools.bench.subject import Subject

SOURCE = Path(__file__).parents[2] / "src"
VOCABULARY = 16


class _Block(nn.Sequential):
    """No output of a unit is a view: FSDP2 warns of those."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, VOCABULARY), nn.ReLU())


def _build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCABULARY, 8), _Block())


def _measure(rank: int, step: bool) -> Finding:
    subject = Subject("tiny", _build, _Block, VOCABULARY, positions=4) if step else None
    return run_bench(Plan((4096, 70_000), (16,), 4096, 0.001, 2, subject), torch.device("cpu"), 2)


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_transport_and_engine_is_measured(cluster: Cluster, world_size: int) -> None:
    findings = cluster.run(_measure, world_size == 2, world_size=world_size)
    assert all(finding == findings[0] for finding in findings), "ranks wrote different numbers"
    calibration = findings[0].calibration
    measured = {(link.transport, link.operation) for link in calibration.links}
    assert {(name, operation) for name in ("direct", "torch") for operation in ("gather", "reduce")} <= measured
    assert len({link.full_bytes for link in calibration.links}) == 2
    assert {speed.dtype for speed in calibration.matrices} == {"float32", "bfloat16"}
    assert [step.engine for step in calibration.steps] == (["fullshard", "FSDP2", "DDP"] if world_size == 2 else [])
    assert calibration.ranks == world_size
    assert parse_calibration(findings[0].document, "here") == calibration


def test_bench_writes_a_calibration(tmp_path: Path) -> None:
    """Two ranks of its own; one JSON document on stdout, the same in the file, tables on stderr."""
    out = tmp_path / "machine.json"
    command = [sys.executable, "-m", "fullshard", "bench", "--ranks", "2", "--quick", "--json", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(out.read_text())
    calibration = parse_calibration(out.read_text(), str(out))
    assert (calibration.ranks, calibration.ranks_per_host) == (2, 2)
    assert calibration.link_seconds("direct", "gather", 1 << 20) > 0
    assert "link between the ranks" in done.stderr
    assert "█" in done.stderr
    assert "Warning" not in done.stderr


def test_one_rank_has_no_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "machine.json"
    threads = torch.get_num_threads()
    try:
        assert main(["bench", "--ranks", "1", "--quick", "--step", "1x16", "--out", str(out)]) == 0
    finally:
        torch.set_num_threads(threads)
    calibration = parse_calibration(out.read_text(), str(out))
    assert calibration.links == ()
    assert len(calibration.steps) == 3
    shown = capsys.readouterr().out
    assert "one rank: there is no link to measure" in shown
    assert "Llama 1x16" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "parallel.nproc = 0 is not possible"),
        (["--ranks", "two"], "parallel.nproc"),
        (["--step", "big"], "expected BLOCKSxWIDTH, such as 8x512"),
        (["--step", "8x500"], "model.hidden_size = 500 is not possible"),
        (["--out", "nowhere/a.json"], "there is no folder nowhere"),
        (["--out", "."], "expected a file, found a folder"),
        (["--train.steps", "3"], "settings of the section runtime only, found --train.steps"),
    ],
)
def test_wrong_usage_ends_before_anything_starts(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("part", "expected"), [(0.0, ""), (1.0, "████"), (2.0, "████"), (0.5, "██"), (0.53, "██▏"), (1e-6, "▏")]
)
def test_bars_are_as_long_as_their_numbers(part: float, expected: str) -> None:
    assert bar(part, 4) == expected
