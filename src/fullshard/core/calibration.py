"""What was measured on a machine, as data: `fullshard bench` writes it, whoever predicts reads it.

A calibration is one JSON document. It is checked once, where it is parsed; a number in it can then be used as it is.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

SCHEMA = 1
OPERATIONS = ("gather", "reduce")

_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True)
class Machine:
    """Where it was measured.

    Attributes:
        device: Type of the device that computes, such as "cpu".
        memory_bytes: Of the host.
    """

    cpu: str
    cores: int
    memory_bytes: int
    device: str
    torch: str
    fullshard: str


@dataclass(frozen=True, slots=True)
class LinkTime:
    """One command of a unit between all ranks.

    Attributes:
        transport: Name of the transport.
        operation: One of `OPERATIONS`.
        full_bytes: Bytes of the whole, of which every rank has 1/N.
        seconds: Of the slowest rank.
    """

    transport: str
    operation: str
    full_bytes: int
    seconds: float

    def __post_init__(self) -> None:
        if self.operation not in OPERATIONS:
            raise ValueError(f"operation must be one of {', '.join(OPERATIONS)}, got {self.operation!r}")
        _require_positive(self, "full_bytes", "seconds")


@dataclass(frozen=True, slots=True)
class MatrixSpeed:
    """Products of two square matrices on every rank at once; floating-point operations a second of the slowest."""

    dtype: str
    size: int
    flops: float

    def __post_init__(self) -> None:
        _require_positive(self, "size", "flops")


@dataclass(frozen=True, slots=True)
class CopySpeed:
    """Copies from memory to memory on every rank at once; bytes copied a second by the slowest."""

    nbytes: int
    bytes_per_second: float

    def __post_init__(self) -> None:
        _require_positive(self, "nbytes", "bytes_per_second")


@dataclass(frozen=True, slots=True)
class StepTime:
    """One training step of a Llama under one engine; `low` and `high` enclose the middle half of the steps."""

    engine: str
    model: str
    seconds: float
    low: float
    high: float

    def __post_init__(self) -> None:
        _require_positive(self, "seconds", "low", "high")


@dataclass(frozen=True, slots=True)
class Calibration:
    """One run of `fullshard bench`.

    Attributes:
        date: UTC, ISO 8601.
        ranks: All of them.
        ranks_per_host: Of one host.
        threads_per_rank: Threads that compute.
    """

    date: str
    machine: Machine
    ranks: int
    ranks_per_host: int
    threads_per_rank: int
    links: tuple[LinkTime, ...] = ()
    matrices: tuple[MatrixSpeed, ...] = ()
    copies: tuple[CopySpeed, ...] = ()
    steps: tuple[StepTime, ...] = ()

    def __post_init__(self) -> None:
        _require_positive(self, "ranks", "ranks_per_host", "threads_per_rank")

    def link_seconds(self, transport: str, operation: str, full_bytes: int) -> float:
        """Seconds of one command, between and beyond the sizes that were measured on straight lines.

        Raises:
            ValueError: Nothing was measured for this transport and operation.
        """
        points = sorted(
            (p.full_bytes, p.seconds) for p in self.links if (p.transport, p.operation) == (transport, operation)
        )
        if not points:
            known = sorted({f"{p.operation} over {p.transport}" for p in self.links})
            raise ValueError(
                f"the calibration has no {operation} over {transport!r}; it has {', '.join(known) or 'no link'}. "
                "Run `fullshard bench` with as many ranks as you train with."
            )
        if full_bytes <= points[0][0] or len(points) == 1:
            # Below the smallest size a command costs what it costs to start one.
            return points[0][1] * max(1.0, full_bytes / points[0][0])
        upper = min(max(1, bisect_left(points, (full_bytes, 0.0))), len(points) - 1)
        (left, fast), (right, slow) = points[upper - 1], points[upper]
        return fast + (slow - fast) * (full_bytes - left) / (right - left)

    def flops(self, dtype: str) -> float:
        """The best speed of matrix products in `dtype`, in floating-point operations a second and rank.

        Raises:
            ValueError: It was not measured.
        """
        speeds = [speed.flops for speed in self.matrices if speed.dtype == dtype]
        if not speeds:
            known = sorted({speed.dtype for speed in self.matrices})
            raise ValueError(
                f"the calibration has no matrix products in {dtype!r}; it has {', '.join(known) or 'none'}"
            )
        return max(speeds)


_SCALARS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,)}
_LISTS: dict[str, type] = {"links": LinkTime, "matrices": MatrixSpeed, "copies": CopySpeed, "steps": StepTime}


def _require_positive(record: object, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} must be a positive number, got {value!r}")


def render_calibration(calibration: Calibration) -> str:
    """The JSON document that `parse_calibration` reads back to an equal calibration."""
    return json.dumps({"schema": SCHEMA, "made_by": "fullshard bench", **asdict(calibration)}, indent=2) + "\n"


def parse_calibration(text: str, source: str) -> Calibration:
    """Read a JSON document.

    Args:
        text: The document.
        source: Where it is from, for messages.

    Raises:
        ValueError: It is not one of `fullshard bench`, or of another schema, or damaged; the text says where.
    """
    advice = "Make a new one with `fullshard bench`."
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{source} is no calibration: it is not JSON ({error}). {advice}") from None
    if not isinstance(document, dict) or "schema" not in document:
        raise ValueError(f"{source} is no calibration: expected a JSON object with a schema. {advice}")
    if document["schema"] != SCHEMA:
        found = document["schema"]
        raise ValueError(f"{source} has schema {found!r}, this version reads schema {SCHEMA}. {advice}")
    body = {key: value for key, value in document.items() if key not in ("schema", "made_by")}
    try:
        return _read_record(Calibration, body, "")
    except ValueError as error:
        raise ValueError(f"{source} is damaged: {error}. {advice}") from None


def _read_record(kind: type[_Record], value: object, where: str) -> _Record:
    """A dataclass from a JSON object; every field must be there, and none besides."""
    inside = f"{where}: " if where else ""
    if not isinstance(value, Mapping):
        raise ValueError(f"{inside}expected an object, found {value!r}")
    types = {field.name: str(field.type) for field in fields(kind)}  # type: ignore[arg-type]
    if missing := [name for name in types if name not in value]:
        raise ValueError(f"{inside}{missing[0]} is missing")
    if unknown := [name for name in value if name not in types]:
        raise ValueError(f"{inside}{unknown[0]} is not known")
    found = {name: _read_field(name, types[name], value[name], inside) for name in types}
    try:
        return kind(**found)
    except ValueError as error:
        raise ValueError(f"{inside}{error}") from None


def _read_field(name: str, kind: str, value: object, inside: str) -> Any:
    if name == "machine":
        return _read_record(Machine, value, name)
    if name in _LISTS:
        if not isinstance(value, list):
            raise ValueError(f"{inside}{name} must be a list, got {value!r}")
        return tuple(_read_record(_LISTS[name], item, f"{name}[{i}]") for i, item in enumerate(value))
    # A whole number is also a fine number of seconds; a bool is an int to Python, but not here.
    if not isinstance(value, _SCALARS[kind]) or isinstance(value, bool):
        raise ValueError(f"{inside}{name} must be of type {kind}, got {value!r}")
    return float(value) if kind == "float" and isinstance(value, int) else value
