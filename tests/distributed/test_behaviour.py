"""What a user sees and sets: evaluation, settings, state dicts, parameters and their gradients."""

from __future__ import annotations

import weakref

import pytest
import torch
from reference import assert_at_rest, full
from stack import Stack, batch, engine_of, make_stack
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cluster import Cluster
from fullshard import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    clip_grad_norm_,
    fully_shard,
)

# no_grad and inference


def check_evaluation(rank: int, mode: str) -> None:
    context = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}[mode]
    model, untouched = make_stack(), make_stack()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (model, untouched)]
    for step in range(4):
        with context():
            model(batch(rank, 100))
        for m, optimizer in zip((model, untouched), optimizers, strict=True):
            m(batch(rank, step)).sum().backward()
            if m is model:
                with context():
                    m(batch(rank, 100))
            optimizer.step()
            optimizer.zero_grad()
        plain = Stack()
        plain.load_state_dict({name: full(value) for name, value in model.state_dict().items()})
        with context():
            assert torch.equal(model(batch(rank, 100)), plain(batch(rank, 100))), "evaluation used stale parameters"
    for ours, theirs in zip(model.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(full(ours.detach()), full(theirs.detach()))


@pytest.mark.parametrize("mode", ["no_grad", "inference", "grad"])
def test_evaluation_never_changes_training(cluster: Cluster, mode: str) -> None:
    """B36, and a forward with gradients enabled whose backward never comes."""
    cluster.run(check_evaluation, mode)


def check_separate_roots(rank: int) -> None:
    models = [make_stack(reshard_after_forward=True), make_stack(reshard_after_forward=True)]
    with torch.no_grad():
        for model in models:
            model(batch(rank))
    for model in models:
        assert_at_rest(model)


def test_root_obeys_reshard_after_forward(cluster: Cluster) -> None:
    """B39."""
    cluster.run(check_separate_roots)


# Methods of FSDPModule


def check_unshard(rank: int) -> None:
    model = make_stack()
    want = full(model.blocks[0].weight.detach())
    block = model.blocks[0]
    block.unshard()
    assert torch.equal(block.weight, want)
    block.reshard()
    assert hasattr(block.weight, "placements")
    handle = model.blocks[2].unshard(async_op=True)
    assert handle is not None
    model.blocks[1].unshard(async_op=True)
    handle.wait()
    assert isinstance(model.blocks[2].weight, nn.Parameter)
    assert not hasattr(model.blocks[2].weight, "placements")
    model(batch(rank)).sum().backward()
    assert_at_rest(model)


def test_unshard_and_reshard(cluster: Cluster) -> None:
    cluster.run(check_unshard)


def check_settings(rank: int) -> None:
    model = make_stack()
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_forward(False)
    model(batch(rank))
    assert all(state.value == "kept" for state in engine_of(model).scheduler.states)
    model.reset_iter_state()
    assert_at_rest(model)
    model.set_reshard_after_forward(True)
    model.set_reshard_after_backward(False)
    model(batch(rank)).sum().backward()
    assert all(state.value == "kept" for state in engine_of(model).scheduler.states)
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    model.set_reshard_after_backward(True)
    model(batch(rank)).sum().backward()
    assert_at_rest(model)
    model.set_is_last_backward(False)
    model(batch(rank)).sum().backward()
    model.set_is_last_backward(True)
    model(batch(rank)).sum().backward()
    assert_at_rest(model)
    with pytest.raises(ValueError, match="must be a bool here"):
        model.set_reshard_after_forward(2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be a positive finite number"):
        model.set_gradient_divide_factor(0.0)
    with pytest.raises(ValueError, match="reduces_in_flight must be at least 1"):
        model.set_reduce_scatter_max_input_buffers(0)


def test_settings_of_a_sharded_module(cluster: Cluster) -> None:
    cluster.run(check_settings)


def check_state_dict(rank: int) -> None:
    model = make_stack()
    keys = list(Stack().state_dict())
    loss = model(batch(rank)).sum()  # the root would keep full parameters here
    state = model.state_dict()
    assert list(state) == keys
    assert all(hasattr(value, "placements") for value in state.values())
    loss.backward()
    copied = {name: value.clone() for name, value in state.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    model.load_state_dict(copied)
    for name, parameter in model.named_parameters():
        assert torch.equal(full(parameter.detach()), full(copied[name]))


def test_state_dict_is_sharded_in_every_state(cluster: Cluster) -> None:
    """B38."""
    cluster.run(check_state_dict)


def check_two_optimizers(rank: int) -> None:
    torch.manual_seed(0)
    reference = Stack()
    torch.manual_seed(0)
    model = fully_shard(Stack())
    optimizers = [
        (torch.optim.SGD(m.blocks[0].parameters(), lr=0.1), torch.optim.SGD(m.blocks[1:].parameters(), lr=0.1))
        for m in (model, reference)
    ]
    for step in range(3):
        for first, second in optimizers:
            first.zero_grad()
            if step == 1:
                second.zero_grad()
        model(batch(rank, step)).sum().backward()
        torch.stack([reference(batch(r, step)).sum() for r in range(2)]).mean().backward()
        for first, second in optimizers:
            first.step()
            second.step()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(full(ours.grad), theirs.grad)
            torch.testing.assert_close(full(ours.detach()), theirs.detach())


def test_gradients_cleared_for_some_parameters_of_a_unit(cluster: Cluster) -> None:
    """Two optimizers on one unit: what one has cleared must not come back with what the other accumulates."""
    cluster.run(check_two_optimizers)


def check_edit_by_hand(rank: int) -> None:
    model = make_stack(reshard_after_forward=False)
    with torch.no_grad():
        model(batch(rank))  # every unit stays full
        for parameter in model.parameters():
            parameter.mul_(0)
        assert model(batch(rank)).abs().sum().item() == 0.0


def test_in_place_edits_of_shards_are_seen_at_the_next_forward(cluster: Cluster) -> None:
    """B95."""
    cluster.run(check_edit_by_hand)


# What the user sees of parameters, and puts in their place


def check_parameters_are_sharded(rank: int) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(8, 8))
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(8, 8)))
    model(batch(rank))  # the root keeps its buffer for a backward
    assert all(hasattr(parameter, "placements") for parameter in model.parameters())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(3):
        loss = model(batch(rank, step)).sum()
        for optimizer in optimizers:
            optimizer.zero_grad()  # between forward and backward
        loss.backward()
        torch.stack([reference(batch(r, step)).sum() for r in range(2)]).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(full(ours.grad), theirs.grad)
            torch.testing.assert_close(full(ours.detach()), theirs.detach())


def test_parameters_are_sharded_in_every_state(cluster: Cluster) -> None:
    """B37, B38: an optimizer made after a forward, and zero_grad between forward and backward."""
    cluster.run(check_parameters_are_sharded)


def check_clip_of_kept_units(rank: int) -> None:
    norms = []
    for keep in (False, True):
        model = make_stack()
        model.set_reshard_after_backward(not keep)
        model(batch(rank)).sum().backward()
        norms.append(clip_grad_norm_(model, 0.1))
    assert norms[0] > 0.1
    assert torch.equal(norms[0], norms[1])


def test_clipping_sees_the_gradients_of_units_that_are_kept(cluster: Cluster) -> None:
    cluster.run(check_clip_of_kept_units)


def check_one_rank_looks(rank: int) -> None:
    model = make_stack()
    model.set_reshard_after_backward(False)
    for step in range(2):
        model(batch(rank, step)).sum().backward()
        if rank == 0:
            model.state_dict()
            other = nn.Linear(2, 2)
            other(torch.ones(1, 2)).sum().backward()
            torch.optim.SGD(other.parameters(), lr=0.1).step()


def test_what_one_rank_does_alone_changes_no_commands(cluster: Cluster) -> None:
    """A state dict, or an optimizer of another model, on one rank."""
    cluster.run(check_one_rank_looks, group_timeout=5.0)


def check_assign(rank: int, how: str) -> None:
    if how == "meta":
        with torch.device("meta"):
            model = Stack()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    else:
        model = make_stack()
        model(batch(rank))
    source = make_stack()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(1.0)
    state = {name: value.clone() for name, value in source.state_dict().items()}
    if how == "copy":
        model.load_state_dict(state)
    else:
        model.load_state_dict(state, assign=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = torch.optim.SGD(source.parameters(), lr=0.1)
    for m, each in ((model, optimizer), (source, expected)):
        m(batch(rank)).sum().backward()
        each.step()
    for (name, ours), theirs in zip(model.named_parameters(), source.parameters(), strict=True):
        assert torch.equal(full(ours.detach()), full(theirs.detach())), name


@pytest.mark.parametrize("how", ["copy", "assign", "meta"])
def test_load_state_dict_after_a_forward_and_with_assign(cluster: Cluster, how: str) -> None:
    """B80."""
    cluster.run(check_assign, how)


def check_conversion_below(rank: int) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    fully_shard(model)
    model(batch(rank)).sum().backward()
    model.zero_grad()
    model[0][0].double().float()  # a module below the sharded one
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0)
    assert model(batch(rank)).abs().sum().item() == 0.0
    with pytest.raises(
        ValueError, match=r"'0.0.weight' was replaced after sharding by one of shape \(8, 8\) with no shar"
    ):
        _replace_and_run(model, rank)


def _replace_and_run(model: nn.Module, rank: int) -> None:
    model[0][0].weight = nn.Parameter(torch.ones(8, 8))
    model(batch(rank))


def test_parameters_converted_or_replaced_below_the_sharded_module(cluster: Cluster) -> None:
    """B80: picked up, or an error that names them."""
    cluster.run(check_conversion_below)


def check_freed(rank: int) -> None:
    model = make_stack()
    model(batch(rank)).sum().backward()
    engine = weakref.ref(engine_of(model))
    del model
    assert engine() is None, "a cycle keeps the buffers until the garbage collector runs"


def test_model_is_freed_without_the_garbage_collector(cluster: Cluster) -> None:
    cluster.run(check_freed)


def check_gradient_hooks(rank: int) -> None:
    model = make_stack()
    seen = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    for _ in range(2):
        model(batch(rank)).sum().backward()
    assert seen == [True] * 16


def test_post_accumulate_hooks_of_sharded_parameters(cluster: Cluster) -> None:
    cluster.run(check_gradient_hooks)


def check_limits(rank: int) -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2))
    model = fully_shard(nn.Linear(8, 8), mesh=mesh)
    model(batch(rank))
    links = model.__dict__["_fullshard"].unit.links
    return [links.shard.limit.total_seconds(), links.replicate.limit.total_seconds()]


def test_time_limit_of_the_job_holds_for_the_groups_of_a_mesh(cluster: Cluster) -> None:
    """torch makes the groups of a mesh with half an hour."""
    assert cluster.run(check_limits, world_size=4, group_timeout=7.0) == [[7.0, 7.0]] * 4


def check_offload_policies(rank: int) -> None:
    for policy in (OffloadPolicy(), CPUOffloadPolicy()):  # on a CPU mesh shards are in host memory anyway
        model = fully_shard(nn.Linear(8, 8), offload_policy=policy)
        model(batch(rank)).sum().backward()
        assert model.weight.grad is not None


def test_offload_policies_on_cpu(cluster: Cluster) -> None:
    cluster.run(check_offload_policies)
