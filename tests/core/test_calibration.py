"""Calibrations: what `fullshard bench` writes is what a predictor reads, and nothing else is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from core.support import Core, holds

ADVICE = "Make a new one with `fullshard bench`."


def _calibration(core: Core) -> Any:
    of = core.calibration
    return of.Calibration(
        date="2026-11-30T00:00:00+00:00",
        machine=of.Machine("EPYC", 2, 24 << 30, "cpu", "2.13.0", "0.1.0"),
        ranks=2,
        ranks_per_host=2,
        threads_per_rank=1,
        links=(
            *(of.LinkTime("direct", "gather", size, size / 1e6) for size in (1000, 2000, 8000)),
            of.LinkTime("direct", "reduce", 1000, 1e-3),
        ),
        matrices=(of.MatrixSpeed("float32", 256, 1e9), of.MatrixSpeed("float32", 512, 3e9)),
        copies=(of.CopySpeed(1 << 20, 4e9),),
        steps=(of.StepTime("FSDP2", "8x512", 0.7, 0.6, 0.8),),
    )


@holds
def test_calibration_survives_a_round_trip(core: Core) -> None:
    made = _calibration(core)
    document = core.calibration.render_calibration(made)
    assert json.loads(document)["schema"] == core.calibration.SCHEMA
    assert core.calibration.parse_calibration(document, "a.json") == made


def _changed(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda document: document.update(changes)


def _in_first_link(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda document: document["links"][0].update(changes)


BAD: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (_changed(schema=2), "a.json has schema 2, this version reads schema 1"),
    (lambda document: document.pop("schema"), "a.json is no calibration: expected a JSON object with a schema"),
    (lambda document: document.pop("ranks"), "a.json is damaged: ranks is missing"),
    (_changed(speed=1), "a.json is damaged: speed is not known"),
    (_changed(ranks="2"), "a.json is damaged: ranks must be of type int, got '2'"),
    (_changed(ranks=True), "ranks must be of type int, got True"),
    (_changed(ranks=0), "ranks must be a positive number, got 0"),
    (_changed(links={}), "links must be a list"),
    (_changed(machine=[]), "machine: expected an object"),
    (lambda document: document["machine"].pop("cpu"), "machine: cpu is missing"),
    (_in_first_link(seconds=float("nan")), "links[0]: seconds must be a positive number, got nan"),
    (_in_first_link(seconds=None), "links[0]: seconds must be of type float, got None"),
    (_in_first_link(operation="scatter"), "links[0]: operation must be one of gather, reduce, got 'scatter'"),
]


@holds
def test_bad_calibrations_are_refused(core: Core) -> None:
    """The error names the file, the place in it, what is there, and what to do."""
    good = core.calibration.render_calibration(_calibration(core))
    texts = [("", "it is not JSON"), ("[]", "expected a JSON object"), (good[:100], "it is not JSON")]
    for change, message in BAD:
        document = json.loads(good)
        change(document)
        texts.append((json.dumps(document), message))
    for text, message in texts:
        with pytest.raises(ValueError, match=r"^a[.]json ") as caught:
            core.calibration.parse_calibration(text, "a.json")
        assert message in str(caught.value)
        assert str(caught.value).endswith(ADVICE)


@holds
def test_link_times_lie_on_straight_lines(core: Core) -> None:
    made = _calibration(core)
    for size in (1000, 1500, 2000, 4000, 8000, 16000):
        assert made.link_seconds("direct", "gather", size) == pytest.approx(size / 1e6)
    # Less than the least that was measured costs as much as that; a single point is a rate.
    assert made.link_seconds("direct", "gather", 10) == pytest.approx(1e-3)
    assert made.link_seconds("direct", "reduce", 3000) == pytest.approx(3e-3)
    steep = core.calibration.LinkTime
    bent = (steep("t", "gather", 100, 1.0), steep("t", "gather", 200, 2.0), steep("t", "gather", 300, 10.0))
    calibration = type(made)(*[getattr(made, name) for name in ("date", "machine")], 2, 2, 1, links=bent)
    assert calibration.link_seconds("t", "gather", 150) == pytest.approx(1.5)
    assert calibration.link_seconds("t", "gather", 250) == pytest.approx(6.0)
    with pytest.raises(ValueError, match="no gather over 'shm'; it has gather over direct, reduce over direct"):
        made.link_seconds("shm", "gather", 1000)


@holds
def test_best_matrices_count(core: Core) -> None:
    made = _calibration(core)
    assert made.flops("float32") == 3e9
    with pytest.raises(ValueError, match="no matrix products in 'bfloat16'; it has float32"):
        made.flops("bfloat16")
