"""Where the values of a wrapped module come from, what is left alone, and dtypes of buffers and of batch norm."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cluster import Cluster
from fullshard import FSDP, MixedPrecision, ShardingStrategy
from fullshard.errors import RanksDisagreeError, UninitializedError
from fullshard.runtime.values.sync import broadcast_module_states
from fullshard.wrap import ModuleWrapPolicy, always_wrap_policy
from models import by_name, make_model
from networks import Blocks, Residual, Tied, WithBuffers


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Everything(nn.Module):
    """Tied weights, blocks, and float and integer buffers, saved and not."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = Tied()
        self.buffers_ = WithBuffers()

    def forward(self, tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.tied(tokens).sum() + self.buffers_(x).sum()


def empty_without_init(module: nn.Module) -> None:
    """As in many scripts for ranks other than 0. NaN, so that what is not filled later cannot pass by luck."""
    module.to_empty(device="cpu", recurse=False)
    for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        if tensor.is_floating_point():
            tensor.data.fill_(torch.nan)


def check_sync(rank: int, strategy: str, how: str) -> None:
    """B74, B77, B78: rank 0's values everywhere at once, for nested units, tied weights and buffers."""
    torch.manual_seed(0)
    expected = Everything()
    torch.manual_seed(rank)
    with torch.device("meta" if rank and how != "seeds" else "cpu"):
        model = Everything()
    options: dict[str, Any] = {}
    if how == "init_fn" and rank:
        options["param_init_fn"] = empty_without_init
    if "HYBRID" in strategy:
        options["device_mesh"] = init_device_mesh("cpu", (2, 2))
    wrapped = FSDP(
        model,
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy({Residual, Tied}),
        sync_module_states=True,
        **options,
    )
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = dict(getattr(wrapped, kind)()), dict(getattr(expected, kind)())
        assert list(ours) == list(theirs)
        for name, tensor in ours.items():
            assert torch.equal(full(tensor), theirs[name]), (rank, name)
    assert wrapped.tied.head.weight is wrapped.tied.embedding.weight
    wrapped(torch.arange(4), torch.ones(2, 4)).backward()
    expected(torch.arange(4), torch.ones(2, 4)).backward()
    for name, parameter in wrapped.named_parameters():
        torch.testing.assert_close(full(parameter.grad), expected.get_parameter(name).grad)


@pytest.mark.parametrize(("strategy", "world_size"), [("FULL_SHARD", 2), ("NO_SHARD", 2), ("HYBRID_SHARD", 4)])
@pytest.mark.parametrize("how", ["seeds", "init_fn", "meta"])
def test_sync_module_states_gives_every_rank_the_values_of_rank_0(
    cluster: Cluster, strategy: str, world_size: int, how: str
) -> None:
    """B74, B77, B78."""
    cluster.run(check_sync, strategy, how, world_size=world_size)


def check_sync_errors(rank: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    different = nn.Linear(3, 2 + rank)
    with pytest.raises(RanksDisagreeError, match=r"Rank 0 has: 'weight', shape \(2, 3\).*Rank 1 has: .*\(3, 3\)"):
        broadcast_module_states(different, [group], torch.device("cpu"))
    with torch.device("meta" if rank == 0 else "cpu"):
        placeholder = nn.Linear(3, 2)
    with pytest.raises(UninitializedError, match=r"on rank 0, .*'weight'.* are on the meta device"):
        broadcast_module_states(placeholder, [group], torch.device("cpu"))


def test_a_rank_without_values_or_with_another_model_is_an_error_on_every_rank(cluster: Cluster) -> None:
    cluster.run(check_sync_errors)


def check_meta(rank: int, init_fn: bool) -> None:
    """Meta modules get memory and values unit by unit; a nested wrapper is not touched again by an outer `init_fn`."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))

    def addresses(module: nn.Module) -> list[int]:
        inside = [part for part in module.modules() if isinstance(part, FSDP)]
        return [parameter.to_local().data_ptr() for part in inside for parameter in part.parameters()]

    def constant(module: nn.Module) -> None:
        before = addresses(module)
        module.to_empty(device="cpu")  # with all that is in it: a careless one
        assert addresses(module) == before
        for number, parameter in enumerate(module.parameters(recurse=False)):
            nn.init.constant_(parameter, number + 1.0)

    torch.manual_seed(0)
    policy: Any = ModuleWrapPolicy({nn.LayerNorm}) if init_fn else always_wrap_policy
    options: dict[str, Any] = {"param_init_fn": constant} if init_fn else {}
    wrapped = FSDP(model, auto_wrap_policy=policy, **options)
    values = {name: full(parameter) for name, parameter in wrapped.named_parameters()}
    if init_fn:
        assert all(torch.equal(v, torch.full_like(v, 1.0 + name.endswith("bias"))) for name, v in values.items()), (
            values
        )
    else:
        assert values["1.1.weight"].eq(1).all()
        assert values["1.0.weight"].std() > 0
    wrapped(torch.ones(1, 4)).sum().backward()


@pytest.mark.parametrize("init_fn", [False, True])
def test_meta_modules_are_filled_before_they_are_sharded(cluster: Cluster, init_fn: bool) -> None:
    cluster.run(check_meta, init_fn)


def check_meta_errors(rank: int) -> None:
    with torch.device("meta"):
        scaled, linear = nn.Sequential(WithBuffers()), nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"modules \['0'\] hold .* no reset_parameters"):
        FSDP(scaled)
    with pytest.raises(UninitializedError, match=r"left .*'weight'.* on the meta device"):
        FSDP(linear, param_init_fn=lambda _: None)


def test_what_cannot_be_filled_is_named(cluster: Cluster) -> None:
    cluster.run(check_meta_errors)


def check_unfilled_source(rank: int, others_have_values: bool) -> None:
    """Only rank 0 needs values, so only it finds that there is no way to them."""
    with torch.device("cpu" if rank > 0 and others_have_values else "meta"):
        model = nn.Sequential(WithBuffers())
    strategy = ShardingStrategy.HYBRID_SHARD if dist.get_world_size() == 4 else ShardingStrategy.FULL_SHARD
    mesh = init_device_mesh("cpu", (2, 2)) if dist.get_world_size() == 4 else None
    with pytest.raises(ValueError, match=r"modules \['0'\] hold .* no reset_parameters"):
        FSDP(model, sharding_strategy=strategy, device_mesh=mesh, sync_module_states=True)


@pytest.mark.parametrize(("world_size", "others_have_values"), [(2, True), (4, False)])
def test_what_rank_0_cannot_fill_is_an_error_on_every_rank(
    cluster: Cluster, world_size: int, others_have_values: bool
) -> None:
    cluster.run(check_unfilled_source, others_have_values, world_size=world_size)


def check_ignored_meta(rank: int) -> None:
    """B82: ignored by identity, and found again after meta tensors became others."""
    with torch.device("meta"):
        model = nn.Linear(4, 3)
    wrapped = FSDP(model, ignored_states=[model.weight])
    assert type(wrapped.weight) is nn.Parameter
    assert wrapped.weight.device.type == "cpu"
    assert hasattr(wrapped.bias, "placements")


def test_ignored_parameters_stay_ignored_when_meta_tensors_are_filled(cluster: Cluster) -> None:
    """B82."""
    cluster.run(check_ignored_meta, world_size=1)


def check_ignored(rank: int, as_states: bool) -> None:
    """B85: what is ignored stays where it is, the same objects; outer wrappers ignore it, too."""
    model = Blocks()
    other = model.blocks[1]
    names = {f"blocks.1.{name}" for name, _ in other.named_parameters()}
    before = dict(other.named_parameters())
    addresses = {name: parameter.data_ptr() for name, parameter in before.items()}
    frozen: Any = {"ignored_states": list(other.parameters())} if as_states else {"ignored_modules": [other]}
    other.requires_grad_(False)
    holder = nn.Sequential(FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Residual}), **frozen), nn.Linear(4, 4))
    wrapped = FSDP(holder)
    for name, parameter in wrapped[0].named_parameters():
        assert (type(parameter) is nn.Parameter) == (name in names), name
    for name, parameter in other.named_parameters():
        assert parameter is before[name]
        assert parameter.data_ptr() == addresses[name]
    wrapped(torch.ones(2, 3, 4)).sum().backward()
    assert len(wrapped.state_dict()) == len(nn.Sequential(Blocks(), nn.Linear(4, 4)).state_dict())


@pytest.mark.parametrize("as_states", [False, True])
def test_ignored_modules_are_not_sharded_or_moved(cluster: Cluster, as_states: bool) -> None:
    """B85."""
    cluster.run(check_ignored, as_states)


class Normed(nn.Module):
    """Batch norm between layers, and a float buffer that a kernel reads."""

    kernel: torch.Tensor
    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.register_buffer("kernel", torch.ones(4))
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x) * self.kernel))


def check_buffers(rank: int) -> None:
    """B48: float buffers compute in `buffer_dtype`, counters never, and a state dict keeps the original dtype."""
    precision = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    wrapped = FSDP(Normed(), mixed_precision=precision)
    dtypes = {name: buffer.dtype for name, buffer in wrapped.named_buffers()}
    assert dtypes == {
        "kernel": torch.bfloat16,
        "steps": torch.int64,
        "norm.running_mean": torch.bfloat16,
        "norm.running_var": torch.bfloat16,
        "norm.num_batches_tracked": torch.int64,
    }
    wrapped(torch.ones(2, 4)).sum().backward()
    saved = nn.Sequential(wrapped).state_dict()
    assert saved["0.kernel"].dtype == saved["0.norm.running_mean"].dtype == torch.float32
    assert saved["0.norm.num_batches_tracked"].item() == 1
    saved["0.kernel"] = torch.full((4,), 2.0)
    nn.Sequential(wrapped).load_state_dict(saved)
    assert wrapped.kernel.dtype == torch.bfloat16
    assert wrapped.kernel.eq(2).all()


def test_buffers_have_a_dtype_of_their_own(cluster: Cluster) -> None:
    """B48."""
    cluster.run(check_buffers, world_size=1)


def check_batch_norm(rank: int) -> None:
    """With a policy, batch norm is a unit that computes in float32 between layers that do not."""
    seen: dict[str, tuple[torch.dtype, torch.dtype]] = {}
    model = Normed()
    model.norm.register_forward_hook(lambda _, args, output: seen.update(inside=(args[0].dtype, output.dtype)))
    wrapped = FSDP(
        model,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
    )
    wrapped.norm.register_forward_hook(lambda _, args, output: seen.update(outside=(args[0].dtype, output.dtype)))
    output = wrapped(torch.randn(4, 4))
    assert seen == {"inside": (torch.float32,) * 2, "outside": (torch.bfloat16,) * 2}
    assert output.dtype == torch.bfloat16
    assert wrapped.norm.running_mean.dtype == torch.float32
    output.sum().backward()
    assert all(parameter.grad is not None for parameter in wrapped.parameters())
    everything_low = MixedPrecision(param_dtype=torch.bfloat16, _module_classes_to_ignore=())
    low = FSDP(Normed(), mixed_precision=everything_low, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    assert not isinstance(low.norm, FSDP)


def test_batch_norm_keeps_full_precision_with_a_policy(cluster: Cluster) -> None:
    cluster.run(check_batch_norm)


def check_inputs(rank: int) -> None:
    """Which inputs are cast: the root's by default, those of units inside only if asked."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.seen: list[torch.dtype] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.append(x.dtype)
            return self.linear(x.to(self.linear.weight.dtype))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.dtype, torch.dtype]:
            return self.inner(x.float()), x.dtype, ids.dtype

    low = functools.partial(MixedPrecision, param_dtype=torch.bfloat16)
    for precision, root, inside in (
        (low(), torch.bfloat16, torch.float32),
        (low(cast_forward_inputs=True), torch.bfloat16, torch.bfloat16),
        (low(cast_root_forward_inputs=False), torch.float32, torch.float32),
        (low(cast_root_forward_inputs=False, cast_forward_inputs=True), torch.bfloat16, torch.bfloat16),
    ):
        wrapped = FSDP(Outer(), mixed_precision=precision, auto_wrap_policy=ModuleWrapPolicy({Inner}))
        output, found, ids = wrapped(torch.ones(1, 4), torch.tensor(1))
        assert (found, ids, wrapped.inner.seen, output.dtype) == (root, torch.int64, [inside], torch.bfloat16), (
            precision
        )


def test_inputs_are_cast_at_the_root_and_inside_if_asked(cluster: Cluster) -> None:
    cluster.run(check_inputs, world_size=1)


def check_case_names(rank: int) -> None:
    case = by_name("buffers")
    assert list(FSDP(make_model(case)).state_dict()) == list(make_model(case).state_dict())


def test_buffers_that_are_not_saved_stay_out_of_state_dicts(cluster: Cluster) -> None:
    cluster.run(check_case_names, world_size=1)
