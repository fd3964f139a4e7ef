"""Ranks with different amounts of work: the same number of steps on all of them."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from reference import full
from torch import nn

from cluster import Cluster
from fullshard import any_rank, even_batches, fully_shard


def batches_of(rank: int) -> list[torch.Tensor]:
    """Rank r has 5 - r batches."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(3, 5, dtype=torch.float64, generator=generator) for _ in range(5 - rank)]


def make_pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    ours = deepcopy(reference)
    fully_shard(ours[0])
    return reference, fully_shard(ours)


def check_training(rank: int, mode: str, divide_by_all: bool) -> None:
    reference, ours = make_pair()
    world = dist.get_world_size()
    pair = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (reference, ours)]
    steps = 0
    batches = iter(batches_of(rank))  # no length
    for batch, share in even_batches(batches, mode=mode, divide_by_initial_world_size=divide_by_all):
        assert (share > 0) == (steps < 5 - rank)
        remaining = [b[steps] for b in map(batches_of, range(world)) if steps < len(b)]
        losses = torch.stack([reference(x).square().mean() for x in remaining])
        for optimizer in pair:
            optimizer.zero_grad()
        (losses.sum() / (world if divide_by_all else len(remaining))).backward()
        (share * ours(batch).square().mean()).backward()
        for optimizer in pair:
            optimizer.step()
        steps += 1
    assert steps == (5 if mode == "join" else 6 - world)
    for (name, got), want in zip(ours.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(got.detach()), want.detach(), msg=(name + "\n{}").format)
    ours.eval()
    results = []
    with torch.no_grad():
        for batch, share in even_batches(batches_of(rank)):
            output = ours(batch)
            results += [output] if share else []
    for got, batch in zip(results, batches_of(rank), strict=True):
        torch.testing.assert_close(got, reference(batch))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("mode", "divide_by_all"), [("join", True), ("join", False), ("shortest", True)])
def test_uneven_batches(cluster: Cluster, world_size: int, mode: str, divide_by_all: bool) -> None:
    """B30: 5 and 4 (and 3) batches; every rank takes the same steps, and gradients are those of the ranks with data."""
    cluster.run(check_training, mode, divide_by_all, world_size=world_size)


def check_errors(rank: int) -> None:
    for given in ([], [torch.ones(1)] * rank):
        taken = list(even_batches(given, mode="shortest"))
        assert taken == []
    assert list(even_batches([])) == []
    with pytest.raises(ValueError, match=r"ranks \[0\] of the group have no batch at all"):
        list(even_batches([torch.ones(1)] * rank))
    with pytest.raises(ValueError, match="mode must be one of join, shortest, got 'pad'"):
        list(even_batches([], mode="pad"))  # type: ignore[arg-type]
    assert [share for _, share in even_batches([None, None])] == [1.0, 1.0]  # any object is a batch


def test_a_rank_without_batches_is_an_error_on_every_rank(cluster: Cluster) -> None:
    cluster.run(check_errors)


def check_generation(rank: int) -> None:
    """Rank 0 generates 3 tokens, rank 1 five."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11))
    ours = deepcopy(reference)
    fully_shard(ours[0])
    fully_shard(ours)
    wanted = 3 + 2 * rank

    def generate(model: nn.Module, alone: bool) -> list[int]:
        tokens = [rank]
        with torch.no_grad():
            while len(tokens) <= wanted if alone else any_rank(len(tokens) <= wanted):
                token = int(model(torch.tensor(tokens))[-1].argmax())
                if len(tokens) <= wanted:
                    tokens.append(token)
        return tokens

    assert generate(ours, alone=False) == generate(reference, alone=True)
    assert any_rank(rank == 1)
    assert not any_rank(False)


def test_generation_of_different_lengths(cluster: Cluster) -> None:
    """B90."""
    cluster.run(check_generation)


def check_alone(rank: int) -> None:
    assert list(even_batches([1, 2], divide_by_initial_world_size=False)) == [(1, 1.0), (2, 1.0)]
    assert any_rank(True)


def test_without_a_process_group(cluster: Cluster) -> None:
    cluster.run(check_alone, init_group=False, world_size=1)
