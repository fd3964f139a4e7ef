"""A stand-in for the runtime: executes commands on facts about units, fails where a real one would compute nonsense.

It knows what memory a unit holds and what may be done with it. It does not know the Scheduler's states or its table.
"""

# ruff: noqa: ARG002  (handlers are called by name, all with the same arguments)

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from core.support import Core
from core.traces import Case, Ev, Item, Model, NewSettings, Setting

# Events after which nothing stays full, whoever asked for it.
_GIVES_UP = ("CHANGED", "ABORT", "FORWARD_FAILED")


@dataclass
class Facts:
    """One unit. A buffer or secondary shard is the version of the parameters it was filled from; None: no memory."""

    buffer: int | None = None
    gathering: bool = False
    registered: bool = False
    secondary: int | None = None
    depth: int = 0
    in_backward: bool = False
    asked_for: bool = False  # the user unsharded it ahead of use
    reason: str = ""  # why it is full though nothing uses it

    @property
    def in_use(self) -> bool:
        return self.depth > 0 or self.in_backward

    @property
    def ahead(self) -> bool:
        """Memory that was taken before its use."""
        return self.buffer is not None and not self.registered


@dataclass
class Simulator:
    """Executes commands and checks them one by one; then `after` checks what must hold after each event."""

    model: Model
    engine: dict[str, Any]
    settings: tuple[Setting, ...]
    explicit_bytes: int = 0  # largest prefetch list that the user ever sets
    explicit_count: int = 0
    version: int = 0
    units: list[Facts] = field(default_factory=list)
    reducing: list[int] = field(default_factory=list)
    all_reducing: list[int] = field(default_factory=list)
    owes_all_reduce: int | None = None
    peak_bytes: int = 0
    peak_reducing_bytes: int = 0
    gathers: int = 0
    wasted_gathers: int = 0
    # Units whose gradients are complete and that were not updated since; units updated in this backward.
    complete: set[int] = field(default_factory=set)
    updated: set[int] = field(default_factory=set)
    settled: bool = True  # settings are those of the last end of backward

    def __post_init__(self) -> None:
        self.units = [Facts() for _ in self.model.full_bytes]

    def note_settings(self, settings: tuple[Setting, ...]) -> None:
        """Lists of what to prefetch count against the bound from the start, since buffers outlive a change of them."""
        for setting in settings:
            for wanted in (setting.forward_prefetch or (), setting.backward_prefetch or ()):
                self.explicit_bytes = max(self.explicit_bytes, sum(self.model.full_bytes[u] for u in wanted))
                self.explicit_count = max(self.explicit_count, len(wanted))

    # Commands

    def execute(self, event: Ev, op: str, unit: int) -> None:
        """One command, by the name of its op."""
        where = f"{op} {unit} at {event}"
        if self.owes_all_reduce is not None:
            assert (op, unit) in (("ALL_REDUCE", self.owes_all_reduce), ("DISCARD", self.owes_all_reduce)), where
        getattr(self, f"_{op.lower()}")(event, unit, where)
        alive = sum(
            size for size, facts in zip(self.model.full_bytes, self.units, strict=True) if facts.buffer is not None
        )
        self.peak_bytes = max(self.peak_bytes, alive)

    def _gather(self, event: Ev, unit: int, where: str) -> None:
        facts = self.units[unit]
        assert facts.buffer is None, f"{where}: it has a full buffer already"
        facts.buffer, facts.gathering = self.version, True
        self.gathers += 1

    def _gather_secondary(self, event: Ev, unit: int, where: str) -> None:
        facts = self.units[unit]
        assert facts.buffer is None, f"{where}: it has a full buffer already"
        assert facts.secondary is not None, f"{where}: it has no secondary shard"
        facts.buffer, facts.gathering = facts.secondary, True
        self.gathers += 1

    def _wait_gather(self, event: Ev, unit: int, where: str) -> None:
        facts = self.units[unit]
        assert facts.buffer is not None, f"{where}: nothing was gathered"
        assert not facts.registered, f"{where}: it was waited for already"
        facts.gathering, facts.registered = False, True

    def _stash(self, event: Ev, unit: int, where: str) -> None:
        facts = self.units[unit]
        assert facts.registered, f"{where}: it is not full"
        facts.registered = False

    def _shrink(self, event: Ev, unit: int, where: str) -> None:
        facts = self.units[unit]
        assert facts.registered, f"{where}: it is not full"
        facts.secondary, facts.buffer, facts.registered = facts.buffer, None, False

    def _free(self, event: Ev, unit: int, where: str) -> None:
        facts = self.units[unit]
        assert facts.buffer is not None or facts.secondary is not None, f"{where}: there is nothing to free"
        if facts.asked_for and unit != event.unit and unit not in event.units:
            assert event.kind in _GIVES_UP, f"{where}: the user has unsharded it"
        self.wasted_gathers += facts.ahead and self.model.full_bytes[unit] > 0
        facts.buffer = facts.secondary = None
        facts.gathering = facts.registered = facts.asked_for = False

    def _hold(self, event: Ev, unit: int, where: str) -> None:
        assert not self.settings[unit].sync_gradients, f"{where}: its gradients are to be reduced"

    def _reduce(self, event: Ev, unit: int, where: str) -> None:
        assert self.settings[unit].sync_gradients, f"{where}: its gradients are to be held"
        assert unit not in self.reducing + self.all_reducing, f"{where}: its last reduction is not complete"
        self.reducing.append(unit)
        assert len(self.reducing) <= self.engine["reduces_in_flight"], f"{where}: too many on the wire {self.reducing}"
        alive = sum(self.model.full_bytes[unit] for unit in self.reducing)
        self.peak_reducing_bytes = max(self.peak_reducing_bytes, alive)

    def _wait_reduce(self, event: Ev, unit: int, where: str) -> None:
        assert self.reducing[:1] == [unit], f"{where}: the oldest reduction is {self.reducing[:1]}"
        self.reducing.pop(0)
        if self.engine["replicated"] and self.settings[unit].sync_replicas:
            self.owes_all_reduce = unit
        if not self.engine["replicated"]:
            self.complete.add(unit)

    def _all_reduce(self, event: Ev, unit: int, where: str) -> None:
        assert self.owes_all_reduce == unit, f"{where}: it is not to be summed over replicas now"
        self.owes_all_reduce = None
        self.all_reducing.append(unit)

    def _wait_all_reduce(self, event: Ev, unit: int, where: str) -> None:
        assert self.all_reducing[:1] == [unit], f"{where}: the oldest all-reduce is {self.all_reducing[:1]}"
        self.all_reducing.pop(0)
        self.complete.add(unit)

    def _update(self, event: Ev, unit: int, where: str) -> None:
        assert self.settings[unit].update_in_backward, f"{where}: nobody wants it updated now"
        assert unit in self.complete, f"{where}: there are no new gradients"
        runs = self.units[unit].in_backward and event.kind != "END_BACKWARD"
        assert not runs, f"{where}: its backward runs and needs the parameters as they were"
        self.complete.remove(unit)
        self.updated.add(unit)

    def _discard(self, event: Ev, unit: int, where: str) -> None:
        assert event.kind in ("ABORT", "FORWARD_FAILED"), f"{where}: gradients would be lost"
        (self.reducing if unit in self.reducing else self.all_reducing).remove(unit)

    # Events

    def before(self, event: Ev) -> None:
        """What an event says about the parameters, before it is answered."""
        if event.kind == "CHANGED":
            self.complete.clear()
            self.updated.clear()
            self.version += 1
            for unit in event.units:  # these have the values of the new version already
                if self.units[unit].buffer is not None:
                    self.units[unit].buffer = self.version
        if event.kind == "UNSHARD" and not self.units[event.unit].registered:
            self.units[event.unit].asked_for = True

    def after(self, event: Ev, ops: list[tuple[str, int]]) -> None:
        """What must hold when the commands of an event have been executed."""
        assert self.owes_all_reduce is None, f"{event}: the sum over replicas was left out"
        note = getattr(self, f"_after_{event.kind.lower()}", None)
        if note is not None:
            note(event, ops)
        for unit, facts in enumerate(self.units):
            where = f"unit {unit} after {event}: {facts}"
            if facts.in_use:
                assert facts.registered, f"{where}: it is in use and not full"
                assert not facts.gathering, f"{where}: it is in use and its gather was not waited for"
                facts.reason = ""
            elif facts.registered:
                assert facts.reason, f"{where}: it is full and nothing needs it"
            if facts.registered:
                facts.asked_for = False
        self._check_prefetches(event)

    def _check_prefetches(self, event: Ev) -> None:
        ahead = [
            u for u, facts in enumerate(self.units) if facts.ahead and not facts.asked_for and self.model.full_bytes[u]
        ]
        budget = self.engine["prefetch_bytes"]
        if budget is None and event.kind in ("NEXT_STEP", "CHANGED"):
            ahead = [unit for unit in ahead if unit]  # the root is to be used next
        if budget is None:
            budget = max(self.model.full_bytes[1:], default=0)
            if len(ahead) == 1:
                return  # one unit always may
        size = sum(self.model.full_bytes[unit] for unit in ahead)
        assert size <= max(budget, self.explicit_bytes), f"{event}: {ahead} take {size} bytes ahead"

    def _enter(self, unit: int) -> None:
        facts = self.units[unit]
        if not facts.in_use:
            assert facts.buffer == self.version, (
                f"unit {unit} is used with stale parameters: {facts}, now {self.version}"
            )

    def _after_pre_forward(self, event: Ev, ops: list[tuple[str, int]]) -> None:
        self._enter(event.unit)
        self.units[event.unit].depth += 1

    def _after_post_forward(self, event: Ev, ops: list[tuple[str, int]]) -> None:
        facts, setting = self.units[event.unit], self.settings[event.unit]
        if not facts.depth:
            assert not ops, f"{event}: it is not running, so nothing is to be done"
            return
        facts.depth -= 1
        auto = setting.after_forward in ("AUTO", "FIT") and event.unit == 0 and event.will_backward
        if setting.after_forward == "KEEP" or auto:
            facts.reason = "policy"
        elif (
            setting.after_forward == "FIT"
            and event.will_backward
            and self._kept_bytes(event.unit) <= self.engine["keep_bytes"]
        ):
            facts.reason = "budget"
        elif event.more or (event.inside_backward and event.will_backward):
            facts.reason = "next use"
        if event.unit == 0 and not facts.depth and not event.inside_backward:
            held = [u for u in self.units if u.registered and not u.in_use and u.reason == "next use"]
            assert not held, f"{event}: units stay full for a next use that has not come"
            if not event.will_backward:
                assert not [u for u in self.units if u.ahead and not u.asked_for], (
                    f"{event}: no backward, but prefetches"
                )

    def _kept_bytes(self, new: int) -> int:
        """What is kept for backward by the budget, `new` with it."""
        kept = {u for u, facts in enumerate(self.units) if facts.registered and facts.reason == "budget"}
        return sum(self.model.full_bytes[unit] for unit in kept | {new})

    def _after_forward_failed(self, event: Ev, ops: list[tuple[str, int]]) -> None:
        facts = self.units[event.unit]
        if not facts.depth:
            assert not ops, f"{event}: it is not running, so nothing is to be done"
            return
        facts.depth -= 1
        if event.inside_backward:
            facts.reason = "next use"
        elif not any(facts.depth for facts in self.units):
            self._after_abort(event, ops)
        elif not facts.depth:
            assert not facts.registered, f"{event}: it keeps its buffer"

    def _after_pre_backward(self, event: Ev, ops: list[tuple[str, int]]) -> None:
        if self.settings[event.unit].unshard_in_backward:
            where = f"{event}: unit {event.unit} was updated, and this backward needs it again"
            assert event.unit not in self.updated or not self.settled, where
            self._enter(event.unit)
            if not self.units[event.unit].depth:
                self.units[event.unit].in_backward = True

    def _after_post_backward(self, event: Ev, ops: list[tuple[str, int]]) -> None:
        self._leave_backward(event.unit)
        self._check_gradients(event, ops, (event.unit,) if event.reducible else ())

    def _after_end_backward(self, event: Ev, ops: list[tuple[str, int]]) -> None:
        for unit, facts in enumerate(self.units):
            self._leave_backward(unit)
            if not facts.in_use:
                assert facts.secondary is None or facts.buffer is not None, (
                    f"{event}: unit {unit} keeps a secondary shard"
                )
                assert not facts.ahead or facts.asked_for, f"{event}: unit {unit} stays gathered ahead"
        self._check_gradients(event, ops, event.units)
        if event.last:
            assert not self.reducing + self.all_reducing, f"{event}: still on the wire"
            left = [unit for unit in self.complete if self.settings[unit].update_in_backward]
            assert not left or not self.settled, f"{event}: units {left} were never updated"
            self.complete.clear()
            self.settled = True
        self.updated.clear()  # a graph from before is refused by the runtime, which knows of graphs

    def _leave_backward(self, unit: int) -> None:
        facts = self.units[unit]
        facts.in_backward = False
        facts.reason = "policy" if self.settings[unit].keep_after_backward else ""

    def _check_gradients(self, event: Ev, ops: list[tuple[str, int]], units: tuple[int, ...]) -> None:
        """Every gradient that is there is reduced or held, once."""
        for unit in range(len(self.units)):
            found = [op for op, u in ops if u == unit and op in ("REDUCE", "HOLD")]
            expected = ["REDUCE" if self.settings[unit].sync_gradients else "HOLD"] * (unit in units)
            assert found == expected, f"{event}: gradients of unit {unit} must be given to {expected}, not {found}"

    def _after_settle(self, event: Ev, ops: list[tuple[str, int]]) -> None:
        self.units[event.unit].reason = "user"

    def _after_reshard(self, event: Ev, ops: list[tuple[str, int]]) -> None:
        assert self.units[event.unit].buffer is None

    def _after_unshard(self, event: Ev, ops: list[tuple[str, int]]) -> None:
        facts = self.units[event.unit]
        assert facts.buffer is not None
        if facts.registered and not facts.in_use:
            facts.reason = facts.reason or "user"

    def _after_changed(self, event: Ev, ops: list[tuple[str, int]]) -> None:
        stale = [
            facts
            for unit, facts in enumerate(self.units)
            if not facts.in_use
            and (facts.buffer is not None or facts.secondary is not None)
            and not (unit in event.units and self.settings[unit].keep_after_backward and facts.buffer is not None)
            and not (unit in event.units and facts.ahead)
        ]
        assert not stale, f"{event}: units keep what was gathered before"

    def _after_next_step(self, event: Ev, ops: list[tuple[str, int]]) -> None:
        gathered = [unit for op, unit in ops if op == "GATHER"]
        assert set(gathered) <= set(event.units), f"{event}: {gathered} may still change"

    def _after_abort(self, event: Ev, ops: list[tuple[str, int]]) -> None:
        self.complete.clear()
        self.updated.clear()
        for facts in self.units:
            facts.depth, facts.in_backward, facts.reason = 0, False, ""
        assert self.at_rest(), f"{event}: {self.units}"

    def at_rest(self) -> bool:
        """No memory is held and nothing is on the wire."""
        return (
            not self.reducing
            and not self.all_reducing
            and all(facts.buffer is None and facts.secondary is None for facts in self.units)
        )


def policies_of(core: Core, settings: tuple[Setting, ...]) -> list[Any]:
    """Settings of a trace as those of the core under test."""
    policy = core.policy
    return [
        policy.UnitPolicy(policy.AfterForward[s.after_forward], **{name: getattr(s, name) for name in _SETTINGS})
        for s in settings
    ]


class Runner:
    """A Scheduler of the core under test, with a simulator that executes and checks what it says."""

    def __init__(self, core: Core, case: Case) -> None:
        self.core = core
        self.case = case
        self.scheduler = core.schedule.Scheduler(
            case.model.full_bytes, policies_of(core, case.settings), core.policy.SchedulePolicy(**case.engine)
        )
        self.simulator = Simulator(case.model, case.engine, case.settings)
        for item in [NewSettings(case.settings), *case.trace]:
            if isinstance(item, NewSettings):
                self.simulator.note_settings(item.settings)

    def feed(self, item: Item) -> list[tuple[str, int]]:
        """Take one item of a trace; returns the commands as (name of op, unit)."""
        if isinstance(item, NewSettings):
            self.scheduler.policies[:] = policies_of(self.core, item.settings)
            self.simulator.settings = item.settings
            self.simulator.settled = False
            return []
        self.simulator.before(item)
        schedule = self.core.schedule
        fields = {name: getattr(item, name) for name in _FIELDS}
        commands = self.scheduler.on(schedule.Event(schedule.EventKind[item.kind], **fields))
        ops = [(command.op.name, command.unit) for command in commands]
        for op, unit in ops:
            self.simulator.execute(item, op, unit)
        self.simulator.after(item, ops)
        assert self.scheduler.at_rest() == self.simulator.at_rest(), f"after {item}: {self.scheduler.states}"
        return ops

    def ends_step(self, item: Item) -> bool:
        """Whether a backward has ended with it, with nothing of the step left to do."""
        running = any(facts.depth for facts in self.simulator.units)
        return isinstance(item, Ev) and item.kind == "END_BACKWARD" and item.last and not running

    def feed_all(self, items: tuple[Item, ...] | list[Item]) -> list[list[tuple[str, int]]]:
        """Take a whole trace."""
        return [self.feed(item) for item in items]


_SETTINGS = tuple(Setting.__dataclass_fields__)[1:]
_FIELDS = tuple(Ev.__dataclass_fields__)[1:]
