"""Sharded training equals unsharded training, for the whole menagerie (REF check)."""

from __future__ import annotations

import pytest
import torch
from reference import Setup, check_reference
from torch.distributed.tensor import Shard

from cluster import Cluster
from models import CASES

NAMES = [case.name for case in CASES]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world_size", [1, 3, 4])  # two ranks: the settings below
def test_gradients_and_values_equal_unsharded_training(cluster: Cluster, name: str, world_size: int) -> None:
    cluster.run(check_reference, name, Setup(), world_size=world_size)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("world_size", "setup"),
    [
        pytest.param(2, Setup(reshard_after_forward=False, dtype=torch.float32), id="keep_float32"),
        pytest.param(2, Setup(reshard_after_forward=True), id="free"),
        pytest.param(4, Setup(reshard_after_forward=2), id="secondary"),
        pytest.param(3, Setup(transport="direct"), id="direct_transport"),
        pytest.param(4, Setup(transport="direct", replicas=2, microbatches=2), id="direct_hsdp"),
        pytest.param(3, Setup(transport="torch"), id="torch_transport"),
        pytest.param(4, Setup(transport="torch", replicas=2, reshard_after_forward=True), id="torch_hsdp"),
        pytest.param(3, Setup(microbatches=3), id="accumulate"),
        pytest.param(2, Setup(microbatches=3, sync=(False, False, True)), id="no_sync"),
        pytest.param(4, Setup(microbatches=4, sync=(True, False, False, True), replicas=2), id="mixed_sync_hsdp"),
    ],
)
def test_every_setting_equals_unsharded_training(cluster: Cluster, name: str, world_size: int, setup: Setup) -> None:
    cluster.run(check_reference, name, setup, world_size=world_size)


def last_dim(parameter: torch.nn.Parameter) -> Shard | None:
    """Shards matrices on their last dim."""
    return Shard(parameter.dim() - 1) if parameter.dim() > 1 else None


@pytest.mark.parametrize(
    ("transport", "world_size"), [("shm", 3), ("shm", 4), ("direct", 3), ("torch", 3), ("torch", 2)]
)
@pytest.mark.parametrize("name", ["mlp", "uneven_mlp", "narrow", "conv", "llama", "tied", "root_and_blocks"])
def test_other_dims_equal_unsharded_training(cluster: Cluster, name: str, world_size: int, transport: str) -> None:
    """B09: rows may be those of any dim, also where they do not divide evenly."""
    setup = Setup(shard_options=(("shard_placement_fn", last_dim),), transport=transport)
    cluster.run(check_reference, name, setup, world_size=world_size)


@pytest.mark.parametrize(
    ("world_size", "setup"),
    [
        pytest.param(7, Setup(transport="torch"), id="7_torch"),
        pytest.param(8, Setup(), id="8"),
        pytest.param(6, Setup(reshard_after_forward=3), id="6_secondary_3"),
        pytest.param(8, Setup(replicas=2, reshard_after_forward=2), id="8_hsdp_secondary"),
        pytest.param(8, Setup(replicas=4, microbatches=2), id="8_hsdp_4x2"),
    ],
)
@pytest.mark.parametrize("name", ["uneven_mlp", "llama"])
def test_up_to_eight_ranks(cluster: Cluster, name: str, world_size: int, setup: Setup) -> None:
    """More ranks than rows, odd numbers of ranks, several replicas."""
    cluster.run(check_reference, name, setup, world_size=world_size)


@pytest.mark.parametrize("replicas", [4, 2, 1])
def test_replicate_axis_always_averages(cluster: Cluster, replicas: int) -> None:
    """B12: a shard axis of size 1 must not turn gradient averaging off."""
    cluster.run(check_reference, "mlp", Setup(replicas=replicas), world_size=4)
