"""Tells what this rank did, and hears what others did, when communication fails."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Thread

import torch
import torch.distributed as dist

from fullshard.core.lifecycle import Op
from fullshard.core.postmortem import MAX_COMMANDS, Told, Trail, report
from fullshard.core.schedule import Command
from fullshard.errors import CommunicationError, PeerLostError
from fullshard.runtime.collectives import exchange_posts, post
from fullshard.runtime.registry import REGISTRY
from fullshard.runtime.unit import Unit

# How long a rank whose communication failed waits for the words of the others.
WAIT_SECONDS = 2.0
# How long the end of the process waits for what is being posted.
_LAST_WORDS_SECONDS = 1.0
# Steps whose commands can be told apart.
_STEPS = 8
COMMUNICATES = frozenset({Op.GATHER, Op.GATHER_SECONDARY, Op.REDUCE, Op.ALL_REDUCE})
_WORDS = {
    Op.GATHER: "gather",
    Op.GATHER_SECONDARY: "gather within the smaller group",
    Op.REDUCE: "reduce",
    Op.ALL_REDUCE: "all-reduce",
    Op.WAIT_GATHER: "wait for the gather of",
    Op.WAIT_REDUCE: "wait for the reduce of",
    Op.WAIT_ALL_REDUCE: "wait for the all-reduce of",
}


class Story:
    """What one engine did. In a step that goes well it costs one entry a step.

    Args:
        units: The engine's units.
        log: The engine's commands, newest last.

    Attributes:
        step: Number of the latest step.
        count: Commands so far; the log may have forgotten the first ones.
        nonfinite: In debug mode, where in this step a gradient was not finite first, in words; "" if none was.
    """

    def __init__(self, units: list[Unit], log: deque[Command]) -> None:
        self._units = units
        self._log = log
        self.step = 0
        self.count = 0
        self.nonfinite = ""
        self._begins: deque[tuple[int, int]] = deque(maxlen=_STEPS)  # (step, commands before it)
        self._failed_in = ""
        self._end = ""  # what has been posted of how this rank ended
        self._posting: Thread | None = None
        self._explained = False
        _LATEST.story = weakref.ref(self)
        weakref.finalize(self, _leave, weakref.ref(self))

    def begin_step(self) -> None:
        """A forward of the root begins."""
        self.step += 1
        _LATEST.story = weakref.ref(self)
        self._failed_in = self.nonfinite = ""
        self._begins.append((self.step, self.count))
        if self._end:  # what failed was overcome, and must not be taken for the cause of a later failure
            self._end = ""
            post("")

    def describe(self, command: Command) -> str:
        """A command in words, such as "gather unit 'blocks.0'"."""
        words = _WORDS.get(command.op, command.op.value)
        return f"{words} unit {self._units[command.unit].name or '(root)'!r}"

    def failed_in(self, unit: Unit) -> None:
        """The forward of `unit` raised; of nested ones the innermost comes first."""
        self._failed_in = self._failed_in or unit.name or "(root)"

    def forward_raised(self) -> None:
        """An exception has left the outermost forward: others wait for this rank soon, and shall know why."""
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, CommunicationError):
            self._post(f"its forward of unit {self._failed_in!r} raised {_line(error)}")

    def backward_died(self, _graph: weakref.ref[object]) -> None:
        """An exception has left a backward. Called by the garbage collector, so nothing is known about it here."""
        self._post("its backward raised", "; see that rank's error")

    def process_ends(self) -> None:
        """The program is over, with or without an error: others that wait for this rank shall know which."""
        error = getattr(sys, "last_value", None)  # what nobody has caught
        what = "without an error that nobody caught" if error is None else f"with {_line(error)}"
        told = error is not None and _line(error) in self._end
        end = self._end if told else "; ".join(filter(None, (self._end, f"its program ended {what}")))
        if self._posting is not None:  # or it may come to its end after what is posted now, or not at all
            self._posting.join(_LAST_WORDS_SECONDS)
        self._post(end, at_once=True)

    def _post(self, end: str, advice: str = "", *, at_once: bool = False) -> None:
        if self._communicates() and not self._explained:
            self._end = end
            text = Trail(tuple(self._told()), self._last(), end + advice, is_cause=True).to_text()
            self._posting = post(text, at_once)

    def explain(self, error: CommunicationError) -> None:
        """Add to `error` what every rank did last, as far as they tell within a short time. Never raises."""
        with suppress(Exception):  # whatever goes wrong here, `error` is what must be seen
            if not self._communicates():
                return
            self._explained = True  # what follows in this process, such as the end of a backward, is no cause
            ranks = sorted({rank for unit in self._units for rank in unit.place.mesh.mesh.flatten().tolist()})
            _add_words(error, self._last(), tuple(self._told()), ranks)

    def _communicates(self) -> bool:
        return dist.is_initialized() and dist.get_world_size() > 1

    def _last(self) -> str:
        return f"step {self.step}: " + (self.describe(self._log[-1]) if self._log else "nothing yet")

    def _told(self) -> list[Told]:
        """The latest communicating commands, oldest first, with their places."""
        told: list[Told] = []
        begins = list(self._begins)
        of_step: list[Command] = []  # newest first
        position = self.count
        for command in reversed(self._log):
            position -= 1
            while begins and position < begins[-1][1]:
                told = self._numbered(begins.pop()[0], of_step) + told
                of_step = []
            of_step.append(command)
        if begins:  # the first step began before the first command
            told = self._numbered(begins[-1][0], of_step) + told
        return told[-MAX_COMMANDS:]

    def _numbered(self, step: int, newest_first: list[Command]) -> list[Told]:
        texts = [self.describe(command) for command in reversed(newest_first) if command.op in COMMUNICATES]
        return [Told(step, number, text) for number, text in enumerate(texts, start=1)]


class _Latest:
    """The story of the engine that has done something last: of several, its words are those that others need."""

    story: weakref.ref[Story] | None = None


_LATEST = _Latest()


def _leave(story: weakref.ref[Story]) -> None:
    """The story is forgotten; or it is not, then this is the end of the process."""
    found = story()
    if found is not None and story == _LATEST.story:
        found.process_ends()


@contextmanager
def explained(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, a failure of communication outside of commands is explained by the engine of some of the parameters."""
    try:
        yield
    except CommunicationError as error:
        owners = (REGISTRY.owner(parameter) for parameter in parameters)
        engine = next((unit.engine for unit in owners if unit is not None and unit.engine is not None), None)
        if engine is not None:
            engine.story.explain(error)
        raise


@contextmanager
def explained_between(ranks: Sequence[int], doing: str) -> Iterator[None]:
    """Inside, a failure of communication that belongs to no engine gets told what each of `ranks` was doing."""
    try:
        yield
    except CommunicationError as error:
        with suppress(Exception):
            _add_words(error, doing, (), ranks)
        raise


def _add_words(error: CommunicationError, last: str, told: tuple[Told, ...], ranks: Sequence[int]) -> None:
    # Up to the parameter: what follows is advice.
    end, lost = _line(error).partition(" (parameter")[0], isinstance(error, PeerLostError)
    own = Trail(told, last, end, waits_for=error.ranks, lost=lost).to_text()
    trails = {}
    for rank, text in exchange_posts(own, ranks, WAIT_SECONDS).items():
        with suppress(ValueError, KeyError, TypeError):  # not of this version
            trails[rank] = Trail.from_text(text)
    error.args = (f"{error}\n{report(trails, ranks)}",)


def _line(error: BaseException) -> str:
    """The type and the first line of an error."""
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:300]}"
