"""Owns the units of one root, their Scheduler, their memory pool; executes commands in the order in which they come."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch._C._autograd import _profiler_enabled
from torch.autograd.profiler import record_function

from fullshard.core.lifecycle import Op, State
from fullshard.core.policy import SchedulePolicy, UnitPolicy
from fullshard.core.replay import Replay
from fullshard.core.schedule import Command, Event, EventKind, Scheduler
from fullshard.errors import CommunicationError, MisuseError
from fullshard.runtime.boundary import Boundary
from fullshard.runtime.collectives import Pending
from fullshard.runtime.device import BufferPool, Streams, keep_freed_host_memory, make_streams
from fullshard.runtime.failures.debug import OrderCheck, wants_debug
from fullshard.runtime.failures.postmortem import COMMUNICATES, Story
from fullshard.runtime.linker import Linker
from fullshard.runtime.params.gradients import warn_dropped
from fullshard.runtime.params.ignored import IgnoredGradients
from fullshard.runtime.params.wishes import update, warn_of_updates
from fullshard.runtime.unit import Unit

_LOG_COMMANDS = 65536
_KEEP_AT_MOST_BYTES = 1 << 30

_EXECUTE: dict[Op, Callable[[Unit], None]] = {
    Op.GATHER: Unit.gather,
    Op.GATHER_SECONDARY: Unit.gather_secondary,
    Op.WAIT_GATHER: Unit.wait_gather,
    Op.STASH: Unit.stash,
    Op.SHRINK: Unit.shrink,
    Op.FREE: Unit.free,
    Op.HOLD: Unit.hold,
    Op.REDUCE: Unit.reduce,
    Op.WAIT_REDUCE: Unit.wait_reduce,
    Op.ALL_REDUCE: Unit.all_reduce,
    Op.WAIT_ALL_REDUCE: Unit.wait_all_reduce,
    Op.DISCARD: Unit.discard,
    Op.UPDATE: update,
}


class Engine:
    """Runs the units under one root module. Unit 0 is the root's.

    Args:
        units: The root's unit first, then the others in the order of the module tree.
        names: Qualified name of each unit's module in the root.

    Attributes:
        log: Commands executed so far, newest last, bounded.
        watch: If set, called for every command in place of executing it; it must call `act(unit)` once.
        ignored: Gradients of parameters that no unit has, if they shall be averaged.
        story: What is told when communication fails.
        unproven: Parameters may have lost their values since the engine was made; the root's next forward looks.
        boundary: What happens between two steps.
        written: Units whose shards have been written since the last forward began; what was gathered of them is stale.
    """

    def __init__(self, units: list[Unit], names: list[str]) -> None:
        device = units[0].place.device
        self.units = units
        self.pool = BufferPool(device, 0)
        self.log: deque[Command] = deque(maxlen=_LOG_COMMANDS)
        self.story = Story(units, self.log)
        self.unproven = False
        self.written: set[int] = set()
        self.watch: Callable[[Unit, Callable[[Unit], None]], None] | None = None
        self.ignored: IgnoredGradients | None = None
        self._check: OrderCheck | None = None
        self._broken: CommunicationError | MisuseError | None = None
        # Dies with the graph task that holds it, so that a backward which raised is noticed without a hook.
        self._backward: weakref.ref[Any] | None = None
        self._linker = Linker(self.pool, units[0].wishes.streams or make_streams(device))
        for index, (unit, name) in enumerate(zip(units, names, strict=True)):
            unit.start(name, index, self._linker.resources(unit))
        self.boundary = Boundary(units)
        self.set_debug(any(wants_debug(unit) for unit in units))
        self._settle_memory()
        for unit in units:
            if unit.wishes.prefetch:
                self.resolve_prefetch(unit)
        # Not when the interpreter ends: then other ranks end, too, and need not be waited for.
        weakref.finalize(self, _end_gathers, [unit.gathering for unit in units]).atexit = False

    def _settle_memory(self) -> None:
        sizes = [unit.full_bytes for unit in self.units]
        # The unit in use and the prefetched one: their blocks go round, so no more is worth keeping.
        self.pool.raise_limit(2 * max(sizes))
        self.pool.reset_peak()
        if self.units[0].place.device.type == "cpu":
            # Two units' gradients and what comes from them: about what is freed and allocated again within a step.
            keep_freed_host_memory(min(4 * max(sizes) + (64 << 20), _KEEP_AT_MOST_BYTES))
        replicated = any(flow.links.replicate is not None for unit in self.units for flow in unit.flows)
        policies = [unit.policy for unit in self.units]
        self.scheduler = Replay(Scheduler(sizes, policies, SchedulePolicy(replicated=replicated)))

    # Settings

    def set_unit_policy(self, unit: Unit, policy: UnitPolicy) -> None:
        """Change the settings of one unit from the next event on."""
        self.scheduler.set_unit_policy(unit.index, policy)

    def resolve_prefetch(self, unit: Unit) -> None:
        """Turn the units that `unit` wants prefetched into indices; units of other engines are left out."""
        mine = {id(each): each.index for each in self.units}
        indices: dict[str, Any] = {
            field: tuple(mine[id(wanted)] for wanted in units if id(wanted) in mine)
            for field, units in unit.wishes.prefetch.items()
        }
        unit.policy = replace(unit.policy, **indices)
        self.set_unit_policy(unit, unit.policy)

    def sizes_changed(self) -> None:
        """A unit was cast: its full buffers have another size."""
        self.scheduler.resize(tuple(unit.full_bytes for unit in self.units))

    def set_schedule(self, **changes: Any) -> None:
        """Change fields of the `SchedulePolicy`."""
        self.scheduler.set_policy(replace(self.scheduler.policy, **changes))

    def set_debug(self, debug: bool) -> None:
        """Whether to compare every communicating command over ranks before it is executed."""
        self._check = OrderCheck(self.story, self.pool, self.streams) if debug else None

    @property
    def streams(self) -> Streams:
        """Streams beside the computation."""
        return self._linker.streams

    def share_streams(self, streams: Streams) -> None:
        """Use the streams of another engine from now on."""
        self._linker = Linker(self.pool, streams)
        for unit in self.units:
            self.relink(unit)

    def relink(self, unit: Unit) -> None:
        """The user changed by what means `unit` communicates."""
        unit.relink(self._linker.resources(unit))

    @property
    def shared_bytes(self) -> int:
        """This rank's part of the memory that ranks of its host share: all of it, divided by their number."""
        return self._linker.shared_bytes

    # Events

    def on(self, event: Event) -> tuple[Command, ...]:
        """Answer one event: decide, then act. Returns what was done."""
        if self._broken is not None and event.kind not in (EventKind.ABORT, EventKind.FORWARD_FAILED):
            self._refuse(self._broken)
        commands = self.scheduler.on(event)
        self.story.count += len(commands)
        left = iter(commands)
        # Asked once an event: to name ranges that nobody records would cost far more than to ask.
        observed = self.watch is not None or _profiler_enabled()
        try:
            for command in left:
                self.log.append(command)
                unit, act = self.units[command.unit], _EXECUTE[command.op]
                if self._check is not None and command.op in COMMUNICATES:
                    self._check.compare(command, unit)
                if observed:
                    self._execute(unit, act)
                else:
                    act(unit)
        except BaseException as error:
            self._note_failure(error, list(left))
            raise
        self._show(event)
        return commands

    def _refuse(self, broken: CommunicationError | MisuseError) -> None:
        if isinstance(broken, MisuseError):
            raise MisuseError(str(broken))
        raise MisuseError(
            f"communication failed earlier ({str(broken).splitlines()[0]}); the process group cannot be used any more, "
            "restart the job from its last checkpoint"
        ) from broken

    def _note_failure(self, error: BaseException, left: Sequence[Command]) -> None:
        """A command failed; the Scheduler takes those that were `left` for done, and their memory must not stay."""
        self.story.count -= len(left)
        if isinstance(error, CommunicationError) and self._broken is None:
            self.story.explain(error)
            # What follows from the first failure explains nothing. A copy: the error itself has a traceback, whose
            # frames hold tensors of the step, whose graph holds the engine.
            self._broken = type(error)(*error.args)
        for command in left:
            if command.op is Op.FREE:
                with suppress(CommunicationError, MisuseError):  # `error` came first
                    self.units[command.unit].free()

    def _show(self, event: Event) -> None:
        """Modules hold full parameters while a computation uses them, or because the user called `unshard`, no longer.

        So `parameters()`, optimizers and state dicts see sharded parameters, also of units that keep their buffers.
        """
        if event.kind in (EventKind.UNSHARD, EventKind.SETTLE):
            return
        states = self.scheduler.states
        for unit in (self.units[event.unit],) if event.unit >= 0 else self.units:
            unit.show(full=states[unit.index].in_use)

    def _execute(self, unit: Unit, act: Callable[[Unit], None]) -> None:
        """The same for those who look on: a range in torch's profile, `watch` in its place."""
        watch = self.watch
        if _profiler_enabled():
            with record_function(f"fullshard: {act.__name__.replace('_', ' ')} {unit.name or '(root)'}"):
                act(unit) if watch is None else watch(unit, act)
        elif watch is None:
            act(unit)
        else:
            watch(unit, act)

    def retire(self, unit: Unit) -> None:
        """`unit` goes to the engine of another root: no more events from units that stay behind, if there are any."""
        self._broken = MisuseError(
            f"unit {unit.name or '(root)'!r} is also in a model with another root, which ran after this one, and a "
            "unit can run under one root only. Make both models submodules of one module, shard that one last, and run "
            "them in its forward"
        )

    def before_forward(self) -> None:
        """Bring the engine to a state from which a forward may begin, whatever happened before."""
        if self._backward is not None:
            self.recover()
            if self.in_backward:
                return
        if not self.scheduler.any_in_use():
            self.boundary.agree(self)
        self.forget_written()

    def forget_written(self) -> None:
        """What was gathered of units that have been written is stale: drop it."""
        if self.written:
            as_before = tuple(unit.index for unit in self.units if unit.index not in self.written)
            self.written.clear()
            self.on(Event(EventKind.CHANGED, units=as_before))

    def before_root_forward(self) -> None:
        """The root's forward, the first of a step or a nested one, is about to begin."""
        wishes = self.units[0].wishes
        if wishes.post_optim_event is not None:
            # Side streams begin after the current one, so this orders gathers too.
            self.streams.join(wishes.post_optim_event)
            wishes.post_optim_event = None
        if not self.in_backward and not self.scheduler.any_in_use():
            self.story.begin_step()
            self.adopt_changes()

    def adopt_changes(self) -> None:
        """Take over parameters that the user moved, cast or replaced in modules below the sharded ones; at rest."""
        for unit in self.units:
            if unit.was_touched:
                unit.reflatten()

    def bring_to_rest(self, unit: Unit) -> None:
        """Free what is gathered of `unit`, which nothing uses."""
        self.on(Event(EventKind.RESHARD, unit.index))

    def note_written(self, *units: Unit) -> None:
        """An optimizer has written the shards of these units: what was gathered of them is stale."""
        indices = [unit.index for unit in units]
        self.written.update(indices)
        self.boundary.written(self, indices)

    def recover(self) -> None:
        """If a backward died, bring every unit back to rest."""
        if self._backward is not None and self._backward() is None:
            self.abort()

    @property
    def in_backward(self) -> bool:
        """Whether a backward is running."""
        return self._backward is not None and self._backward() is not None

    def enter_backward(self, token: Any) -> None:
        """A backward begins; `token` lives as long as its graph task."""
        self._backward = weakref.ref(token, self.story.backward_died)
        for unit in self.units:
            unit.begin_backward()

    def end_backward(self) -> None:
        """Autograd has run everything of this backward."""
        self._backward = None
        states = self.scheduler.states
        units = tuple(
            unit.index
            for unit in self.units
            if unit.trainable and (states[unit.index] is State.BACKWARD or unit.has_gradients_to_reduce)
        )
        self.on(Event(EventKind.END_BACKWARD, units=units, last=self.units[0].wishes.is_last_backward))
        if self.units[0].policy.sync_gradients:
            self.boundary.backward_ended()
        if self.ignored is not None and self.units[0].policy.sync_gradients:
            try:
                self.ignored.average()
            except CommunicationError as error:
                self._note_failure(error, ())
                raise

    def forget_held(self, unit: Unit) -> None:
        """Drop the gradients of `unit` that are not in `.grad` yet: held, or reduced over a part of the ranks."""
        self.recover()
        if not self.in_backward:
            unit.discard()

    def forward_failed(self, unit: Unit, inside_backward: bool) -> None:
        """The forward of `unit` raised; nothing here may hide that error."""
        if not inside_backward:
            self.story.failed_in(unit)
            if self.scheduler.in_use() == [unit.index]:
                self.story.forward_raised()  # before anything that waits for others
        try:
            self.on(Event(EventKind.FORWARD_FAILED, unit.index, inside_backward=inside_backward))
        except CommunicationError:
            self._release_all()
        except MisuseError:
            pass  # full parameters were written to, too

    def abort(self) -> None:
        """Give up the current step: every unit returns to sharded, and the next step just works.

        Gradients of a backward that was running are dropped; those of earlier, complete backwards are kept unless the
        one that failed had already added to them.
        """
        failed_backward, self._backward = self._backward is not None, None
        try:
            self.on(Event(EventKind.ABORT, inside_backward=failed_backward))
        except CommunicationError:
            # Kept in `_broken`, and raised at the next event; here it would hide why the step was given up.
            self._release_all()
        if failed_backward:
            self._undo_backward()

    def reset(self) -> None:
        """Give up the current step and every gradient that is not reduced yet."""
        self.abort()
        for unit in self.units:
            unit.drop_gradients()

    def _undo_backward(self) -> None:
        warn_of_updates(unit for unit in self.units if unit.index in self.written)
        lost = [unit.undo_backward() for unit in self.units]
        if any(lost):
            for unit in self.units:
                unit.clear_gradients()
            warn_dropped()

    def _release_all(self) -> None:
        """Communication is lost: give up what is in flight, whatever each unit says about it."""
        self.scheduler.on(Event(EventKind.ABORT, inside_backward=True))
        for unit in self.units:
            for give_up in (unit.discard, unit.free):
                with suppress(CommunicationError):
                    give_up()


def _end_gathers(gathering: list[list[Pending]]) -> None:
    """The model is gone with gathers under way: end them, or the messages that come would find no memory."""
    for pending in (each for pendings in gathering for each in pendings):
        with suppress(CommunicationError):
            pending.finish()
