"""docs/compatibility.md lists every public name of torch's FSDP1 and FSDP2, and is true.

The list comes from the torch that is installed: a new torch with a new name fails here and says which.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

import torch_names

DOCUMENT = Path(__file__).parents[1] / "docs" / "compatibility.md"
VERDICTS = ("same", "same and better", "different", "absent")
NAMES = torch_names.torch_names()


def rows() -> Iterator[tuple[str, str, str]]:
    """(name, verdict, why) of every row of the tables."""
    for line in DOCUMENT.read_text().splitlines():
        found = re.fullmatch(r"\| `([^`]+)` \| ([^|]+) \| ?([^|]*)\|", line)
        if found:
            yield found[1], found[2].strip(), found[3].strip()


def test_every_public_name_of_torch_has_one_row() -> None:
    listed = [name for name, _, _ in rows()]
    assert sorted(set(NAMES) - set(listed)) == [], "names of torch without a row in docs/compatibility.md"
    assert sorted(set(listed) - set(NAMES)) == [], "rows for names that this torch does not have"
    assert len(listed) == len(set(listed))


def test_every_row_has_a_verdict_and_a_difference_has_a_reason() -> None:
    for name, verdict, why in rows():
        assert verdict in VERDICTS, f"{name}: {verdict!r}"
        assert why or verdict == "same", f"{name} is {verdict!r} without a reason"


def test_names_that_the_table_calls_present_are_present() -> None:
    absent = {name for name, verdict, _ in rows() if verdict == "absent"}
    assert set(NAMES) - torch_names.our_names(NAMES) == absent


@pytest.mark.parametrize(("module", "name"), torch_names.imports())
def test_import_line_works_with_the_package_name_changed(module: str, name: str) -> None:
    ours = importlib.import_module(f"{torch_names.OURS}.{module}".rstrip("."))
    assert hasattr(ours, name)


def callables() -> Iterator[tuple[str, Callable[..., Any], Callable[..., Any]]]:
    """(name, torch's, ours) of everything that is called."""
    for name, value in NAMES.items():
        if value is None:
            continue
        module_name, _, attribute = name.rpartition(".")
        ours = getattr(importlib.import_module(f"{torch_names.OURS}.{module_name}".rstrip(".")), attribute)
        if not inspect.isclass(value):
            yield name, value, ours
            continue
        if not issubclass(value, Enum):
            yield name, value.__init__, ours.__init__
        if is_dataclass(value):
            continue  # its fields are the arguments of `__init__`
        for method in (key for key in NAMES if key.startswith(f"{name}.") and "(" not in key):
            attribute = method.rpartition(".")[2]
            if callable(getattr(value, attribute)) and callable(getattr(ours, attribute, None)):
                yield method, getattr(value, attribute), getattr(ours, attribute)


def test_arguments_stand_in_torchs_order_with_torchs_defaults() -> None:
    """A call with positional arguments means the same; ours may have more arguments behind, by keyword."""
    wrong = []
    for name, theirs, ours in callables():
        expected, found = torch_names.arguments(theirs), torch_names.arguments(ours)
        if list(found)[: len(expected)] != list(expected):
            wrong.append(f"{name}: torch has {list(expected)}, fullshard {list(found)}")
            continue
        for argument, parameter in expected.items():
            if not _same_default(parameter.default, found[argument].default):
                wrong.append(f"{name}({argument}): {parameter.default} in torch, {found[argument].default} here")
            by_position = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            if by_position and found[argument].kind is not parameter.POSITIONAL_OR_KEYWORD:
                wrong.append(f"{name}({argument}) cannot be given by position")
    assert wrong == []


def _same_default(theirs: Any, ours: Any) -> bool:
    # An argument that torch demands may have a default here. Enums and policies of two packages only print alike.
    return (
        theirs is inspect.Parameter.empty
        or theirs is ours
        or theirs == ours
        or str(theirs).rpartition(".")[2] == str(ours).rpartition(".")[2]
    )
