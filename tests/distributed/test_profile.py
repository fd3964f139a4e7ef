"""Profiles of running models: nothing changes, everything is seen, and nothing is left behind."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import profile as torch_profile

import fullshard
from cluster import Cluster
from fullshard import FullyShardedDataParallel, fully_shard
from fullshard.core.lifecycle import Op
from fullshard.core.profile import Kind, Recording, Span, step_parts
from fullshard.errors import MisuseError
from fullshard.runtime.engine import Engine

WIDTH = 256  # a parameter of 256 x 256 is large: it has a message of its own
BLOCKS = 3
STEPS = 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x


def sharded(**options: Any) -> tuple[Net, Engine]:
    model = Net()
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    model(torch.ones(1, WIDTH))
    engine: Engine = model.__dict__["_fullshard"].unit.engine
    return model, engine


def train(model: nn.Module, profile: fullshard.Profile | None, steps: int = STEPS) -> list[torch.Tensor]:
    """Losses and final shards."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(steps):
        torch.manual_seed(100 * step + dist.get_rank())
        loss = model(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
        if profile is not None:
            profile.step()
    return found + [parameter._local_tensor.detach().clone() for parameter in model.parameters()]


def check_same_numbers(rank: int, transport: str) -> None:
    without = train(sharded(transport=transport)[0], None)
    model, engine = sharded(transport=transport)
    engine.log.clear()
    with fullshard.profile(model) as profile:
        within = train(model, profile)
    assert all(torch.equal(a, b) for a, b in zip(without, within, strict=True))
    assert str(profile.summary()).startswith("a step of")


@pytest.mark.parametrize("transport", ["shm", "direct", "torch"])
def test_a_profile_changes_no_number(cluster: Cluster, transport: str) -> None:
    """Losses and parameters, bit for bit, in counted, unoverlapped and measured steps alike."""
    cluster.run(check_same_numbers, transport)


def check_recording(rank: int, world: int, transport: str) -> None:
    model, engine = sharded(transport=transport)
    train(model, None, steps=1)
    engine.log.clear()
    with fullshard.profile(model) as profile:
        train(model, profile)
    assert [recording.rank for recording in profile.recordings] == list(range(world))
    own = profile.recordings[rank]
    assert [ran.op for ran in own.commands] == [command.op for command in engine.log]
    assert own.units == ("(root)", "blocks.0", "blocks.1", "blocks.2")
    assert [step.kind for step in own.steps] == [Kind.COUNTED, Kind.ALONE, Kind.ALONE] + [Kind.MEASURED] * 3
    _check_waits(own)
    summary = profile.summary()
    for step in own.steps:
        assert sum(step_parts(own, step).values()) == step.end_ns - step.begin_ns
    parts = summary.ranks[rank].parts
    assert sum(parts.values()) == pytest.approx(summary.ranks[rank].step_seconds)
    # Every block in forward; all but the last, which is still there, in backward; gradients of every block.
    full_bytes, gathers = engine.units[1].full_bytes, 2 * BLOCKS - 1
    assert summary.ranks[rank].gathered_bytes == gathers * full_bytes
    assert summary.ranks[rank].reduced_bytes == BLOCKS * (WIDTH + 1) * WIDTH * 4
    # This rank's own part into the full buffer; small gradients into their message, from it and beside the large ones.
    copied = summary.ranks[rank].copied_bytes
    assert copied is not None
    expected = gathers * full_bytes // world
    if transport == "shm":  # there the wire is a copy: of what other ranks sum
        expected += BLOCKS * WIDTH * WIDTH * 4 * (world - 1) // world
    assert 0 <= copied - expected <= BLOCKS * 5 * WIDTH * 4


def _check_waits(recording: Recording) -> None:
    """Each gather is waited for, or given up, before the next of its unit; each reduce, too."""
    for starts, ends in (
        ((Op.GATHER,), (Op.WAIT_GATHER, Op.FREE)),
        ((Op.REDUCE,), (Op.WAIT_REDUCE,)),
    ):
        in_flight: set[int] = set()
        for ran in recording.commands:
            if ran.op in starts:
                assert ran.unit not in in_flight
                in_flight.add(ran.unit)
            elif ran.op in ends:
                in_flight.discard(ran.unit)
        assert not in_flight
    assert all(a.end_ns <= b.begin_ns for a, b in zip(recording.commands, recording.commands[1:], strict=False))


@pytest.mark.parametrize(("world_size", "transport"), [(2, "direct"), (2, "shm"), (4, "direct")])
def test_a_profile_sees_every_command_and_adds_up(cluster: Cluster, world_size: int, transport: str) -> None:
    cluster.run(check_recording, world_size, transport, world_size=world_size)


def check_alone(rank: int) -> None:
    """In the unoverlapped steps nothing is left to wait for when the wait comes; else a block's gather is."""
    model, engine = sharded(transport="direct")
    left: dict[Kind, list[int]] = {kind: [] for kind in Kind}
    with fullshard.profile(model) as profile:
        inner = engine.watch
        assert inner is not None

        def watch(unit: Any, act: Any) -> None:
            inner(unit, act)
            if act.__name__ == "gather":
                left[profile._kind].append(sum(pending._exchange.receives_left for pending in unit.in_flight))

        engine.watch = watch
        train(model, profile)
    assert sum(left[Kind.ALONE]) == 0
    assert sum(left[Kind.MEASURED]) > 0


def test_transfers_are_alone_in_the_steps_for_it(cluster: Cluster) -> None:
    cluster.run(check_alone)


def check_trace(rank: int, path: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, _ = sharded(mesh=mesh)
    with fullshard.profile(model) as profile:
        for _ in range(4):
            with profile.range("forward and backward"):
                model(torch.ones(2, WIDTH)).sum().backward()
            profile.step()
    profile.write_trace(path)
    assert all(range_.name == "forward and backward" for range_ in profile.recordings[0].ranges)
    assert "compute" in profile.summary().parts


def test_a_trace_has_every_rank_as_a_process(cluster: Cluster, tmp_path: Path) -> None:
    """Replicas, too."""
    cluster.run(check_trace, str(tmp_path / "trace.json"), world_size=4)
    trace = json.loads((tmp_path / "trace.json").read_text())
    names = {(event["pid"], event["name"]) for event in trace["traceEvents"]}
    for rank in range(4):
        for name in ("gather blocks.1", "wait reduce blocks.0", "all reduce blocks.2", "step 3 (measured)", "compute"):
            assert (rank, name) in names
    assert trace["otherData"]["summary"]["measured_steps"] == 1


def check_off(rank: int) -> None:
    """No recorder is made, nothing of a command is named, and nothing stays after a profile."""
    model, engine = sharded()
    with fullshard.profile(model) as profile:
        train(model, profile, steps=1)
    del profile
    gc.collect()
    assert engine.watch is None
    made: list[str] = []
    monitored = (fullshard.Profile.__init__, torch.profiler.record_function.__init__)
    originals = [function.__code__ for function in monitored]

    def note(frame: Any, event: str, _arg: Any) -> None:
        if event == "call" and frame.f_code in originals:
            made.append(frame.f_code.co_qualname)

    model(torch.ones(1, WIDTH)).sum().backward()
    sys.setprofile(note)
    try:
        model(torch.ones(1, WIDTH)).sum().backward()
    finally:
        sys.setprofile(None)
    assert made == []
    assert not [each for each in gc.get_objects() if isinstance(each, fullshard.Profile)]


def test_without_a_profile_nothing_is_made(cluster: Cluster) -> None:
    cluster.run(check_off)


def check_torch_profiler(rank: int) -> None:
    model, _ = sharded()
    train(model, None, steps=1)
    with torch_profile() as prof:
        train(model, None, steps=1)
    names = {event.name for event in prof.events()}
    for name in ("gather blocks.0", "wait gather blocks.1", "reduce blocks.2", "wait reduce blocks.0"):
        assert f"fullshard: {name}" in names


def test_torch_profiler_shows_commands_by_name(cluster: Cluster) -> None:
    cluster.run(check_torch_profiler)


def fail_on_first(rank: int) -> None:
    if rank == 0:
        raise RuntimeError("on one rank")
    # What another rank of such a job would run into soon, without the wait for it.
    raise RuntimeError("on one rank, so on the others")


def check_misuse(rank: int) -> None:
    with pytest.raises(ValueError, match="Linear has no sharded module"), fullshard.profile(nn.Linear(2, 2)):
        pass
    model, engine = sharded()
    with fullshard.profile(model) as profile:
        with pytest.raises(MisuseError, match="is open already"), fullshard.profile(model):
            pass
        with pytest.raises(MisuseError, match=r"at least 4 steps .* 0 did"):
            profile.summary()
        train(model, profile, steps=3)
    with pytest.raises(MisuseError, match="3 did"):
        profile.summary()
    assert len(profile.trace()["traceEvents"]) > 100  # it has what there is
    # A step that raises closes the profile without waiting for other ranks.
    with pytest.raises(RuntimeError, match="on one rank"), fullshard.profile(model):
        fail_on_first(rank)
    assert engine.watch is None
    train(model, None, steps=1)


def test_misuse_of_a_profile_is_an_error_that_helps(cluster: Cluster) -> None:
    cluster.run(check_misuse)


def check_before_first_forward(rank: int) -> None:
    """Two roots below a module that is not sharded, which have not run yet; one is of torch's older interface."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": fully_shard(nn.Linear(8, 8)), "b": FullyShardedDataParallel(nn.Linear(8, 8))})
    with fullshard.profile(model) as profile:
        for _ in range(5):
            model["b"](model["a"](torch.ones(2, 8))).sum().backward()
            profile.step()
    own = profile.recordings[rank]
    assert len(own.units) == 2
    assert {ran.unit for ran in own.commands} == {0, 1}
    assert own.ranges == ()
    assert Span not in map(type, own.commands)


def test_a_profile_may_begin_before_the_first_forward(cluster: Cluster) -> None:
    cluster.run(check_before_first_forward)
