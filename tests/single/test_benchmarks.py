"""The benchmarks' own arithmetic and names; that they run is seen by running them."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    def load_one(name: str) -> ModuleType:
        monkeypatch.syspath_prepend(str(FOLDER))
        return importlib.import_module(name)

    return load_one


def test_workloads_and_reaches_name_engines_that_exist(load: Any) -> None:
    engines, workloads, report = (load(name) for name in ("engines", "workloads", "report"))
    for workload in workloads.WORKLOADS.values():
        assert set(workload.engines) <= set(engines.ENGINES)
    for reach in report.REACHES:
        assert set(reach.workloads.split()) <= set(workloads.WORKLOADS)
        assert set(reach.engines) <= set(engines.ENGINES)


def test_ideal_peak_by_hand(load: Any) -> None:
    """Width 64, hidden 128: a block has 4 x 64 x 64 + 3 x 64 x 128 + 2 x 64 parameters, the rest 2 x 256 x 64 + 64."""
    workloads = load("workloads")
    block = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
    whole = 2 * block + 2 * 256 * 64 + 64
    tiny = workloads.WORKLOADS["tiny"]
    assert workloads.ideal_peak_bytes(tiny, 0) == (12 + 4) * whole // 2 + 12 * block
    assert workloads.ideal_peak_bytes(tiny, 10**9) == 12 * whole // 2 + 12 * block + 10**9


def test_reaches_are_met_or_missed(load: Any) -> None:
    report = load("report")
    values = {"seconds": 1, "time_over_fsdp2": {"median": 0.5}, "memory": {"peak_bytes": 90}}
    reference = {"seconds": 1, "time_over_fsdp2": {"median": 1.0}, "memory": {"peak_bytes": 100}}
    found = {"fullshard-direct": values, "fsdp2": reference, "fullshard-shm": {"missing": "no"}}
    result = {"workload": {"name": "a"}, "engines": found, "ideal": {"peak_bytes": 80}}
    lines = report._reach_lines(result, {name: found[name] for name in ("fullshard-direct", "fsdp2")})
    assert "reach: fullshard-direct time_over_fsdp2 at most 0.55: 0.500, met" in lines
    assert "reach: fullshard-direct peak_over_ideal at most 1.05: 1.125, MISSED" in lines
    assert "reach: fullshard-shm time_over_fsdp2 at most 0.40: not measured" in lines


def test_checkpoint_compares_what_it_measures(load: Any) -> None:
    checkpoint, savers = load("checkpoint"), load("savers")
    assert set(checkpoint.CONTENDERS) == {*savers.SAVERS, *checkpoint.DISKS}
    found = {
        "disk-buffered": {"save": [1.0, 3.0], "load": [1.0, 1.0]},
        "disk-direct": {"save": [2.0, 2.0], "load": [0.5, 2.0]},
        "dcp": {"save": [4.0, 4.0], "load": [4.0, 4.0], "stall": [0.5]},
        "fullshard": {"save": [1.2, 2.4], "load": [3.0, 3.0], "stall": [0.06]},
        "fullshard-overlap": {"stall": [0.03]},
    }
    checkpoint.add_disk(found)
    assert found["disk"]["save"] == [1.0, 2.0]  # the faster way of each round
    shape = {"cpu": "one", "cores": 2, "torch": "2"}
    result = {"found": found, "ratios": checkpoint.ratios(found), "machine": shape, "bytes": 2**30, "rounds": 2}
    assert checkpoint.goal_lines(result) == [
        "save / dcp save, goal at most 0.5: 0.450 (0.375-0.525), met",
        "save / disk save, goal at most 1.3: 1.200 (1.200-1.200), met",
        "load / dcp load, goal at most 0.5: 0.750 (0.750-0.750), MISSED",
        "load / disk load: 4.500 (3.750-5.250)",
        "stall / fullshard save, goal at most 0.05: 0.050 (0.050-0.050), met",
        "fullshard-overlap stall / fullshard save, goal at most 0.05: 0.025 (0.025-0.025), met",
    ]
    text = checkpoint.markdown({**result, "title": "a job", "page_cache": "dropped"})
    assert "| **fullshard.checkpoint** | 1.800 | 3.000 | 60 | 0.56 | 0.33 |" in text


def test_checkpoint_job_has_the_bytes_that_were_asked_for(load: Any) -> None:
    checkpoint = load("checkpoint")
    for asked in (3e6, 0.75 * 2**30):
        assert abs(checkpoint.state_bytes(asked, 2) / asked - 1) < 0.1


def test_planning_on_paper_ranks(load: Any) -> None:
    planning = load("paper_ranks").plan_on_paper(40, 1)
    seconds = {what: spread["median"] for what, spread in planning["seconds"].items()}
    assert seconds.pop("all") == pytest.approx(sum(seconds.values()))
