"""torch.compile around, of and below sharded modules: the same numbers, one graph a block, hooks outside of graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

from cluster import Cluster
from distributed.reference import assert_at_rest
from fullshard import fully_shard
from networks import Blocks

STEPS = 3


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def counter(backend: str) -> Any:
    """A backend that counts the graphs it is given."""
    # Dynamo asks every input for its gradient, and hides the warning of that only where warnings are not errors.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    torch._dynamo.reset()
    return CompileCounterWithBackend(backend)


# How a model is compiled: (before sharding each block, after sharding each block, the whole model). A function
# compiles in place, or returns what to put in place of its module.
Way = tuple[Callable[..., Any] | None, Callable[..., Any] | None, Callable[..., Any] | None]


def in_place(module: nn.Module, backend: Any, **options: Any) -> nn.Module:
    module.compile(backend=backend, **options)
    return module


def in_place_without_breaks(module: nn.Module, backend: Any) -> nn.Module:
    return in_place(module, backend, fullgraph=True)


def wrapped(module: nn.Module, backend: Any) -> nn.Module:
    return torch.compile(module, backend=backend)


def wrapped_without_breaks(module: nn.Module, backend: Any) -> nn.Module:
    return torch.compile(module, backend=backend, fullgraph=True)


def checkpointed(module: nn.Module, backend: Any) -> nn.Module:
    return torch.compile(checkpoint_wrapper(module), backend=backend)


def checkpoint_of_compiled(module: nn.Module, backend: Any) -> nn.Module:
    return checkpoint_wrapper(in_place(module, backend))


BLOCK_WAYS: dict[str, Way] = {
    "block.compile() before": (in_place_without_breaks, None, None),
    "torch.compile(block) before": (wrapped_without_breaks, None, None),
    "block.compile() after": (None, in_place_without_breaks, None),
    "torch.compile(block) after": (None, wrapped_without_breaks, None),
    "checkpoint inside, compiled, sharded": (checkpointed, None, None),
    "checkpoint around compiled, sharded": (checkpoint_of_compiled, None, None),
    "sharded, then checkpoint around compiled": (None, checkpoint_of_compiled, None),
}
MODEL_WAYS: dict[str, Way] = {
    "model.compile()": (None, None, in_place),
    "torch.compile(model)": (None, None, wrapped),
    "blocks and model": (in_place, None, wrapped),
}
WAYS = BLOCK_WAYS | MODEL_WAYS


def compile_blocks(model: Blocks, how: Callable[..., Any] | None, backend: Any) -> None:
    for i, block in enumerate(model.blocks):
        if how is not None:
            model.blocks[i] = how(block, backend)


def sharded_and_compiled(way: Way, backend: Any, **options: Any) -> tuple[Any, Any]:
    """(what is called, the sharded model)."""
    before, after, whole = way
    torch.manual_seed(0)
    model = Blocks()
    compile_blocks(model, before, backend)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    compile_blocks(model, after, backend)
    return (model if whole is None else whole(model, backend)), model


def train(model: Any, parameters: Any, ranks: list[int], evaluate: bool) -> list[Tensor]:
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        loss = torch.stack([model(batch(rank, step)).float().square().mean() for rank in ranks]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if evaluate:
            with torch.no_grad():
                losses.append(model(batch(0, step)))
    return losses


def check_against_reference(rank: int, name: str, backend: str, evaluate: bool = False) -> int:
    """Train beside the plain model; returns the number of graphs made in training."""
    mesh = init_device_mesh("cpu", (2,))
    counted = counter(backend)
    called, model = sharded_and_compiled(WAYS[name], counted, mesh=mesh)
    torch.manual_seed(0)
    reference = Blocks()
    want = train(reference, reference.parameters(), [0, 1], evaluate)
    got = train(called, model.parameters(), [rank], evaluate)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    expected = dict(reference.named_parameters())
    for key, parameter in model.named_parameters():
        plain = key.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
        torch.testing.assert_close(parameter.full_tensor(), expected[plain], atol=1e-5, rtol=1e-5, msg=f"{name} {key}")
    assert_at_rest(model)
    return int(counted.frame_count)


@pytest.mark.parametrize("name", BLOCK_WAYS)
def test_a_compiled_block_is_one_graph(cluster: Cluster, name: str) -> None:
    """B125. Both blocks share it: no guard knows which block it is, or whether parameters are gathered."""
    assert cluster.run(check_against_reference, name, "eager") == [1, 1]


@pytest.mark.parametrize("name", MODEL_WAYS)
def test_a_compiled_model_breaks_at_its_sharded_blocks_only(cluster: Cluster, name: str) -> None:
    """B125. Graphs: what the model does before, between and after its blocks, and the block, which both share."""
    assert cluster.run(check_against_reference, name, "eager") == [4, 4]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_evaluation_between_compiled_steps(cluster: Cluster, backend: str) -> None:
    """B125, B36. The graph is made once more for no_grad, and not again when training goes on."""
    assert cluster.run(check_against_reference, "block.compile() before", backend, True) == [2, 2]
