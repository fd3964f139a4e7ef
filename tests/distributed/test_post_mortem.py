"""When communication fails: every rank says what each of them did last, within a short time."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stack import batch, engine_of, make_stack
from torch import nn

from cluster import Cluster
from fullshard import clip_grad_norm_, full_parameters, full_tensor
from fullshard.errors import CommunicationError, MisuseError, PeerLostError, PeerTimeoutError
from fullshard.runtime.collectives import postbox
from fullshard.runtime.failures import postmortem
from fullshard.runtime.whole.forms import Form
from fullshard.runtime.whole.module_state import write_module
from fullshard.runtime.whole.optim_state import write_optimizer

LIMIT_SECONDS = 2.0
NOTHING = "  rank {} posted nothing: its process has ended, it is stuck or busy outside of fullshard, or the network to"


def say_done() -> None:
    store_of_job().set(f"done/{dist.get_rank()}", "")


def stay_until_done(*ranks: int) -> None:
    """Stay alive, and take part in nothing, until these ranks are done."""
    store_of_job().wait([f"done/{rank}" for rank in ranks], timedelta(seconds=40))


def store_of_job() -> Any:
    return dist.distributed_c10d._get_default_store()


def run_failing(model: nn.Module, rank: int, steps: int = 2) -> str:
    """The text of the error that a rank ends with; every rank must end well before any usual time limit."""
    started = time.monotonic()
    text = ""
    try:
        for step in range(steps):
            model(batch(rank, step)).sum().backward()
            model.zero_grad()
    except CommunicationError as error:
        text = f"{type(error).__name__}: {error}"
        with pytest.raises(MisuseError, match=r"communication failed earlier \([^\n]*\); the process group"):
            model(batch(rank))  # the report is said once
    assert time.monotonic() - started < 25.0
    say_done()
    return text


@contextlib.contextmanager
def nobody_answers() -> Iterator[None]:
    """Words of others are waited for half a second, not two: there will be none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(postmortem, "WAIT_SECONDS", 0.5)
        yield


def fail(*_: Any) -> None:
    raise ValueError("bad sample")


def check_one_of_three(rank: int, where: str) -> str:
    model = make_stack()
    model(batch(rank)).sum().backward()
    model.zero_grad()
    if rank == 2 and where == "forward":
        model.blocks[2].register_forward_pre_hook(fail)
    if rank == 2 and where == "backward":
        model.blocks[2].register_full_backward_pre_hook(fail)
    if rank != 2:
        return run_failing(model, rank)
    with pytest.raises(ValueError, match="bad sample"):  # its own error is what a rank ends with
        model(batch(rank)).sum().backward()
    stay_until_done(0, 1)
    return ""


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_rank_that_raises_and_goes_on_elsewhere(cluster: Cluster, where: str) -> None:
    """B122: the others name rank 2, what they wait for, and what everybody did last."""
    texts = cluster.run(check_one_of_three, where, world_size=3, group_timeout=LIMIT_SECONDS)
    for text in texts[:2]:
        first, *rest = text.splitlines()
        assert first.startswith(("PeerLostError: ", "PeerTimeoutError: ")), text
        assert "waited for rank(s) [" in first, "the error itself comes first"
        assert "of unit 'blocks." in first
        assert rest[0] == "What each rank did last:"
        for other, line in enumerate(rest[1:3]):
            assert line.startswith(f"  rank {other}: step 2: "), text
            assert "of step 2)" in line
        if where == "forward":
            assert rest[3].startswith("  rank 2: step 2: "), text
            assert "its forward of unit 'blocks.2' raised ValueError: bad sample" in rest[3]
        else:
            assert "its backward raised; see that rank's error" in rest[3]


def check_another_way(rank: int) -> str:
    model = make_stack()
    for step in range(2):
        model(batch(rank, step)).sum().backward()
    if rank == 1:
        model.order = [0, 3, 1, 2]
    return run_failing(model, rank)


def test_ranks_that_go_different_ways(cluster: Cluster) -> None:
    """B27, B28: the first command in which they differ is named, the same on every rank."""
    texts = cluster.run(check_another_way, group_timeout=LIMIT_SECONDS)
    assert all(texts)
    found = {text.splitlines()[-1] for text in texts}
    assert len(found) == 1
    line = found.pop()
    assert line.startswith("First difference: rank 1 went on to gather unit 'blocks."), line
    assert " where rank 0 went on to gather unit 'blocks." in line
    assert line.endswith("of step 3).")


def check_alone(rank: int) -> str:
    model = make_stack()
    model(batch(rank)).sum().backward()
    if rank == 0:  # what the other rank never enters
        dist.all_reduce(torch.ones(1), async_op=True)
        stay_until_done(1)
        return ""
    with nobody_answers():
        return run_failing(model, rank, steps=1)


def test_call_on_one_rank_only(cluster: Cluster) -> None:
    """B111: a rank that left for a collective of its own is said to be busy elsewhere."""
    _, text = cluster.run(check_alone, group_timeout=LIMIT_SECONDS)
    assert "gather of unit 'blocks.0': rank 1 waited for rank(s) [0]" in text
    assert NOTHING.format(0) in text
    assert "rank 1: step 2: wait for the gather of unit 'blocks.0'" in text


def check_clipping_alone(rank: int) -> str:
    model = make_stack()
    model(batch(rank)).sum().backward()
    if rank == 1:
        stay_until_done(0)
        return ""
    with nobody_answers(), pytest.raises(CommunicationError) as caught:
        clip_grad_norm_(model, 1.0)
    say_done()
    return str(caught.value)


def test_clipping_on_one_rank_only(cluster: Cluster) -> None:
    text, _ = cluster.run(check_clipping_alone, group_timeout=LIMIT_SECONDS)
    assert text.startswith("sum of norms of unit '(all)': rank 0 waited for ranks [0, 1]")
    assert "rank 1 posted nothing" in text


def check_first_forward_alone(rank: int) -> str:
    model = make_stack()
    if rank == 1:
        stay_until_done(0)
        return ""
    with nobody_answers(), pytest.raises(PeerTimeoutError) as caught:
        model(batch(rank))
    say_done()
    return str(caught.value)


def test_first_forward_on_one_rank_only(cluster: Cluster) -> None:
    """Groups of a mesh have torch's limit of half an hour; the job's own counts all the same."""
    text, _ = cluster.run(check_first_forward_alone, group_timeout=LIMIT_SECONDS)
    assert text.startswith("comparison of the model of unit '(while building)': rank 0 waited for ranks [0, 1]")
    assert "  rank 0: its first forward, comparison of the model; PeerTimeoutError" in text
    assert text.splitlines()[-1].startswith("Look first at rank 1: stopped, stuck, busy")


class GoneStore:
    """Where the process that served it has died; or, with `hangs`, where it does not answer."""

    def __init__(self, hangs: bool) -> None:
        self.hangs = hangs

    def set(self, *_: str) -> None:
        if self.hangs:
            stay_until_done(0)
        raise RuntimeError("Connection reset by peer")


def check_without_store(rank: int, hangs: bool) -> str:
    model = make_stack()
    model(batch(rank)).sum().backward()
    if rank == 1:
        stay_until_done(0)
        return ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(postbox, "_store", lambda: GoneStore(hangs))
        return run_failing(model, rank)


@pytest.mark.parametrize("hangs", [False, True])
def test_store_that_is_gone_or_hangs(cluster: Cluster, hangs: bool) -> None:
    """The error comes all the same, within a bounded time, with this rank's own words."""
    text, _ = cluster.run(check_without_store, hangs, group_timeout=LIMIT_SECONDS)
    assert text.startswith("PeerTimeoutError: gather of unit 'blocks.0': rank 0 waited for rank(s) [1]")
    assert "  rank 0: step 2: wait for the gather of unit 'blocks.0'" in text
    assert "rank 1 posted nothing" in text


def check_overcome(rank: int) -> str:
    model = make_stack()
    model.fail_at = 1
    with pytest.raises(ValueError, match="bad batch"):
        model(batch(rank))
    model.fail_at = None
    model(batch(rank)).sum().backward()
    if rank == 1:
        stay_until_done(0)
        return ""
    with nobody_answers():
        return run_failing(model, rank)


def test_failure_that_was_overcome_is_not_told(cluster: Cluster) -> None:
    text, _ = cluster.run(check_overcome, group_timeout=LIMIT_SECONDS)
    assert "rank 1 posted nothing" in text


def check_no_cost(rank: int) -> None:
    model = make_stack()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(postbox, "_start", lambda _act: pytest.fail("nothing has failed"))
        for step in range(3):
            model(batch(rank, step)).sum().backward()
    assert engine_of(model).story.step == 3


def check_steps_told(rank: int) -> None:
    """Steps are told apart though their commands are the same objects, once they are replayed."""
    model = make_stack(count=2)
    for number in range(6):
        model(batch(rank, number)).sum().backward()
    story = engine_of(model).story
    told = story._told()
    per_step = {entry.step: sum(other.step == entry.step for other in told) for entry in told}
    assert sorted(per_step) == list(range(7 - len(per_step), 7))
    assert len(per_step) > 2
    assert len(set(list(per_step.values())[1:])) == 1  # of the oldest only the end may be left
    assert story.count == len(engine_of(model).log)


def test_equal_steps_are_told_apart(cluster: Cluster) -> None:
    cluster.run(check_steps_told)


def test_steps_that_go_well_post_nothing(cluster: Cluster) -> None:
    cluster.run(check_no_cost)


def check_peer_lost(rank: int) -> str:
    model = make_stack(transport="torch")
    model(batch(rank)).sum().backward()
    if rank == 1:
        os._exit(1)
    with pytest.raises(CommunicationError) as caught:
        model(batch(rank))
    assert isinstance(caught.value, PeerLostError)
    return str(caught.value)


def test_lost_peer_of_the_torch_transport(cluster: Cluster) -> None:
    outcomes = cluster.run_outcomes(check_peer_lost, group_timeout=LIMIT_SECONDS)
    assert "the connection is closed, that process has ended. Look at its error first." in outcomes[0].value
    assert "rank 1 posted nothing" in outcomes[0].value


def check_whole_alone(rank: int) -> dict[str, str]:
    model = make_stack()
    optimizer = torch.optim.Adam(model.parameters())
    model(batch(rank)).sum().backward()
    optimizer.step()
    texts: dict[str, str] = {}
    if rank == 1:
        stay_until_done(0)
        return texts
    for how, call in WHOLE.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(postmortem, "WAIT_SECONDS", 0.2)
            with pytest.raises(CommunicationError) as caught:
                call(model, optimizer)
        texts[how] = str(caught.value)
    say_done()
    return texts


WHOLE: dict[str, Callable[[nn.Module, torch.optim.Optimizer], object]] = {
    "full tensor": lambda model, _: full_tensor(next(model.parameters()), "blocks.0.weight"),
    "full parameters": lambda model, _: full_parameters(model).__enter__(),
    "full state dict": lambda model, _: write_module(model, model.state_dict(), "", Form()),
    "full optimizer state": lambda model, optimizer: write_optimizer(model, optimizer, Form()),
}


def test_whole_tensors_on_one_rank_only(cluster: Cluster) -> None:
    """B111: what all ranks must call together, one rank calls alone."""
    texts, _ = cluster.run(check_whole_alone, group_timeout=LIMIT_SECONDS)
    assert list(texts) == list(WHOLE)
    for how, text in texts.items():
        first, *rest = text.splitlines()
        assert first.startswith(f"{how} of unit 'blocks.0"), text
        assert "rank 0 waited for rank(s) [1] (" in first, text
        assert rest[0] == "What each rank did last:"
        assert rest[1].startswith("  rank 0: step 1: "), text
        assert rest[2].startswith("  rank 1 posted nothing"), text
