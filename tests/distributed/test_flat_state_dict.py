"""State dicts of `fullshard.optim.flat`: those of the per-parameter form, both ways, at any number of ranks."""

from __future__ import annotations

import io
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from reference import Setup, full, shard_case
from test_dcp import assert_same as assert_same_in_order
from test_flat_optimizer import Twins, assert_same, by_dim, odd, train
from test_optimizers import Odd, inputs, loss_of
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from cluster import Cluster
from fullshard import FSDP, optim
from models import by_name, make_model, run_case

AdamW = torch.optim.AdamW


def assert_same_tree(*states: dict[str, Any]) -> None:
    """Whatever the order in which optimizers made the states of their parameters."""
    one, other = ({**state, "state": dict(sorted(state["state"].items()))} for state in states)
    assert_same_in_order(one, other)


def plain_and_flat(model: nn.Module) -> list[torch.optim.Optimizer]:
    options: dict[str, Any] = {"lr": 0.01, "fused": True}
    return [AdamW(by_dim(model), **options), optim.flat(AdamW, by_dim(model), **options)]


def crossed(rank: int, how: str) -> None:
    """Each form takes the other's state after two steps, and both go on as before."""
    models = [odd(), odd()]
    optimizers = [plain_and_flat(model)[form] for form, model in enumerate(models)]
    for step in range(2):
        train(list(zip(models, optimizers, strict=True)), rank, step)
    assert_same_tree(*(optimizer.state_dict() for optimizer in optimizers))
    taken = []
    for form, model in enumerate(models):
        other = plain_and_flat(model)[1 - form]
        if how == "state_dict":
            other.load_state_dict(deepcopy(optimizers[form].state_dict()))
        elif how == "pickle":
            file = io.BytesIO()
            torch.save(optimizers[form].state_dict(), file)
            file.seek(0)
            other.load_state_dict(torch.load(file, weights_only=False))
        elif how == "tools":
            set_optimizer_state_dict(model, other, get_optimizer_state_dict(model, optimizers[form]))
        elif how == "full":
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            state = get_optimizer_state_dict(model, optimizers[form], options=options)
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_optimizer_state_dict(model, other, state, options=options)
        else:
            state = FSDP.full_optim_state_dict(model, optimizers[form], rank0_only=False)
            other.load_state_dict(FSDP.shard_full_optim_state_dict(state, model, optim=other))
        taken.append(other)
    for step in range(2, 4):
        train(list(zip(models, taken, strict=True)), rank, step)
        assert_same([(models[1], taken[1]), (models[0], taken[0])][::-1], f"{how}, step {step}")


@pytest.mark.parametrize("how", ["state_dict", "pickle", "tools", "full", "FSDP"])
def test_either_form_continues_from_the_state_of_the_other(cluster: Cluster, how: str) -> None:
    cluster.run(crossed, how)


def check_diverged(rank: int) -> None:
    """Numbers of steps that differ between parameters go into the state dict, and come out of it."""
    case = by_name("conditional")
    twins: Twins = []
    for form in range(2):
        model = shard_case(case, make_model(case, torch.float32), Setup(torch.float32))
        twins.append((model, plain_and_flat(model)[form]))
    for step in range(5):
        for model, optimizer in twins:
            run_case(case, model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same(twins, f"step {step}")
        if step == 2:
            left, right = (get_optimizer_state_dict(model, optimizer) for model, optimizer in twins)
            assert_same_tree(left, right)
            fresh = [plain_and_flat(model)[form] for form, (model, _) in enumerate(twins)]
            for (model, _), optimizer, state in zip(twins, fresh, (right, left), strict=True):
                set_optimizer_state_dict(model, optimizer, deepcopy(state))
            twins = [(model, optimizer) for (model, _), optimizer in zip(twins, fresh, strict=True)]


def test_parameters_with_other_numbers_of_steps(cluster: Cluster) -> None:
    cluster.run(check_diverged)


def save(rank: int, folder: str, form: int) -> list[torch.Tensor]:
    model = odd()
    optimizer = plain_and_flat(model)[form]
    for step in range(2):
        train_everywhere(model, optimizer, step)
    dcp.save({"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)
    train_everywhere(model, optimizer, 2)
    return [full(parameter.detach()) for parameter in model.parameters()]


def load(rank: int, folder: str, form: int) -> list[torch.Tensor]:
    model = odd()
    optimizer = plain_and_flat(model)[form]
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])
    train_everywhere(model, optimizer, 2)
    return [full(parameter.detach()) for parameter in model.parameters()]


def train_everywhere(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """The same batch on every rank, so that results do not depend on their number."""
    loss_of(model, inputs(0, step).float()).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(("saves", "loads"), [(0, 1), (1, 0)], ids=["into flat", "from flat"])
def test_checkpoint_of_one_form_loads_into_the_other_at_another_world_size(
    cluster: Cluster, tmp_path: Path, saves: int, loads: int
) -> None:
    wanted = cluster.run(save, str(tmp_path), saves, world_size=2)[0]
    got = cluster.run(load, str(tmp_path), loads, world_size=3)[0]
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def check_unsharded(rank: int) -> None:
    """Full state fits the plain model's optimizer."""
    model = odd()
    optimizer = plain_and_flat(model)[1]
    train_everywhere(model, optimizer, 0)
    options = StateDictOptions(full_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    torch.manual_seed(0)
    reference = Odd()
    reference.load_state_dict({name: full(value) for name, value in model.state_dict().items()})
    theirs = AdamW(by_dim(reference), lr=0.01)
    set_optimizer_state_dict(reference, theirs, deepcopy(state))  # torch takes the tensors themselves over
    for step in range(1, 3):
        train_everywhere(model, optimizer, step)
        train_everywhere(reference, theirs, step)
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(one.detach()), other.detach(), rtol=1e-6, atol=1e-6)


def test_full_state_fits_the_unsharded_model(cluster: Cluster) -> None:
    cluster.run(check_unsharded)


def check_real_steps(rank: int) -> None:
    """B64: the step that torch's tools take to make state does not count, and no state is a step too far."""
    models = [odd(), odd()]
    optimizers = [plain_and_flat(model)[form] for form, model in enumerate(models)]
    for model, optimizer in zip(models, optimizers, strict=True):
        state = get_optimizer_state_dict(model, optimizer)
        assert all(values["step"] == 0 for values in state["state"].values())
    train(list(zip(models, optimizers, strict=True)), rank, 0)
    assert_same(list(zip(models, optimizers, strict=True)), "after the tools")


def test_the_step_of_torchs_tools_does_not_count(cluster: Cluster) -> None:
    cluster.run(check_real_steps)


def check_plain_rows(rank: int) -> None:
    model = odd()
    optimizer = plain_and_flat(model)[1]
    train_everywhere(model, optimizer, 0)
    state = optimizer.state_dict()
    state["state"][0] = {name: full(value) for name, value in state["state"][0].items()}
    optimizer.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"'exp_avg' of the sharded parameter .* is a whole plain tensor"):
        optimizer.step()


def test_whole_tensors_where_shards_belong_are_refused(cluster: Cluster) -> None:
    cluster.run(check_plain_rows)
