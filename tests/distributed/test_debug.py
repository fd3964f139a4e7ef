"""Debug mode: ranks that are about to do different things raise the same error, before anything is mixed up."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from reference import assert_at_rest, full
from stack import batch, engine_of, make_stack
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cluster import Cluster
from fullshard import clip_grad_norm_, fully_shard
from fullshard.errors import CommunicationError, PeerTimeoutError, RanksDisagreeError
from fullshard.runtime.failures import debug as debugging


def make_debugged(**options: Any) -> Any:
    model = make_stack(**options)
    model.set_debug(True)
    model(batch(0)).sum().backward()
    model.zero_grad()
    return model


def check_swapped(rank: int, transport: str) -> str:
    model = make_debugged(transport=transport)
    if rank == 1:
        model.order = [0, 2, 1, 3]
    with pytest.raises(RanksDisagreeError) as caught:
        model(batch(rank)).sum().backward()
    model.zero_grad()
    model.order = [0, 1, 2, 3]
    model(batch(rank)).sum().backward()  # the next step works, and nothing was left behind
    assert_at_rest(model)
    return str(caught.value)


@pytest.mark.parametrize("transport", ["direct", "torch"])
def test_blocks_in_another_order(cluster: Cluster, transport: str) -> None:
    """B28: of equal size, so that nothing else would notice where the backend matches collectives by their order."""
    texts = cluster.run(check_swapped, transport)
    assert len(set(texts)) == 1
    assert texts[0].startswith("ranks 0 and 1 do not run the same commands: rank 0 is about to gather unit 'blocks."), (
        texts[0]
    )
    assert ", rank 1 to gather unit 'blocks." in texts[0]
    assert "of step 2). Ranks of one group must run their units in the same order" in texts[0]


def check_silent(rank: int) -> float:
    """The same swap without debug mode on a transport that has no tags."""
    model, reference = make_stack(transport="torch", count=2), make_stack(count=2)
    if rank == 1:
        model.order = [1, 0]
    for m in (model, reference):
        m.set_prefetch_bytes(0)
    with torch.no_grad():
        return float((model(batch(0)) - reference(batch(0))).abs().max())


def test_swap_without_debug_mode_is_silent_where_messages_have_no_tags(cluster: Cluster) -> None:
    """B28: why there is a debug mode. If this fails, the documentation can promise more."""
    assert max(cluster.run(check_silent)) > 1e-3


def check_skipped(rank: int) -> str:
    model = make_debugged()
    if rank == 1:
        model.order = [0, 1, 3]
    with pytest.raises(RanksDisagreeError) as caught:
        model(batch(rank)).sum().backward()
    return str(caught.value)


def test_block_that_one_rank_skips(cluster: Cluster) -> None:
    """B27."""
    texts = cluster.run(check_skipped, world_size=3)
    assert len(set(texts)) == 1
    assert "ranks 0 and 1 do not run the same commands" in texts[0]
    assert "'blocks.2'" in texts[0]


def check_frozen_later(rank: int) -> str:
    model = make_debugged()
    if rank == 1:
        model.blocks[1].weight.requires_grad_(False)
    with pytest.raises(RanksDisagreeError) as caught:
        model(batch(rank)).sum().backward()
    return str(caught.value)


def test_parameter_that_one_rank_freezes_between_steps(cluster: Cluster) -> None:
    """The same command, with another number of bytes."""
    first, second = cluster.run(check_frozen_later)
    assert first == second
    assert "rank 0 is about to reduce unit 'blocks.1' (" in first
    assert "rank 1 to reduce unit 'blocks.1' (" in first


def check_absent(rank: int) -> str:
    model = make_debugged()
    if rank == 1:
        _wait_for_rank_0()
        return ""
    try:
        model(batch(rank))
    except PeerTimeoutError as error:
        return str(error)
    finally:
        _store().set("done", "")
    return "no error"


def _store() -> Any:
    return torch.distributed.distributed_c10d._get_default_store()


def _wait_for_rank_0() -> None:
    _store().wait(["done"])


def test_rank_without_any_command(cluster: Cluster) -> None:
    """B27: named within the time limit."""
    text, _ = cluster.run(check_absent, group_timeout=2.0)
    assert text.startswith("comparison before gather unit '(root)' (")
    assert "command 1 of step 2) of unit '(root)': rank 0 waited for rank(s) [1]" in text
    assert "rank 1 posted nothing" in text


def check_same_numbers(rank: int, replicas: int) -> None:
    mesh = init_device_mesh("cpu", (replicas, 4 // replicas), mesh_dim_names=("r", "s"))
    mesh = mesh if replicas > 1 else mesh["s"]
    models = [make_stack(mesh=mesh, reshard_after_forward=r) for r in (True, True, 2 if replicas == 1 else True)]
    for model in models[1:]:
        model.set_debug(True)
    for step in range(3):
        for model in models:
            model(batch(rank, step)).sum().backward()
    for ours, debugged, shrunk in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(full(ours.grad), full(debugged.grad))
        assert torch.equal(full(ours.grad), full(shrunk.grad))
    assert list(engine_of(models[0]).log) == list(engine_of(models[1]).log)
    models[1].set_debug(False)
    models[1](batch(rank)).sum().backward()


@pytest.mark.parametrize("replicas", [1, 2])
def test_debug_mode_changes_nothing_else(cluster: Cluster, replicas: int) -> None:
    cluster.run(check_same_numbers, replicas, world_size=4)


def check_environment(rank: int) -> None:
    os.environ["FULLSHARD_DEBUG"] = "1"
    model = make_stack()
    model.order = [0, 1, 2, 3] if rank == 0 else [1, 0, 2, 3]
    with pytest.raises(RanksDisagreeError, match="do not run the same commands"):
        model(batch(rank))


def test_debug_mode_by_environment(cluster: Cluster) -> None:
    cluster.run(check_environment)


def check_one_sided(rank: int) -> None:
    model = make_stack()
    model.set_debug(rank == 0)
    model(batch(rank))


def test_debug_mode_on_one_rank_only(cluster: Cluster) -> None:
    cluster.run(check_one_sided, expect=RanksDisagreeError, match="debug True.*debug False")


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a_rather_long_name_for_a_module_that_holds_one_layer = nn.ModuleDict({"x" * 200: nn.Linear(4, 4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.a_rather_long_name_for_a_module_that_holds_one_layer.values():
            x = layer(x)
        return x


def check_long_names(rank: int) -> None:
    model = Deep()
    for layer in model.a_rather_long_name_for_a_module_that_holds_one_layer.values():
        fully_shard(layer)
    fully_shard(model).set_debug(True)
    model(torch.ones(1, 4)).sum().backward()


def test_names_of_any_length(cluster: Cluster) -> None:
    cluster.run(check_long_names)


def test_errors_of_one_tree() -> None:
    assert not issubclass(RanksDisagreeError, CommunicationError), "the process group is still good after it"


def check_nan(rank: int, debug: bool) -> tuple[str, list[str]]:
    model = make_stack(count=4)
    model.set_debug(debug)
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(debugging._LOG, "warning", lambda text, *args: said.append(text % args))
        for step in range(2):
            if step == 1 and rank == 1:
                model.blocks[2].register_full_backward_pre_hook(lambda *_: (torch.full((3, 8), torch.nan),))
            model.zero_grad()
            model(batch(rank, step)).sum().backward()
    with pytest.raises(RuntimeError) as caught:
        clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    assert clip_grad_norm_(model, 1.0).isnan()
    return str(caught.value), said


@pytest.mark.parametrize("debug", [False, True])
def test_nan_on_one_rank(cluster: Cluster, debug: bool) -> None:
    """All ranks say which gradients, and in debug mode on which rank and with which parameter it began."""
    (text, said), (other, others) = cluster.run(check_nan, debug)
    assert text == other
    assert said == others
    assert "the gradient norm of order 2.0 is nan, so the gradients cannot be clipped" in text
    names = "'blocks.0.weight', 'blocks.0.bias', 'blocks.1.weight' and 3 more"
    where = "parameter 'weight' of unit 'blocks.2' on rank 1, in the backward of step 2"
    end = f"It began with {where}" if debug else "FULLSHARD_DEBUG=1 tells on which rank it begins"
    assert text.endswith(f"Not finite: the gradients of {names}. {end}"), text
    assert said == ([f"a gradient is not finite: {where}"] if debug else [])
