"""Numbers that need more than the plain reference: mixed precision, clipping, accumulation patterns, divide factors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from reference import Setup, check_reference, full, shard_case
from torch import nn

from cluster import Cluster
from fullshard import MixedPrecisionPolicy, clip_grad_norm_, fully_shard
from models import by_name, make_model, run_case

NORM_TYPES = (1.0, 2.0, 3.0, float("inf"))


def check_clip(rank: int, name: str, replicas: int) -> None:
    """Each step clips by another norm."""
    norm_types = iter(NORM_TYPES)

    def clip(rank: int, ours: nn.Module, reference: nn.Module, setup: Setup) -> None:
        norm_type = next(norm_types)
        # torch cannot add a replicated norm to a sharded one, nor take the infinite norm of an empty shard.
        torch_can = name != "scalar" and norm_type != float("inf")
        torch_value = torch.nn.utils.clip_grad_norm_(ours.parameters(), 1e9, norm_type) if torch_can else None
        got = clip_grad_norm_(ours, 0.1, norm_type)
        want = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1, norm_type)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
        if torch_value is not None:
            torch.testing.assert_close(full(torch_value), want, rtol=1e-12, atol=0)

    check_reference(rank, name, Setup(replicas=replicas, steps=len(NORM_TYPES)), clip)


@pytest.mark.parametrize(("world_size", "replicas"), [(2, 1), (4, 1), (4, 2)])
@pytest.mark.parametrize("name", ["uneven_mlp", "narrow", "one_element", "frozen", "unused_branch", "scalar"])
def test_clipped_norm_is_global(cluster: Cluster, name: str, world_size: int, replicas: int) -> None:
    """B56: one norm over all shards, the same on every rank, with empty shards and gradients that are None."""
    cluster.run(check_clip, name, replicas, world_size=world_size)


def check_clip_without_gradients(rank: int) -> None:
    model = fully_shard(nn.Linear(4, 4))
    assert clip_grad_norm_(model, 1.0).item() == 0.0
    with pytest.raises(ValueError, match="max_norm must be at least 0"):
        clip_grad_norm_(model, -1.0)
    model(torch.full((1, 4), float("nan"))).sum().backward()
    with pytest.raises(RuntimeError, match="cannot be clipped"):
        clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    assert clip_grad_norm_(model, 1.0).isnan()


def test_clip_without_gradients_and_with_nan(cluster: Cluster) -> None:
    cluster.run(check_clip_without_gradients)


def check_bf16(rank: int, name: str, world: int) -> None:
    """bf16 compute over fp32 master parameters against the same casts done by hand, unsharded."""
    case = by_name(name)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    reference = make_model(case, torch.float32)
    ours = shard_case(case, make_model(case, torch.float32), Setup(shard_options=(("mp_policy", policy),)))
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        loss = run_case(case, ours, rank, step, dtype=torch.float32)
        loss.backward()
        want = _bf16_mean_gradients(case, reference, world, step)
        expected = dict(reference.named_parameters())
        for parameter_name, parameter in ours.named_parameters():
            assert parameter.dtype == torch.float32
            assert parameter.grad is not None
            assert parameter.grad.dtype == torch.float32
            # The products are the same bf16 kernels on the same bf16 values, and the sum is exact enough for fp32.
            torch.testing.assert_close(full(parameter.grad), want[parameter_name], rtol=1e-6, atol=1e-7)
        optimizer.step()
        with torch.no_grad():
            for parameter_name, parameter in reference.named_parameters():
                parameter.sub_(want[parameter_name], alpha=0.1)
                torch.testing.assert_close(
                    full(dict(ours.named_parameters())[parameter_name].detach()), expected[parameter_name].detach()
                )


def _bf16_mean_gradients(case: object, reference: nn.Module, world: int, step: int) -> dict[str, torch.Tensor]:
    from copy import deepcopy

    total = {name: torch.zeros_like(p) for name, p in reference.named_parameters()}
    for rank in range(world):
        low = deepcopy(reference).to(torch.bfloat16)
        run_case(case, low, rank, step, dtype=torch.bfloat16).backward()  # type: ignore[arg-type]
        for name, parameter in low.named_parameters():
            assert parameter.grad is not None
            total[name] += parameter.grad.float()
    return {name: value / world for name, value in total.items()}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", ["mlp", "uneven_mlp", "root_and_blocks"])
def test_bf16_compute_with_fp32_master_and_fp32_sums(cluster: Cluster, name: str, world_size: int) -> None:
    cluster.run(check_bf16, name, world_size, world_size=world_size)


def check_master_moves(rank: int) -> None:
    model = nn.Linear(4, 4, bias=False)
    nn.init.ones_(model.weight)
    ours = fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-4, weight_decay=0.0)
    output = ours(torch.ones(2, 4))
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    optimizer.step()
    state = optimizer.state[ours.weight]
    assert ours.weight.dtype == state["exp_avg"].dtype == torch.float32
    assert (full(ours.weight.detach()) < 1.0).all()


def test_fp32_master_takes_steps_too_small_for_bf16(cluster: Cluster) -> None:
    """B52: master weights and optimizer state are float32, so lr 1e-4 moves a weight of 1.0."""
    cluster.run(check_master_moves)


def check_casts(rank: int) -> None:
    class Probe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor, *, extra: dict[str, object]) -> dict[str, torch.Tensor]:
            self.seen = (x.dtype, extra["ids"].dtype, extra["mask"].dtype, extra["table"].dtype)  # type: ignore[attr-defined]
            return {"y": x * self.weight, "ids": extra["ids"]}  # type: ignore[dict-item]

    extra = {
        "ids": torch.arange(4),
        "mask": torch.ones(4, dtype=torch.bool),
        "table": torch.ones(4, dtype=torch.float64),
    }
    bf16 = fully_shard(Probe(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32))
    output = bf16(torch.ones(4), extra=extra)
    assert bf16.seen == (torch.bfloat16, torch.int64, torch.bool, torch.bfloat16)
    assert (output["y"].dtype, output["ids"].dtype) == (torch.float32, torch.int64)
    kept = fully_shard(Probe(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False))
    kept(torch.ones(4), extra=extra)
    assert kept.seen == (torch.float32, torch.int64, torch.bool, torch.float64)


def test_input_and_output_casts(cluster: Cluster) -> None:
    """B47: integers and bools are never cast, and the cast of inputs can be turned off."""
    cluster.run(check_casts, world_size=1)


def check_accumulation_dtype(rank: int) -> None:
    """Many bf16 gradients, accumulated without communication, are added up in the dtype of the reduction."""
    model = fully_shard(
        nn.Linear(1, 1, bias=False),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )
    model.set_requires_gradient_sync(False)
    for step in range(300):
        model.set_requires_gradient_sync(step == 299)
        model(torch.ones(1, 1)).sum().backward()
    assert full(model.weight.grad).item() == 300.0  # bf16 would stop at 256


def test_unsynchronized_gradients_add_up_in_reduce_dtype(cluster: Cluster) -> None:
    cluster.run(check_accumulation_dtype)


def check_one_rank_accumulates(rank: int) -> None:
    model = fully_shard(nn.Linear(3, 1, bias=False))
    for _ in range(4):
        model(torch.ones(1, 3)).sum().backward()
    assert full(model.weight.grad).tolist() == [[4.0, 4.0, 4.0]]


def test_accumulation_on_one_rank_does_not_double(cluster: Cluster) -> None:
    """B15."""
    cluster.run(check_one_rank_accumulates, world_size=1)


def check_divide_factor(rank: int, factor: float | None) -> None:
    model = fully_shard(nn.Linear(3, 2, bias=False))
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    model(torch.full((1, 3), rank + 1.0)).sum().backward()
    expected = (1.0 + 2.0) / (factor or 2)
    assert full(model.weight.grad).unique().tolist() == [expected]


@pytest.mark.parametrize("factor", [None, 1.0, 4.0])
def test_gradients_are_divided_once(cluster: Cluster, factor: float | None) -> None:
    """B13: the mean on a backend that can only sum; or any factor the user sets."""
    cluster.run(check_divide_factor, factor)


def check_fp16_sum(rank: int) -> None:
    model = fully_shard(
        nn.Linear(1, 1, bias=False),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16),
    )
    model(torch.full((1, 1), 30000.0)).sum().backward()
    assert full(model.weight.grad).item() == 30000.0  # the plain sum of 4 ranks would be past 65504


def test_float16_sums_do_not_overflow(cluster: Cluster) -> None:
    cluster.run(check_fp16_sum, world_size=4)


def check_mixed_dtypes(rank: int) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Linear(4, 6, dtype=torch.bfloat16)
            self.norm = nn.LayerNorm(6)
            self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
            self.codes = nn.Parameter(torch.arange(7, dtype=torch.uint8), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.codes.tolist() == list(range(7))
            return (self.norm(self.low(x.bfloat16()).float()) * self.scale).sum()

    torch.manual_seed(0)
    reference = Mixed()
    torch.manual_seed(0)
    ours = fully_shard(Mixed())
    inputs = [torch.randn(3, 4, generator=torch.Generator().manual_seed(r)) for r in range(dist.get_world_size())]
    torch.stack([reference(x) for x in inputs]).mean().backward()
    ours(inputs[rank]).backward()
    for name, parameter in ours.named_parameters():
        want = dict(reference.named_parameters())[name]
        assert parameter.dtype == want.dtype
        assert (parameter.grad is None) == (want.grad is None)
        if want.grad is not None:
            tolerance = 2e-2 if want.dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(full(parameter.grad), want.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_several_dtypes_in_one_unit(cluster: Cluster, world_size: int) -> None:
    """B51, B54: parameters keep their own dtypes; integers are gathered bit by bit and never get gradients."""
    cluster.run(check_mixed_dtypes, world_size=world_size)
