"""Parameters that are DTensors already: tensor parallelism inside, fully sharded data parallelism outside."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference import assert_at_rest, full
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims as TorchDims
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from cluster import Cluster
from fullshard import DataParallelMeshDims, MixedPrecisionPolicy, clip_grad_norm_, fully_shard, materialize

WIDTH, HEADS, LENGTH, VOCABULARY = 16, 4, 6, 12


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The number of heads here follows from the width, which tensor parallelism divides.
        q, k, v = (part(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        result: torch.Tensor = self.out((scores @ v).transpose(1, 2).flatten(-2))
        return result


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(self.norm(x))
        return result.clone()  # torch warns of outputs that are views


def parallelize(model: Transformer, tp: DeviceMesh, sequence: bool) -> Transformer:
    """Colwise and rowwise pairs; with `sequence`, norms and what is between the blocks are sharded along the tokens."""
    rows: dict[str, Any] = {"output_layouts": Shard(1)} if sequence else {}
    parallelize_module(
        model,
        tp,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), **rows),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        | (
            {"norm": SequenceParallel(), "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())}
            if sequence
            else {}
        ),
    )
    whole: dict[str, Any] = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
    for block in model.blocks:
        plan: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
        plan |= {"attention.out": RowwiseParallel(**rows), "up": ColwiseParallel(), "down": RowwiseParallel(**rows)}
        if sequence:
            into = {name: PrepareModuleInput(**whole) for name in ("attention", "up")}
            plan |= {"norm1": SequenceParallel(), "norm2": SequenceParallel(), "attention": into["attention"]}
            plan["up"] = ColwiseParallel(input_layouts=Shard(1))
        parallelize_module(block, tp, plan)
    return model


def mesh_3d(replicas: int, shards: int, tp: int) -> tuple[DeviceMesh, DeviceMesh, int, int]:
    """Data-parallel mesh, tensor-parallel mesh, this rank's data-parallel number and the number of those."""
    # Torch caches what it does for meshes by their ranks and names, beyond the life of a process group; so that tests
    # in one process do not meet each other's groups, every shape has names of its own.
    name = f"tp{replicas}{shards}{tp}"
    if replicas == 1:
        mesh = init_device_mesh("cpu", (shards, tp), mesh_dim_names=("dp", name))
        return mesh["dp"], mesh[name], mesh.get_local_rank("dp"), shards
    mesh = init_device_mesh("cpu", (replicas, shards, tp), mesh_dim_names=("dp_replicate", "dp_shard", name))
    number = mesh.get_local_rank("dp_replicate") * shards + mesh.get_local_rank("dp_shard")
    return mesh["dp_replicate", "dp_shard"], mesh[name], number, replicas * shards


def shard(model: Transformer, engine: Callable[..., Any], **options: Any) -> Any:
    for block in model.blocks:
        engine(block, **options)
    return engine(model, **options)


def loss_of(model: nn.Module, step: int, part: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + part)
    tokens = torch.randint(VOCABULARY, (3, LENGTH), generator=generator)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


def transformer(dtype: torch.dtype = torch.float64) -> Transformer:
    torch.manual_seed(1)
    return Transformer().to(dtype)


def compare(ours: nn.Module, reference: nn.Module, tolerance: float = 1e-6) -> None:
    expected = dict(reference.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(full(parameter.detach()), expected[name].detach(), atol=tolerance, rtol=tolerance)
        got, want = full(parameter.grad), expected[name].grad
        assert (got is None) == (want is None), name
        if got is not None:
            torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance, msg=(name + "\n{}").format)


def check_training(rank: int, sizes: tuple[int, int, int], sequence: bool, microbatches: int) -> None:
    torch.set_default_dtype(torch.float64)
    dp, tp, part, parts = mesh_3d(*sizes)
    reference = transformer()
    ours = shard(parallelize(transformer(), tp, sequence), fully_shard, mesh=dp)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (reference, ours)]
    try:
        for step in range(2):
            for micro in range(microbatches):
                number = step * microbatches + micro
                sum(loss_of(reference, number, other) / parts for other in range(parts)).backward()
                ours.set_requires_gradient_sync(micro == microbatches - 1)
                loss_of(ours, number, part).backward()
            norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            torch.testing.assert_close(clip_grad_norm_(ours, 0.5), norm, atol=1e-7, rtol=1e-7)
            compare(ours, reference)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            compare(ours, reference)
            assert_at_rest(ours)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence"])
@pytest.mark.parametrize("sizes", [(1, 2, 2), (1, 2, 1), (1, 1, 2), (2, 1, 2)], ids=str)
def test_trains_as_unsharded(cluster: Cluster, sizes: tuple[int, int, int], sequence: bool) -> None:
    world = sizes[0] * sizes[1] * sizes[2]
    cluster.run(check_training, sizes, sequence, 1, world_size=world)


def test_accumulates_without_communication(cluster: Cluster) -> None:
    cluster.run(check_training, (1, 2, 2), True, 3, world_size=4)


def check_same_as_torch(rank: int, sizes: tuple[int, int, int]) -> None:
    """Side by side with torch's own engine: everything that a program can see of the sharded parameters."""
    dp, tp, part, _ = mesh_3d(*sizes)
    models = [
        shard(parallelize(transformer(torch.float32), tp, True), engine, mesh=dp)
        for engine in (fully_shard, torch_fully_shard)
    ]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    seen: list[list[tuple[str, type, type, tuple[int, ...], str]]] = []
    for model, optimizer in zip(models, optimizers, strict=True):
        types: list[tuple[str, type, type, tuple[int, ...], str]] = []

        def note(module: nn.Module, _: Any, types: list[Any] = types) -> None:
            for name, p in module.named_parameters(recurse=False):
                inside = (tuple(p.to_local().shape), str(p.placements)) if isinstance(p, DTensor) else (p.shape, "")
                types.append((name, type(p), type(p.detach()), *inside))

        for module in model.modules():
            module.register_forward_pre_hook(note)
        loss_of(model, 0, part).backward()
        optimizer.step()
        seen.append(types)
    assert seen[0] == seen[1], "what the modules hold in forward"
    ours, torchs = (model.state_dict() for model in models)
    assert list(ours) == list(torchs)
    for name, value in ours.items():
        other = torchs[name]
        assert value.placements == other.placements, name
        assert value.device_mesh.mesh_dim_names == other.device_mesh.mesh_dim_names, name
        assert value.device_mesh == other.device_mesh, name
        assert (value.shape, value.stride()) == (other.shape, other.stride()), name
        local, expected = value.to_local(), other.to_local()
        assert (local.shape, local.is_contiguous()) == (expected.shape, True), name
        torch.testing.assert_close(local, expected, msg=(name + "\n{}").format)
    for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert mine.grad.placements == theirs.grad.placements
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad.full_tensor(), atol=1e-6, rtol=1e-5)
    models[0].load_state_dict(torchs)
    models[0].load_state_dict(copy.copy(torchs), assign=True)
    torch.testing.assert_close(loss_of(models[0], 1, part), loss_of(models[1], 1, part))


@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 1, 2)], ids=str)
def test_parameters_look_as_torchs(cluster: Cluster, sizes: tuple[int, int, int]) -> None:
    cluster.run(check_same_as_torch, sizes, world_size=4)


def check_precision(rank: int) -> None:
    dp, tp, part, _ = mesh_3d(1, 2, 2)
    options = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    engines = ((fully_shard, MixedPrecisionPolicy(**options)), (torch_fully_shard, TorchPolicy(**options)))
    ours, torchs = (
        shard(parallelize(transformer(torch.float32), tp, True), engine, mesh=dp, mp_policy=policy)
        for engine, policy in engines
    )
    for model in (ours, torchs):
        loss_of(model, 0, part).backward()
    for mine, theirs in zip(ours.parameters(), torchs.parameters(), strict=True):
        assert mine.dtype == mine.grad.dtype == torch.float32
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad.full_tensor(), atol=1e-4, rtol=2e-2)


def test_bf16_with_tensor_parallel(cluster: Cluster) -> None:
    cluster.run(check_precision, world_size=4)


def check_mixed_kinds(rank: int, sizes: tuple[int, int, int]) -> None:
    """Parameters that are parallel, plain, frozen and ignored in one model: one norm, on all ranks the same."""
    dp, tp, part, parts = mesh_3d(*sizes)

    def build() -> Transformer:
        model = transformer()
        model.head.weight.requires_grad_(False)
        return model

    reference, ours = build(), build()
    for block in ours.blocks:
        parallelize_module(block, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    ignored = ours.norm.weight
    shard(ours, fully_shard, mesh=dp, ignored_params={ignored}, average_ignored_grads=False)
    sum(loss_of(reference, 0, other) / parts for other in range(parts)).backward()
    loss_of(ours, 0, part).backward()
    dist.all_reduce(ignored.grad)
    ignored.grad.div_(dist.get_world_size())
    for order in (1.0, 2.0, float("inf")):
        want = nn.utils.clip_grad_norm_(reference.parameters(), 0.5, order)
        torch.testing.assert_close(clip_grad_norm_(ours, 0.5, order), want, atol=1e-6, rtol=1e-6)
    compare(ours, reference)


@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 1, 2)], ids=str)
def test_clips_parallel_plain_frozen_and_ignored(cluster: Cluster, sizes: tuple[int, int, int]) -> None:
    cluster.run(check_mixed_kinds, sizes, world_size=4)


def check_torch_clips(rank: int, sizes: tuple[int, int, int]) -> None:
    dp, tp, part, parts = mesh_3d(*sizes)
    reference = transformer(torch.float32)
    ours = parallelize(transformer(torch.float32), tp, True)
    shard(ours, fully_shard, mesh=dp)
    sum(loss_of(reference, 0, other) / parts for other in range(parts)).backward()
    loss_of(ours, 0, part).backward()
    want = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    got = nn.utils.clip_grad_norm_(ours.parameters(), 0.5)
    torch.testing.assert_close(full(got), want, atol=1e-5, rtol=1e-5)
    compare(ours, reference, 1e-5)


@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 1, 2)], ids=str)
def test_torch_clips_a_parallel_model(cluster: Cluster, sizes: tuple[int, int, int]) -> None:
    cluster.run(check_torch_clips, sizes, world_size=4)


def check_materialize(rank: int) -> None:
    dp, tp, part, _ = mesh_3d(1, 2, 2)
    torch.manual_seed(3)
    reference = transformer(torch.float32)
    with torch.device("meta"):
        ours = Transformer()
    shard(parallelize(ours, tp, True), fully_shard, mesh=dp)

    def reset(module: nn.Module) -> None:
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()

    torch.manual_seed(3)
    for module in reference.modules():
        reset(module)
    torch.manual_seed(3)
    materialize(ours)
    for (name, mine), theirs in zip(ours.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs, atol=0, rtol=0, msg=(name + "\n{}").format)
    loss_of(ours, 0, part).backward()


def test_materializes_parallel_parameters_as_unsharded(cluster: Cluster) -> None:
    cluster.run(check_materialize, world_size=4)


def check_cast(rank: int) -> None:
    """`model.double()` puts new local tensors behind the parameters; they become one flat shard again."""
    dp, tp, part, parts = mesh_3d(1, 2, 2)
    reference = transformer(torch.float32)
    ours = shard(parallelize(transformer(torch.float32), tp, False), fully_shard, mesh=dp)
    loss_of(ours, 0, part).backward()
    ours.zero_grad()
    ours.double()
    reference.double()
    loss_of(ours, 0, part).backward()
    sum(loss_of(reference, 0, other) / parts for other in range(parts)).backward()
    compare(ours, reference, 1e-6)


def test_cast_after_sharding(cluster: Cluster) -> None:
    cluster.run(check_cast, world_size=4)


def check_spmd(rank: int, kind: str) -> None:
    """All parameters on the full mesh, as torch's `dp_mesh_dims` wants them."""
    sizes, names = {
        "shard": ((2, 2), ("dp", "tp")),
        "replicate": ((2, 2), ("rep", "tp")),
        "hsdp": ((2, 2, 1), ("rep", "dp", "tp")),
        "two": ((2, 2, 1), ("dp", "cp", "tp")),
    }[kind]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    dims = {
        "shard": {"shard": "dp"},
        "replicate": {"replicate": "rep"},
        "hsdp": {"shard": "dp", "replicate": "rep"},
        "two": {"shard": ("dp", "cp")},
    }[kind]
    data = [i for i, name in enumerate(names) if name != "tp"]
    reference = Feed()

    def build() -> nn.Module:
        model = Feed()
        for name, parameter in list(model.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            layout: list[Any] = [Replicate()] * mesh.ndim
            layout[-1] = Shard(1) if name == "down.weight" else Replicate() if name == "down.bias" else Shard(0)
            made = nn.Parameter(distribute_tensor(parameter.detach(), mesh, layout))
            setattr(model.get_submodule(owner), leaf, made)
        return model

    models = [
        fully_shard(build(), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**dims)),
        torch_fully_shard(build(), mesh=mesh, dp_mesh_dims=TorchDims(**dims)),
    ]
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))
    layout: list[Any] = [Shard(0) if i in data else Replicate() for i in range(mesh.ndim)]
    for model in models:
        loss = model(distribute_tensor(x, mesh, layout)).square().mean()
        loss.full_tensor().backward()
    reference(x).square().mean().backward()
    for (name, mine), theirs in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert mine.placements == theirs.placements, name
        assert mine.device_mesh == theirs.device_mesh, name
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad.full_tensor(), msg=(name + "\n{}").format)
        assert mine.grad.to_local().is_contiguous()


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.relu(self.up(x)))
        return result


@pytest.mark.parametrize("kind", ["shard", "replicate", "hsdp", "two"])
def test_parameters_on_the_full_mesh(cluster: Cluster, kind: str) -> None:
    cluster.run(check_spmd, kind, world_size=4)


def check_uneven(rank: int) -> None:
    """Rows that neither axis divides evenly, logits that stay parallel, and a smaller shard after forward."""
    dp, tp, part, parts = mesh_3d(1, 2, 2)
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 7))
    ours = copy.deepcopy(reference)
    logits = ColwiseParallel(input_layouts=Shard(-1), output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(ours, tp, {"0": ColwiseParallel(), "2": logits})
    fully_shard(ours, mesh=dp)
    x, labels = torch.randn(parts, 5, 6), torch.arange(5)
    with loss_parallel():
        nn.functional.cross_entropy(ours(x[part]), labels).backward()
    sum(nn.functional.cross_entropy(reference(each), labels) / parts for each in x).backward()
    compare(ours, reference)


def test_uneven_rows_and_parallel_loss(cluster: Cluster) -> None:
    cluster.run(check_uneven, world_size=4)


def check_smaller_shard(rank: int) -> None:
    dp, tp, _, _ = mesh_3d(1, 4, 1)
    reference, ours = Feed(), Feed()
    parallelize_module(ours, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(ours, mesh=dp, reshard_after_forward=2)
    x = torch.randn(3, WIDTH)
    for model in (ours, reference):
        model(x).square().sum().backward()
    compare(ours, reference, 1e-5)
    assert_at_rest(ours)


def test_smaller_shard_after_forward(cluster: Cluster) -> None:
    cluster.run(check_smaller_shard, world_size=4)


def check_refused(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    layer = parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel())
    with pytest.raises(
        ValueError, match=r"'weight' already is a DTensor .* cannot be joined with the data-parallel mesh"
    ):
        fully_shard(layer, mesh=mesh)
    with pytest.raises(ValueError, match="all parameters must be DTensors on the mesh"):
        fully_shard(nn.Linear(4, 4), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    with pytest.raises(ValueError, match="names 'tp', but the dims of the mesh are"):
        fully_shard(nn.Linear(4, 4), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="tp"))
    with pytest.raises(ValueError, match="names no dim"):
        DataParallelMeshDims()


def test_meshes_that_do_not_fit(cluster: Cluster) -> None:
    cluster.run(check_refused)
