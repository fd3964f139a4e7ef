"""What a wrapped module looks like: names, attributes, state dicts, and the methods of the wrapper."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fullshard
import fullshard.api
import fullshard.fully_sharded_data_parallel
import fullshard.wrap
from cluster import Cluster
from fullshard import (
    FSDP,
    BackwardPrefetch,
    CPUOffload,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from fullshard.core.lifecycle import Op
from fullshard.errors import AlreadyShardedError, MisuseError
from fullshard.runtime.module import unit_of
from fullshard.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from fullshard.wrapper.arguments import Arguments
from models import by_name, make_model
from networks import Blocks, Residual


def blocks() -> FSDP:
    torch.manual_seed(0)
    return FSDP(Blocks(), auto_wrap_policy=ModuleWrapPolicy({Residual}))


def batch(rank: int) -> torch.Tensor:
    return torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(rank))


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def test_constructor_arguments_are_torchs() -> None:
    ours = list(inspect.signature(FullyShardedDataParallel.__init__).parameters.values())
    theirs = list(inspect.signature(torch_fsdp.FullyShardedDataParallel.__init__).parameters.values())
    assert [each.name for each in ours[: len(theirs)]] == [each.name for each in theirs]
    for mine, other in zip(ours, theirs, strict=False):
        assert getattr(mine.default, "name", mine.default) == getattr(other.default, "name", other.default), mine.name
    assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in ours[len(theirs) :])


def test_settings_have_torchs_fields_and_defaults() -> None:
    for name in torch_fsdp.__all__:
        theirs, ours = getattr(torch_fsdp, name), getattr(fullshard, name, None)
        if ours is None or not hasattr(theirs, "__dataclass_fields__") or name.endswith("Policy"):
            continue
        if name == "StateDictSettings":
            continue  # ours has defaults
        if name == "DataParallelMeshDims":
            continue
        made, other = ours(), theirs()
        assert {field: repr(getattr(made, field)) for field in theirs.__dataclass_fields__} == {
            field: repr(getattr(other, field)) for field in theirs.__dataclass_fields__
        }, name
    for name in ("ShardingStrategy", "BackwardPrefetch", "StateDictType", "OptimStateKeyType"):
        assert set(getattr(torch_fsdp, name).__members__) <= set(getattr(fullshard, name).__members__)


def test_modules_hold_the_names_that_torchs_do() -> None:
    for ours, theirs in (
        (fullshard.wrap, "torch.distributed.fsdp.wrap"),
        (fullshard.api, "torch.distributed.fsdp.api"),
    ):
        module = __import__(theirs, fromlist=["__all__"])
        assert set(module.__all__) <= set(ours.__all__)
    assert fullshard.fully_sharded_data_parallel.FullyShardedDataParallel is FSDP is FullyShardedDataParallel


def check_snippet(rank: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    with pytest.warns(UserWarning, match="whole model is one unit"):
        model = FSDP(
            model,
            sharding_strategy=ShardingStrategy.FULL_SHARD,
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            auto_wrap_policy=size_based_auto_wrap_policy,
        )
    optimizer = torch.optim.AdamW(model.parameters())
    output = model(torch.ones(2, 8))
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    optimizer.step()


def test_the_snippet_of_the_readme_runs_as_it_stands(cluster: Cluster) -> None:
    cluster.run(check_snippet)


def check_names(rank: int) -> None:
    plain, wrapped = Blocks(), blocks()
    outer = nn.Sequential(wrapped)
    for ours, prefix in ((wrapped, ""), (outer, "0.")):
        assert [prefix + name for name, _ in plain.named_parameters()] == [name for name, _ in ours.named_parameters()]
        assert [prefix + name for name in plain.state_dict()] == list(ours.state_dict())
        assert not any("_fsdp_wrapped_module" in name for name, _ in ours.named_modules())
        assert not any("_fsdp_wrapped_module" in name for name in ours.state_dict()._metadata)
    assert set(plain.state_dict()._metadata) == set(wrapped.state_dict()._metadata)
    assert wrapped.get_parameter("blocks.0.up.weight") is dict(wrapped.named_parameters())["blocks.0.up.weight"]
    assert isinstance(wrapped.blocks[0], FSDP)
    assert isinstance(wrapped.blocks[0].module, Residual)
    assert "_fsdp_wrapped_module" in dict(wrapped.named_children())
    assert isinstance(FSDP(nn.Sequential(nn.Linear(2, 2)))[0], nn.Linear)
    assert "FullyShardedDataParallel(" in repr(wrapped)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = wrapped.nothing_like_it


def test_no_name_shows_the_wrapper(cluster: Cluster) -> None:
    cluster.run(check_names)


def check_state_dicts(rank: int) -> None:
    """Both ways between the wrapped and the plain module, also from a dict with wrappers in its names."""
    source = blocks()
    saved = source.state_dict()
    plain = Blocks()
    plain.load_state_dict({name: full(value) for name, value in saved.items()})
    target = blocks()
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.zero_()
    hidden = {
        f"_fsdp_wrapped_module.{name}".replace("blocks.0.", "blocks.0._fsdp_wrapped_module."): value
        for name, value in saved.items()
    }
    for each in (saved, hidden):
        target.load_state_dict(each)
        torch.testing.assert_close(target(batch(rank)), plain(batch(rank)))
        with torch.no_grad():
            for parameter in target.parameters():
                parameter.zero_()
    nn.Sequential(target).load_state_dict({f"0.{name}": value for name, value in saved.items()})
    torch.testing.assert_close(target(batch(rank)), plain(batch(rank)))
    broken = dict(saved)
    broken["blocks.0.extra"] = broken.pop("blocks.0.up.weight")
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "blocks.0.up.weight"') as caught:
        target.load_state_dict(broken)
    assert "_fsdp_wrapped_module" not in str(caught.value)
    incompatible = target.load_state_dict(broken, strict=False)
    assert incompatible.missing_keys == ["blocks.0.up.weight"]
    assert incompatible.unexpected_keys == ["blocks.0.extra"]


def test_state_dicts_load_both_ways(cluster: Cluster) -> None:
    cluster.run(check_state_dicts)


def check_roots(rank: int) -> None:
    model = blocks()
    assert FSDP.fsdp_modules(model) == [model, *model.blocks]
    assert FSDP.fsdp_modules(nn.Sequential(model, blocks()), root_only=True)[0] is model
    assert len(FSDP.fsdp_modules(nn.Sequential(model, blocks()), root_only=True)) == 2
    assert model.check_is_root()
    assert not any(block.check_is_root() for block in model.blocks)
    assert isinstance(model, FSDPModule)
    assert (model.rank, model.world_size, model.process_group) == (rank, dist.get_world_size(), dist.group.WORLD)
    assert model.sharding_strategy is ShardingStrategy.FULL_SHARD
    for method in (lambda each: each.no_sync().__enter__(), lambda each: each.clip_grad_norm_(1.0)):
        with pytest.raises(MisuseError, match="outermost"):
            method(model.blocks[0])


def test_the_root_is_the_outermost_wrapper(cluster: Cluster) -> None:
    cluster.run(check_roots)


def check_no_sync(rank: int) -> None:
    model, reference = blocks(), Blocks()
    reference.load_state_dict({name: full(value) for name, value in model.state_dict().items()})
    for each in range(dist.get_world_size()):
        for microbatch in range(3):
            (reference(batch(10 * microbatch + each)).square().sum() / dist.get_world_size()).backward()
    for microbatch in range(3):
        with model.no_sync() if microbatch < 2 else contextlib.nullcontext():
            loss = model(batch(10 * microbatch + rank)).square().sum()
            with pytest.raises(MisuseError, match="between steps"):
                inside(model)
            loss.backward()
        held = [parameter.grad is not None for parameter in model.parameters()]
        assert all(held) if microbatch == 2 else not any(held)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(full(parameter.grad), reference.get_parameter(name).grad)
    norm = model.clip_grad_norm_(0.5)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(full(parameter.grad), reference.get_parameter(name).grad)


def inside(model: FSDP) -> None:
    """Clip while the model's forward runs."""
    handle = model.blocks[1].module.register_forward_hook(lambda *_: model.clip_grad_norm_(1.0))
    try:
        model(torch.ones(2, 3, 4))
    finally:
        handle.remove()


def test_no_sync_holds_gradients_and_clipping_is_global(cluster: Cluster) -> None:
    cluster.run(check_no_sync)


def check_gathers_of_microbatches(rank: int, strategy: ShardingStrategy, gathers: list[int]) -> None:
    torch.manual_seed(0)
    model = FSDP(Blocks(), auto_wrap_policy=ModuleWrapPolicy({Residual}), sharding_strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        counts = []
        for microbatch in range(3):
            with model.no_sync() if microbatch < 2 else contextlib.nullcontext():
                loss = model(batch(10 * microbatch + rank)).square().sum()
                engine = unit_of(model).engine
                loss.backward()
            counts.append(sum(command.op is Op.GATHER for command in engine.log))
            engine.log.clear()
        optimizer.step()
        if step:
            assert counts == gathers


@pytest.mark.parametrize(
    ("strategy", "gathers"), [(ShardingStrategy.SHARD_GRAD_OP, [3, 0, 0]), (ShardingStrategy.FULL_SHARD, [4, 4, 4])]
)
def test_no_sync_keeps_what_forward_keeps(cluster: Cluster, strategy: ShardingStrategy, gathers: list[int]) -> None:
    cluster.run(check_gathers_of_microbatches, strategy, gathers)


def check_what_is_given(rank: int) -> None:
    layer = nn.BatchNorm1d(4, affine=False)
    mean = layer.running_mean
    halves = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    with pytest.warns(UserWarning, match="itself ignored"):
        wrapped = FSDP(layer, ignored_modules=[layer], mixed_precision=halves, device_id="cpu")
    assert wrapped.running_mean is mean
    assert mean.dtype == torch.float32

    model = blocks()
    optimizer = torch.optim.Adam(model.parameters())
    model(batch(rank)).square().sum().backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    named = FSDP.optim_state_dict(model, optimizer, {"state": before["state"]})
    assert set(named) == {"state"}
    loaded = FSDP.optim_state_dict_to_load(model, optimizer, named)
    assert set(loaded) == {"state"}
    optimizer.load_state_dict({**loaded, "param_groups": before["param_groups"]})
    for key, values in optimizer.state_dict()["state"].items():
        for kind, value in values.items():
            torch.testing.assert_close(full(value), full(before["state"][key][kind]), rtol=0, atol=0)


def check_replaced_before_summon(rank: int, ran: bool) -> None:
    model = blocks()
    if ran:
        model(batch(rank))
    layer = model.blocks[0].up
    layer.weight = nn.Parameter(torch.full_like(layer.weight, 2.0))
    with FSDP.summon_full_params(model):
        assert torch.equal(layer.weight, torch.full((6, 4), 2.0))
    assert torch.equal(full(layer.weight), torch.full((6, 4), 2.0))


@pytest.mark.parametrize("ran", [False, True])
def test_summon_shows_parameters_that_replaced_others(cluster: Cluster, ran: bool) -> None:
    cluster.run(check_replaced_before_summon, ran)


def check_wrapped_inside_ignored(rank: int) -> None:
    model = Blocks()
    model.blocks[0].up = FSDP(model.blocks[0].up)
    left = model.blocks[0].down.weight
    model = FSDP(model, ignored_modules=[model.blocks[0]], average_ignored_grads=False)
    assert model.blocks[0].down.weight is left
    assert isinstance(model.blocks[0].up.weight, DTensor)
    model(batch(rank)).square().sum().backward()
    assert isinstance(model.blocks[0].up.weight.grad, DTensor)
    with pytest.raises(ValueError, match="cannot be ignored"):
        FSDP(nn.Sequential(model), ignored_modules=[model])


def test_wrapped_modules_inside_an_ignored_one_stay_sharded(cluster: Cluster) -> None:
    cluster.run(check_wrapped_inside_ignored)


def test_ignored_buffers_and_state_without_groups_stay_what_they_are(cluster: Cluster) -> None:
    cluster.run(check_what_is_given)


def check_no_sync_around_fully_shard(rank: int) -> None:
    """A unit made by `fully_shard` inside of the class, and a setting of the user that no_sync must give back."""
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    reference = copy.deepcopy(inner)
    fullshard.fully_shard(inner[0])
    model = FSDP(inner)
    inner[0].set_requires_all_reduce(False)
    before = [part.__dict__["_fullshard"].unit.policy for part in (model, inner[0])]
    with model.no_sync():
        model(batch(rank)).square().sum().backward()
    assert [part.__dict__["_fullshard"].unit.policy for part in (model, inner[0])] == before
    model(batch(10 + rank)).square().sum().backward()
    for seed in (0, 1, 10, 11):
        (reference(batch(seed)).square().sum() / 2).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(full(parameter.grad), reference.get_parameter(name).grad)


def test_no_sync_ends_for_units_of_fully_shard_too(cluster: Cluster) -> None:
    cluster.run(check_no_sync_around_fully_shard)


def check_load_while_running(rank: int) -> None:
    model = blocks()
    state = model.state_dict()
    handle = model.blocks[1].module.register_forward_hook(lambda *_: model.load_state_dict(state) and None)
    with pytest.raises(MisuseError, match=r"load_state_dict of unit .* was called while its forward runs"):
        model(batch(rank))
    handle.remove()
    model(batch(rank)).sum().backward()
    with pytest.raises(ValueError, match="max_norm must be at least 0, got nan"):
        model.clip_grad_norm_(float("nan"))


def test_loading_while_the_model_runs_is_refused(cluster: Cluster) -> None:
    cluster.run(check_load_while_running)


def check_apply(rank: int) -> None:
    model = blocks()
    seen: list[torch.Size] = []

    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            seen.append(module.weight.shape)
            with torch.no_grad():
                module.weight.copy_(torch.arange(module.weight.numel()).view_as(module.weight))

    assert model.apply(fill) is model
    plain = Blocks().apply(fill)
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]
    for name, parameter in model.named_parameters():
        if name.endswith("weight") and parameter.dim() == 2 and "norm" not in name:
            torch.testing.assert_close(full(parameter), plain.get_parameter(name))


def test_apply_sees_full_parameters_and_keeps_edits(cluster: Cluster) -> None:
    cluster.run(check_apply)


def check_copy_and_checkpointing(rank: int) -> None:
    model = blocks()
    copied = copy.deepcopy(model)
    apply_activation_checkpointing(copied, check_fn=lambda module: isinstance(module, Residual))
    for each in (model, copied):
        each(batch(rank)).square().sum().backward()
    assert isinstance(copied.blocks[0].module, Residual)
    for one, other in zip(model.parameters(), copied.parameters(), strict=True):
        assert one is not other
        torch.testing.assert_close(full(one.grad), full(other.grad))


def test_copies_and_checkpointing_after_wrapping_train_the_same(cluster: Cluster) -> None:
    cluster.run(check_copy_and_checkpointing)


def check_groups(rank: int) -> None:
    """Ranks given as process groups: one, the pair of a hybrid strategy, and hosts that are found."""
    mine = [rank % 2, rank % 2 + 2]
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3], [0, 1], [2, 3])]
    shard, replicate = groups[rank % 2], groups[2 + rank // 2]
    model = FSDP(nn.Linear(4, 4), process_group=shard)
    assert model.weight.device_mesh.mesh.tolist() == mine
    hybrid = FSDP(nn.Linear(4, 4), process_group=(shard, replicate), sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    assert hybrid.weight.device_mesh.mesh.tolist() == [[0, 2], [1, 3]]
    replicated = FSDP(nn.Linear(4, 4), process_group=shard, sharding_strategy=ShardingStrategy.NO_SHARD)
    for each, ranks in ((model, mine), (hybrid, range(4)), (replicated, mine)):
        each(torch.full((1, 4), float(rank))).sum().backward()
        torch.testing.assert_close(full(each.weight.grad), torch.full((4, 4), sum(ranks) / len(ranks)))
    with pytest.warns(UserWarning, match="one replica of 4 ranks"):
        hosts = FSDP(nn.Linear(4, 4), sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    assert hosts.weight.device_mesh.mesh.tolist() == [[0, 1, 2, 3]]


def test_process_groups_say_where_to_shard(cluster: Cluster) -> None:
    cluster.run(check_groups, world_size=4)


@pytest.mark.parametrize(
    ("device_id", "chosen"),
    [(1, [1]), ("cuda:2", [2]), (torch.device("cuda"), []), (None, []), ("cpu", []), ("xpu:1", [])],
)
def test_the_device_that_is_named_becomes_the_current_one(
    monkeypatch: pytest.MonkeyPatch, device_id: Any, chosen: list[int]
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "set_device_index", calls.append)
    Arguments(device_id=device_id).choose_device()
    assert calls == chosen


def check_misuse(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()))
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, "sharding_strategy must be", {"sharding_strategy": 3}),
        (TypeError, "mixed_precision must be", {"mixed_precision": torch.bfloat16}),
        (TypeError, "backward_prefetch must be", {"backward_prefetch": True}),
        (TypeError, "auto_wrap_policy must be callable", {"auto_wrap_policy": 3}),
        (TypeError, "use_orig_params must be a bool", {"use_orig_params": "yes"}),
        (ValueError, "takes a 1-D mesh", {"device_mesh": mesh}),
        (ValueError, "pass only one", {"device_mesh": mesh, "process_group": dist.group.WORLD}),
        (
            ValueError,
            "pair of process groups",
            {"process_group": dist.group.WORLD, "sharding_strategy": ShardingStrategy.HYBRID_SHARD},
        ),
        (ValueError, "names an accelerator", {"device_id": 0}),
        (TypeError, "device_mesh must be a DeviceMesh or None, got str", {"device_mesh": "cpu"}),
        (TypeError, "process_group must be a ProcessGroup, a pair of them or None, got 0", {"process_group": 0}),
        (TypeError, "must be an iterable", {"ignored_modules": 3}),
        (
            ValueError,
            "either modules or parameters",
            {"ignored_states": [nn.Linear(1, 1), nn.Parameter(torch.ones(1))]},
        ),
        (ValueError, "cannot be given together", {"ignored_states": [], "ignored_modules": []}),
    ]
    for error, text, options in cases:
        model = nn.Linear(4, 4)
        with pytest.raises(error, match=text):
            FSDP(model, **options)
        assert isinstance(model.weight, nn.Parameter)
        assert not hasattr(model.weight, "placements")
    with pytest.raises(TypeError, match=r"wraps an nn.Module"):
        FSDP(3)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="ModuleList has no forward"):
        FSDP(nn.ModuleList([nn.Linear(2, 2)]))
    wrapped = FSDP(nn.Linear(4, 4), cpu_offload=CPUOffload(True), backward_prefetch=BackwardPrefetch.BACKWARD_POST)
    assert wrapped.cpu_offload.offload_params
    assert wrapped.backward_prefetch is BackwardPrefetch.BACKWARD_POST
    assert (wrapped.forward_prefetch, wrapped.limit_all_gathers) == (False, True)
    with pytest.raises(AlreadyShardedError, match=r"already sharded \(at .*test_wrapper_class.py"):
        FSDP(wrapped)
    with pytest.raises(ValueError, match="'0' is wrapped already"):
        FSDP(nn.Sequential(wrapped), auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=1))


def test_wrong_arguments_are_refused_before_anything_changes(cluster: Cluster) -> None:
    """B87: a second wrap names the place of the first one."""
    cluster.run(check_misuse)


def check_frozen(rank: int) -> None:
    """B17: frozen and trainable parameters in one unit."""
    case = by_name("frozen")
    model = FSDP(make_model(case))
    model(*[value.float() for value in case.make_input(rank, 0)]).sum().backward()
    for parameter in model.parameters():
        assert (parameter.grad is not None) == parameter.requires_grad
    flows = model.__dict__["_fullshard"].unit.flows
    trainable = sum(parameter.to_local().numel() for parameter in model.parameters() if parameter.requires_grad)
    reduced = sum(flow.plan().numel for flow in flows)
    assert reduced < trainable + 64  # padding only


def test_frozen_parameters_in_a_unit_cost_no_gradient(cluster: Cluster) -> None:
    """B17."""
    cluster.run(check_frozen)


def check_foreign_settings(rank: int) -> None:
    """A library that was not told of the change hands over torch's own settings."""
    model = FSDP(
        Blocks(),
        sharding_strategy=torch_fsdp.ShardingStrategy.SHARD_GRAD_OP,  # type: ignore[arg-type]
        mixed_precision=torch_fsdp.MixedPrecision(param_dtype=torch.bfloat16),  # type: ignore[arg-type]
        cpu_offload=torch_fsdp.CPUOffload(),  # type: ignore[arg-type]
        backward_prefetch=torch_fsdp.BackwardPrefetch.BACKWARD_PRE,  # type: ignore[arg-type]
        auto_wrap_policy=torch_fsdp.wrap.ModuleWrapPolicy({Residual}),
    )
    assert model(batch(rank)).dtype == torch.bfloat16
    assert model.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
    assert len(FSDP.fsdp_modules(model)) == 3


def test_settings_of_torchs_classes_are_accepted(cluster: Cluster) -> None:
    cluster.run(check_foreign_settings)


def check_comm_hook(rank: int, strategy: str) -> None:
    """torch's default hooks give the gradients of no hook; one that does not communicate leaves each rank its own."""
    sharding = ShardingStrategy[strategy]
    whole = sharding is ShardingStrategy.NO_SHARD
    state = default_hooks.DefaultState(dist.group.WORLD)

    def keep_own(_state: object, gradient: torch.Tensor, output: torch.Tensor | None = None) -> None:
        if output is not None:
            output.copy_(gradient.chunk(dist.get_world_size())[rank])

    def wrapped() -> FSDP:
        torch.manual_seed(0)
        return FSDP(Blocks(), auto_wrap_policy=ModuleWrapPolicy({Residual}), sharding_strategy=sharding)

    plain, hooked, own = wrapped(), wrapped(), wrapped()
    hooked.register_comm_hook(state, default_hooks.allreduce_hook if whole else default_hooks.reduce_scatter_hook)
    own.register_comm_hook(None, keep_own)
    with pytest.raises(MisuseError, match="registered already"):
        hooked.register_comm_hook(state, default_hooks.allreduce_hook)
    alone = Blocks()
    alone.load_state_dict({name: full(value) for name, value in plain.state_dict().items()})
    for each in (plain, hooked, own, alone):
        each(batch(rank)).square().sum().backward()
    for (name, one), other, mine in zip(plain.named_parameters(), hooked.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(other.grad.to_local(), one.grad.to_local())
        rows = mine.grad.to_local()
        expected = alone.get_parameter(name).grad
        start = 0 if whole else rank * -(-expected.shape[0] // dist.get_world_size())
        torch.testing.assert_close(rows, expected[start : start + rows.shape[0]])


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_a_communication_hook_takes_the_place_of_the_reduction(cluster: Cluster, strategy: str) -> None:
    cluster.run(check_comm_hook, strategy)
