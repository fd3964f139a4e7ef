"""The worker pool keeps its promises: results and errors by rank, no hang, no state that leaks into the next call."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from cluster import Cluster, RankError


def _sum_of_ranks(rank: int, scale: float) -> float:
    value = torch.tensor([rank * scale])
    dist.all_reduce(value)
    return value.item()


def _rank_and_size(rank: int) -> tuple[int, int, int]:
    return rank, dist.get_rank(), dist.get_world_size()


def _fail_on(rank: int, failing: int) -> int:
    expected = 41
    if rank == failing:
        assert expected == rank
    return rank


def _die_on(rank: int, dying: int) -> None:
    if rank == dying:
        os._exit(3)
    dist.all_reduce(torch.ones(1))


def _die_as_rank_one() -> str:
    if multiprocessing.current_process().name == "fullshard-rank-1":
        os._exit(4)
    return "arrived"


class _DiesOnArrival:
    """An argument that ends the process of rank 1 while it is unpickled, before there is a process group."""

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return _die_as_rank_one, ()


def _take(rank: int, argument: object) -> object:
    return argument


def _peer_never_comes(rank: int) -> None:
    if rank == 0:
        dist.recv(torch.ones(1), src=1)
    else:
        threading.Event().wait()


def _warn(rank: int) -> None:
    warnings.warn("something is off", UserWarning, stacklevel=1)


def _raise_in_thread(rank: int) -> None:
    def target() -> None:
        raise KeyError("lost in a thread")

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()


def _raise_in_destructor(rank: int) -> None:
    class Bad:
        def __del__(self) -> None:
            raise KeyError("lost in a destructor")

    bad = Bad()
    bad.itself = bad  # type: ignore[attr-defined]


def _return_lambda(rank: int) -> object:
    return lambda: rank


def _random_numbers(rank: int) -> float:
    return torch.rand(()).item()


def _spoil_state(rank: int) -> None:
    os.environ["FULLSHARD_SPOILED"] = "1"
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    dist.destroy_process_group()


def _read_state(rank: int) -> tuple[str | None, torch.dtype, bool]:
    return os.environ.get("FULLSHARD_SPOILED"), torch.get_default_dtype(), torch.is_grad_enabled()


def _value_error(rank: int) -> None:
    raise ValueError(f"bad input on {rank}")


def _sharded_sum(rank: int) -> float:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(torch.arange(7.0), mesh, [Shard(0)]).sum().full_tensor().item()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_back_by_rank(cluster: Cluster, world_size: int) -> None:
    assert cluster.run(_rank_and_size, world_size=world_size) == [(r, r, world_size) for r in range(world_size)]


def test_collectives_work(cluster: Cluster) -> None:
    assert cluster.run(_sum_of_ranks, 2.0, world_size=3) == [6.0, 6.0, 6.0]


def test_failure_names_the_rank_and_shows_its_traceback(cluster: Cluster) -> None:
    with pytest.raises(RankError) as caught:
        cluster.run(_fail_on, 1)
    text = str(caught.value)
    assert "rank 1: AssertionError" in text
    assert "assert expected == rank" in text
    assert "expected = 41" in text
    assert "rank 0: returned a value" in text


def test_death_before_the_group_exists_leaves_the_pool_usable(cluster: Cluster) -> None:
    waiting, dead = cluster.run_outcomes(_take, _DiesOnArrival(), group_timeout=0.5)
    assert (waiting.kind, dead.kind, dead.exit_code) == ("error", "died", 4)
    assert cluster.run(_sum_of_ranks, 1.0) == [1.0, 1.0]


def test_dead_rank_is_reported_the_others_are_heard_and_the_next_call_works(cluster: Cluster) -> None:
    before = cluster.run(_rank_and_size) and cluster.process_ids()
    survivor, dead = cluster.run_outcomes(_die_on, 1)
    assert (dead.kind, dead.exit_code) == ("died", 3)
    assert survivor.kind == "error"
    assert survivor.error_type in {"RuntimeError", "DistBackendError", "DistNetworkError"}
    assert cluster.run(_sum_of_ranks, 1.0) == [1.0, 1.0]
    after = cluster.process_ids()
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_hang_is_bounded_and_shows_where_and_peers_wait_no_longer_than_the_group_timeout(cluster: Cluster) -> None:
    cluster.run(_rank_and_size)
    start = time.monotonic()
    waiting, hung = cluster.run_outcomes(_peer_never_comes, timeout=2.0, group_timeout=0.5)
    assert time.monotonic() - start < 10
    assert (waiting.kind, hung.kind) == ("error", "hung")
    assert "_peer_never_comes" in hung.details


def test_warning_in_a_rank_is_an_error(cluster: Cluster) -> None:
    cluster.run(_warn, expect=UserWarning, match="something is off")


@pytest.mark.parametrize("fn", [_raise_in_thread, _raise_in_destructor])
def test_error_that_python_only_prints_fails_the_call(cluster: Cluster, fn: object) -> None:
    cluster.run(fn, expect=AssertionError, match="lost in a")  # type: ignore[arg-type]


def test_expect_checks_every_rank(cluster: Cluster) -> None:
    assert cluster.run(_value_error, expect=ValueError) == ["bad input on 0", "bad input on 1"]
    with pytest.raises(RankError, match="does not match"):
        cluster.run(_value_error, expect=ValueError, match="on 0")
    with pytest.raises(RankError, match="not so on rank 0"):
        cluster.run(_fail_on, 1, expect=AssertionError)


def test_result_that_cannot_be_pickled_is_an_error(cluster: Cluster) -> None:
    with pytest.raises(RankError, match="cannot be pickled"):
        cluster.run(_return_lambda)


def test_seed_is_set_per_call_and_equal_on_all_ranks(cluster: Cluster) -> None:
    first, second = cluster.run(_random_numbers), cluster.run(_random_numbers)
    assert first == second
    assert first[0] == first[1]
    assert cluster.run(_random_numbers, seed=1) != first


def test_state_does_not_leak_into_the_next_call(cluster: Cluster) -> None:
    cluster.run(_spoil_state)
    assert cluster.run(_read_state) == [(None, torch.float32, True)] * 2


def test_meshes_of_different_sizes_follow_each_other(cluster: Cluster) -> None:
    for world_size in (2, 3, 1, 2):
        assert cluster.run(_sharded_sum, world_size=world_size) == [21.0] * world_size


def test_wrong_options_are_refused(cluster: Cluster) -> None:
    with pytest.raises(TypeError, match="unknown options"):
        cluster.run(_rank_and_size, worldsize=2)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="between 1 and 8"):
        cluster.run(_rank_and_size, world_size=9)


def test_call_is_cheap(cluster: Cluster) -> None:
    cluster.run(_rank_and_size)
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        cluster.run(_rank_and_size)
        seconds.append(time.perf_counter() - start)
    # The median is a few milliseconds; the bound only has to tell it from starting a process, on a busy machine too.
    assert sorted(seconds)[5] < 0.5
