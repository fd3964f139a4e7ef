"""Methods of a sharded module: the signatures of torch's FSDP2, and what each of them does."""

from __future__ import annotations

import inspect
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from reference import assert_at_rest, full
from stack import Stack, batch, engine_of, make_stack
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from cluster import Cluster
from fullshard import FSDPModule, UnshardHandle, fully_shard, register_fsdp_forward_method, share_comm_ctx
from fullshard.core.lifecycle import Op
from fullshard.errors import MisuseError
from fullshard.runtime.policy import MixedPrecisionPolicy

# Signatures

_METHODS = [name for name, value in vars(torch_fsdp.FSDPModule).items() if inspect.isfunction(value)]
# Inside of torch's engine; a sharded module of ours has no state object of torch's.
_NOT_OURS = {"_get_fsdp_state"}
_FUNCTIONS = ["register_fsdp_forward_method", "share_comm_ctx", "MixedPrecisionPolicy", "CPUOffloadPolicy"]


def arguments(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", sorted(set(_METHODS) - _NOT_OURS - {"_apply"}))
def test_methods_take_the_arguments_of_torchs(name: str) -> None:
    assert arguments(getattr(FSDPModule, name)) == arguments(getattr(torch_fsdp.FSDPModule, name))


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_functions_take_the_arguments_of_torchs(name: str) -> None:
    assert arguments(getattr(fullshard, name)) == arguments(getattr(torch_fsdp, name))


# The class of a sharded module

T = TypeVar("T")


class Slotted(nn.Linear):
    __slots__ = ("note",)


class Typed(nn.Linear, Generic[T]):
    pass


class Abstract(nn.Linear, ABC):
    @abstractmethod
    def kind(self) -> str: ...


class Concrete(Abstract):
    def kind(self) -> str:
        return "concrete"


class Counted(nn.Linear):
    """Its own __new__ takes the arguments of __init__; unknown attributes come from elsewhere; new ones are refused."""

    made = 0

    def __new__(cls, size: int, out: int) -> Counted:
        cls.made += size * out
        return super().__new__(cls)

    def __getattr__(self, name: str) -> Any:
        return "found elsewhere" if name == "elsewhere" else super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":
            raise AttributeError("sealed")
        super().__setattr__(name, value)


class Overriding(nn.Linear):
    def unshard(self) -> str:
        return "the user's own"


def check_classes(rank: int) -> None:
    for cls in (nn.Linear, Slotted, Typed, Concrete, Counted, Overriding):
        module = fully_shard(cls(4, 4))
        assert isinstance(module, FSDPModule)
        assert isinstance(module, cls)
        assert type(module).__name__ == f"FSDP{cls.__name__}"
        assert type(module).__mro__[:3] == (type(module), FSDPModule, cls)
        module(torch.ones(1, 4)).sum().backward()
        assert type(fully_shard(cls(4, 4))) is type(module)
        assert type(type(module)(4, 4)) is cls, "constructing the class of a sharded module makes a plain one"
        with pytest.raises(MisuseError, match=rf"\(FSDP{cls.__name__}\) cannot be pickled.*Save its state_dict"):
            pickle.dumps(module)
    assert Slotted.note.__get__  # the slot is still the class's own
    assert fully_shard(Counted(4, 4)).elsewhere == "found elsewhere"
    assert fully_shard(Overriding(4, 4)).unshard() is None, "the engine's method comes first, as in torch"


def test_class_of_a_sharded_module(cluster: Cluster) -> None:
    cluster.run(check_classes)


def check_container(rank: int) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)))
    assert type(model[:2]) is nn.Sequential
    assert not isinstance(model[1], FSDPModule)
    modules = [nn.Linear(4, 4), nn.Linear(4, 4)]
    assert fully_shard(modules) is modules
    assert all(isinstance(module, FSDPModule) for module in modules)


def test_containers_and_lists(cluster: Cluster) -> None:
    cluster.run(check_container)


# Calls in every state


def settings_of(model: FSDPModule) -> None:
    """Every setting, to what it is by default, and as torch takes it."""
    model.set_requires_gradient_sync(True, recurse=True)
    model.set_requires_all_reduce(True, recurse=False)
    model.set_reshard_after_forward(True, False)
    model.set_reshard_after_backward(True, recurse=True)
    model.set_unshard_in_backward(True)
    model.set_is_last_backward(True)
    model.set_gradient_divide_factor(dist.get_world_size())
    model.set_force_sum_reduction_for_comms(True)
    model.set_reduce_scatter_unused_params(True, recurse=True)
    model.set_reduce_scatter_unused_params(False)
    model.set_reduce_scatter_max_input_buffers(2, recurse=True)
    model.set_separate_reduce_scatter_group(True, recurse=True)
    model.set_separate_reduce_scatter_group(False)
    model.set_allocate_memory_from_process_group_for_comm(True)
    model.set_post_optim_event(torch.Event("cpu"))
    model.set_all_reduce_hook(lambda _gradients: None)
    model.set_modules_to_forward_prefetch([model])
    model.set_modules_to_forward_prefetch([])
    model.set_modules_to_backward_prefetch([])
    model._set_unshard_async_op(True)


def check_any_time(rank: int, when: str) -> None:
    model, reference = make_stack(), make_stack()
    touched = [model, model.blocks[1]]

    def set_all(*_: object) -> None:
        for module in touched:
            settings_of(module)

    if when == "before":
        set_all()
    if when == "forward":
        model.blocks[2].register_forward_pre_hook(set_all)
    if when == "backward":
        model.blocks[1].register_full_backward_hook(set_all)
    for step in range(2):
        for m in (model, reference):
            m(batch(rank, step)).sum().backward()
        if when == "after":
            set_all()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(full(ours.grad), full(theirs.grad))
    assert_at_rest(model)


@pytest.mark.parametrize("when", ["before", "forward", "backward", "after"])
def test_settings_may_be_changed_at_any_time(cluster: Cluster, when: str) -> None:
    """On the root and on a nested unit, before the first forward and within a step."""
    cluster.run(check_any_time, when)


def check_meta(rank: int) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    model.set_is_last_backward(False)
    model.set_reduce_scatter_max_input_buffers(3)
    model[0].set_prefetch_bytes(0)
    model.set_is_last_backward(True)
    fullshard.materialize(model)
    model(torch.ones(1, 4)).sum().backward()
    policy = engine_of(model).scheduler.policy
    assert (policy.reduces_in_flight, policy.prefetch_bytes) == (3, 0)


def test_settings_need_no_engine(cluster: Cluster) -> None:
    """They are taken down on the meta device, too, and hold when the first forward makes the engine."""
    cluster.run(check_meta)


def check_refusals(rank: int) -> None:
    model = make_stack()
    plain: Any = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"must be a bool here, got 2; only fully_shard takes an int"):
        model.set_reshard_after_forward(2)
    with pytest.raises(ValueError, match="only sharded modules can be prefetched, got Linear"):
        model.set_modules_to_forward_prefetch([plain])
    with pytest.raises(ValueError, match="share_comm_ctx expects sharded modules, got Linear"):
        share_comm_ctx([model, plain])
    for factor in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="must be a positive finite number"):
            model.set_gradient_divide_factor(factor)
    with pytest.raises(TypeError, match="max_input_buffers must be an int, got bool"):
        model.set_reduce_scatter_max_input_buffers(True)
    with pytest.raises(ValueError, match="reduces_in_flight must be at least 1, got 0"):
        model.set_reduce_scatter_max_input_buffers(0)
    with pytest.raises(ValueError, match="prefetch_bytes must be None or at least 0"):
        model.set_prefetch_bytes(-1)
    with pytest.raises(TypeError, match="must be callable with one tensor, got int"):
        model.set_all_reduce_hook(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="symmetric memory needs backend 'NCCL' and its devices, got 'NCCL' on 'cpu'"):
        model.set_symm_mem_for_comm()
    with pytest.raises(ValueError, match=r"FSDPStack has no method 'sing'"):
        register_fsdp_forward_method(model, "sing")
    with pytest.warns(DeprecationWarning, match="Use `set_gradient_divide_factor` instead"):
        model.set_reduce_scatter_divide_factor(2.0)
    model(batch(rank))
    with pytest.raises(MisuseError, match=r"must be called on the root FSDP module, not on unit 'blocks.0'"):
        model.blocks[0].reset_iter_state()
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        Stack.forward(model)  # type: ignore[call-arg]
    register_fsdp_forward_method(plain, "sing")  # what is not sharded is left alone


def test_bad_values_are_refused(cluster: Cluster) -> None:
    cluster.run(check_refusals)


# What they do, beside torch's


class Two(nn.Module):
    """Uses both of its parameters, or the first only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.uses_b = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        return self.b(x) if self.uses_b else x


class Blocks(nn.Sequential):
    skipped: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self):
            x = x if i == self.skipped else block(x)
        return x


def make_both(replicas: int = 1) -> tuple[nn.Module, nn.Module]:
    """The same model under torch's FSDP2 and under ours."""
    made = []
    for shard in (torch_fsdp.fully_shard, fully_shard):
        torch.manual_seed(0)
        model = Blocks(Two(), Two())
        shape = (dist.get_world_size(),) if replicas == 1 else (replicas, dist.get_world_size() // replicas)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")[-len(shape) :])
        for block in model:
            shard(block, mesh=mesh)
        made.append(shard(model, mesh=mesh))
    return made[0], made[1]


def same_gradients(theirs: nn.Module, ours: nn.Module) -> None:
    for (name, expected), got in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        assert (expected.grad is None) == (got.grad is None), f"{name}: torch has {expected.grad}, we {got.grad}"
        if expected.grad is not None:
            torch.testing.assert_close(got.grad.to_local(), expected.grad.to_local(), msg=(name + "\n{}").format)


def step_both(models: tuple[nn.Module, nn.Module], rank: int, step: int = 0) -> None:
    for model in models:
        model(batch(rank, step, width=4)).square().sum().backward()


def check_sync_sets_all_reduce(rank: int) -> None:
    models = make_both(replicas=2)
    for step, calls in enumerate(
        (
            [("set_requires_all_reduce", False)],
            [("set_requires_gradient_sync", False)],
            [("set_requires_gradient_sync", True)],  # makes replicas sync again, too
        )
    ):
        for model in models:
            for name, value in calls:
                getattr(model, name)(value)
        step_both(models, rank, step)
    same_gradients(*models)


def test_gradient_sync_switches_the_all_reduce_too(cluster: Cluster) -> None:
    cluster.run(check_sync_sets_all_reduce, world_size=4)


def check_divide(rank: int, replicas: int) -> None:
    models = make_both(replicas)
    for model in models:
        model.set_gradient_divide_factor(3.0)  # the root's own unit only: it has no parameters
        model[0].set_gradient_divide_factor(8.0)
        model[1].set_force_sum_reduction_for_comms(True)
        model[0].set_force_sum_reduction_for_comms(True)  # Gloo has no other reduction in torch's engine either
    step_both(models, rank)
    same_gradients(*models)


@pytest.mark.parametrize("replicas", [1, 2])
def test_divide_factor(cluster: Cluster, replicas: int) -> None:
    cluster.run(check_divide, replicas, world_size=4)


def check_unused(rank: int, reduce_unused: bool) -> None:
    models = make_both()
    step_both(models, rank)
    for model in models:
        model.zero_grad()
        model.set_reduce_scatter_unused_params(reduce_unused)
        model[1].uses_b = False
    step_both(models, rank)
    same_gradients(*models)
    assert (models[1][1].b.weight.grad is not None) == reduce_unused
    if reduce_unused:  # ranks differ in what they use
        for model in models:
            model.zero_grad()
            model[1].uses_b = rank == 0
        step_both(models, rank, 1)
        same_gradients(*models)


@pytest.mark.parametrize("reduce_unused", [False, True])
def test_unused_parameters(cluster: Cluster, reduce_unused: bool) -> None:
    """B25."""
    cluster.run(check_unused, reduce_unused)


def check_unused_unit(rank: int) -> None:
    models = make_both()
    step_both(models, rank)
    for model in models:
        model.zero_grad()
        model.set_reduce_scatter_unused_params(True)
        model.skipped = 0
    step_both(models, rank)
    same_gradients(*models)
    assert not full(models[1][0].a.weight.grad).any()
    assert_at_rest(models[1])


def test_unit_that_no_rank_used(cluster: Cluster) -> None:
    cluster.run(check_unused_unit)


def check_hook(rank: int, replicas: int) -> None:
    models = make_both(replicas)
    seen: list[list[torch.Tensor]] = [[], []]

    def make_hook(found: list[torch.Tensor]) -> Callable[[torch.Tensor], None]:
        def hook(gradients: torch.Tensor) -> None:
            assert gradients.dim() == 1
            found.append(gradients.sum())
            gradients.mul_(2)

        return hook

    for model, found in zip(models, seen, strict=True):
        for block in model:
            block.set_all_reduce_hook(make_hook(found))
    step_both(models, rank)
    same_gradients(*models)
    torch.testing.assert_close(torch.stack(seen[0]), torch.stack(seen[1]))
    if replicas > 1:
        with pytest.raises(ValueError, match="stream cannot be set on a mesh with a replicate axis"):
            models[1][0].set_all_reduce_hook(lambda _: None, stream=object())  # type: ignore[arg-type]


@pytest.mark.parametrize("replicas", [1, 2])
def test_all_reduce_hook_sees_mean_gradients(cluster: Cluster, replicas: int) -> None:
    cluster.run(check_hook, replicas, world_size=4)


def check_hook_as_replication(rank: int) -> None:
    """Replication by hand: a hook that averages over ranks outside of the mesh equals HSDP."""
    hybrid = make_both(replicas=2)[1]
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
    by_hand = nn.Sequential(Two(), Two())
    for block in by_hand:
        fully_shard(block, mesh=mesh["s"])

        def hook(gradients: torch.Tensor) -> None:
            dist.all_reduce(gradients, group=mesh.get_group("r"))
            gradients.div_(2)

        block.set_all_reduce_hook(hook)
    fully_shard(by_hand, mesh=mesh["s"])
    for model in (hybrid, by_hand):
        model[1].uses_b = rank < 2  # one replica uses a parameter that the other does not
        model(batch(rank, width=4)).square().sum().backward()
    same_gradients(hybrid, by_hand)


def test_all_reduce_hook_can_replicate(cluster: Cluster) -> None:
    cluster.run(check_hook_as_replication, world_size=4)


def check_reset(rank: int) -> None:
    model, reference = make_stack(), make_stack()
    model(batch(rank)).sum().backward()
    model.zero_grad()
    model.set_requires_gradient_sync(False)
    model(batch(rank, 1)).sum().backward()  # accumulated, not reduced
    model.fail_at = 2
    with pytest.raises(ValueError, match="bad batch"):
        model(batch(rank))
    model.reset_iter_state()
    assert_at_rest(model)
    model.fail_at = None
    model.set_requires_gradient_sync(True)
    for m in (model, reference):
        m(batch(rank, 2)).sum().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(full(ours.grad), full(theirs.grad)), "what was accumulated before the reset must be gone"


def test_reset_iter_state_drops_what_was_accumulated(cluster: Cluster) -> None:
    """As torch documents: the sequence of microbatches is to be restarted."""
    cluster.run(check_reset)


def check_handles(rank: int) -> None:
    model = make_stack()
    assert model.unshard() is None
    model.reshard()
    handle = model.blocks[0].unshard(async_op=True)
    assert isinstance(handle, UnshardHandle)
    handle.wait()
    assert not hasattr(model.blocks[0].weight, "placements")
    model.blocks[0].reshard()
    handle.wait()  # a second wait is over at once, and gathers nothing
    assert hasattr(model.blocks[0].weight, "placements")
    UnshardHandle().wait()
    model(batch(rank)).sum().backward()
    assert_at_rest(model)


def test_unshard_handles(cluster: Cluster) -> None:
    cluster.run(check_handles)


def check_prefetch_lists(rank: int) -> None:
    model = make_stack()
    for step in range(2):
        model(batch(rank, step)).sum().backward()
    engine = engine_of(model)
    usual = _gathers(model, rank)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[3]])
    assert _gathers(model, rank) != usual
    model.blocks[0].set_modules_to_forward_prefetch([])
    _gathers(model, rank)
    assert _gathers(model, rank) == usual, "an empty list is the default again"
    assert engine.scheduler.at_rest()


def _gathers(model: nn.Module, rank: int) -> list[int]:
    engine = engine_of(model)
    engine.log.clear()
    model(batch(rank)).sum().backward()
    return [command.unit for command in engine.log if command.op is Op.GATHER]


def test_explicit_prefetch_can_be_undone(cluster: Cluster) -> None:
    cluster.run(check_prefetch_lists)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.added = lambda x: self.linear(x) + 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """The user's documentation."""
        return self.linear(x) * 2

    @staticmethod
    def halve(x: torch.Tensor) -> torch.Tensor:
        return x / 2


def check_forward_methods(rank: int) -> None:
    torch.manual_seed(0)
    model, plain = fully_shard(Encoder()), Encoder()
    plain.load_state_dict({name: full(value) for name, value in model.state_dict().items()})
    x = batch(0, width=4)
    for name in ("encode", "added", "halve"):
        register_fsdp_forward_method(model, name)
        expected = x / 2 if name == "halve" else plain.linear(x) * 2 if name == "encode" else plain.linear(x) + 1
        torch.testing.assert_close(getattr(model, name)(x), expected)
        assert_at_rest_after_forward(model)
    assert model.encode.__doc__ == "The user's documentation."


def assert_at_rest_after_forward(model: nn.Module) -> None:
    model.reshard()
    assert_at_rest(model)


def test_methods_of_every_kind_can_be_forward_methods(cluster: Cluster) -> None:
    """Functions of the class, static ones, and functions that lie on the instance."""
    cluster.run(check_forward_methods)


def check_policies(rank: int) -> None:
    mine = fully_shard(nn.Linear(4, 4), mp_policy=torch_fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    unit = mine.__dict__["_fullshard"].unit
    assert unit.precision == MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(nn.Linear(4, 4), offload_policy=torch_fsdp.OffloadPolicy())
    model = fully_shard(nn.Linear(4, 4), offload_policy=torch_fsdp.CPUOffloadPolicy(pin_memory=False))
    model(torch.ones(1, 4)).sum().backward()
    share_comm_ctx([])
    share_comm_ctx([mine, model])  # one has an engine, one has none yet
    mine(torch.ones(1, 4)).sum().backward()
    assert engine_of(mine).streams is engine_of(model).streams


def test_torchs_policy_objects_are_taken(cluster: Cluster) -> None:
    cluster.run(check_policies)
