"""What users hang on modules and parameters, and the tools of torch they put around a step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from cluster import Cluster
from distributed.reference import assert_at_rest, full
from fullshard import fully_shard
from networks import Blocks, Residual


def batch(rank: int, step: int = 0) -> Tensor:
    return torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def models() -> tuple[Any, Any]:
    """(plain, sharded), the same values."""
    torch.manual_seed(0)
    reference = Blocks().double()
    model = copy.deepcopy(reference)
    shard(model)
    return reference, model


def shard(model: Any) -> None:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def reference_loss(reference: nn.Module, step: int = 0) -> Tensor:
    return torch.stack([loss_of(reference, batch(r, step)) for r in range(2)]).mean()


def compare_gradients(model: nn.Module, reference: nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(ours.grad), theirs.grad, msg=name)


# -- hooks on modules --------------------------------------------------------------------------------------------------


def watch(part: nn.Module, seen: list[str]) -> None:
    """Every kind of hook on a module; each notes what it sees of the module's parameters."""

    def note(kind: str, module: nn.Module, *_: Any) -> None:
        parameters = list(module.parameters(recurse=False)) or list(module.parameters())
        assert not any(isinstance(parameter, DTensor) for parameter in parameters), f"{kind} sees sharded parameters"
        assert all(bool(parameter.abs().sum() > 0) for parameter in parameters if parameter.numel() > 4), kind
        seen.append(kind)

    part.register_forward_pre_hook(partial(note, "forward pre"))
    part.register_forward_hook(partial(note, "forward"))
    part.register_full_backward_pre_hook(partial(note, "backward pre"))
    part.register_full_backward_hook(partial(note, "backward"))


def check_module_hooks(rank: int, before: bool) -> None:
    torch.manual_seed(0)
    reference = Blocks().double()
    model = copy.deepcopy(reference)
    seen: list[str] = []

    def watch_parts() -> None:
        for part in (model.blocks[0], model.blocks[1].up, model.norm):
            watch(part, seen)

    if before:
        watch_parts()
    shard(model)
    if not before:
        watch_parts()
    for _ in range(2):
        loss_of(model, batch(rank)).backward()
        reference_loss(reference).backward()
    compare_gradients(model, reference)
    assert sorted(seen) == sorted(["forward pre", "forward", "backward pre", "backward"] * 3 * 2)
    assert_at_rest(model)


@pytest.mark.parametrize("before", [True, False], ids=["before sharding", "after sharding"])
def test_hooks_of_modules_see_full_parameters(cluster: Cluster, before: bool) -> None:
    """B90. Whenever they were registered, on sharded modules and on modules below them."""
    cluster.run(check_module_hooks, before)


def check_hooks_that_change(rank: int) -> None:
    reference, model = models()
    for each in (reference, model):
        for block in each.blocks:
            block.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
            block.register_forward_hook(lambda _, __, output: output.sin())
            block.register_full_backward_pre_hook(lambda _, gradients: (gradients[0] * 3,))
    loss_of(model, batch(rank)).backward()
    reference_loss(reference).backward()
    compare_gradients(model, reference)
    assert_at_rest(model)


def test_hooks_of_modules_may_change_what_passes(cluster: Cluster) -> None:
    cluster.run(check_hooks_that_change)


# -- hooks on parameters -----------------------------------------------------------------------------------------------


def step_inside_backward(model: nn.Module) -> None:
    """torch's tutorial: an optimizer a parameter, which steps and frees the gradient as soon as it is there."""
    optimizers = {parameter: torch.optim.AdamW([parameter], lr=0.01) for parameter in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)


def check_optimizer_in_backward(rank: int) -> None:
    reference, model = models()
    for each in (reference, model):
        step_inside_backward(each)
    for step in range(3):
        reference_loss(reference, step).backward()
        loss_of(model, batch(rank, step)).backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        assert_at_rest(model)
        for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(full(ours.detach()), theirs.detach(), msg=f"step {step}, {name}")


def test_optimizer_steps_inside_backward(cluster: Cluster) -> None:
    cluster.run(check_optimizer_in_backward)


def check_tensor_hooks(rank: int) -> None:
    reference, model = models()
    for each in (reference, model):
        for parameter in each.parameters():
            parameter.register_hook(lambda gradient: gradient * 2 if gradient.ndim > 1 else None)
    for step in range(2):  # the second is added to the first, which is not doubled again
        reference_loss(reference, step).backward()
        loss_of(model, batch(rank, step)).backward()
        compare_gradients(model, reference)


def test_hooks_of_parameters_may_replace_gradients(cluster: Cluster) -> None:
    """They get the mean over ranks, a DTensor, before it is added to what is there."""
    cluster.run(check_tensor_hooks)


def check_early_hooks(rank: int) -> None:
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        model = nn.Linear(4, 4)
        getattr(model.weight, register)(lambda _: None)
        with pytest.warns(UserWarning, match=r"'weight' have hooks .* before sharding: they will not be called"):
            fully_shard(model)


def test_hooks_registered_on_parameters_before_sharding(cluster: Cluster) -> None:
    """They belong to parameters that the model no longer has, which is said aloud."""
    cluster.run(check_early_hooks)


# -- tools of torch around a step --------------------------------------------------------------------------------------


def anomaly_detection() -> Any:
    return torch.autograd.detect_anomaly(check_nan=True)


def own_saved_tensors_hooks() -> Any:
    return saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor)


def profiler() -> Any:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


def flop_counter() -> Any:
    return FlopCounterMode(display=False)


def multithreading_off() -> Any:
    return torch.autograd.set_multithreading_enabled(False)


TOOLS = [anomaly_detection, save_on_cpu, own_saved_tensors_hooks, profiler, flop_counter, multithreading_off]


def check_tool(rank: int, tool: Callable[[], Any]) -> None:
    reference, model = models()
    with pytest.warns(UserWarning, match="Anomaly") if tool is anomaly_detection else pytest.MonkeyPatch.context():
        context = tool()
    for step in range(2):
        with context if step == 0 or tool is not profiler else profiler() as active:
            loss_of(model, batch(rank, step)).backward()
        if tool is flop_counter:
            assert active.get_total_flops() > 0
        reference_loss(reference, step).backward()
    compare_gradients(model, reference)
    assert_at_rest(model)


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.__name__)
def test_tools_around_a_step(cluster: Cluster, tool: Callable[[], Any]) -> None:
    cluster.run(check_tool, tool)


# -- activation checkpointing ------------------------------------------------------------------------------------------


def save_products(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


def selective() -> Any:
    return create_selective_checkpoint_contexts(save_products)


class Calls(nn.Module):
    """Calls a function on a module, as `checkpoint` is used by hand."""

    def __init__(self, inner: nn.Module, **options: Any) -> None:
        super().__init__()
        self.inner = inner
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, **self.options)  # type: ignore[no-any-return]


def by_wrapper(reentrant: bool, block: nn.Module) -> nn.Module:
    kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    return checkpoint_wrapper(block, checkpoint_impl=kind)


# How a block is recomputed -> (its replacement, whether it, not what is inside, is the unit).
CHECKPOINTS: dict[str, tuple[Callable[[nn.Module], nn.Module], bool]] = {
    "by hand around": (lambda block: Calls(block, use_reentrant=False), False),
    "by hand inside": (lambda block: Calls(block, use_reentrant=False), True),
    "reentrant by hand around": (lambda block: Calls(block, use_reentrant=True), False),
    "reentrant by hand inside": (lambda block: Calls(block, use_reentrant=True), True),
    "selective around": (lambda block: Calls(block, use_reentrant=False, context_fn=selective), False),
    "selective inside": (lambda block: Calls(block, use_reentrant=False, context_fn=selective), True),
    "wrapper around": (partial(by_wrapper, False), False),
    "wrapper inside": (partial(by_wrapper, False), True),
    "reentrant wrapper around": (partial(by_wrapper, True), False),
    "reentrant wrapper inside": (partial(by_wrapper, True), True),
}


def gathers(model: Any) -> int:
    engine = model.__dict__["_fullshard"].unit.engine
    count = sum(command.op.name == "GATHER" for command in engine.log)
    engine.log.clear()
    return count


def check_checkpoint(rank: int, name: str) -> None:
    torch.manual_seed(0)
    reference = Blocks().double()
    model: Any = copy.deepcopy(reference)
    wrap, outer = CHECKPOINTS[name]
    for i, block in enumerate(model.blocks):
        model.blocks[i] = fully_shard(wrap(block)) if outer else wrap(fully_shard(block))
    fully_shard(model)
    for step in range(3):
        loss_of(model, batch(rank, step)).backward()
        reference_loss(reference, step).backward()
        compare_gradients(model, reference)
        assert_at_rest(model)
        # The root and two blocks in forward, one block again in backward: the other is still there, and recomputation
        # finds the parameters that its backward has gathered.
        assert gathers(model) <= (4 if outer else 5), step


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_activation_checkpointing(cluster: Cluster, name: str) -> None:
    cluster.run(check_checkpoint, name)


def check_apply_checkpointing(rank: int) -> None:
    reference, model = models()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Residual))
    loss_of(model, batch(rank)).backward()
    reference_loss(reference).backward()
    compare_gradients(model, reference)
    assert_at_rest(model)


def test_apply_activation_checkpointing_after_sharding(cluster: Cluster) -> None:
    cluster.run(check_apply_checkpointing)
