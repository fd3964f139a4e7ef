"""What is answered without deciding is what would be decided, whatever the events; a settled step decides nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st

from core.simulator import policies_of
from core.support import Core, holds, holds_for
from core.test_schedule import CHAINS, Chain
from core.traces import Case, Ev, Item, NewSettings, cases
from fullshard.errors import MisuseError


class Pair:
    """A Scheduler that decides everything, and one that is asked only for what a Replay in front of it has not seen."""

    def __init__(self, core: Core, case: Case) -> None:
        self.core = core
        policy = core.policy.SchedulePolicy(**case.engine)

        def scheduler() -> Any:
            return core.schedule.Scheduler(case.model.full_bytes, policies_of(core, case.settings), policy)

        self.plain = scheduler()
        self.behind = scheduler()
        self.replay = core.replay.Replay(self.behind)
        self.decided = 0
        decide = self.behind.on

        def count(event: Any) -> Any:
            self.decided += 1
            return decide(event)

        self.behind.on = count

    def feed(self, item: Item) -> None:
        """Take one item of a trace, and compare all that callers see."""
        if isinstance(item, NewSettings):
            self.plain.policies[:] = policies_of(self.core, item.settings)
            for unit, policy in enumerate(self.plain.policies):
                self.replay.set_unit_policy(unit, policy)
            return
        event = self.core.events.Event(self.core.events.EventKind[item.kind], *_fields(item))
        assert _outcome(self.replay, event) == _outcome(self.plain, event), f"the answer to {item} differs"
        assert self.replay.states == self.plain.states, f"states after {item} differ"
        assert self.replay.in_use() == self.plain.in_use(), f"depths after {item} differ"


def _fields(item: Any) -> list[Any]:
    return [getattr(item, name) for name in tuple(type(item).__dataclass_fields__)[1:]]


def _outcome(scheduler: Any, event: Any) -> Any:
    """The commands, or the kind of error: a trace that is repeated may begin where it cannot."""
    try:
        return scheduler.on(event)
    except (AssertionError, MisuseError) as error:
        return type(error)


@holds_for(st.tuples(cases(), st.integers(1, 3), st.sampled_from([2, 20, 10_000]), st.integers(1, 50)), examples=200)
def test_what_is_replayed_is_what_would_be_decided(core: Core, case: tuple[Case, int, int, int]) -> None:
    """Any steps, several times over, also if little is remembered, and if somebody asks between events for more."""
    run, times, limit, ask_every = case
    pair = Pair(core, run)
    pair.replay._limit = limit
    for number, item in enumerate((NewSettings(run.settings), *run.trace) * times):
        pair.feed(item)
        assert pair.replay._nodes <= limit + 2 * len(pair.plain.states) + 1
        if not number % ask_every:
            assert pair.replay.at_rest() == pair.plain.at_rest(), f"rest after {item}"


@holds_for(CHAINS, examples=30)
def test_a_settled_step_decides_nothing(core: Core, chain: Chain) -> None:
    """The first step records an order, the second one follows it, the third begins as the second did."""
    case = chain.case()
    pair = Pair(core, case)
    for number in range(5):
        before = pair.decided
        for item in case.trace:
            pair.feed(item)
        assert number < 3 or pair.decided == before, "a settled step was decided again"


@holds
def test_settings_that_come_back_decide_nothing(core: Core) -> None:
    """Gradient accumulation changes the settings twice a step, and sometimes not."""
    case = Chain((1, 2, 3), None).case()
    pair = Pair(core, case)
    off = tuple(type(setting)(sync_gradients=False) for setting in case.settings)
    for number in range(5):
        before = pair.decided
        for settings in (off, case.settings, case.settings):
            for item in (NewSettings(settings), *case.trace):
                pair.feed(item)
        assert number < 3 or pair.decided == before, "settings that came back were decided again"


@holds
def test_an_event_that_fails_is_not_remembered(core: Core) -> None:
    """Not even if it has changed something first, which would be our bug."""
    case = Chain((1, 2), None).case()
    pair = Pair(core, case)
    decide, event, kind = pair.behind.on, core.events.Event, core.events.EventKind

    def fail_halfway(_: Any) -> None:
        decide(event(kind.UNSHARD, 1))
        raise AssertionError

    for item in case.trace * 3:
        pair.feed(item)
    pair.behind.on = fail_halfway
    with pytest.raises(AssertionError):
        pair.replay.on(event(kind.SETTLE, 1))
    pair.behind.on = decide
    pair.plain.on(event(kind.UNSHARD, 1))
    for item in (Ev("RESHARD", 1), *case.trace, *case.trace, Ev("RESHARD", 1)):
        pair.feed(item)


@holds
def test_everything_a_scheduler_remembers_is_saved(core: Core) -> None:
    """A field that `save` leaves out would let two situations look the same that are not."""
    scheduler = core.schedule.Scheduler([1, 1], [core.policy.UnitPolicy()] * 2, core.policy.SchedulePolicy())
    settings = {"full_bytes", "_one_unit_bytes", "policies", "policy"}
    of_one_event = {"_out", "moved", "_handlers"}
    saved = {"states", "depths", "_order", "_to_backward", "_pinned", "_reductions", "_kept", "_updates"}
    assert set(vars(scheduler)) == settings | of_one_event | saved, "is the new field saved and loaded?"
