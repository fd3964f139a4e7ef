"""Bad input and failures: every rank gets the same clear error, within the time limit."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from reference import full
from stack import Stack, batch, make_stack
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

import fullshard
from cluster import Cluster
from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.errors import (
    AlreadyShardedError,
    MisuseError,
    PeerLostError,
    PeerTimeoutError,
    RanksDisagreeError,
    StaleOptimizerError,
    UninitializedError,
)
from models import by_name, run_case

# Arguments


def check_more_arguments(linear: nn.Linear) -> None:
    """What would otherwise be taken for something else: names for parameters, any object for True."""
    for wrong in ({"weight"}, {linear}, linear.weight, "weight", 3):
        with pytest.raises(TypeError, match="ignored_params must"):
            fully_shard(linear, ignored_params=wrong)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="holds a module twice"):
        fully_shard([linear, linear])
    with pytest.raises(TypeError, match="shard_placement_fn must be callable, got int"):
        fully_shard(linear, shard_placement_fn=1)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="average_ignored_grads must be a bool or None, got 'no'"):
        fully_shard(linear, average_ignored_grads="no")  # type: ignore[call-overload]
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    with pytest.raises(TypeError, match="must be a DataParallelMeshDims, got str"):
        fully_shard(linear, mesh=mesh, dp_mesh_dims="dp")  # type: ignore[call-overload]


def check_arguments(rank: int) -> None:
    linear = nn.Linear(4, 4)
    with pytest.raises(TypeError, match=r"takes an nn.Module or a list of them, got int"):
        fully_shard(3)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="empty list"):
        fully_shard([])
    with pytest.raises(ValueError, match="cannot wrap a ModuleList: it has no forward"):
        fully_shard(nn.ModuleList([linear]))
    with pytest.raises(ValueError, match="one module contains another"):
        fully_shard([outer := nn.Sequential(linear), outer[0]])
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh, got str"):
        fully_shard(linear, mesh="cpu")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="transport must be one of auto, shm, direct, torch, got 'nvlink'"):
        fully_shard(linear, transport="nvlink")
    with pytest.raises(ValueError, match=r"reshard_after_forward=3 must be a divisor .* 4: one of \[1, 2, 4\]"):
        fully_shard(linear, reshard_after_forward=3)
    with pytest.raises(TypeError, match="must be a bool, an int, None or 'auto', got 'yes'"):
        fully_shard(linear, reshard_after_forward="yes")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="mp_policy must be a MixedPrecisionPolicy, got dtype"):
        fully_shard(linear, mp_policy=torch.bfloat16)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"must be a floating dtype, got torch.int8"):
        MixedPrecisionPolicy(param_dtype=torch.int8)
    with pytest.raises(TypeError, match="offload_policy must be an OffloadPolicy, got bool"):
        fully_shard(linear, offload_policy=True)  # type: ignore[call-overload]
    with pytest.raises(
        TypeError, match="must return a Shard, a ShardPlacementResult or None, got 1 for parameter 'weight'"
    ):
        fully_shard(linear, shard_placement_fn=lambda _: 1)  # type: ignore[call-overload, return-value]
    with pytest.raises(ValueError, match="the dim must be from 0 to 1"):
        fully_shard(linear, shard_placement_fn=lambda _: Shard(5))
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
    with pytest.raises(ValueError, match=r"1-D \(shard\) or 2-D .*got 3 dims"):
        fully_shard(linear, mesh=mesh)
    with pytest.raises(ValueError, match="is complex"):
        fully_shard(nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.complex64))]))
    check_more_arguments(linear)
    assert type(linear) is nn.Linear, "a refused module must stay as it was"
    assert type(linear.weight) is nn.Parameter
    dist.barrier()  # a rank that left now would break the group that another one is still making


def test_bad_arguments(cluster: Cluster) -> None:
    cluster.run(check_arguments, world_size=4)


def check_mesh_without_this_rank(rank: int) -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    if rank == 2:
        with pytest.raises(ValueError, match="rank 2 is not in the mesh"):
            fully_shard(nn.Linear(4, 4), mesh=mesh)
    dist.barrier()


def test_mesh_that_does_not_fit_the_world(cluster: Cluster) -> None:
    cluster.run(check_mesh_without_this_rank, world_size=3)


def check_no_group(rank: int) -> None:
    with pytest.raises(ValueError, match=r"start the script with torchrun, call torch\.distributed\.init_process"):
        fully_shard(nn.Linear(2, 2))
    # torch counts the attempt, and would name this worker's next group otherwise than its peers do.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()


def test_no_process_group(cluster: Cluster) -> None:
    cluster.run(check_no_group, init_group=False, world_size=1)


def check_twice(rank: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model[0])
    with pytest.raises(AlreadyShardedError, match=r"FSDPLinear is already sharded \(at .*test_misuse.py:\d+\)"):
        fully_shard(model[0])
    fully_shard(model)
    with pytest.raises(AlreadyShardedError, match="once a module, blocks first and the root last"):
        fully_shard(model)


def test_module_sharded_twice(cluster: Cluster) -> None:
    """B87."""
    cluster.run(check_twice)


def check_two_roots(rank: int) -> None:
    trunk = fully_shard(nn.Linear(4, 4))
    first, second = (fully_shard(nn.Sequential(nn.Linear(4, 4), trunk)) for _ in range(2))
    first(torch.ones(2, 4)).sum().backward()
    second(torch.ones(2, 4)).sum().backward()
    with pytest.raises(MisuseError, match=r"unit '1' is also in a model with another root, which ran after this one"):
        first(torch.ones(2, 4))
    second(torch.ones(2, 4)).sum().backward()


def test_a_unit_that_two_roots_share_runs_under_the_latest_one_only(cluster: Cluster) -> None:
    cluster.run(check_two_roots)


def check_torch_inside(rank: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    torch_fsdp.fully_shard(model[0])
    with pytest.raises(MisuseError, match=r"module '0' is sharded by torch.distributed.fsdp already"):
        fully_shard(model)
    assert type(model[1].weight) is nn.Parameter


def test_a_model_that_torchs_fsdp_has_sharded_is_refused(cluster: Cluster) -> None:
    cluster.run(check_torch_inside)


def check_stale_optimizer(rank: int) -> None:
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model(batch(rank)).sum().backward()
    with pytest.raises(StaleOptimizerError, match=r"'weight', which the model no longer uses.*after sharding"):
        optimizer.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_optimizer_made_before_sharding(cluster: Cluster) -> None:
    """B62."""
    cluster.run(check_stale_optimizer)


def check_optimizer_that_was_fine(rank: int) -> None:
    make_stack()  # from here on optimizers are watched
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch(0)).sum().backward()
    optimizer.step()
    fully_shard(model)
    model(batch(rank)).sum().backward()
    with pytest.raises(StaleOptimizerError):
        optimizer.step()


def test_optimizer_that_had_stepped_before_sharding(cluster: Cluster) -> None:
    """B62: it was checked and found right, and became wrong."""
    cluster.run(check_optimizer_that_was_fine)


def check_parameter_gone(rank: int, how: str, stepped: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    if stepped:
        model(torch.ones(1, 4)).sum().backward()
    weight = model[1].weight
    if how == "deleted":
        del model[1].weight
    elif how == "none":
        model[1].weight = None
    else:
        nn.utils.parametrize.register_parametrization(model[1], "weight", nn.Identity())
    for _ in range(2):
        with pytest.raises(
            MisuseError, match=r"parameter 'weight' .* no parameter 'weight' any more.*before fully_shard"
        ):
            model(torch.ones(1, 4))
    if how != "parametrized":
        model[1].weight = weight
        model(torch.ones(1, 4)).sum().backward()


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("how", ["deleted", "none", "parametrized"])
def test_parameter_that_is_gone_after_sharding(cluster: Cluster, how: str, stepped: bool) -> None:
    """Every rank raises the same before anything is sent; with the parameter back training goes on."""
    cluster.run(check_parameter_gone, how, stepped)


def check_ranks_disagree(rank: int, kind: str) -> None:
    width = 8 if kind != "shape" or rank == 0 else 12
    model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4))
    if kind == "dtype" and rank == 1:
        model[1].double()
    if kind == "frozen" and rank == 1:
        model[1].requires_grad_(False)
    if kind == "more" and rank == 1:
        model.append(nn.Linear(4, 4))
        fully_shard(model[2])
    if kind != "units" or rank == 0:
        fully_shard(model[0])
    fully_shard(model)
    model(torch.ones(1, 4))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "shape",
            r"ranks 0 and 1 do not train the same.*'1.weight' of unit '\(root\)', shape \(4, 8\).*\(4, 12\)",
        ),
        ("dtype", "float32.*float64"),
        ("frozen", "trainable.*frozen"),
        ("units", "unit .*with"),
        ("more", "unit .*with"),
    ],
)
def test_ranks_that_disagree_on_the_model(cluster: Cluster, kind: str, message: str) -> None:
    cluster.run(check_ranks_disagree, kind, expect=RanksDisagreeError, match=message)


# Tied weights


def check_tied(rank: int, how: str) -> None:
    torch.manual_seed(0)
    embedding, head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
    head.weight = embedding.weight
    reference = nn.Embedding(10, 4)
    reference.load_state_dict(embedding.state_dict())
    model = nn.Sequential(embedding, head)
    if how == "siblings":
        fully_shard(embedding)
        with pytest.raises(ValueError, match=r"'weight' is tied to 'weight'.*fully_shard\(\[a, b\]\)"):
            fully_shard(head)
        return
    if how == "group":
        fully_shard([embedding, head])
    if how == "inner":
        fully_shard(embedding)
    fully_shard(model)
    assert embedding.weight is head.weight
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(3):
        inputs = [torch.randint(10, (6,), generator=torch.Generator().manual_seed(r + 10 * step)) for r in range(4)]
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(inputs[rank]).square().sum().backward()
        world = dist.get_world_size()
        losses = [(reference(x) @ reference.weight.T).square().sum() for x in inputs[:world]]
        torch.stack(losses).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(full(embedding.weight.detach()), reference.weight.detach())
    assert embedding.weight is head.weight
    model.load_state_dict(model.state_dict())
    assert embedding.weight is head.weight
    assert len(list(model.parameters())) == 1


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("how", ["siblings", "group", "inner", "root"])
def test_tied_weights_train_every_row_or_raise(cluster: Cluster, how: str, world_size: int) -> None:
    """B01, B02."""
    cluster.run(check_tied, how, world_size=world_size)


# Meta device


def check_meta(rank: int, how: str) -> None:
    case = by_name("llama")
    torch.manual_seed(7)
    with torch.device("meta"):
        reference = case.build()
    reference.to_empty(device="cpu")
    _initialize(reference)
    torch.manual_seed(7)
    with torch.device("meta"):
        model = case.build()
    for unit in case.unit_modules(model):
        fully_shard(unit)
    fully_shard(model)
    with pytest.raises(UninitializedError, match=r"are on the meta device; call fullshard.materialize"):
        run_case(case, model, rank, 0, dtype=torch.float32)
    if how == "materialize":
        fullshard.materialize(model, init_fn=_initialize_one)
    else:
        model.to_empty(device="cpu")
        with pytest.raises(UninitializedError, match=r"materialized \(from the meta device.*and never given values"):
            run_case(case, model, rank, 0, dtype=torch.float32)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
            elif how == "reset_parameters":
                for name, parameter in module.named_parameters(recurse=False):
                    assert name == "weight"
                    nn.init.ones_(parameter)
        _fill_buffers(model)
    expected = reference.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(full(value), expected[name]), name
    largest = max(parameter.numel() for parameter in reference.parameters())
    assert all(p._local_tensor.numel() <= -(-largest // 2) for p in model.parameters())
    assert torch.equal(
        run_case(case, model, rank, 0, dtype=torch.float32), run_case(case, reference, rank, 0, dtype=torch.float32)
    )


def _initialize(model: nn.Module) -> None:
    for module in model.modules():
        _initialize_one(module)


def _initialize_one(module: nn.Module) -> None:
    """reset_parameters where there is one, ones for norms, and the buffers."""
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
    else:
        for parameter in module.parameters(recurse=False):
            nn.init.ones_(parameter)
    _fill_own_buffers(module)


def _fill_buffers(model: nn.Module) -> None:
    for module in model.modules():
        _fill_own_buffers(module)


def _fill_own_buffers(module: nn.Module) -> None:
    for buffer in module.buffers(recurse=False):
        with torch.no_grad():
            buffer.copy_(torch.arange(buffer.numel(), dtype=buffer.dtype).view_as(buffer) / 10)


@pytest.mark.parametrize("how", ["materialize", "reset_parameters"])
def test_meta_device_init_equals_the_unsharded_one(cluster: Cluster, how: str) -> None:
    """Shards only, and the same weights; parameters or buffers that nobody filled are an error (B75)."""
    cluster.run(check_meta, how)


def check_unfilled_buffer(rank: int) -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("inv_freq", torch.arange(4.0), persistent=False)
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x * self.inv_freq)

    with torch.device("meta"):
        model = Rotary()
    fully_shard(model)
    model.to_empty(device="cpu")
    model.linear.reset_parameters()
    with pytest.raises(UninitializedError, match=r"buffers 'inv_freq' were materialized .*never given values"):
        model(torch.ones(1, 4))
    with torch.no_grad():
        model.inv_freq.copy_(torch.arange(4.0))
    model(torch.ones(1, 4)).sum().backward()


def test_non_persistent_buffer_that_nobody_filled(cluster: Cluster) -> None:
    """B75."""
    cluster.run(check_unfilled_buffer)


# Peers


def check_dead_rank(rank: int, how: str) -> None:
    model = make_stack()
    model(batch(rank)).sum().backward()
    if rank == 2:
        if how == "forward":
            model.blocks[2].register_forward_pre_hook(lambda _m, _a: os._exit(1))
        else:
            model.blocks[2].register_full_backward_hook(lambda _m, _a, _b: os._exit(1))
    started = time.monotonic()
    try:
        for _ in range(2):
            model(batch(rank)).sum().backward()
    except (PeerLostError, PeerTimeoutError) as error:
        assert time.monotonic() - started < 15.0
        with pytest.raises(MisuseError, match="restart the job from its last checkpoint"):
            model(batch(rank))
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


@pytest.mark.parametrize("how", ["forward", "backward"])
def test_rank_that_dies_mid_step(cluster: Cluster, how: str) -> None:
    """B122: the others end within the limit with an error that names unit, command and the missing rank."""
    outcomes = cluster.run_outcomes(check_dead_rank, how, world_size=3, group_timeout=5.0)
    assert outcomes[2].kind == "died"
    for outcome in outcomes[:2]:
        text = outcome.details
        assert "PeerLostError" in text or "PeerTimeoutError" in text
        assert "of unit 'blocks." in text or "of unit '(root)'" in text
        assert "waited for rank(s) [2]" in text or "waited for rank(s) [" in text


def check_stopped_rank(rank: int) -> None:
    model = make_stack()
    model(batch(rank)).sum().backward()
    if rank == 1:
        return  # leaves the step without dying
    model(batch(rank))


def test_rank_that_does_not_take_part(cluster: Cluster) -> None:
    """B27: the error names the module and the rank that did not call it."""
    outcomes = cluster.run_outcomes(check_stopped_rank, group_timeout=2.0)
    assert outcomes[0].error_type in ("PeerTimeoutError", "PeerLostError")
    assert "gather of unit 'blocks.0': rank 0 waited for rank(s) [1]" in outcomes[0].details


def check_skipping_rank(rank: int, transport: str) -> None:
    model = make_stack(transport=transport)
    model(batch(rank)).sum().backward()
    if rank == 1:
        model.order = [0, 1, 3]
    model(batch(rank)).sum().backward()


@pytest.mark.parametrize(
    ("transport", "message"), [("direct", "waited for rank(s)"), ("shm", "is at another command than rank")]
)
def test_rank_that_skips_a_module(cluster: Cluster, transport: str, message: str) -> None:
    """B27, B28: units are told apart, so that a wrong order cannot mix up their rows."""
    outcomes = cluster.run_outcomes(check_skipping_rank, transport, group_timeout=2.0)
    assert all(outcome.kind == "error" for outcome in outcomes)
    assert any("blocks." in outcome.details and message in outcome.details for outcome in outcomes)
