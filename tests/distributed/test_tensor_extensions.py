"""Parameters that are subclasses: those that say themselves what is gathered, and those with attributes only."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch
from reference import assert_at_rest
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils import _pytree as pytree

from cluster import Cluster
from fullshard import MixedPrecisionPolicy, clip_grad_norm_, fully_shard

aten = torch.ops.aten
WIDTH = 8
# Operators that keep the subclass, on each of its inner tensors.
KEEPING = (
    aten.detach.default,
    aten.view.default,
    aten.as_strided.default,
    aten.split.Tensor,
    aten.slice.Tensor,
    aten.new_zeros.default,
    aten.empty_like.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.zeros_like.default,
)


class Half(torch.Tensor):
    """A trainable parameter in full precision that travels in bfloat16, whatever the precision policy says."""

    @staticmethod
    def __new__(cls: type[Half], data: torch.Tensor) -> Half:
        made: Half = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, data.shape, data.stride(), data.storage_offset(), dtype=data.dtype, device=data.device
        )
        return made

    def __init__(self, data: torch.Tensor) -> None:
        self.data_inside = data

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_inside"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], _: Any, size: Any, stride: Any) -> Half:
        return Half(inner["data_inside"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(Half, lambda half: half.data_inside, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, Half, result) if func in KEEPING else result

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        assert mesh.ndim == 1
        assert isinstance(module, nn.Linear)
        assert hasattr(mp_policy, "param_dtype")
        assert outer_stride == (outer_size[1], 1)
        rows = -(-outer_size[0] // mesh.size())
        padded = self.data_inside.new_zeros(rows, outer_size[1], dtype=torch.bfloat16)
        padded[: self.shape[0]].copy_(self.data_inside)
        return (padded,), "half"

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        assert metadata == "half"
        (gathered,) = outputs
        assert gathered.dtype == torch.bfloat16
        if out is not None:
            with torch.no_grad(), _unsafe_preserve_version_counter(out):  # torch's engine leaves both to the subclass
                out.copy_(gathered[: out.shape[0]])
            return None
        full = gathered.to(param_dtype)
        return full, (gathered, full)


class HalfWithoutTrimming(Half):
    """Refills `out` with all that came, as is usual where rows divide evenly."""

    rows: ClassVar[list[tuple[int, int | None]]] = []  # of outputs, of `out`

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        return pytree.tree_map_only(Half, lambda half: cls(half.data_inside), result)

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        self.rows.append((len(outputs[0]), None if out is None else len(out)))
        if out is None:
            return super().fsdp_post_all_gather(outputs, metadata, param_dtype)
        with torch.no_grad(), _unsafe_preserve_version_counter(out):
            out.copy_(outputs[0])
        return None


class Codes(torch.Tensor):
    """A frozen matrix as 8-bit codes and one scale a row, like the 4-bit weights of QLoRA."""

    @staticmethod
    def __new__(cls: type[Codes], codes: torch.Tensor, scales: torch.Tensor) -> Codes:
        made: Codes = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, codes.shape, codes.stride(), dtype=torch.float32, device=codes.device
        )
        return made

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        self.codes, self.scales = codes, scales

    @classmethod
    def of(cls, weight: torch.Tensor) -> Codes:
        scales = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scales).round().to(torch.int8), scales)

    def plain(self) -> torch.Tensor:
        return self.codes.to(self.scales.dtype) * self.scales

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first, rest = args[0], args[1:]
        if func in (aten.detach.default, aten.view.default, aten.as_strided.default):
            return Codes(first.codes, first.scales)
        if func is aten.split.Tensor:
            return [Codes(*pair) for pair in zip(first.codes.split(*rest), first.scales.split(*rest), strict=True)]
        if func is aten.new_zeros.default:
            rows = rest[0][0]
            return Codes(first.codes.new_zeros(rest[0]), first.scales.new_zeros(rows, 1))
        if func is aten.slice.Tensor:
            return Codes(aten.slice(first.codes, *rest), aten.slice(first.scales, *rest))
        if func is aten.copy_.default:
            first.codes.copy_(rest[0].codes)
            first.scales.copy_(rest[0].scales)
            return first
        raise NotImplementedError(f"{func}")

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], Any]:
        assert mesh.ndim == 1
        return (self.codes, self.scales), "sizes"  # the older signature

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        codes, scales = outputs
        assert (codes.dtype, metadata, param_dtype) == (torch.int8, "sizes", torch.float32)
        if out is not None:
            assert out.codes.untyped_storage() == codes.untyped_storage(), "refilled under the same storage"
            return None
        return Codes(codes, scales), (codes, scales)


class Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Codes) -> torch.Tensor:
        ctx.weight = weight  # not the plain one, which would stay in memory
        return x @ weight.plain().T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient @ ctx.weight.plain(), None


class Adapted(nn.Module):
    """A frozen quantized linear map with a trainable low-rank one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(Codes.of(torch.randn(WIDTH, WIDTH)), requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.randn(WIDTH, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.weight, Codes)
        result: torch.Tensor = Dequantize.apply(x, self.weight) + x @ self.a.T @ self.b.T  # type: ignore[no-untyped-call]
        return result


def check_adapted(rank: int, replicas: int) -> None:
    def build() -> nn.Module:
        torch.manual_seed(4)
        return nn.Sequential(Adapted(), nn.ReLU(), Adapted())

    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("r", "s"))
    mesh = mesh if replicas > 1 else mesh["s"]
    reference, ours = build(), build()
    for block in (ours[0], ours[2]):
        fully_shard(block, mesh=mesh)
    fully_shard(ours, mesh=mesh)
    assert isinstance(ours[0].weight.to_local(), Codes)
    assert ours[0].weight.to_local().codes.shape == (WIDTH * replicas // world, WIDTH)
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (reference, ours)]
    for step in range(3):
        data = torch.randn(world, 5, WIDTH)
        ours(data[rank]).square().mean().backward()
        torch.stack([reference(part).square().mean() for part in data]).mean().backward()
        norm = clip_grad_norm_(ours, 1.0)
        trained = [p for p in reference.parameters() if p.requires_grad]
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(trained, 1.0), msg=f"step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_at_rest(ours)
    for mine, theirs in zip(ours.parameters(), reference.parameters(), strict=True):
        if theirs.requires_grad:
            torch.testing.assert_close(mine.full_tensor(), theirs)
    ours.unshard()
    ours[0].unshard()
    for name in ("codes", "scales"):
        torch.testing.assert_close(getattr(ours[0].weight, name), getattr(reference[0].weight, name), atol=0, rtol=0)


@pytest.mark.parametrize(("world", "replicas"), [(2, 1), (4, 2), (1, 1)])
def test_frozen_codes_with_adapters_train_as_unsharded(cluster: Cluster, world: int, replicas: int) -> None:
    """B54, B55 with the protocol: codes are gathered bit by bit, the class and its parts are there in forward."""
    cluster.run(check_adapted, replicas, world_size=world)


def check_half(rank: int, rows: int, precision: torch.dtype | None) -> None:
    def build() -> nn.Module:
        torch.manual_seed(6)
        model = nn.Sequential(nn.Linear(WIDTH, rows), nn.ReLU(), nn.Linear(rows, WIDTH))
        for layer in (model[0], model[2]):
            layer.weight = nn.Parameter(Half(layer.weight.detach()))
        return model

    models = []
    for engine, policy in ((fully_shard, MixedPrecisionPolicy), (torch_fully_shard, TorchPolicy)):
        model: Any = build()
        for layer in (model[0], model[2]):
            engine(layer, mp_policy=policy(param_dtype=precision), reshard_after_forward=True)  # type: ignore[operator]
        models.append(engine(model, mesh=init_device_mesh("cpu", (2,))))  # type: ignore[operator]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + rank)
            model(torch.randn(4, WIDTH, generator=generator)).float().square().mean().backward()
        for (name, mine), theirs in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            label = f"step {step}, {name}\n{{}}".format
            torch.testing.assert_close(mine.grad.to_local(), theirs.grad.to_local(), msg=label)
        for optimizer in optimizers:
            optimizer.step()
        assert_at_rest(models[0])


@pytest.mark.parametrize(("rows", "precision"), [(4, None), (5, None), (4, torch.bfloat16)])
def test_trainable_subclass_trains_as_with_torch(cluster: Cluster, rows: int, precision: torch.dtype | None) -> None:
    cluster.run(check_half, rows, precision)


def check_refill(rank: int, rows: int) -> None:
    HalfWithoutTrimming.rows.clear()
    torch.manual_seed(6)
    layer = nn.Linear(WIDTH, rows)
    weight = layer.weight.detach().clone()
    layer.weight = nn.Parameter(HalfWithoutTrimming(weight))
    fully_shard(layer)
    data = torch.randn(3, WIDTH)
    expected = nn.functional.linear(data, weight.bfloat16().float(), layer.bias.full_tensor())
    for _ in range(2):
        torch.testing.assert_close(layer(data), expected)
        layer.reshard()
    padded = rows + rows % 2
    assert HalfWithoutTrimming.rows == [(padded, None), (rows, rows), (rows, rows)]


@pytest.mark.parametrize("rows", [8, 9])
def test_outputs_have_the_rows_of_the_tensor_that_they_refill(cluster: Cluster, rows: int) -> None:
    """`out.copy_(outputs[0])` works for uneven rows, too; torch's engine passes padded outputs there, which raises."""
    cluster.run(check_refill, rows)


class Scaled(nn.Parameter):
    """A parameter with something written on it, as quantization libraries do."""

    scale: float


def check_attributes(rank: int) -> None:
    seen: list[tuple[type, Any, Any]] = []

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.Tensor._make_subclass(Scaled, torch.arange(6.0).view(3, 2), True)
            self.weight.scale = 2.0
            self.codes = nn.Parameter(torch.arange(5, dtype=torch.uint8).view(5, 1), requires_grad=False)
            self.codes.quant_state = {"blocks": 5}  # type: ignore[attr-defined]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((type(self.weight), self.weight.scale, getattr(self.codes, "quant_state", None)))
            assert torch.equal(self.codes.detach(), torch.arange(5, dtype=torch.uint8).view(5, 1))
            result: torch.Tensor = (x @ self.weight.T) * self.weight.scale
            return result

    model = fully_shard(Reader(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.scale == 2.0
    model.weight.scale = 3.0
    model.codes.quant_state = "new"
    model(torch.ones(1, 2)).sum().backward()
    assert seen == [(Scaled, 2.0, {"blocks": 5}), (Scaled, 3.0, "new")]
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((3, 2), 5.0))
    assert model.codes.grad is None
    twin = copy.deepcopy(model)
    twin.weight.scale = 4.0
    twin(torch.ones(1, 2))
    assert seen[-1][:2] == (Scaled, 4.0)
    assert model.weight.scale == 3.0


def test_attributes_and_class_of_a_parameter_are_seen_in_forward(cluster: Cluster) -> None:
    """B55: a Parameter subclass without the protocol keeps its class and what is written on it."""
    cluster.run(check_attributes)


class Closed(Half):
    """Made of other tensors, and without the protocol."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("fsdp_"):
            raise AttributeError(name)
        return super().__getattribute__(name)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is aten.detach.default
        return Closed(args[0].data_inside)


def check_refused(rank: int) -> None:
    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(Closed(torch.ones(2, 2)))
    with pytest.raises(ValueError, match=r"'weight' is a Closed.*needs the methods fsdp_pre_all_gather"):
        fully_shard(layer)
    layer.weight = nn.Parameter(Half(torch.ones(4, 2)))
    with pytest.raises(NotImplementedError, match="reshard_after_forward as an int"):
        fully_shard(layer, mesh=init_device_mesh("cpu", (4,)), reshard_after_forward=2)


def test_what_cannot_be_gathered_is_refused(cluster: Cluster) -> None:
    cluster.run(check_refused, world_size=4)
