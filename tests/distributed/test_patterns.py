"""Ways to call modules: several graphs, recomputation, recursion, groups, other entry points, odd outputs."""

from __future__ import annotations

import pytest
import torch
from reference import assert_at_rest, full
from stack import Stack, batch, engine_of, make_stack
from torch import nn
from torch.utils.checkpoint import checkpoint

from cluster import Cluster
from fullshard import (
    fully_shard,
    register_fsdp_forward_method,
)

# B31, B32: several graphs


def check_two_graphs(rank: int) -> None:
    results = []
    for order in ("first", "second", "sum", "twice"):
        model = make_stack()
        a, b = model(batch(rank, 0)).sum(), model(batch(rank, 1)).sum()
        if order == "first":
            a.backward()
            b.backward()
        elif order == "second":
            b.backward()
            a.backward()
        elif order == "sum":
            (a + b).backward()
        else:
            a.backward(retain_graph=True)
            b.backward()
            model.zero_grad()
            a.backward()
            b2 = model(batch(rank, 1)).sum()
            b2.backward()
        assert_at_rest(model)
        results.append([full(parameter.grad) for parameter in model.parameters()])
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            torch.testing.assert_close(got, want)


def test_two_forwards_then_two_backwards_in_any_order(cluster: Cluster) -> None:
    """B31, B32."""
    cluster.run(check_two_graphs)


def check_checkpointing(rank: int) -> None:
    class Checkpointed(Stack):
        reentrant = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
            return x

    results = []
    for reentrant in (False, True):
        torch.manual_seed(0)
        model = Checkpointed()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        model.reentrant = reentrant
        for _ in range(2):
            model.zero_grad()
            model(batch(rank).requires_grad_()).sum().backward()
            assert_at_rest(model)
        results.append([full(parameter.grad) for parameter in model.parameters()])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_both_kinds_of_activation_checkpointing(cluster: Cluster) -> None:
    cluster.run(check_checkpointing)


class Recursive(nn.Module):
    """Calls itself a few times."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        x = self.linear(x).tanh()
        return self(x, depth - 1) * 2 if depth else x


def check_recursion(rank: int) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(Recursive())
    torch.manual_seed(0)
    model = nn.Sequential(Recursive())
    fully_shard(model[0])
    fully_shard(model)
    for step in range(2):
        model(batch(rank, step)).sum().backward()
        torch.stack([reference(batch(r, step)).sum() for r in range(2)]).mean().backward()
        assert_at_rest(model)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(ours.grad), theirs.grad)


def test_module_that_calls_itself(cluster: Cluster) -> None:
    cluster.run(check_recursion)


def check_group(rank: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard([model[0], model[2]])
    fully_shard(model)
    for _ in range(2):
        model(batch(rank).requires_grad_()).sum().backward()
    log = [str(command) for command in engine_of(model).log]
    assert log.count("REDUCE 1") == 2  # once a step, for both modules
    assert log.count("GATHER 1") <= 4
    assert_at_rest(model)


def test_group_of_modules_is_reduced_once(cluster: Cluster) -> None:
    cluster.run(check_group)


def check_segment(rank: int, reentrant: bool) -> None:
    class Segmented(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    model = Segmented(8, 64)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    for _ in range(2):
        engine = engine_of(model)
        if engine is not None:
            engine.pool.reset_peak()
        model(batch(rank, width=64).requires_grad_()).sum().backward()
    assert engine.pool.peak_bytes <= 3 * engine.units[1].full_bytes


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_segment_is_not_full_all_at_once(cluster: Cluster, reentrant: bool) -> None:
    cluster.run(check_segment, reentrant)


def check_submodule_first(rank: int) -> None:
    torch.manual_seed(0)
    reference = Stack(2)
    torch.manual_seed(0)
    model = Stack(2)
    fully_shard(model.blocks[0])
    fully_shard(model)
    (model.blocks[0](batch(rank)).sum() + model(batch(rank, 1)).sum()).backward()
    losses = [reference.blocks[0](batch(r)).sum() + reference(batch(r, 1)).sum() for r in range(2)]
    torch.stack(losses).mean().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(ours.grad), theirs.grad)
    assert_at_rest(model)


def test_submodule_that_runs_before_its_root(cluster: Cluster) -> None:
    """It has an engine of its own until the root starts; the graph made with it stays valid."""
    cluster.run(check_submodule_first)


def check_hidden_output(rank: int) -> None:
    class Hidden(nn.Linear):
        def forward(self, x: torch.Tensor) -> object:
            y = super().forward(x)
            return {"what a function holds is not looked into": lambda: y}

    model = fully_shard(Hidden(8, 8))
    with pytest.warns(UserWarning, match="without a tensor in a tuple, list, dict or dataclass"):
        model(batch(rank))
    with torch.no_grad():
        model(batch(rank))


def test_output_whose_tensors_cannot_be_found(cluster: Cluster) -> None:
    cluster.run(check_hidden_output)


class WithNothing(nn.Linear):
    """Uses a parameter without elements."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.nothing.sum()


def check_no_elements(rank: int) -> None:
    model = fully_shard(WithNothing())
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    assert full(model.bias.grad).tolist() == [4.0, 4.0, 4.0]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parameter_without_elements(cluster: Cluster, world_size: int) -> None:
    cluster.run(check_no_elements, world_size=world_size)


class Encoder(nn.Module):
    """Has another way in than `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x) * 2

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        if x.isnan().any():
            raise ValueError("bad batch")
        return self.linear(x).tanh()


def check_other_method(rank: int) -> None:
    torch.manual_seed(0)
    reference = Encoder()
    torch.manual_seed(0)
    model = fully_shard(Encoder())
    with pytest.raises(ValueError, match="has no method 'decode'"):
        register_fsdp_forward_method(model, "decode")
    register_fsdp_forward_method(model, "encode")
    with pytest.raises(ValueError, match="bad batch"):
        model.encode(torch.full((1, 8), torch.nan))
    assert_at_rest(model)
    model.encode(batch(rank)).sum().backward()
    model(batch(rank, 1)).sum().backward()  # forward calls it, so the two nest
    for step, call in enumerate((reference.encode, reference)):
        torch.stack([call(batch(r, step)).sum() for r in range(2)]).mean().backward()
    assert_at_rest(model)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(ours.grad), theirs.grad)


def test_other_methods_than_forward(cluster: Cluster) -> None:
    """B90."""
    cluster.run(check_other_method)
