"""Transport through shared memory: what is in it, who waits for whom, and what is left of it afterwards."""

from __future__ import annotations

import gc
import logging
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from reference import Setup, check_reference
from stack import batch, engine_of, make_stack
from torch import nn

from cluster import Cluster
from fullshard import fully_shard
from fullshard.errors import CommunicationError, MisuseError, PeerLostError
from fullshard.runtime.collectives import Shared
from fullshard.runtime.collectives.shm import blocks, hosts


def shared_of(model: nn.Module) -> Shared:
    unit = model.__dict__["_fullshard"].unit
    found = unit.resources.links[unit.place].shard
    assert isinstance(found, Shared)
    return found


def step(model: nn.Module, x: torch.Tensor) -> float:
    loss = model(x).pow(2).mean()
    loss.backward()
    return loss.item()


# What is shared


def check_one_buffer(rank: int) -> tuple[int, int]:
    model = make_stack(count=2, width=16)
    step(model, batch(rank, width=16))
    model.blocks[0].unshard()
    weight = model.blocks[0].weight
    dist.barrier()
    address = weight.data_ptr()
    line = next(
        line
        for line in Path("/proc/self/maps").read_text().splitlines()
        if int(line.split("-")[0], 16) <= address < int(line.split("-")[1].split()[0], 16)
    )
    assert "memfd:fullshard" in line, line
    result = int(line.split()[4]), address - int(line.split("-")[0], 16)
    dist.barrier()
    model.blocks[0].reshard()
    return result


def test_the_full_buffer_of_a_unit_exists_once_a_host(cluster: Cluster) -> None:
    """Every rank's full parameter is the same bytes of the same file."""
    files = cluster.run(check_one_buffer, world_size=3)
    assert files[0] == files[1] == files[2]


def check_block_bytes(rank: int, count: int) -> tuple[int, int]:
    model = make_stack(count=count, width=64)
    for number in range(3):
        step(model, batch(rank, number, width=64))
    found = shared_of(model)
    unit_bytes = engine_of(model).units[1].full_bytes
    return found.blocks.nbytes, unit_bytes


@pytest.mark.parametrize("world_size", [2, 3])
def test_memory_is_a_few_units_whatever_the_depth_and_whoever_is_ahead(cluster: Cluster, world_size: int) -> None:
    """Two full buffers and one to spare; the gradients of one unit and one to spare. Rounding adds up to an eighth."""
    found = [cluster.run(check_block_bytes, count, world_size=world_size) for count in (4, 4, 12)]
    assert found[0] == found[1] == found[2]
    nbytes, unit_bytes = found[0][0]
    assert nbytes <= (3 + 2 * (world_size - 1)) * (unit_bytes * 1.125 + 8192)


@pytest.mark.parametrize("transport", ["shm", "direct"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_training_equals_unsharded_training(cluster: Cluster, world_size: int, transport: str) -> None:
    cluster.run(check_reference, "llama", Setup(transport=transport), world_size=world_size)


def check_same_bits(rank: int) -> None:
    """Both transports add in rank order."""
    gradients = []
    for transport in ("shm", "direct"):
        model = make_stack(transport=transport)
        step(model, batch(rank))
        gradients.append([p.grad._local_tensor for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sums_are_those_of_direct_exchange_bit_for_bit(cluster: Cluster, world_size: int) -> None:
    cluster.run(check_same_bits, world_size=world_size)


# Several hosts


def check_hosts(rank: int, host_of: tuple[int, ...], setup: Setup) -> None:
    with mock.patch.object(hosts, "host_identity", return_value=f"host {host_of[rank]}"):
        check_reference(rank, "llama", setup)


@pytest.mark.parametrize(
    "host_of", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 0, 1, 1, 1), (0, 0, 1, 1, 2, 2)], ids=str
)
def test_columns_carry_rows_between_hosts(cluster: Cluster, host_of: tuple[int, ...]) -> None:
    cluster.run(check_hosts, host_of, Setup(transport="shm"), world_size=len(host_of))


@pytest.mark.parametrize("host_of", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 0)], ids=str)
def test_hsdp_with_shards_or_replicas_on_one_host(cluster: Cluster, host_of: tuple[int, ...]) -> None:
    cluster.run(check_hosts, host_of, Setup(replicas=2), world_size=4)


def check_other_dims(rank: int) -> None:
    """Rows that lie in many places are sent by messages between hosts, and written in place on one."""
    with mock.patch.object(hosts, "host_identity", return_value=f"host {rank // 2}"):
        options = (("shard_placement_fn", last_dim),)
        check_reference(rank, "llama", Setup(transport="shm", shard_options=options))


def last_dim(parameter: torch.Tensor) -> Any:
    from torch.distributed.tensor import Shard

    return Shard(parameter.dim() - 1)


def test_other_shard_dims_on_two_hosts(cluster: Cluster) -> None:
    cluster.run(check_other_dims, world_size=4)


def check_uneven_hosts(rank: int, caught: str) -> str:
    with mock.patch.object(hosts, "host_identity", return_value=f"host {min(rank, 1)}"):
        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("fullshard").addHandler(handler)
        try:
            check_reference(rank, "llama", Setup(steps=1))
            with pytest.raises(ValueError, match=caught):
                step(make_stack(transport="shm"), batch(rank))
        finally:
            logging.getLogger("fullshard").removeHandler(handler)
    return "\n".join(records)


def test_ranks_that_cannot_share_exchange_messages_and_say_so_once(cluster: Cluster) -> None:
    for text in cluster.run(check_uneven_hosts, "equally many ranks", world_size=3):
        assert text.count("exchange messages") == 1
        assert "do not have equally many ranks" in text


# What goes wrong


def check_no_memory(rank: int) -> list[str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fullshard").addHandler(handler)
    try:
        with mock.patch.object(blocks, "reserve", return_value=-1):
            check_reference(rank, "llama", Setup(replicas=dist.get_world_size() // 2))
    finally:
        logging.getLogger("fullshard").removeHandler(handler)
    return records


@pytest.mark.parametrize("world_size", [2, 4])
def test_without_memory_ranks_exchange_messages(cluster: Cluster, world_size: int) -> None:
    """The maker of a block says that there is none; then every rank sends, and training goes on."""
    for records in cluster.run(check_no_memory, world_size=world_size):
        assert len(records) == world_size // 2, records  # one a group
        assert all("no shared memory" in record for record in records)


def check_no_leave(rank: int) -> list[str]:
    """On one rank the system refuses to make memory; then no rank may use any."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fullshard").addHandler(handler)
    try:
        with mock.patch.object(os, "memfd_create", side_effect=PermissionError if rank == 1 else os.memfd_create):
            check_reference(rank, "llama", Setup(steps=1))
    finally:
        logging.getLogger("fullshard").removeHandler(handler)
    return records


def test_a_rank_that_may_not_make_memory(cluster: Cluster) -> None:
    for records in cluster.run(check_no_leave):
        assert len(records) == 1
        assert "leave to make memory: not so on ranks [1]" in records[0]


def check_other_file(rank: int, folder: str) -> None:
    """The number of a file is sent, and may be that of another file when it is opened."""
    path = Path(folder) / f"data-{rank}"
    path.write_bytes(b"x" * 4096)
    with path.open("r+b") as file:
        assert hosts.open_memory(os.getpid(), file.fileno(), 4096) is None
    number = hosts.reserve("block", 4096)
    assert hosts.open_memory(os.getpid(), number, 8192) is None
    memory = hosts.open_memory(os.getpid(), number, 4096)
    assert memory is not None
    os.close(number)


def test_only_memory_of_ours_is_opened(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(check_other_file, str(tmp_path), world_size=1)


def check_many_sizes(rank: int) -> tuple[int, int]:
    torch.manual_seed(0)
    widths = [8 * (1 + number) for number in range(24)]
    model = nn.Sequential(*[nn.Linear(a, b) for a, b in zip([8, *widths], widths, strict=False)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    for number in range(3):
        step(model, batch(rank, number))
    largest = max(unit.full_bytes for unit in engine_of(model).units)
    return shared_of(model).blocks.nbytes, largest


def test_units_of_many_sizes_share_blocks(cluster: Cluster) -> None:
    for nbytes, largest in cluster.run(check_many_sizes):
        assert nbytes <= 10 * (largest + 4096)


class TwoDtypes(nn.Module):
    """One unit of two dtypes, the first of which is written to in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8, max_norm=0.5)
        self.linear = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(self.embedding(tokens).double())
        return result


def check_assigned_while_full(rank: int) -> None:
    """Loading with assign=True makes new buffers; those that were full give their memory back."""
    model = make_stack(count=3)
    step(model, batch(rank))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    made = []
    for _ in range(6):
        for block in model.blocks:
            block.unshard()
        model.load_state_dict(state, assign=True)
        made.append(shared_of(model).blocks.nbytes)
        assert shared_of(model).blocks.free_bytes == made[-1]
        assert engine_of(model).pool.live_bytes == 0
    assert made[1] == made[-1]
    step(model, batch(rank))


def test_loading_by_assignment_into_full_units(cluster: Cluster) -> None:
    cluster.run(check_assigned_while_full)


def check_two_dtypes(rank: int) -> None:
    torch.manual_seed(0)
    model = fully_shard(TwoDtypes(), reshard_after_forward=True)
    for _ in range(3):
        with pytest.raises(MisuseError, match="written to"):
            model(torch.arange(10)).sum().backward()
        assert not any(flow.buffers.is_full for flow in engine_of(model).units[0].flows)
        assert engine_of(model).pool.live_bytes == 0


def test_all_memory_of_a_unit_is_given_back_if_a_part_was_written_to(cluster: Cluster) -> None:
    cluster.run(check_two_dtypes)


def check_background(rank: int) -> None:
    """What is summed on a host leaves for the others before it is waited for."""
    with mock.patch.object(hosts, "host_identity", return_value=f"host {rank // 2}"):
        model = make_stack(count=3, transport="shm")
        step(model, batch(rank))
    transport, engine = shared_of(model), engine_of(model)
    begun: list[bool] = []

    def watch(unit: Any, act: Any) -> None:
        if act.__name__ == "wait_reduce":
            dist.barrier()  # every rank has written
            transport._advance()
            begun.append(all(pending._between is not None for pending in unit._reducing))
        act(unit)

    engine.watch = watch
    step(model, batch(rank))
    assert begun == [True] * 3


def test_reductions_go_on_between_hosts_before_they_are_waited_for(cluster: Cluster) -> None:
    cluster.run(check_background, world_size=4)


def check_other_order(rank: int) -> None:
    model = make_stack(count=4)
    step(model, batch(rank))
    if rank == 1:
        model.order = [3, 2, 1, 0]
    step(model, batch(rank))


def test_ranks_in_another_order_are_refused_not_mixed(cluster: Cluster) -> None:
    """All units are of one size, so the ranks meet in the same block with the rows of different units."""
    cluster.run(check_other_order, expect=CommunicationError, match="another command|another way", group_timeout=2.0)


def lose_a_rank(rank: int, victim: int, moment: int) -> None:
    model = make_stack(count=4, width=64)
    step(model, batch(rank, width=64))
    engine = engine_of(model)
    commands = 0

    def watch(unit: Any, act: Any) -> None:
        nonlocal commands
        commands += 1
        if rank == victim and commands == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        act(unit)

    engine.watch = watch
    with pytest.raises(PeerLostError, match=rf"rank(\(s\))? \[?{victim}"):
        step(model, batch(rank, width=64))
    assert "memfd:fullshard" in Path("/proc/self/maps").read_text()


def check_killed(rank: int, victim: int, moment: int) -> str:
    lose_a_rank(rank, victim, moment)
    gc.collect()
    return Path("/proc/self/maps").read_text()


@pytest.mark.parametrize(("victim", "moment"), [(0, 3), (1, 1), (1, 14), (2, 22)])
def test_a_killed_rank_is_noticed_and_nothing_is_left(cluster: Cluster, victim: int, moment: int) -> None:
    """`kill -9` of any rank: the others end with its number, no file stays, and memory goes with the model."""
    before = sorted(path.name for path in Path("/dev/shm").iterdir())
    outcomes = cluster.run_outcomes(check_killed, victim, moment, world_size=3)
    assert outcomes[victim].kind == "died"
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome.kind == "value", outcome.details
            assert "memfd:fullshard" not in outcome.value
    assert not [name for name in os.listdir("/dev/shm") if name not in before and "fullshard" in name]  # noqa: PTH208


def check_forward_failed(rank: int) -> None:
    """A forward that raised on every rank leaves blocks in a state that the next step can use."""
    model = make_stack(count=4)
    for number in range(4):
        model.fail_at = number
        with pytest.raises(ValueError, match="bad batch"):
            step(model, batch(rank))
    model.fail_at = None
    other = make_stack(count=4, transport="direct")
    assert step(model, batch(rank)) == step(other, batch(rank))
    assert not any(flow.buffers.is_full for unit in engine_of(model).units for flow in unit.flows)


def test_a_step_after_failed_ones_works(cluster: Cluster) -> None:
    cluster.run(check_forward_failed, world_size=3)


def check_lazy(rank: int) -> None:
    """A kept unit keeps its block; the others go round."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    for number, layer in enumerate(model):
        fully_shard(layer, reshard_after_forward=number % 2 == 0)
    fully_shard(model)
    plain = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    plain.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    for number in range(3):
        step(model, batch(0, number))
        step(plain, batch(0, number))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def test_kept_and_freed_units_side_by_side(cluster: Cluster) -> None:
    cluster.run(check_lazy, world_size=2)


class Renormalizing(nn.Module):
    """Writes to its weight in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8, max_norm=0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.embedding(tokens)
        return result


def check_writes(rank: int) -> None:
    torch.manual_seed(0)
    tokens = torch.arange(10)
    for transport in ("direct", "shm"):
        torch.manual_seed(0)
        model = Renormalizing()
        fully_shard(model.embedding, transport=transport)
        fully_shard(model, transport=transport)
        if transport == "direct":
            model(tokens).sum().backward()
            continue
        with pytest.raises(MisuseError, match=r"\['weight'\] were written to.*transport='direct'"):
            model(tokens).sum().backward()
        with pytest.raises(MisuseError, match="written to"):  # and again: nothing was kept from the failed step
            model(tokens).sum().backward()


def test_writing_to_what_other_ranks_compute_with_is_refused(cluster: Cluster) -> None:
    cluster.run(check_writes)
