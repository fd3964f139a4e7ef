"""From the meta device to values: the flows that users' programs have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference import full
from torch import nn
from torch.distributed.tensor import distribute_tensor

from cluster import Cluster
from fullshard import fully_shard
from fullshard.errors import UninitializedError


class Block(nn.Module):
    """Has its own way to initialize itself, as blocks of large models do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 6)

    def init_weights(self) -> None:
        self.norm.reset_parameters()
        for linear in (self.up, self.down):
            nn.init.trunc_normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    """Initializes all of itself from one method, buffers too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 9, bias=False)
        self.register_buffer("angles", torch.arange(6.0), persistent=False)

    def init_weights(self, buffer_device: str) -> None:
        with torch.device(buffer_device):
            self.angles = torch.arange(6.0)
        nn.init.normal_(self.embedding.weight)
        for block in self.blocks:
            block.init_weights()
        self.head.weight.data.uniform_(-0.1, 0.1)
        with torch.no_grad():
            self.head.weight.add_(torch.randn_like(self.head.weight) * 0.01)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embedding(x) * self.angles.cos()
        for block in self.blocks:
            y = block(y)
        return self.head(y)


def shard(model: Net) -> Net:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def initialized() -> Net:
    with torch.device("meta"):
        model = Net()
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    with torch.no_grad():
        model.init_weights("cpu")
    return model


def assert_trains_like(model: nn.Module, reference: nn.Module) -> None:
    for m in (model, reference):
        m(torch.arange(9)).square().mean().backward()
    for (name, one), two in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(full(one.detach()), two.detach()), name
        torch.testing.assert_close(full(one.grad), two.grad, msg=name)


def check_init_weights(rank: int, how: str) -> None:
    reference = initialized()
    with torch.device("meta"):
        model = Net()
    shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    if how == "method":
        with torch.no_grad():
            model.init_weights(buffer_device="cpu")
    else:
        model.angles = torch.arange(6.0)
        for m in (reference, model):
            torch.manual_seed(4)
            m.apply(draw)
    assert_trains_like(model, reference)


def draw(module: nn.Module) -> None:
    """What is given to `model.apply`."""
    if isinstance(module, nn.LayerNorm):
        nn.init.ones_(module.weight)
        nn.init.zeros_(module.bias)
    for name, parameter in module.named_parameters(recurse=False):
        if not isinstance(module, nn.LayerNorm):
            nn.init.kaiming_uniform_(parameter) if name == "weight" else parameter.data.normal_()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("how", ["method", "apply"])
def test_initialization_gives_the_unsharded_numbers_on_any_number_of_ranks(
    cluster: Cluster, how: str, world_size: int
) -> None:
    """B74: random numbers for sharded tensors, by the model's own method or by `apply`."""
    cluster.run(check_init_weights, how, world_size=world_size)


def check_distributed_by_hand(rank: int) -> None:
    """Shard on meta, distribute full tensors, assign; then gather one parameter after the other on every rank."""
    reference = initialized()
    whole = reference.state_dict()
    with torch.device("meta"):
        model = Net()
    shard(model)
    sharded = {}
    for name, value in whole.items():
        like = model.state_dict()[name]
        sharded[name] = nn.Parameter(distribute_tensor(value, like.device_mesh, like.placements))
    model.load_state_dict(sharded, assign=True)
    model.angles = torch.arange(6.0)
    saved = {}
    for name, value in model.state_dict().items():
        gathered = value.full_tensor()
        if dist.get_rank() == 0:
            saved[name] = gathered.cpu()
    assert len(saved) == (len(whole) if rank == 0 else 0)
    assert all(torch.equal(value, whole[name]) for name, value in saved.items())
    assert_trains_like(model, reference)


def test_full_tensors_distributed_by_hand(cluster: Cluster) -> None:
    cluster.run(check_distributed_by_hand, world_size=3)


def check_rank0_loop(rank: int) -> None:
    """Rank 0 has the values; each tensor is broadcast, distributed and dropped, and all are assigned in the end."""
    reference = initialized()
    whole = reference.state_dict() if rank == 0 else {}
    with torch.device("meta"):
        model = Net()
    shard(model)
    loaded: dict[str, Any] = {}
    for name, like in model.state_dict().items():
        value = whole[name].detach() if rank == 0 else torch.empty(like.size(), dtype=like.dtype)
        dist.broadcast(value, src=0)
        loaded[name] = distribute_tensor(value, like.device_mesh, like.placements)
    model.load_state_dict(loaded, assign=True)
    model.angles = torch.arange(6.0)
    assert_trains_like(model, reference)


def test_tensors_broadcast_one_by_one_from_rank_0(cluster: Cluster) -> None:
    """B77, B78."""
    cluster.run(check_rank0_loop)


def check_emptied(rank: int) -> None:
    model = shard(initialized())
    with torch.device("meta"):
        other = shard(Net())
    with pytest.raises(UninitializedError, match=r"'embedding.weight', 'head.weight', 'blocks.0.norm.weight'"):
        other(torch.arange(9))
    model(torch.arange(9)).sum().backward()
    state = {name: full(value).clone() for name, value in model.state_dict().items()}
    model.to_empty(device="cpu")
    with pytest.raises(UninitializedError, match=r"'blocks.0.up.weight'.* by to_empty\) and never given values"):
        model(torch.arange(9))
    model.load_state_dict(state)
    with pytest.raises(UninitializedError, match="buffers 'angles' were materialized"):
        model(torch.arange(9))
    model.angles.copy_(torch.arange(6.0))
    model(torch.arange(9))


def test_model_emptied_after_training_and_names_of_what_has_no_values(cluster: Cluster) -> None:
    """B75."""
    cluster.run(check_emptied)


def check_ignored(rank: int) -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    fully_shard(model, ignored_params={model.weight})
    model.to_empty(device="cpu")
    assert not hasattr(model.weight, "placements")
    assert hasattr(model.bias, "placements")
    model.load_state_dict({"weight": torch.ones(4, 4), "bias": torch.zeros(4)})
    assert model(torch.ones(1, 4)).tolist() == [[4.0] * 4]
    assert not hasattr(model.weight, "placements")


def test_ignored_parameters_stay_plain_when_they_get_memory(cluster: Cluster) -> None:
    """B82."""
    cluster.run(check_ignored, world_size=1)
