"""What this rank has to save, and what all ranks have: the manifest before there are files.

[Note: what is exchanged]
All ranks usually have the same tensors, divided alike. So they compare a digest, and each computes the manifest by
itself: names and shapes of 100 000 tensors travel to nobody. Only where ranks differ (stages of a pipeline) they tell
each other everything. After the files are on the disk, each rank tells the first one their sizes and seals.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fullshard.core.ckpt.boxes import Division
from fullshard.errors import CheckpointError
from fullshard.runtime.checkpoint.agree import Ranks
from fullshard.runtime.checkpoint.files.checks import checksum
from fullshard.runtime.checkpoint.files.memory import as_bytes
from fullshard.runtime.checkpoint.merging import PLAIN, Described, Shared, Told, merge
from fullshard.runtime.checkpoint.state.collect import collect, inner
from fullshard.runtime.checkpoint.state.rows import Held
from fullshard.runtime.loop.in_backward import InBackwardOptimizer
from fullshard.runtime.registry import REGISTRY


@dataclass(frozen=True, slots=True)
class Description:
    """What one rank has.

    Attributes:
        told: What it has in common with others.
        own: Shape and dtype of tensors that it alone has, by name.
        values: JSON of keys that each rank has for itself.
        held: All its tensors.
    """

    told: Told
    own: Mapping[str, tuple[tuple[int, ...], str]]
    values: Mapping[str, Any]
    held: Mapping[str, Held]

    def digest(self) -> bytes:
        """The same on two ranks that have the same to tell."""
        return hashlib.blake2b(repr(self.told).encode(), digest_size=16).digest()

    def written(self, shared: Shared, rank: int) -> dict[str, torch.Tensor]:
        """The tensors of this rank's file, by name, sharing memory with what they are of."""

        def is_written(name: str, held: Held) -> bool:
            if name in self.own:
                return held.tensor.numel() > 0
            return shared.divisions[shared.tensors[name].division].box(held.shape, rank) is not None

        return {name: held.tensor for name, held in self.held.items() if is_written(name, held)}


def describe(state: Mapping[str, Any], ranks: Ranks) -> Description:
    """What this rank has of a state. Does not communicate.

    Raises:
        CheckpointError: A tensor is divided over ranks that do not save.
        TypeError: Something cannot be saved; see `collect`.
    """
    collected = collect(state)
    places = {member: place for place, member in enumerate(ranks.members)}
    numbers: dict[int, int] = {}  # by identity: tensors that are divided alike share one object
    divisions: list[Division] = []
    own: dict[str, tuple[tuple[int, ...], str]] = {}
    told: dict[str, Described] = {}
    for name, held in collected.tensors.items():
        division = held.division
        if division is None:
            told[name] = (held.shape, held.dtype, PLAIN)
        elif name.partition("/")[0].endswith(f"@{ranks.members[ranks.rank]}"):
            own[name] = (held.shape, held.dtype)
        else:
            if id(division) not in numbers:
                numbers[id(division)] = len(divisions)
                divisions.append(_placed(division, places, name))
            told[name] = (held.shape, held.dtype, numbers[id(division)])
    everything = Told(tuple(divisions), told, collected.aliases, collected.values)
    return Description(everything, own, collected.rank_values, collected.tensors)


def changed_by_steps(state: Mapping[str, Any], description: Description) -> dict[str, torch.Tensor]:
    """Tensors, as the state has them, that only a step of an optimizer in it changes: its parameters, and its states.

    Settings of its groups may be tensors too, which schedulers change.
    """
    parameters: dict[str, set[str]] = {}  # names, by key of the optimizer
    numbers: set[int] = set()  # identities; what a hook has put in the place of a tensor may be anything
    for key, value in state.items():
        optimizer = inner(value)
        if isinstance(optimizer, torch.optim.Optimizer) and not isinstance(optimizer, InBackwardOptimizer):
            parameters[key] = {name for group in description.told.values[key]["groups"] for name in group["params"]}
            numbers.update(id(parameter) for group in optimizer.param_groups for parameter in group["params"])
            states = [each for each in optimizer.state.values() if isinstance(each, Mapping)]  # it may hold more
            numbers.update(id(tensor) for each in states for tensor in each.values())
    everywhere = set[str]().union(*parameters.values())
    found: dict[str, torch.Tensor] = {}
    for name, held in description.held.items():
        key, _, rest = name.partition("/")
        is_state = rest.rpartition("/")[0] in parameters.get(key, ())
        is_parameter = name in everywhere and not _is_computed_with(held.source)
        if (is_state or is_parameter) and id(held.source) in numbers:
            found[name] = held.source
    return found


def _is_computed_with(parameter: torch.Tensor) -> bool:
    """Whether forward computes with the very memory of a sharded parameter: that of a unit which is not divided.

    A module that writes to what it computes with would change it, and the counter of the sharded one would not tell.
    """
    unit = REGISTRY.owner(parameter)
    return unit is not None and any(flow.buffers.world.size == 1 for flow in unit.flows)


def agree(ranks: Ranks, description: Description, digests: Sequence[bytes]) -> Shared:
    """What all ranks have together; all call it.

    Raises:
        CheckpointError: They have different things under one name; on all ranks.
    """
    told: list[Told | None] = [description.told]
    if len(set(digests)) > 1:  # of those who would tell the same, the first does
        is_first = digests.index(digests[ranks.rank]) == ranks.rank
        told = ranks.exchange(description.told if is_first else None, "compare")
    shared = merge(told)
    if shared.twins:
        _compare_twins(ranks, shared.twins, description.held)
    return shared


def _compare_twins(ranks: Ranks, twins: Mapping[str, tuple[Division, ...]], held: Mapping[str, Held]) -> None:
    """Make sure that tensors of one name which several sets of ranks have are the same."""
    tensors = {name: held[name].tensor.cpu().contiguous() for name in twins if name in held}
    own = {name: checksum(as_bytes(tensor).numpy().data) for name, tensor in tensors.items()}
    sums = ranks.exchange(own, "compare")
    for name, (first, *others) in twins.items():
        for other in others:
            pairs = zip(first.ranks, other.ranks, strict=True)
            if any(sums[one].get(name) != sums[two].get(name) for one, two in pairs):
                raise CheckpointError(
                    f"tensor {name!r} on ranks {list(first.ranks)} is not that on ranks {list(other.ranks)}, though it "
                    "has the same name. If it is meant to be the same, the ranks have drifted apart; if it is not "
                    "(experts of each rank), give it another name on each, or let each set of ranks save to a folder "
                    "of its own with group="
                )


def _placed(division: Division, places: Mapping[int, int], name: str) -> Division:
    """A division over global ranks as one over files."""
    missing = [rank for rank in division.ranks if rank not in places]
    if missing:
        raise CheckpointError(
            f"tensor {name!r} is divided over ranks {list(division.ranks)[:16]}, but {missing[:16]} do not take part: "
            "save with a group that has all ranks of the mesh"
        )
    return replace(division, ranks=tuple(places[rank] for rank in division.ranks))
