"""Loading state dicts into sharded modules: full and sharded ones, what does not fit, and who holds how much."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference import assert_at_rest, full
from stack import Stack, batch, make_stack
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cluster import Cluster
from fullshard import FSDPModule, fully_shard


class Odd(nn.Module):
    """Dims that do not divide, a scalar, a parameter without elements, buffers, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.inner = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 5, bias=False))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("mean", torch.rand(3))
        self.register_buffer("count", torch.tensor(4, dtype=torch.int64))
        self.register_buffer("cache", torch.rand(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embedding(x))) * self.scale + self.nothing.sum()


def shard(model: Odd, **options: Any) -> Odd:
    fully_shard(model.inner[0], **options)
    fully_shard(model.inner, **options)
    return fully_shard(model, **options)


def plain(seed: int, build: Callable[[], nn.Module] = Odd) -> nn.Module:
    torch.manual_seed(seed)
    return build()


def assert_equal(model: nn.Module, expected: nn.Module) -> None:
    state, wanted = model.state_dict(), expected.state_dict()
    assert list(state) == list(wanted)
    for name, value in state.items():
        assert torch.equal(full(value), wanted[name]), name


# Full tensors into shards

OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "1-D": dict,
    "Shard(1)": lambda: {"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 else None},
    "HSDP": lambda: {"mesh": init_device_mesh("cpu", (2, dist.get_world_size() // 2))},
}


def check_full(rank: int, how: str, kind: str) -> None:
    source = plain(1)
    with torch.device("meta" if how == "meta" else "cpu"):
        model = shard(plain(0), **OPTIONS[kind]())
    if how == "after a step":
        model(torch.arange(7)).sum().backward()
        model.zero_grad()
    state = source.state_dict()
    given = dict(state)
    result = model.load_state_dict(state, assign=how in ("assign", "meta"))
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert all(state[name] is value for name, value in given.items())
    if how == "meta":
        model.cache = source.cache.clone()
    assert_equal(model, source)
    assert model.head.weight is model.embedding.weight
    with torch.no_grad():
        source.embedding.weight.add_(0)  # what was loaded is not an alias of what was given
    for m in (model, source):
        m(torch.arange(7)).square().mean().backward()
        torch.optim.SGD(m.parameters(), lr=0.1).step()
    assert_at_rest(model)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(full(value), source.state_dict()[name], msg=name)


@pytest.mark.parametrize("how", ["copy", "after a step", "assign", "meta"])
@pytest.mark.parametrize(("kind", "world_size"), [("1-D", 3), ("Shard(1)", 2), ("HSDP", 4)])
def test_full_state_dict_into_a_sharded_model(cluster: Cluster, how: str, kind: str, world_size: int) -> None:
    """B80: every rank takes its rows, and the next step is that of the unsharded model."""
    cluster.run(check_full, how, kind, world_size=world_size)


def check_wrapped(rank: int) -> None:
    reference = Stack()
    model = plain(3, Stack)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
        fully_shard(model.blocks[i] if i % 2 else model.blocks[i]._checkpoint_wrapped_module)
    fully_shard(model)
    assert list(model.state_dict()) == list(reference.state_dict())
    model.load_state_dict(reference.state_dict())
    assert_equal(model, reference)
    model.blocks[1].load_state_dict({"weight": torch.ones(8, 8), "bias": torch.zeros(8)})  # a part by itself
    assert full(model.blocks[1].weight.detach()).eq(1).all()
    converted = {name: value.bfloat16() for name, value in reference.state_dict().items()}
    model.load_state_dict(converted)
    assert all(value.dtype == torch.float32 for value in model.state_dict().values())
    model.load_state_dict(converted, assign=True)
    assert all(value.dtype == torch.bfloat16 for value in model.state_dict().values())
    assert model(batch(rank).bfloat16()).dtype == torch.bfloat16


def test_full_state_dict_below_wrappers_and_of_other_dtypes(cluster: Cluster) -> None:
    cluster.run(check_wrapped)


# What does not fit


def check_strict(rank: int, kind: str) -> None:
    model = make_stack()
    model(batch(rank))
    sharded = make_stack().state_dict() if kind == "sharded" else plain(5, Stack).state_dict()
    state = {name: value + 1 for name, value in sharded.items()}
    before = {name: full(value).clone() for name, value in model.state_dict().items()}
    state.pop("blocks.1.bias")
    with pytest.raises(RuntimeError, match=r'FSDPStack \(nothing was changed\):\s+Missing key.*: "blocks.1.bias"\.'):
        model.load_state_dict(state)
    state["blocks.1.bias"], state["extra"] = torch.zeros(8), torch.zeros(1)
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "extra"'):
        model.load_state_dict(state)
    state["blocks.3.weight"] = torch.zeros(8, 7)
    with pytest.raises(RuntimeError, match=r"size mismatch for blocks.3.weight: copying a param with shape .*8, 7"):
        model.load_state_dict(state, strict=False)
    for name, value in model.state_dict().items():
        assert torch.equal(full(value), before[name]), name
    state.pop("blocks.3.weight")
    result = model.load_state_dict(state, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["blocks.3.weight"], ["extra"])
    assert torch.equal(full(model.blocks[0].weight.detach()), full(state["blocks.0.weight"]))
    assert full(model.blocks[1].bias.detach()).eq(0).all()


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_failed_load_names_everything_and_changes_nothing(cluster: Cluster, kind: str) -> None:
    """B100."""
    cluster.run(check_strict, kind)


class Renaming(nn.Module):
    """Accepts what an older version saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_load_state_dict_pre_hook(self.rename)
        self.version = 0

    @staticmethod
    def rename(_module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in [name for name in state if name.startswith(f"{prefix}old.")]:
            state[name.replace("old.", "linear.")] = state.pop(name)

    def get_extra_state(self) -> int:
        return self.version

    def set_extra_state(self, state: int) -> None:
        self.version = state


def check_renaming(rank: int) -> None:
    source = plain(1, Renaming)
    source.version = 3
    state = {name.replace("linear.", "old."): value for name, value in source.state_dict().items()}
    model = nn.Sequential(plain(0, Renaming))
    fully_shard(model[0].linear)
    fully_shard(model)
    model.load_state_dict({f"0.{name}": value for name, value in state.items()})
    assert torch.equal(full(model[0].linear.weight.detach()), source.linear.weight)
    assert model[0].version == 3


def test_modules_with_their_own_way_of_loading(cluster: Cluster) -> None:
    """Hooks that rename keys, extra state, batch norm: what they accept is accepted."""
    cluster.run(check_renaming)


def check_tied(rank: int) -> None:
    for values in ("full", "sharded"):
        source = plain(1) if values == "full" else shard(plain(1))
        model = shard(plain(0))
        state = dict(source.state_dict())
        model.load_state_dict(state)  # equal values
        assert torch.equal(full(model.head.weight.detach()), full(source.head.weight.detach()))
        state["embedding.weight"] = state["embedding.weight"] + 1
        with pytest.warns(
            UserWarning, match=r'"embedding.weight", "head.weight" are one parameter .*\'head.weight\' is'
        ):
            model.load_state_dict(state)
        assert torch.equal(full(model.embedding.weight.detach()), full(source.head.weight.detach()))
        state.pop("head.weight")
        with pytest.raises(
            RuntimeError, match=r'"head.weight" is tied to "embedding.weight", which is there: strict=F'
        ):
            model.load_state_dict(state)
        model.load_state_dict(state, strict=False)
        assert torch.equal(full(model.head.weight.detach()), full(state["embedding.weight"]))
        assert model.head.weight is model.embedding.weight


def test_tied_weights_with_both_keys_or_one(cluster: Cluster) -> None:
    """B05."""
    cluster.run(check_tied)


def check_other_mesh(rank: int) -> None:
    meshes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    source = fully_shard(nn.Linear(4, 4), mesh=meshes["shard"])
    model = fully_shard(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match=r"weight is sharded over the mesh .* but the model over .*full_tensor\(\)"):
        model.load_state_dict(source.state_dict())
    model.load_state_dict({name: full(value) for name, value in source.state_dict().items()})


def test_state_dict_of_another_mesh(cluster: Cluster) -> None:
    cluster.run(check_other_mesh, world_size=4)


# Only rank 0 has the values


class LiveBytes(TorchDispatchMode):
    """Counts the memory that operations under it return and that is alive at once, each byte once.

    Args:
        known: Tensors whose memory is not counted.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.known = {storage_of(tensor).data_ptr() for tensor in known}
        self.alive: dict[int, tuple[StorageWeakRef, int, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                storage = storage_of(tensor)
                if storage.data_ptr() not in self.known:
                    start = storage.data_ptr()
                    self.alive[storage._cdata] = (StorageWeakRef(storage), start, start + storage.nbytes())
        self.peak = max(self.peak, self._bytes())
        return result

    def _bytes(self) -> int:
        total, reached = 0, 0
        for _, start, stop in sorted(self.alive.values(), key=lambda entry: entry[1]):
            total += max(0, stop - max(start, reached))
            reached = max(reached, stop)
        return total


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    storage: torch.UntypedStorage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
    return storage


class Wide(nn.Module):
    """Tied weights, buffers of two dtypes, and enough blocks that one of them is small beside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))
        self.head = nn.Linear(64, 32, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mean", torch.rand(3))
        self.register_buffer("count", torch.tensor([4]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x) * self.mean.sum() * self.count


def shard_wide(model: Wide, **options: Any) -> FSDPModule:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def check_rank0(rank: int) -> None:
    source = plain(1, Wide)
    state = source.state_dict() if rank == 0 else {}
    whole = sum(p.nbytes for p in source.parameters())
    with LiveBytes() as live:
        with torch.device("meta"):
            model = shard_wide(Wide())
        model.to_empty(device="cpu")
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state, options=options)
    if rank:
        assert live.peak <= whole // dist.get_world_size() + 3 * 64 * 64 * 4, (live.peak, whole)
    assert_equal(model, source)
    assert model.head.weight is model.embedding.weight
    for step in range(3):
        x = torch.arange(5) + step
        for m in (model, source):
            m.zero_grad()
            m(x).square().mean().backward()
            torch.optim.SGD(m.parameters(), lr=0.1).step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(full(value), source.state_dict()[name], msg=name)


@pytest.mark.parametrize("world_size", [2, 4])
def test_values_from_rank_0_alone_reach_all_and_no_rank_holds_the_model(cluster: Cluster, world_size: int) -> None:
    """B04, B77, B78, B81: tied weights, buffers; others hold their shard and a parameter or two at most."""
    cluster.run(check_rank0, world_size=world_size)


def check_streamed(rank: int) -> None:
    source = plain(1, Wide)
    model = shard_wide(plain(0, Wide))
    state = source.state_dict()
    with LiveBytes([*state.values(), *model.state_dict().values()]) as live:
        model.load_state_dict(state)
    assert live.peak == 0  # nothing but views of what was given and of the shards
    with LiveBytes(state.values()) as live:
        model.load_state_dict(state, assign=True)
    assert live.peak <= sum(p._local_tensor.nbytes for p in model.parameters()) + 1024
    assert_equal(model, source)


def test_full_state_dict_is_not_copied_before_it_is_written(cluster: Cluster) -> None:
    """B81."""
    cluster.run(check_streamed)


def check_rank0_alone(rank: int, broadcast: bool) -> None:
    source = plain(1)
    model = shard(plain(0), **OPTIONS["HSDP" if broadcast else "1-D"]())
    state = source.state_dict() if rank == 0 else {}
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast))
    assert_equal(model, source)


def test_full_dict_on_rank_0_only(cluster: Cluster) -> None:
    """B116: with broadcast it loads; without, the ranks that have nothing say so at once, and rank 0 does not hang."""
    cluster.run(check_rank0_alone, True, world_size=4)
    outcomes = cluster.run_outcomes(check_rank0_alone, False, group_timeout=2.0)
    assert [outcome.kind for outcome in outcomes] == ["error", "error"]
    assert "state_dict is empty" in outcomes[1].text


def check_gather_alone(rank: int) -> None:
    model = make_stack()
    if rank == 0:
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def test_full_gather_on_rank_0_alone_ends(cluster: Cluster) -> None:
    """B111."""
    outcomes = cluster.run_outcomes(check_gather_alone, group_timeout=2.0)
    assert outcomes[0].kind == "error", outcomes


# Saving by hand


def check_save_by_hand(rank: int) -> None:
    """Every rank may write its own part; what is read again is the part, without the rest of the flat shard."""
    model = shard(plain(0))
    model(torch.arange(7)).square().mean().backward()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    other = shard(plain(1))
    stepped = torch.optim.AdamW(other.parameters())
    other.load_state_dict(loaded["model"])
    stepped.load_state_dict(loaded["optimizer"])
    for m, o in ((model, optimizer), (other, stepped)):
        o.zero_grad()
        m(torch.arange(7)).square().mean().backward()
        o.step()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(full(one.detach()), full(two.detach()))
    big = make_stack(count=1, width=64)
    file = io.BytesIO()
    torch.save(big.blocks[0].bias, file)
    assert file.tell() < 8192  # the weight, which is in the same flat shard, has as many bytes
    torch.save(big.blocks[0].weight.detach(), io.BytesIO())


def test_ranks_save_and_load_their_own_parts(cluster: Cluster) -> None:
    """B112: `torch.save` of a sharded state dict keeps what each rank has, and it can be loaded again."""
    cluster.run(check_save_by_hand)
