"""What a checkpoint is loaded into: first everything is compared, then a list of what to read, then what to do."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from fullshard.core.ckpt.manifest import Manifest
from fullshard.errors import CheckpointError, CheckpointMismatchError, FullshardError
from fullshard.runtime.checkpoint.state.collect import (
    by_module_name,
    check_keys,
    has_state,
    inner,
    naming,
    taking,
)
from fullshard.runtime.checkpoint.state.modules import ModuleState, finish_module, module_state, registered
from fullshard.runtime.checkpoint.state.optimizers import OptimizerPlan
from fullshard.runtime.checkpoint.state.plan import Plan, Read
from fullshard.runtime.checkpoint.state.special import PerRank, RandomState
from fullshard.runtime.checkpoint.state.values import Path, encode

_LOG = logging.getLogger("fullshard")
_LISTED = 50  # names of one kind in an error


@dataclass(frozen=True, slots=True)
class Targets:
    """How one rank loads.

    Attributes:
        reads: (name, which part, where to) of every tensor that this rank must read.
        finish: To be called when all of them are read: gives the objects their state, tells engines.
        values: Values of the checkpoint by key, of those that are no objects' state; filled by `finish`.
        missing: Names that are wanted and not in the checkpoint, where that is allowed.
        unexpected: The reverse; also what is for other ranks, such as the other stages of a pipeline.
        refused: Those of them that strict does not allow, see `refuse_unexpected`.
        skipped: Keys of the checkpoint that are not loaded: nobody asked, or they are of other ranks.
    """

    reads: list[Read]
    finish: Callable[[], None]
    values: dict[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()


def targets(
    state: Mapping[str, Any], manifest: Manifest, rank: int, world_size: int, strict: bool | Mapping[str, bool] = True
) -> Targets:
    """Compare a checkpoint with what it is to be loaded into. Nothing is changed, and nothing sent.

    Args:
        state: As of `collect`; values only say which keys are wanted.
        manifest: Of the checkpoint.
        rank: This rank.
        world_size: Number of ranks that load.
        strict: Whether names on one side only are errors; by key, where that is not to be so for all.

    Raises:
        CheckpointMismatchError: What does not fit, all of it; but not if only names that this rank does not want.
        ValueError: A key of `state` or `strict` cannot be one.
        MisuseError: A forward or backward of a module is running.
    """
    check_keys(state)
    plan = Plan(manifest, rank, world_size)
    loader = _Loader(plan, _by_key(manifest))
    if isinstance(strict, Mapping) and (unknown := [key for key in strict if key not in state]):
        raise ValueError(f"strict names keys that are not loaded: {unknown}; expected some of {list(state)}")
    for key, value in state.items():
        if isinstance(inner(value), nn.Module):
            loader.add_names(key, inner(value))
    # Random states last: what others do while they are loaded may draw numbers.
    for key, value in sorted(state.items(), key=lambda item: isinstance(item[1], RandomState)):
        before = len(plan.finishers)
        loader.add(key, value, strict.get(key, True) if isinstance(strict, Mapping) else strict)
        plan.finishers[before:] = [partial(_give, key, finish) for finish in plan.finishers[before:]]
    plan.skipped += [key for key in loader.known if key not in state]
    _refuse(plan, loader.known)
    return Targets(
        plan.reads,
        partial(_finish, plan),
        loader.values,
        tuple(plan.missing),
        tuple(plan.unexpected),
        tuple(name for name in plan.unexpected if name in plan.strict),
        tuple(plan.skipped),
    )


def _by_key(manifest: Manifest) -> dict[str, list[str]]:
    """Names of tensors, by the key that they are of."""
    found: dict[str, list[str]] = {}
    for name in (*manifest.tensors, *manifest.aliases):
        found.setdefault(name.partition("/")[0], []).append(name)
    return found


def refuse_unexpected(refused: Sequence[Sequence[str]]) -> None:
    """Raise for names in the checkpoint that no rank wants. Each rank passes the same, and raises the same.

    Args:
        refused: `Targets.refused` of every rank that loads.

    Raises:
        CheckpointMismatchError: There are some.
    """
    everywhere = set(refused[0]).intersection(*refused[1:])
    if everywhere:
        raise _mismatch([], [name for name in refused[0] if name in everywhere], [])


def _refuse(plan: Plan, known: list[str]) -> None:
    missing = [name for name in plan.missing if name in plan.strict]
    problems = list(plan.problems)
    if any("/" not in name for name in missing):
        problems.append(f"the checkpoint has the keys {', '.join(known)}")
    if missing or problems:
        raise _mismatch(missing, [name for name in plan.unexpected if name in plan.strict], problems)


def _mismatch(missing: list[str], unexpected: list[str], problems: list[str]) -> CheckpointMismatchError:
    lines = [
        *([f"not in the checkpoint: {_some(missing)}"] if missing else []),
        *([f"in the checkpoint, but not wanted: {_some(unexpected)}"] if unexpected else []),
        *problems[:_LISTED],
        *([f"and {len(problems) - _LISTED} more"] if len(problems) > _LISTED else []),
        *(["strict=False loads what fits, only(...) loads a part"] if missing or unexpected else []),
    ]
    return CheckpointMismatchError("the checkpoint does not fit, nothing was changed:\n  " + "\n  ".join(lines))


def _some(names: list[str]) -> str:
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")


def _give(key: str, finish: Callable[[], None]) -> None:
    """What an object says of its state is not about the arguments of `load`: the checkpoint may come from anyone."""
    try:
        finish()
    except FullshardError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"the state of {key!r} in the checkpoint was refused when it was loaded: {type(error).__name__}: {error}"
        ) from error


def _finish(plan: Plan) -> None:
    for finish in plan.finishers:
        finish()
    if plan.converted:
        name, change = next(iter(plan.converted.items()))
        _LOG.warning("%d tensors of the checkpoint were converted, such as %s: %s", len(plan.converted), name, change)
    if plan.skipped:
        _LOG.info("in the checkpoint, and not loaded: %s", ", ".join(plan.skipped))


class _Loader:
    """Compares one entry of the state after the other.

    Attributes:
        plan: What is noted.
        known: Keys of the checkpoint.
        values: For `Targets`.
    """

    def __init__(self, plan: Plan, by_key: dict[str, list[str]]) -> None:
        manifest = plan.manifest
        self.plan = plan
        self.values: dict[str, Any] = {}
        of_ranks = [key for values in manifest.rank_state for key in values]
        keys = (key.partition("@")[0] for key in by_key)
        self.known = list(dict.fromkeys([*manifest.state, *of_ranks, *keys]))
        self._by_key = by_key
        self._names: dict[int, str] = {}
        self._modules: dict[str, ModuleState] = {}

    def add_names(self, key: str, module: nn.Module) -> None:
        """Look through a module."""
        self._modules[key] = found = module_state(module)
        for number, name in found.parameters.items():
            self._names.setdefault(number, f"{key}/{name}")

    def add(self, key: str, value: Any, strict: bool) -> None:
        """Compare one entry of the state."""
        plan, of_ranks = self.plan, any(key in values for values in self.plan.manifest.rank_state)
        if key not in self.known:
            plan.miss([key], strict)
            return
        if of_ranks is not isinstance(value, PerRank | RandomState):
            here, there = ("once for all ranks", "by each rank") if of_ranks else ("by each rank", "once for all ranks")
            plan.problems.append(f"{key} is loaded {here}, but was saved {there} (see per_rank)")
            return
        found = {} if of_ranks else plan.manifest.state.get(key, {"kind": "module"})
        kind = found.get("kind") if isinstance(found, dict) else None
        if key in self._modules:
            # A state dict that was saved as a value has the same names.
            if self._is(key, kind, "module", "value", "object"):
                self._module(key, value, found, strict)
        elif isinstance(inner(value), torch.optim.Optimizer):
            if self._is(key, kind, "optimizer"):
                takes = by_module_name(taking(value))
                OptimizerPlan(inner(value), key, self._names, takes, strict, plan).make(found)
        elif isinstance(value, RandomState):
            self._random(key, value)
        elif isinstance(value, PerRank):
            self._own(key, value.object, strict)
        elif self._is(key, kind, "object", "value"):
            # Only then: to be asked for its state before it is loaded may cost an object much.
            like = _placed(key, value) if self._is_divided(key) else None
            self._take(key, value, plan.decode(found.get("value"), key, like))

    def _is(self, key: str, kind: Any, *expected: str) -> bool:
        if kind not in expected:
            self.plan.problems.append(f"{key} was saved as {kind}, and cannot be loaded as {expected[0]}")
        return kind in expected

    def _is_divided(self, key: str) -> bool:
        """Whether it was saved with sharded tensors."""
        manifest = self.plan.manifest
        divisions = (manifest.division_of(manifest.resolve(name)) for name in self._by_key.get(key, ()))
        return any(division.splits or len(division.ranks) > 1 for division in divisions)

    def _take(self, key: str, value: Any, made: Any) -> None:
        if has_state(value):
            self.plan.finishers.append(lambda: value.load_state_dict(made))
        else:
            self.plan.finishers.append(lambda: self.values.update({key: made}))

    # Modules

    def _module(self, key: str, value: Any, saved: Mapping[str, Any], strict: bool) -> None:
        plan, found, takes = self.plan, self._modules[key], taking(value)
        names: dict[str, list[str]] = {name: [name] for name in found.tensors}
        for alias, name in found.aliases.items():
            names[name].append(alias)
        present = {name.partition("/")[2] for name in self._by_key.get(key, [])}
        missing, made = [], {}
        is_registered = registered(found) if found.makers else None
        for name, group in names.items():
            if not any(map(takes, group)):
                continue
            there = [each for each in group if each in present]
            if not there:
                missing.append(f"{key}/{name}")
                continue
            self._warn_of_two(key, there)
            plan.read(f"{key}/{there[0]}", found.tensors[name])
            if is_registered is not None and name in found.makers and not is_registered(found.tensors[name]):
                made[name] = found.tensors[name]
        extra = saved.get("extra")
        extra = {name: each for name, each in extra.items() if takes(name)} if isinstance(extra, dict) else {}
        decoded = {name: plan.decode(each, key) for name, each in extra.items() if name in found.extra}
        plan.miss([*missing, *(f"{key}/{name}" for name in found.extra if takes(name) and name not in extra)], strict)
        wanted = {name for group in names.values() for name in group}
        loose = {name for name in present - wanted if takes(name) and not name.startswith(tuple(extra))}
        plan.leave([f"{key}/{name}" for name in sorted({*loose, *(extra.keys() - found.extra.keys())})], strict)
        plan.finishers.append(lambda: finish_module(inner(value), found, made, decoded))

    def _warn_of_two(self, key: str, names: list[str]) -> None:
        if len({self.plan.manifest.resolve(f"{key}/{name}") for name in names}) > 1:
            warnings.warn(
                f"{', '.join(names)} are one parameter in {key!r}, but several tensors in the checkpoint; that of "
                f"{names[0]!r} is loaded. Was it saved from a model in which they are not tied?",
                stacklevel=5,
            )

    # What each rank has for itself

    def _saved_by(self, key: str, rank: int) -> Any:
        """The value of one rank, filled when everything is read."""
        value = self.plan.manifest.rank_state[rank].get(key)
        value = value.get("value") if isinstance(value, dict) else None
        return self.plan.decode(value, key)

    def _random(self, key: str, value: RandomState) -> None:
        plan, saved = self.plan, self.plan.manifest.rank_state
        # A rank that was not there when it was saved, also if `fullshard ckpt reshard` has made a place for it.
        is_new = plan.rank >= len(saved) or key not in saved[plan.rank]
        made = self._saved_by(key, 0 if is_new else plan.rank)
        if not (isinstance(made, dict) and {"cpu", "python"} <= made.keys()):
            plan.problems.append(f"{key} is not the state of random generators in the checkpoint")
        elif is_new:
            plan.finishers.append(lambda: value.seed_from(made, plan.rank))
        else:
            plan.finishers.append(lambda: value.load_state_dict(made))

    def _own(self, key: str, value: Any, strict: bool) -> None:
        plan = self.plan
        saved = len(plan.manifest.rank_state)
        if saved == plan.world_size and key not in plan.manifest.rank_state[plan.rank]:
            self._not_saved(key, strict, f"{key} was saved by other ranks, but not by rank {plan.rank}")
        elif saved == plan.world_size:
            self._take(key, value, self._saved_by(key, plan.rank))
        elif callable(take := getattr(value, "load_state_dicts", None)):
            states = [self._saved_by(key, rank) for rank in range(saved)]
            plan.finishers.append(lambda: take(states, plan.rank, plan.world_size))
        else:
            self._not_saved(
                key,
                strict,
                f"{key} was saved by each of {saved} ranks, and cannot be divided over {plan.world_size}: give the "
                f"object a method load_state_dicts(states, rank, world_size), or pass strict={{{key!r}: False}}",
            )

    def _not_saved(self, key: str, strict: bool, why: str) -> None:
        """There is nothing for this rank under a key."""
        if strict:
            self.plan.problems.append(why)
        else:
            self.plan.skipped.append(key)


def _placed(key: str, value: Any) -> dict[str, torch.Tensor]:
    """Tensors that an object has now, by the names that they would be saved under: rows are loaded as rows."""
    found: dict[str, torch.Tensor] = {}

    def put(tensor: torch.Tensor, path: Path) -> str:
        name = naming(key, path, found)
        found[name] = tensor
        return name

    with suppress(TypeError):  # saving it would say so
        encode(value.state_dict() if has_state(value) else value, (key,), put)
    return found
