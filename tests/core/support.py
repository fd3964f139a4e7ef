"""What the tests of core/ share: the modules under test as one object, and properties that run on any such object.

A property is a function `check(core, case)` with a hypothesis strategy for `case`. pytest runs it on the real modules;
`test_mutations.py` runs the same function on modules with a deliberate fault in them. So a property never imports
`fullshard.core` itself, and cases are made of plain data: enums of a faulty module are not those of the real one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import fullshard.core

CORE_FOLDER = Path(fullshard.core.__file__).parent
# In the order in which they may import each other.
CORE_MODULES = (
    *("spec", "layout", "grouping", "lifecycle", "policy", "order", "budget", "events", "reductions"),
    *("updates", "schedule", "replay", "scaling", "cost"),
    *("profile", "summary", "trace"),
    "calibration",
)


class Core:
    """The modules of core/, by name.

    Args:
        sources: Text to run in place of a module's file.
    """

    def __init__(self, sources: Mapping[str, str] | None = None) -> None:
        modules = _load(sources or {})
        self.spec: Any = modules["spec"]
        self.layout: Any = modules["layout"]
        self.grouping: Any = modules["grouping"]
        self.lifecycle: Any = modules["lifecycle"]
        self.policy: Any = modules["policy"]
        self.events: Any = modules["events"]
        self.budget: Any = modules["budget"]
        self.schedule: Any = modules["schedule"]
        self.replay: Any = modules["replay"]
        self.scaling: Any = modules["scaling"]
        self.cost: Any = modules["cost"]
        self.profile: Any = modules["profile"]
        self.summary: Any = modules["summary"]
        self.trace: Any = modules["trace"]
        self.calibration: Any = modules["calibration"]


@cache
def _code(name: str, text: str) -> CodeType:
    return compile(text, f"{name}.py", "exec")


def source_of(name: str) -> str:
    """The text of one module of core/."""
    return (CORE_FOLDER / f"{name}.py").read_text()


def _load(sources: Mapping[str, str]) -> dict[str, ModuleType]:
    """Run the modules anew, so that all of them see each other and none sees the real ones."""
    full_names = {name: f"fullshard.core.{name}" for name in CORE_MODULES}
    real = {full: sys.modules.pop(full, None) for full in full_names.values()}
    made: dict[str, ModuleType] = {}
    try:
        for name, full in full_names.items():
            made[name] = sys.modules[full] = ModuleType(full)
            exec(_code(name, sources.get(name) or source_of(name)), made[name].__dict__)
    finally:
        for full, module in real.items():
            sys.modules.pop(full, None)
            if module is not None:
                sys.modules[full] = module
    return made


@cache
def real_core() -> Core:
    """core/ as it is."""
    return Core()


@dataclass(frozen=True)
class Property:
    """One property: what must hold of every case that the strategy makes, or of a few things written out (no cases)."""

    check: Callable[..., None]
    cases: st.SearchStrategy[Any] | None
    examples: int

    def run(self, core: Core, *, find_only: bool = False) -> None:
        """Try the property on `core`, on the same cases in every run.

        Args:
            core: The modules under test.
            find_only: Raise what the first failing case raised, without shrinking it or running it again.
        """
        check, cases = self.check, self.cases
        if cases is None:
            check(core)
            return
        # No database, no deadline, no complaint about slowness: a busy machine must not change the result of a test.
        config = settings(
            derandomize=True,
            database=None,
            deadline=None,
            max_examples=self.examples,
            phases=[Phase.generate] if find_only else [Phase.generate, Phase.shrink],
            report_multiple_bugs=False,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        )

        failures: list[BaseException] = []

        @config
        @given(case=cases)
        def on_one(case: Any) -> None:
            try:
                check(core, case)
            except BaseException as failure:
                failures.append(failure)
                raise

        try:
            on_one()
        except BaseException:
            if find_only and failures:
                raise failures[0] from None
            raise


PROPERTIES: dict[str, Property] = {}


def holds_for(cases: st.SearchStrategy[Any], examples: int = 60) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """Turn `test_x(core, case)` into a test without arguments, and note it as a property of the same name."""
    return lambda check: _as_test(Property(check, cases, examples))


def holds(check: Callable[[Core], None]) -> Callable[[], None]:
    """The same for `test_x(core)`: a fact about a table, or examples worked out by hand."""
    return _as_test(Property(check, None, 1))


def _as_test(made: Property) -> Callable[[], None]:
    PROPERTIES[made.check.__name__] = made

    def test() -> None:
        made.run(real_core())

    test.__name__ = made.check.__name__
    test.__module__ = made.check.__module__
    test.__doc__ = made.check.__doc__
    return test
