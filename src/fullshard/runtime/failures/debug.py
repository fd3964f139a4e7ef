"""Debug mode: ranks compare each communicating command before they run it."""

from __future__ import annotations

import json
import logging
import os

import torch
import torch.distributed as dist

from fullshard.core.lifecycle import Op
from fullshard.core.schedule import Command
from fullshard.errors import RanksDisagreeError
from fullshard.runtime.collectives import Call, GatherItem, Transport, command_tag, make_messages
from fullshard.runtime.device import BufferPool, Streams
from fullshard.runtime.failures.nonfinite import first_nonfinite
from fullshard.runtime.failures.postmortem import Story
from fullshard.runtime.unit import Unit

_LOG = logging.getLogger("fullshard")
_MESSAGE_BYTES = 256
# After the numbers of the commands themselves, see `unit`.
_CHECK = 7


def debug_by_environment() -> bool:
    """Whether FULLSHARD_DEBUG=1 is set: a job that hangs is looked into without a change to its code."""
    return os.environ.get("FULLSHARD_DEBUG", "") == "1"


def wants_debug(unit: Unit) -> bool:
    """Whether an engine with this unit shall run in debug mode."""
    return unit.wishes.debug or debug_by_environment()


class OrderCheck:
    """Exchanges what each rank is about to do, and raises on all of them if they differ.

    Args:
        story: Of the engine; it knows the step.
        pool: Memory for staging.
        streams: Streams beside the computation.
    """

    def __init__(self, story: Story, pool: BufferPool, streams: Streams) -> None:
        self._story = story
        self._pool = pool
        self._streams = streams
        self._transports: dict[dist.ProcessGroup, Transport] = {}
        self._step = 0
        self._number = 0

    def compare(self, command: Command, unit: Unit) -> None:
        """Compare `command` for `unit` over the ranks that it communicates with.

        Raises:
            RanksDisagreeError: On every rank, the same.
            CommunicationError: A rank has no command to compare within the time limit.
        """
        self._number = self._number + 1 if self._step == self._story.step else 1
        self._step = self._story.step
        words = self._story.describe(command).encode("ascii", "replace").decode()  # one byte a letter: it must fit
        nonfinite = first_nonfinite(unit)[-48:] if command.op is Op.REDUCE else ""
        what: list[object] = [words[-160:], _wire_bytes(command.op, unit)]
        for group in _groups_of(command.op, unit):
            self._compare_over(group, [*what, self._number, self._step, nonfinite], unit)

    def _compare_over(self, group: dist.ProcessGroup, message: list[object], unit: Unit) -> None:
        texts = self._exchange(group, message, unit)
        ranks = dist.get_process_group_ranks(group)
        first = json.loads(texts[0])
        for rank, text in zip(ranks, texts, strict=True):
            theirs = json.loads(text)
            if theirs[:2] != first[:2]:
                raise RanksDisagreeError(
                    f"ranks {ranks[0]} and {rank} do not run the same commands: rank {ranks[0]} is about to "
                    f"{_words(first)}, rank {rank} to {_words(theirs)}. Ranks of one group must run their units "
                    "in the same order; look for what depends on the rank: a skipped or swapped module, another number "
                    "of batches, a call on one rank only"
                )
            if theirs[-1] and not self._story.nonfinite:
                where = f"parameter {theirs[-1]!r} of unit {unit.name or '(root)'!r} on rank {rank}"
                self._story.nonfinite = f"{where}, in the backward of step {self._step}"
                _LOG.warning("a gradient is not finite: %s", self._story.nonfinite)

    def _exchange(self, group: dist.ProcessGroup, message: list[object], unit: Unit) -> list[str]:
        device = unit.place.device
        if group not in self._transports:
            self._transports[group] = make_messages(group, device, self._pool, self._streams)
        transport = self._transports[group]
        own = torch.frombuffer(bytearray(json.dumps(message).encode().ljust(_MESSAGE_BYTES)), dtype=torch.uint8)
        whole = torch.empty(transport.size, _MESSAGE_BYTES, dtype=torch.uint8, device=device)
        whole[transport.rank].copy_(own)
        item = GatherItem("the command", whole.view(-1), _MESSAGE_BYTES, whole.numel())
        # One tag for all of them: whatever a rank does next meets what the others do next.
        call = Call(
            f"comparison before {_words(message)}", unit.name or "(root)", command_tag("order of commands", _CHECK)
        )
        pending = transport.gather([item], call)
        pending.wait()
        pending.finish()
        return [bytes(row).decode() for row in whole.cpu().numpy()]


def _groups_of(op: Op, unit: Unit) -> list[dist.ProcessGroup]:
    """Groups of several ranks in which the unit communicates for `op`: one, unless parameters have meshes of their own.

    The group of its smaller world for GATHER_SECONDARY, that of replicas for ALL_REDUCE.
    """
    groups = []
    for place in dict.fromkeys([flow.place for flow in unit.flows] or [unit.place]):
        special = {Op.GATHER_SECONDARY: place.secondary, Op.ALL_REDUCE: place.replicate_group}
        groups.append(special.get(op, place.shard_group))
    return [group for group in groups if group is not None and group.size() > 1]


def _wire_bytes(op: Op, unit: Unit) -> int:
    """Bytes that the command makes or sums, over all dtypes: which parameters are trainable shows here, too."""
    if op in (Op.GATHER, Op.GATHER_SECONDARY):
        return unit.full_bytes
    return sum(
        spec.numel * flow.sum_dtype.itemsize
        for flow in unit.flows
        for spec, trainable in zip(flow.buffers.specs, flow.plan().trainable, strict=True)
        if trainable
    )


def _words(message: list[object]) -> str:
    text, nbytes, number, step, _ = message
    return f"{text} ({nbytes} bytes, command {number} of step {step})"
