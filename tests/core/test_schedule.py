"""The Scheduler under generated runs of models: whatever a model does, what it gets is full, fresh and bounded.

`traces.py` makes the runs, `simulator.py` executes the commands and checks each of them, without knowing the Scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import strategies as st

from core.simulator import Facts, Runner, Simulator
from core.support import Core, holds, holds_for
from core.traces import (
    ENGINES,
    Call,
    Case,
    Emitter,
    Ev,
    Item,
    Model,
    NewSettings,
    Setting,
    StepKind,
    Way,
    cases,
    emit_step,
    every_unit_once,
    models,
)
from fullshard.errors import MisuseError

TRAINING = st.sampled_from(
    [StepKind.TRAIN, StepKind.MICROBATCHES, StepKind.TWO_GRAPHS, StepKind.ONE_GRAPH, StepKind.INNER_UNIT]
)


# Any run


@holds_for(cases(), examples=300)
def test_any_run_is_valid(core: Core, case: Case) -> None:
    """Nested units, any order, repeats, skips, checkpoints, failures, accumulation, replicas, settings that change.

    The simulator checks after every event (see its messages): a unit in use is gathered, waited for and fresh; no
    buffer is gathered twice, freed twice or kept without a reason; prefetches are within the budget; each gradient is
    reduced or held exactly once, reductions complete in order, no more of them are on the wire than allowed, and none
    after the end of backward.
    """
    Runner(core, case).feed_all(case.trace)


def _nothing_kept(case: Case) -> Case:
    """The case without the setting that keeps parameters full between steps."""

    def changed(settings: tuple[Setting, ...]) -> tuple[Setting, ...]:
        return tuple(replace(setting, keep_after_backward=False) for setting in settings)

    trace = tuple(NewSettings(changed(i.settings)) if isinstance(i, NewSettings) else i for i in case.trace)
    return replace(case, settings=changed(case.settings), trace=trace)


@holds_for(cases(TRAINING).map(_nothing_kept), examples=150)
def test_every_step_ends_at_rest(core: Core, case: Case) -> None:
    """Back to sharded after each backward, also if the model did not use all of its units or outputs."""
    runner = Runner(core, case)
    for item in case.trace:
        runner.feed(item)
        if runner.ends_step(item):
            assert runner.scheduler.at_rest(), runner.scheduler.states


@holds_for(cases(), examples=100)
def test_same_events_give_same_commands(core: Core, case: Case) -> None:
    """Ranks see the same events; what else differs between two processes (addresses, hashes) must not matter."""
    one, other = Runner(core, case), Runner(core, case)
    for item in case.trace:
        assert one.feed(item) == other.feed(item)


# Failures


@dataclass(frozen=True)
class Abort:
    """A run that is given up after `cut` items; how the modules that were running are left; a step after that."""

    case: Case
    cut: int
    in_backward: bool
    unwinding: str
    next_step: tuple[Item, ...]


@st.composite
def aborts(draw: st.DrawFn) -> Abort:
    case = draw(cases(most_steps=2))
    cut = draw(st.integers(0, len(case.trace)))
    settings = [case.settings, *(item.settings for item in case.trace[:cut] if isinstance(item, NewSettings))][-1]
    emitter = Emitter(case.model, settings)
    emit_step(draw, emitter, StepKind.TRAIN)
    return Abort(
        case,
        cut,
        draw(st.booleans()),
        draw(st.sampled_from(["", "POST_FORWARD", "FORWARD_FAILED"])),
        tuple(emitter.items),
    )


@holds_for(aborts(), examples=200)
def test_abort_at_any_point_leads_to_rest(core: Core, abort: Abort) -> None:
    """And the next step is valid without any call by the user, also if modules were running when the abort came."""
    runner = Runner(core, abort.case)
    runner.feed_all(abort.case.trace[: abort.cut])
    running = [unit for unit, facts in enumerate(runner.simulator.units) for _ in range(facts.depth)]
    # A backward that failed takes its gradients with it; those of an earlier one are waited for and kept.
    commands = runner.feed(Ev("ABORT", inside_backward=abort.in_backward))
    assert abort.in_backward or "DISCARD" not in {op for op, _ in commands}
    assert runner.scheduler.at_rest()
    assert runner.scheduler.in_use() == []
    if abort.unwinding:
        runner.feed_all([Ev(abort.unwinding, unit) for unit in reversed(running)])
    for item in abort.next_step:
        runner.feed(item)
        if runner.ends_step(item) and not any(setting.keep_after_backward for setting in runner.simulator.settings):
            assert runner.scheduler.at_rest()


@dataclass(frozen=True)
class Repeated:
    """A step of a model that does the same in every step."""

    case: Case
    cut: int


@st.composite
def repeated(draw: st.DrawFn) -> Repeated:
    """Every unit runs once, in an order of its own, some of them in unusual ways."""
    model = draw(models())
    count = len(model.parents)
    ways = [Way.PLAIN, Way.PLAIN, Way.TWO_OUTPUTS, Way.NO_INPUT_GRADIENT]
    ways += [Way.CHECKPOINT, Way.CHECKPOINT_STOPS, Way.REENTRANT]
    drawn = [draw(st.sampled_from(ways)) for _ in range(count)]
    call = every_unit_once(model, draw(st.permutations(range(count))), drawn)
    after = draw(st.sampled_from(["AUTO", "FREE", "KEEP", "SHRINK", "FIT"]))
    settings = tuple(Setting(after, unshard_in_backward=draw(st.integers(0, 4)) > 0) for _ in range(count))
    emitter = Emitter(model, settings)
    emitter.run([call])
    emitter.backward(call)
    emitter.end_backward()
    emitter.items.append(Ev("CHANGED"))
    return Repeated(
        Case(model, settings, draw(ENGINES), tuple(emitter.items)), draw(st.integers(1, len(emitter.items)))
    )


@holds_for(repeated(), examples=150)
def test_abort_leaves_nothing_behind(core: Core, step: Repeated) -> None:
    """The step after an abort is, command by command, the step that would have come without it."""
    trace = step.case.trace
    failed, whole = Runner(core, step.case), Runner(core, step.case)
    failed.feed_all(trace)
    failed.feed_all([*trace[: step.cut], Ev("ABORT")])
    whole.feed_all(trace)
    whole.feed_all(trace)
    assert failed.feed_all(trace) == whole.feed_all(trace)


# Speed: what is recorded and what is gathered ahead


@holds_for(repeated(), examples=150)
def test_a_repeated_step_settles_and_wastes_nothing(core: Core, step: Repeated) -> None:
    """From the second step on the commands repeat, and no gather is thrown away unused."""
    runner = Runner(core, step.case)
    runner.feed_all(step.case.trace)
    wasted = runner.simulator.wasted_gathers
    second = runner.feed_all(step.case.trace)
    assert runner.feed_all(step.case.trace) == second
    assert runner.simulator.wasted_gathers == wasted


@dataclass(frozen=True)
class Chain:
    """A root and blocks of one size below it, which run in an order other than that of the module tree."""

    order: tuple[int, ...]
    ahead: int | None  # budget in blocks; None is the default

    def case(self, blocks_after: str = "FREE", **engine: Any) -> Case:
        count = len(self.order) + 1
        model = Model((100,) * count, (True,) * count, (1,) * count, (-1, *[0] * (count - 1)))
        call = Call(0, inner=tuple(Call(unit) for unit in self.order))
        emitter = Emitter(model, (Setting(), *[Setting(blocks_after)] * (count - 1)))
        emitter.run([call])
        emitter.backward(call)
        emitter.end_backward()
        budget = None if self.ahead is None else 100 * self.ahead
        defaults = {"prefetch_bytes": budget, "keep_bytes": 0, "reduces_in_flight": 1, "replicated": False}
        return Case(model, emitter.settings, {**defaults, **engine}, tuple(emitter.items))


CHAINS = st.builds(
    Chain,
    st.integers(1, 8).flatmap(lambda n: st.permutations(range(1, n + 1))).map(tuple),
    st.sampled_from([None, 1, 2, 3]),
)


@holds_for(CHAINS, examples=60)
def test_prefetch_follows_the_recorded_order(core: Core, chain: Chain) -> None:
    """From the second step on, no block has to begin its own gather, in forward or backward, and none comes twice."""
    case = chain.case()
    runner = Runner(core, case)
    runner.feed_all(case.trace)
    gathered: list[int] = []
    for item in case.trace:
        if isinstance(item, Ev) and item.kind in ("PRE_FORWARD", "PRE_BACKWARD") and item.unit:
            assert runner.simulator.units[item.unit].buffer is not None, f"{item} finds nothing gathered"
        gathered += [unit for op, unit in runner.feed(item) if op == "GATHER"]
    # The last block of forward is the first of backward: its buffer stays.
    assert gathered == [0, *chain.order, *chain.order[-2::-1]]


@holds_for(CHAINS, examples=60)
def test_full_buffers_of_a_chain_are_the_root_one_in_use_and_those_ahead(core: Core, chain: Chain) -> None:
    case = chain.case()
    runner = Runner(core, case)
    runner.feed_all([*case.trace, *case.trace])
    assert runner.simulator.peak_bytes == 100 * min(
        len(chain.order) + 1, 2 + (1 if chain.ahead is None else chain.ahead)
    )


@holds
def test_small_units_are_gathered_together(core: Core) -> None:
    """Without a number as many as are no larger than the largest unit below the root, and one of any size."""
    assert core.budget.one_unit_bytes([500, 10, 40, 20]) == 40
    assert core.budget.one_unit_bytes([500]) == 0
    sizes = (500, 15, 15, 15, 40, 30)
    model = Model(sizes, (True,) * 6, (1,) * 6, (-1, *[0] * 5))
    engine = {"prefetch_bytes": None, "reduces_in_flight": 1, "replicated": False}
    runner = Runner(core, Case(model, (Setting(),) * 6, engine, ()))
    call = Call(0, inner=tuple(Call(unit) for unit in range(1, 6)))
    emitter = Emitter(model, (Setting(),) * 6)
    emitter.run([call], grad=False)
    gathered = [[unit for op, unit in runner.feed(item) if op == "GATHER"] for item in emitter.items]
    entered = [made for made, item in zip(gathered, emitter.items, strict=True) if item.kind == "PRE_FORWARD"]
    assert entered == [[0, 1, 2], [3], [], [4], [5], []]


@holds_for(st.tuples(CHAINS, st.integers(1, 4)), examples=40)
def test_as_many_reductions_overlap_as_allowed(core: Core, case: tuple[Chain, int]) -> None:
    chain, allowed = case
    run = chain.case(reduces_in_flight=allowed)
    runner = Runner(core, run)
    most = 0
    for item in run.trace:
        runner.feed(item)
        most = max(most, len(runner.simulator.reducing))
    assert most == min(allowed, len(chain.order) + 1)


@holds
def test_the_buffer_that_stays_after_forward_is_the_one_backward_needs_first(core: Core) -> None:
    """Unit 2 is inside unit 1: it enters forward last, but unit 1 leaves last and comes first in backward."""
    model = Model((100,) * 3, (True,) * 3, (1,) * 3, (-1, 0, 1))
    emitter = Emitter(model, (Setting(),) * 3)
    call = Call(0, inner=(Call(1, inner=(Call(2),)),))
    emitter.run([call])
    emitter.backward(call)
    emitter.end_backward()
    engine = {"prefetch_bytes": None, "reduces_in_flight": 1, "replicated": False}
    runner = Runner(core, Case(model, emitter.settings, engine, ()))
    stays = [unit for commands in runner.feed_all(emitter.items) for op, unit in commands if op == "STASH"]
    assert stays == [1]
    assert runner.simulator.wasted_gathers == 0
    assert runner.simulator.gathers == 3 + 1


@holds
def test_a_prefetch_does_not_wait_behind_units_without_parameters(core: Core) -> None:
    """Unit 1 is only a container of others: that it has nothing to gather must not use up the one prefetch."""
    model = Model((100, 0, 100), (True, False, True), (1, 1, 1), (-1, 0, 1))
    case = Case(model, (Setting(),) * 3, {"prefetch_bytes": None, "reduces_in_flight": 1, "replicated": False}, ())
    runner = Runner(core, case)
    assert [unit for op, unit in runner.feed(Ev("PRE_FORWARD", 0)) if op == "GATHER"] == [0, 2]


@holds
def test_records_stay_bounded(core: Core) -> None:
    """Forwards with gradients but without backward, for ever: what is noted for their backward must not grow."""
    scheduler = core.schedule.Scheduler([1, 1], [core.policy.UnitPolicy()] * 2, core.policy.SchedulePolicy())
    kind, event = core.schedule.EventKind, core.schedule.Event
    scheduler.on(event(kind.PRE_FORWARD, 0))
    for _ in range(2000):
        scheduler.on(event(kind.PRE_FORWARD, 1))
        scheduler.on(event(kind.POST_FORWARD, 1, will_backward=True))
    assert len(scheduler._to_backward) <= 200
    assert len(scheduler._order.recorded) <= 200


# Across the step boundary


def _next_step(core: Core, chain: Chain, final: tuple[int, ...], **engine: Any) -> tuple[Runner, list[int]]:
    """A settled model whose optimizer has written everything, and what it then gathers for the next step."""
    case = chain.case(**engine)
    runner = Runner(core, case)
    runner.feed_all([*case.trace, *case.trace, Ev("CHANGED")])
    return runner, [unit for op, unit in runner.feed(Ev("NEXT_STEP", units=final)) if op == "GATHER"]


@holds_for(CHAINS, examples=40)
def test_the_next_step_begins_with_what_a_forward_begins_with(core: Core, chain: Chain) -> None:
    """The same gathers come earlier, no other ones, and the next step finds them."""
    count = len(chain.order)
    everything = tuple(range(count + 1))
    runner, gathered = _next_step(core, chain, everything)
    ahead = 1 if chain.ahead is None else chain.ahead - 1  # of the user's number the root is a part
    assert gathered == [0, *chain.order[:ahead]]
    case = chain.case()
    before, wasted = runner.simulator.gathers, runner.simulator.wasted_gathers
    first = runner.feed(case.trace[0])
    assert ("GATHER", 0) not in first
    runner.feed_all(case.trace[1:])
    assert runner.simulator.gathers - before == 2 * count - len(gathered)
    assert runner.simulator.wasted_gathers == wasted
    assert runner.scheduler.at_rest()


@holds
def test_units_that_may_change_are_not_gathered_for_the_next_step(core: Core) -> None:
    chain = Chain((3, 1, 2), None)
    assert _next_step(core, chain, (0, 1, 2))[1] == [0]  # 3 comes second, and is still to be written
    assert _next_step(core, chain, (1, 2, 3))[1] == []
    assert _next_step(core, chain, (0, 3))[1] == [0, 3]
    assert _next_step(core, chain, (0, 1, 2, 3), prefetch_bytes=0)[1] == []
    explicit = chain.case().settings
    case = replace(chain.case(), settings=(replace(explicit[0], forward_prefetch=(2,)), *explicit[1:]))
    ops = Runner(core, case).feed(Ev("NEXT_STEP", units=(0, 1, 2, 3)))
    assert ops == [("GATHER", 0), ("GATHER", 2)]


@holds
def test_what_was_gathered_for_the_next_step_is_dropped_if_it_changes(core: Core) -> None:
    """And only that."""
    runner, gathered = _next_step(core, Chain((1, 2, 3), 3), (0, 1, 2, 3))
    assert gathered == [0, 1, 2]
    assert runner.feed(Ev("CHANGED", units=(0, 2, 3))) == [("FREE", 1)]
    assert runner.feed(Ev("NEXT_STEP", units=(0, 1, 2, 3))) == [("GATHER", 1)]


# From forward to backward: the budget of "auto"


@holds_for(CHAINS, examples=40)
def test_nothing_kept_is_zero3_and_all_kept_is_zero2(core: Core, chain: Chain) -> None:
    """The two ends of one scale, command by command, in every step."""
    count = len(chain.order)

    def log(after: str, keep_bytes: int) -> list[list[tuple[str, int]]]:
        case = chain.case(after, keep_bytes=keep_bytes)
        settings = (Setting("FIT" if after == "FIT" else "AUTO"), *case.settings[1:])
        return Runner(core, replace(case, settings=settings)).feed_all(case.trace * 3)

    assert log("FIT", 0) == log("FREE", 0)
    assert log("FIT", 100 * count) == log("KEEP", 0)


@holds_for(st.tuples(CHAINS, st.integers(0, 9)), examples=60)
def test_every_unit_that_fits_saves_one_gather(core: Core, case: tuple[Chain, int]) -> None:
    """In between: those that leave forward last, after the one whose buffer stays anyway; a bounded peak."""
    chain, fit = case
    count = len(chain.order)
    run = chain.case("FIT", keep_bytes=100 * fit + 50)
    runner = Runner(core, run)
    runner.feed_all(run.trace)
    before = runner.simulator.gathers
    ops = [op for ops in runner.feed_all(run.trace) for op in ops]
    saved = min(fit, count - 1)
    assert runner.simulator.gathers - before == 2 * count - saved  # the root once, the last block once
    kept = chain.order[-1 - saved : count - 1] if fit < count else chain.order
    assert {unit for unit in chain.order if ops.count(("GATHER", unit)) == 1} == {*kept, chain.order[-1]}
    ahead = 1 if chain.ahead is None else chain.ahead
    assert runner.simulator.peak_bytes <= 100 * min(count + 1, 2 + ahead + fit)


@holds
def test_units_that_fit_are_chosen_from_the_end(core: Core) -> None:
    keep = core.budget.units_to_keep
    sizes = [99, 10, 20, 30, 0]
    assert keep((), (3, 2, 1), sizes, 60, 3) == {1, 2, 3}
    assert keep((), (3, 2, 1), sizes, 59, 3) == {1, 2}
    assert keep((), (3, 2, 1), sizes, 59, None) == {2, 3}
    assert keep((), (3, 2, 1), sizes, 45, None) == {3, 1}  # what does not fit leaves room for a smaller one
    assert keep((1, 2), (3, 2, 1), sizes, 45, None) == {1, 2}  # kept already, for a backward that is still to come
    assert keep((), (4, 3), sizes, 0, None) == frozenset()
    assert keep((), (4, 3), sizes, 30, None) == {3, 4}


@holds
def test_what_backward_does_not_read_is_not_kept_for_it(core: Core) -> None:
    case = Chain((1, 2, 3), None).case("FIT", keep_bytes=150)
    settings = (*case.settings[:2], replace(case.settings[2], unshard_in_backward=False), case.settings[3])
    runner = Runner(core, replace(case, settings=settings))
    ops = [op for ops in runner.feed_all(case.trace * 2) for op in ops]
    assert [ops.count(("GATHER", unit)) for unit in (1, 2, 3)] == [2, 2, 2]


@holds
def test_what_stays_after_backward_is_no_part_of_the_budget(core: Core) -> None:
    """Full from the last microbatch, because the user said so: the next forward frees what does not fit."""
    case = Chain((1, 2, 3), None).case("FIT", keep_bytes=50)
    settings = tuple(replace(setting, keep_after_backward=True) for setting in case.settings)
    runner = Runner(core, replace(case, settings=settings))
    runner.feed_all(case.trace * 2)
    assert [facts.reason for facts in runner.simulator.units] == ["policy"] * 4


# Settings, by hand


@holds
def test_parameters_kept_after_backward_are_not_gathered_again(core: Core) -> None:
    """Until they change: then a kept copy is stale."""
    case = Chain((1, 2), None).case()
    kept = replace(case, settings=tuple(replace(setting, keep_after_backward=True) for setting in case.settings))
    runner = Runner(core, kept)
    runner.feed_all(case.trace)
    assert runner.simulator.gathers == 5 - 1  # of two blocks in both directions and the root, one stays from forward
    count = runner.simulator.gathers
    runner.feed_all([item for item in case.trace if isinstance(item, Ev) and item.unit in (0, -1)])
    assert runner.simulator.gathers == count
    runner.feed(Ev("CHANGED"))
    assert runner.scheduler.at_rest()


@holds
def test_kept_parameters_that_were_not_written_stay(core: Core) -> None:
    """B126: the frozen base of an adapter, kept full, is gathered once and not once a step."""
    case = Chain((1, 2), None).case()
    always = {"after_forward": "KEEP", "keep_after_backward": True}
    kept = replace(case, settings=tuple(replace(setting, **always) for setting in case.settings))
    runner = Runner(core, kept)
    runner.feed_all(case.trace)
    count = runner.simulator.gathers
    runner.feed(Ev("CHANGED", units=(1, 2)))
    runner.feed_all(case.trace)
    assert runner.simulator.gathers == count + 1  # the root, which was written
    # Kept for a backward that does not come: not to be kept beyond it.
    runner = Runner(core, replace(case, settings=tuple(replace(s, after_forward="KEEP") for s in case.settings)))
    runner.feed_all([item for item in case.trace if isinstance(item, Ev) and "FORWARD" in item.kind])
    runner.feed(Ev("CHANGED", units=(0, 1, 2)))
    assert runner.scheduler.at_rest()


@holds
def test_a_unit_that_backward_does_not_read_is_not_gathered_for_it(core: Core) -> None:
    case = Chain((1, 2), None).case()
    settings = (Setting(), Setting(), Setting(unshard_in_backward=False))
    runner = Runner(core, replace(case, settings=settings))
    runner.feed_all([*case.trace, *case.trace])
    assert runner.simulator.gathers == 2 * (1 + 2 + 1)


@holds
def test_what_a_user_unsharded_ahead_stays_until_its_use(core: Core) -> None:
    """No prefetch decision drops it, and its forward finds it there."""
    case = Chain((1, 2, 3), None).case()
    runner = Runner(core, case)
    runner.feed(Ev("UNSHARD", 3))
    gathered = [unit for commands in runner.feed_all(case.trace[:6]) for op, unit in commands if op == "GATHER"]
    assert case.trace[5] == Ev("PRE_FORWARD", 3)
    assert gathered == [0, 1, 2]


@holds
def test_units_that_backward_did_not_use_are_sharded_after_it(core: Core) -> None:
    """A block whose output got no gradient: kept for a backward that never came, it would go stale in silence."""
    for after in ("FREE", "KEEP", "SHRINK"):
        case = Chain((1, 2, 3), 0).case(blocks_after=after)
        runner = Runner(core, case)
        runner.feed_all([item for item in case.trace if item not in (Ev("PRE_BACKWARD", 2), Ev("POST_BACKWARD", 2))])
        assert runner.scheduler.at_rest()


@holds
def test_modules_of_one_unit_share_one_gather(core: Core) -> None:
    """What the first module gathered stays for the second, and no longer than the forward if that does not come."""
    model = Model((100, 100), (True, True), (1, 2), (-1, 0))
    engine = {"prefetch_bytes": 0, "reduces_in_flight": 1, "replicated": False}
    runner = Runner(core, Case(model, (Setting(), Setting()), engine, ()))
    both, first = (Call(0, inner=tuple(Call(1, module) for module in range(count))) for count in (2, 1))
    emitter = Emitter(model, (Setting(), Setting()))
    emitter.run([both, first], grad=False)
    runner.feed_all(emitter.items)
    assert runner.simulator.gathers == 2 * 2
    assert runner.scheduler.at_rest()


@holds
def test_a_secondary_shard_serves_backward_only(core: Core) -> None:
    """Backward gathers from the smaller group; the next forward from the shards that the optimizer writes."""
    case = Chain((1, 2, 3), 0).case(blocks_after="SHRINK")
    runner = Runner(core, case)
    for _ in range(2):
        ops = [op for commands in runner.feed_all(case.trace) for op, unit in commands if unit]
        assert ops.count("GATHER") == ops.count("SHRINK") == ops.count("GATHER_SECONDARY") == 3


@holds
def test_resharding_what_is_in_use_is_refused(core: Core) -> None:
    scheduler = core.schedule.Scheduler([1], [core.policy.UnitPolicy()], core.policy.SchedulePolicy())
    kind, event = core.schedule.EventKind, core.schedule.Event
    scheduler.on(event(kind.PRE_FORWARD, 0))
    with pytest.raises(
        MisuseError, match="unit 0 cannot be resharded: its forward is running and needs the full param"
    ):
        scheduler.on(event(kind.RESHARD, 0))
    scheduler.on(event(kind.POST_FORWARD, 0, will_backward=True))
    scheduler.on(event(kind.RESHARD, 0))
    scheduler.on(event(kind.PRE_BACKWARD, 0))
    with pytest.raises(MisuseError, match="its backward is running"):
        scheduler.on(event(kind.RESHARD, 0))


@holds
def test_a_scheduler_needs_a_policy_for_every_unit(core: Core) -> None:
    with pytest.raises(ValueError, match=r"^2 units but 1 policies$"):
        core.schedule.Scheduler([1, 1], [core.policy.UnitPolicy()], core.policy.SchedulePolicy())


@holds
def test_commands_are_short_in_a_log(core: Core) -> None:
    assert str(core.schedule.Command(core.lifecycle.Op.WAIT_GATHER, 3)) == "WAIT_GATHER 3"


# The table


def _facts_of(state: str) -> list[Facts]:
    """What a unit in this state may hold; where a buffer came from a secondary shard, that is still there."""
    if state == "SHARDED":
        return [Facts()]
    if state == "SECONDARY":
        return [Facts(secondary=0)]
    full = state != "PREFETCHED"
    return [Facts(buffer=0, registered=full, gathering=gathering, secondary=secondary)
            for gathering in {False, not full} for secondary in (None, 0)]  # fmt: skip


@holds
def test_table_entries_do_what_their_states_say(core: Core) -> None:
    """Whatever a unit of the first state holds, the commands can be executed and leave what the next state holds."""
    for (state, step), (target, ops) in core.lifecycle.TABLE.items():
        for start in _facts_of(state.name):
            unit = replace(start)
            engine = {"prefetch_bytes": None, "reduces_in_flight": 1, "replicated": False}
            simulator = Simulator(Model((1,), (True,), (1,), (-1,)), engine, (Setting(),))
            simulator.units = [unit]
            for op in ops:
                simulator.execute(Ev(step.name, 0), op.name, 0)
            held = (unit.buffer is not None, unit.registered)
            assert held in {(f.buffer is not None, f.registered) for f in _facts_of(target.name)}, (state, step)
            assert not (target.in_use and unit.gathering), (state, step)
            assert target.has_full_buffer == held[0], (state, step)
            if target.name in ("SHARDED", "SECONDARY"):
                assert (unit.secondary is not None) == (target.name == "SECONDARY"), (state, step)


@holds
def test_table_has_an_answer_to_everything_that_can_happen(core: Core) -> None:
    """What is missing is impossible (leaving a forward that does not run) or a misuse (resharding what is in use)."""
    states, steps = core.lifecycle.State, core.lifecycle.Step
    exits = {step for step in steps if step.name.startswith("EXIT_")}
    missing = {(state, step) for state in states for step in steps} - core.lifecycle.TABLE.keys()
    in_use = {states.FORWARD, states.BACKWARD}
    prefetch = {steps.PREFETCH, steps.PREFETCH_BACKWARD}
    has_buffer = set(states) - {states.SHARDED, states.SECONDARY}
    assert missing == (
        {(s, step) for s in set(states) - in_use for step in exits}
        | {(s, step) for s in has_buffer for step in prefetch}
        | {(s, steps.RESHARD) for s in in_use}
    )


@holds
def test_table_steps_go_where_their_names_say(core: Core) -> None:
    states, steps = core.lifecycle.State, core.lifecycle.Step
    running = {states.FORWARD, states.BACKWARD}
    allowed = {
        steps.ABORT: {states.SHARDED},
        steps.RESHARD: {states.SHARDED},
        steps.ENTER_FORWARD: running,
        steps.ENTER_BACKWARD: running,
        steps.PREFETCH: {states.PREFETCHED},
        steps.PREFETCH_BACKWARD: {states.PREFETCHED},
        steps.UNSHARD: set(states) - {states.SHARDED, states.SECONDARY, states.HELD},
        steps.SETTLE: set(states) - {states.PREFETCHED, states.HELD},
        steps.EXIT_KEEP: {states.KEPT, states.BACKWARD},
        steps.EXIT_HOLD: {states.HELD, states.BACKWARD},
        steps.EXIT_FREE: {states.SHARDED, states.BACKWARD},
        steps.EXIT_STASH: {states.PREFETCHED, states.BACKWARD},
        steps.EXIT_SHRINK: {states.SECONDARY, states.BACKWARD},
        steps.LEAVE_FREE: {states.SHARDED, states.FORWARD},
        steps.LEAVE_KEEP: set(states) - {states.HELD, states.BACKWARD},
    }
    assert set(allowed) == set(steps)
    for (_, step), (target, _) in core.lifecycle.TABLE.items():
        assert target in allowed[step], (step, target)


@holds
def test_what_is_in_use_is_left_only_by_its_end(core: Core) -> None:
    """A backward inside a forward does not end the forward, nor a recomputation the backward around it."""
    states, steps = core.lifecycle.State, core.lifecycle.Step
    ends = {
        states.FORWARD: {step for step in steps if step.name.startswith("EXIT_")} | {steps.ABORT},
        states.BACKWARD: {steps.LEAVE_FREE, steps.LEAVE_KEEP, steps.ABORT},
    }
    for (state, step), (target, ops) in core.lifecycle.TABLE.items():
        if state in ends and step not in ends[state]:
            assert (target, ops) == (state, ()), (state, step)


@holds
def test_every_state_can_be_reached(core: Core) -> None:
    states = core.lifecycle.State
    reached, todo = {states.SHARDED}, [states.SHARDED]
    while todo:
        at = todo.pop()
        new = {target for (state, _), (target, _) in core.lifecycle.TABLE.items() if state is at} - reached
        reached |= new
        todo += new
    assert reached == set(states)
    assert all(a is not b for a, b in pairwise(states))


@holds
def test_an_impossible_event_is_our_bug_and_says_so(core: Core) -> None:
    scheduler = core.schedule.Scheduler([1], [core.policy.UnitPolicy()], core.policy.SchedulePolicy())
    with pytest.raises(AssertionError, match=r"^unit 0 in state 'sharded' cannot 'exit forward, free'$"):
        scheduler._move(0, core.lifecycle.Step.EXIT_FREE)


@holds
def test_a_forward_prefetch_takes_the_primary_shard(core: Core) -> None:
    """It is the one that the optimizer writes; a backward prefetch takes the secondary one, which is cheaper."""
    ops, states, steps = core.lifecycle.Op, core.lifecycle.State, core.lifecycle.Step
    forward = core.lifecycle.TABLE[states.SECONDARY, steps.PREFETCH]
    backward = core.lifecycle.TABLE[states.SECONDARY, steps.PREFETCH_BACKWARD]
    assert forward == (states.PREFETCHED, (ops.FREE, ops.GATHER))
    assert backward == (states.PREFETCHED, (ops.GATHER_SECONDARY,))
