"""Traces: what hooks would report of a model that runs, as plain data.

A `Call` is one call of one module, with the calls inside it. `Emitter` walks calls as torch would run them (forward,
backward, recomputation, failures) and writes down the events of runtime/hooks.py and runtime/engine.py, from what it
knows of the run itself and never from the Scheduler's answers. The strategies at the end make models and runs of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

from hypothesis import strategies as st


class _Short:
    """Shows only what is not the default: a failing trace has to be read."""

    def __repr__(self) -> str:
        changed = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in changed)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002
        """For hypothesis, which shows a failing case."""
        printer.text(repr(self))


@dataclass(frozen=True, repr=False)
class Ev(_Short):
    """An event, by the name of its kind: the enum itself belongs to the module under test."""

    kind: str
    unit: int = -1
    will_backward: bool = False
    more: bool = False
    inside_backward: bool = False
    reducible: bool = True
    units: tuple[int, ...] = ()
    last: bool = True


@dataclass(frozen=True, repr=False)
class Setting(_Short):
    """Settings of one unit, as in `UnitPolicy`; `after_forward` by name."""

    after_forward: str = "AUTO"
    keep_after_backward: bool = False
    unshard_in_backward: bool = True
    sync_gradients: bool = True
    sync_replicas: bool = True
    forward_prefetch: tuple[int, ...] | None = None
    backward_prefetch: tuple[int, ...] | None = None
    update_in_backward: bool = False


@dataclass(frozen=True)
class NewSettings:
    """The user changes the settings of all units."""

    settings: tuple[Setting, ...]


Item = Ev | NewSettings


@dataclass(frozen=True)
class Model:
    """The units of a case; unit 0 is the root."""

    full_bytes: tuple[int, ...]
    trainable: tuple[bool, ...]
    modules: tuple[int, ...]  # modules of each unit
    parents: tuple[int, ...]  # unit in whose forward each unit's modules are called; -1 for the root

    def children(self, unit: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == unit]


class Way(Enum):
    """How one call differs from a plain one."""

    PLAIN = "plain"
    FROZEN = "its output requires no gradient"
    UNUSED = "its output requires a gradient and gets none"
    NO_INPUT_GRADIENT = "its inputs require no gradient, so no hook reports the end of its backward"
    TWO_OUTPUTS = "two outputs, each of which reports the start of its backward"
    CHECKPOINT = "recomputed in backward"
    CHECKPOINT_STOPS = "recomputed in backward until the last saved tensor is there, then stopped by an exception"
    REENTRANT = "recomputed in backward with a backward of its own"
    INNER_GRAD = "takes gradients of what is inside in its forward"


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a module of `unit`, or of a plain container of modules if that is None. Compared by identity."""

    unit: int | None
    module: int = 0
    inner: tuple[Call, ...] = ()
    way: Way = Way.PLAIN

    def walk(self) -> Iterator[Call]:
        yield self
        for call in self.inner:
            yield from call.walk()

    def last(self) -> Call:
        """The call that ends last but for those around it."""
        return self.inner[-1].last() if self.inner else self


class Failed(Exception):  # noqa: N818
    """A forward of the model raised."""


class Stopped(Exception):  # noqa: N818
    """Activation checkpointing has recomputed all that it needs."""


@dataclass
class Emitter:
    """Writes the events of a run. `items` is the trace so far."""

    model: Model
    settings: tuple[Setting, ...]
    items: list[Item] = field(default_factory=list)
    # A forward raises in this many calls from now, and the exception is caught so many calls further out.
    fail_in: int = -1
    caught_after: int = 99
    # Facts of the run
    _depth: dict[int, int] = field(default_factory=dict)
    _in_backward: set[int] = field(default_factory=set)
    _full_gradients: set[int] = field(default_factory=set)
    _ran: dict[int, set[int]] = field(default_factory=dict)
    _done: set[Call] = field(default_factory=set)  # without a backward (any more); kept, or ids come again
    _stop_at: Call | None = None
    _unwound: int = 0

    def set(self, settings: tuple[Setting, ...]) -> None:
        self.settings = settings
        self.items.append(NewSettings(settings))

    # Forward

    def forward(self, call: Call, *, grad: bool = True, inside: bool = False) -> None:
        """One forward. `inside`: autograd is running."""
        grad = grad and (call.way is not Way.REENTRANT or inside)
        unit = call.unit
        if unit is not None:
            self.items.append(Ev("PRE_FORWARD", unit, inside_backward=inside))
            self._depth[unit] = self._depth.get(unit, 0) + 1
        try:
            self._body(call, grad=grad, inside=inside)
        except (Failed, Stopped):
            if unit is not None:
                self._depth[unit] -= 1
                self._ran.pop(unit, None)
                self.items.append(Ev("FORWARD_FAILED", unit, inside_backward=inside))
            raise
        if unit is None:
            return
        self._depth[unit] -= 1
        will = grad and unit not in self._in_backward and call.way is not Way.FROZEN
        more = self._others_to_run(unit, call.module)
        self.items.append(Ev("POST_FORWARD", unit, will_backward=will, more=more, inside_backward=inside))

    def _body(self, call: Call, *, grad: bool, inside: bool) -> None:
        for inner in call.inner:
            try:
                self.forward(inner, grad=grad and call.way is not Way.FROZEN, inside=inside)
            except Failed:
                self._done.add(inner)
                self._unwound += 1
                if self._unwound < self.caught_after:
                    raise
        if call.way is Way.INNER_GRAD and grad and not inside:
            for inner in reversed(call.inner):
                self.backward(inner)
                self._done.add(inner)
            self.end_backward()
        if call is self._stop_at:
            raise Stopped
        self.fail_in -= 1
        if self.fail_in == 0:
            raise Failed

    def _others_to_run(self, unit: int, module: int) -> bool:
        if self.model.modules[unit] == 1:
            return False
        ran = self._ran.setdefault(unit, set())
        ran.add(module)
        if len(ran) == self.model.modules[unit]:
            ran.clear()
        return bool(ran)

    # Backward

    def backward(self, call: Call) -> None:
        """The backward of one call, its part of a graph task."""
        if call in self._done or call.way in (Way.FROZEN, Way.UNUSED):
            return
        if call.way is Way.REENTRANT:
            self.forward(call, inside=True)
        unit = call.unit
        if unit is not None:
            for _ in range(2 if call.way is Way.TWO_OUTPUTS else 1):
                self.items.append(Ev("PRE_BACKWARD", unit))
            if self.settings[unit].unshard_in_backward and not self._depth.get(unit):
                self._in_backward.add(unit)
        if call.way in (Way.CHECKPOINT, Way.CHECKPOINT_STOPS):
            self._recompute(call)
        for inner in reversed(call.inner):
            self.backward(inner)
        if unit is not None:
            self._after_backward(call, unit)

    def _after_backward(self, call: Call, unit: int) -> None:
        trainable = self.model.trainable[unit]
        if trainable:
            self._full_gradients.add(unit)
        # A module that is inside itself has one backward for the hooks: that of the outermost call.
        if call.way is not Way.NO_INPUT_GRADIENT:
            self._in_backward.discard(unit)
            self.items.append(Ev("POST_BACKWARD", unit, reducible=trainable))
            if self.settings[unit].sync_gradients:
                self._full_gradients.discard(unit)

    def _recompute(self, call: Call) -> None:
        self._stop_at = call.last() if call.way is Way.CHECKPOINT_STOPS else None
        again = replace(call, way=Way.PLAIN)
        if call is self._stop_at:
            self._stop_at = again
        try:
            self.forward(again, inside=True)
        except Stopped:
            pass
        finally:
            self._stop_at = None

    def end_backward(self, *, last: bool = True) -> None:
        """The graph task ends."""
        units = sorted(self._full_gradients | {u for u in self._in_backward if self.model.trainable[u]})
        self.items.append(Ev("END_BACKWARD", units=tuple(units), last=last))
        self._in_backward.clear()
        self._full_gradients -= {unit for unit in units if self.settings[unit].sync_gradients}

    # Steps

    def run(self, calls: Sequence[Call], *, grad: bool = True) -> list[Call]:
        """Forwards, one after the other; returns those that can have a backward."""
        succeeded = []
        for call in calls:
            self._unwound = 0
            try:
                self.forward(call, grad=grad)
                succeeded.append(call)
            except Failed:
                self.abort_facts()
        return succeeded

    def abort_facts(self) -> None:
        """The step is over."""
        self._depth.clear()
        self._in_backward.clear()
        self._full_gradients.clear()


# Strategies

_SIZES = st.sampled_from([16, 16, 40, 64, 100, 0])
_AFTER = st.sampled_from(["AUTO", "AUTO", "FREE", "KEEP", "SHRINK", "FIT"])
_RARELY = st.integers(0, 4).map(lambda n: n == 4)
_WAYS = st.sampled_from([Way.PLAIN] * 8 + list(Way))
_FATES = st.sampled_from([1, 1, 1, 1, 1, 1, 2, 0])  # how often a module is called


@st.composite
def models(draw: st.DrawFn, most: int = 6) -> Model:
    """Trees of units; leaves may have several modules."""
    count = draw(st.integers(1, most))
    parents = [-1] + [draw(st.integers(0, unit - 1)) for unit in range(1, count)]
    leaves = [unit not in parents and unit > 0 for unit in range(count)]
    return Model(
        tuple(draw(_SIZES) for _ in range(count)),
        tuple(not draw(_RARELY) for _ in range(count)),
        tuple(draw(st.sampled_from([1, 1, 1, 2, 3])) if leaf else 1 for leaf in leaves),
        tuple(parents),
    )


@st.composite
def _prefetch_lists(draw: st.DrawFn, count: int) -> tuple[int, ...] | None:
    if not draw(_RARELY):
        return None
    return tuple(draw(st.lists(st.integers(0, count - 1), max_size=2, unique=True)))


@st.composite
def settings_of(draw: st.DrawFn, count: int) -> tuple[Setting, ...]:
    """Settings of all units: half of the time all the same, as a user makes them, else mixed."""
    sync, replicas = not draw(_RARELY), not draw(_RARELY)
    if draw(st.booleans()):
        update = draw(_RARELY)
        return (Setting(draw(_AFTER), sync_gradients=sync, sync_replicas=replicas, update_in_backward=update),) * count
    return tuple(
        Setting(
            draw(_AFTER), draw(_RARELY), not draw(_RARELY), sync, replicas,
            draw(_prefetch_lists(count)), draw(_prefetch_lists(count)), draw(_RARELY),
        )
        for _ in range(count)
    )  # fmt: skip


@st.composite
def calls_of(draw: st.DrawFn, model: Model, unit: int = 0, ways: st.SearchStrategy[Way] = _WAYS) -> Call:
    """One forward of the model below `unit`."""
    inner: list[Call] = []
    for child in model.children(unit):
        for _ in range(draw(_FATES)):
            made = draw(calls_of(model, child, ways))
            inner += [replace(made, module=module) for module in range(model.modules[child])]
    if len(inner) > 1 and draw(st.booleans()):
        inner = draw(st.permutations(inner))
    if len(inner) > 1 and draw(_RARELY):
        start = draw(st.integers(0, len(inner) - 1))
        inner[start:] = [Call(None, inner=tuple(inner[start:]), way=draw(ways))]
    if draw(st.integers(0, 9)) == 9:
        inner.append(Call(unit, way=Way.UNUSED))  # a module that calls itself: the hooks report one backward
    return Call(unit, inner=tuple(inner), way=draw(ways))


def every_unit_once(model: Model, order: Sequence[int], ways: Sequence[Way]) -> Call:
    """A forward of the whole model; `order` says which of the units below one unit comes first."""

    def call(unit: int, module: int = 0) -> Call:
        below = sorted(model.children(unit), key=order.index)
        return Call(unit, module, tuple(call(u, m) for u in below for m in range(model.modules[u])), ways[unit])

    return call(0)


class StepKind(Enum):
    """What a user does between two changes of settings."""

    TRAIN = "forward, backward"
    MICROBATCHES = "forward, backward, forward, backward"
    TWO_GRAPHS = "two forwards, then their backwards in either order"
    ONE_GRAPH = "two forwards, one backward"
    EVALUATE = "forward without gradients"
    NO_BACKWARD = "forward with gradients, but no backward"
    INNER_UNIT = "an inner module is called by itself"
    BY_HAND = "unshard, wait, reshard"
    FAIL = "a forward raises"


KINDS = st.sampled_from([*StepKind, *[StepKind.TRAIN] * 4, StepKind.BY_HAND])


def _train(draw: st.DrawFn, emitter: Emitter, kind: StepKind) -> None:
    """A step with gradients: forwards and backwards in the order that `kind` says."""
    model = emitter.model
    count = {StepKind.TRAIN: 1, StepKind.INNER_UNIT: 1}.get(kind, 2)
    unit = draw(st.integers(0, len(model.parents) - 1)) if kind is StepKind.INNER_UNIT else 0
    calls = [draw(calls_of(model, unit)) for _ in range(count)]
    last = not draw(_RARELY)
    if kind is StepKind.MICROBATCHES:
        for call in emitter.run(calls[:1]):
            emitter.backward(call)
            emitter.end_backward(last=last)
        calls = calls[1:]
    ran = emitter.run(calls)
    if draw(st.booleans()):
        ran.reverse()
    for number, call in enumerate(ran):
        emitter.backward(call)
        if kind is not StepKind.ONE_GRAPH or number == len(ran) - 1:
            emitter.end_backward(last=last)


def _by_hand(draw: st.DrawFn, emitter: Emitter) -> None:
    units = st.integers(0, len(emitter.model.parents) - 1)
    kinds = st.sampled_from(["UNSHARD", "SETTLE", "RESHARD", "CHANGED"])
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(kinds)
        emitter.items.append(Ev(kind) if kind == "CHANGED" else Ev(kind, draw(units)))


def emit_step(draw: st.DrawFn, emitter: Emitter, kind: StepKind) -> None:
    """Write one step."""
    if kind is StepKind.BY_HAND:
        _by_hand(draw, emitter)
    elif kind in (StepKind.EVALUATE, StepKind.NO_BACKWARD):
        emitter.run([draw(calls_of(emitter.model))], grad=kind is StepKind.NO_BACKWARD)
    elif kind is StepKind.FAIL:
        emitter.fail_in = draw(st.integers(1, 6))
        emitter.caught_after = draw(st.sampled_from([99, 99, 1, 2]))
        emitter.run([draw(calls_of(emitter.model))])
        emitter.fail_in, emitter.caught_after = -1, 99
    else:
        _train(draw, emitter, kind)


@dataclass(frozen=True)
class Case:
    """A model, the settings of its engine, and what happens."""

    model: Model
    settings: tuple[Setting, ...]
    engine: dict[str, Any]
    trace: tuple[Item, ...]


ENGINES = st.fixed_dictionaries(
    {
        "prefetch_bytes": st.sampled_from([None, None, 0, 50, 100, 150, 1000]),
        "keep_bytes": st.sampled_from([0, 50, 120, 1000]),
        "reduces_in_flight": st.integers(1, 3),
        "replicated": st.booleans(),
    }
)


@st.composite
def _updates(draw: st.DrawFn, count: int) -> list[Item]:
    """An optimizer's step: all at once, or so that the next step begins while some units are still to be written."""
    items: list[Item] = [Ev("CHANGED")]
    if draw(_RARELY):
        items.append(Ev("NEXT_STEP", units=tuple(sorted(draw(st.sets(st.integers(0, count - 1)))))))
    if draw(_RARELY):
        items.append(Ev("CHANGED", units=tuple(sorted(draw(st.sets(st.integers(0, count - 1)))))))
    return items


@st.composite
def cases(draw: st.DrawFn, kinds: st.SearchStrategy[StepKind] = KINDS, most_steps: int = 4) -> Case:
    """Any run: several steps of any kinds, settings that change between them, optimizer steps between them."""
    model = draw(models())
    count = len(model.parents)
    first = draw(settings_of(count))
    emitter = Emitter(model, first)
    for number in range(draw(st.integers(1, most_steps))):
        if number and draw(_RARELY):
            emitter.set(draw(settings_of(count)))
        if number and draw(st.booleans()):
            emitter.items += draw(_updates(count))
        emit_step(draw, emitter, draw(kinds))
    return Case(model, first, draw(ENGINES), tuple(emitter.items))
