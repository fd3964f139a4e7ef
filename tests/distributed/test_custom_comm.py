"""The user's own all-gather and reduce-scatter, as torch's FSDP2 takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference import assert_at_rest, full
from stack import batch, engine_of, make_stack
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as torch_comms
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as TorchAllGather

from cluster import Cluster
from fullshard import AllGather, MixedPrecisionPolicy, ReduceScatter, fully_shard
from fullshard.errors import CommunicationError, MisuseError


class Allocating:
    """Counts buffers; the same memory is handed out for the same size again, as a persistent buffer."""

    def __init__(self) -> None:
        self.made: list[tuple[int, torch.dtype]] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.made.append((size[0], dtype))
        return torch.full(tuple(size), float("nan"), dtype=dtype, device=device)  # nobody may rely on what it holds


class MyAllGather(Allocating, AllGather):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class SynchronousAllGather(MyAllGather):
    """Makes no use of async_op, and nothing to wait for."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        assert async_op
        dist.all_gather_single(output_tensor, input_tensor, group=group)


class MyReduceScatter(Allocating, ReduceScatter):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        assert op == dist.ReduceOp.SUM
        return dist.reduce_scatter_single(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


class DuckTyped:
    """No class of ours or torch's; reduces by an all-reduce."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any) -> None:
        dist.all_reduce(input_tensor, op=op, group=group)
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


class Averaging(MyReduceScatter):
    """Wrong here: averages whatever it is asked for."""

    def __call__(self, output_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        super().__call__(output_tensor, *args, **kwargs)
        output_tensor.div_(dist.get_world_size())


COMMS = {
    "ours": (MyAllGather, MyReduceScatter),
    "synchronous": (SynchronousAllGather, None),
    "reduce only": (None, DuckTyped),
    "torch": (torch_comms.DefaultAllGather, torch_comms.DefaultReduceScatter),
}


def check_equal(rank: int, kind: str, half: bool, options: dict[str, Any]) -> None:
    if half:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # Uneven rows, an empty shard on the last rank of three, large parameters beside the small ones.
    models = [make_stack(count=3, width=100, **options), make_stack(count=3, width=100, **options)]
    gather, reduce = COMMS[kind]
    for module in (models[0], *models[0].blocks[:2]):
        if gather is not None:
            module.set_custom_all_gather(gather())
        if reduce is not None:
            module.set_custom_reduce_scatter(reduce())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(3):
        outputs = []
        for model, optimizer in zip(models, optimizers, strict=True):
            outputs.append(model(batch(rank, step, width=100)))
            outputs[-1].square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert_at_rest(model)
        torch.testing.assert_close(outputs[0], outputs[1])
    for mine, theirs in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(full(mine.detach()), full(theirs.detach()))


@pytest.mark.parametrize("transport", ["direct", "torch"])
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", sorted(COMMS))
def test_custom_comms_give_the_same_numbers(cluster: Cluster, kind: str, half: bool, transport: str) -> None:
    cluster.run(check_equal, kind, half, {"transport": transport}, world_size=3)


def check_secondary(rank: int) -> None:
    models = [make_stack(reshard_after_forward=2) for _ in range(2)]
    comm = MyAllGather()
    for block in models[0].blocks:
        block.set_custom_all_gather(comm)
    for model in models:
        model(batch(rank)).sum().backward()
    for mine, theirs in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(full(mine.grad), full(theirs.grad))
    assert len({numel for numel, _ in comm.made}) == 2, "gathers of four ranks in forward, of two in backward"


def test_custom_all_gather_of_a_smaller_group(cluster: Cluster) -> None:
    cluster.run(check_secondary, world_size=4)


def check_buffers(rank: int) -> None:
    gather, reduce = MyAllGather(), MyReduceScatter()
    model = fully_shard(nn.Linear(8, 6, bias=False), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    for step in range(2):  # a change after the first forward counts, too
        model(torch.ones(1, 8)).sum().backward()
        if step == 0:
            model.set_custom_all_gather(gather)
            model.set_custom_reduce_scatter(reduce)
            assert not gather.made
    assert gather.made == [(48, torch.bfloat16)]
    dtypes = {dtype for _, dtype in reduce.made}
    assert dtypes == {torch.bfloat16}
    (whole, _), (part, _) = reduce.made
    assert whole == 2 * part, "one chunk a rank"


def test_buffers_are_flat_and_of_the_wire_dtype(cluster: Cluster) -> None:
    cluster.run(check_buffers)


def check_misuse(rank: int) -> None:
    model = make_stack()
    with pytest.raises(TypeError, match=r"methods of fullshard.AllGather: allocate\(size, .*got int"):
        model.set_custom_all_gather(3)
    with pytest.raises(TypeError, match=r"methods of fullshard.ReduceScatter"):
        model.set_custom_reduce_scatter(lambda **_: None)
    model.set_custom_all_gather(MyAllGather())
    for method in (model.set_allocate_memory_from_process_group_for_comm, model.set_symm_mem_for_comm):
        with pytest.raises(MisuseError, match="cannot be combined with a custom collective"):
            method(True)
    wrong = fully_shard(nn.Linear(4, 4))
    wrong.set_custom_reduce_scatter(Averaging())
    with pytest.raises(MisuseError, match=r"Averaging was asked for ReduceOp.SUM over 2 ranks.*the engine divides"):
        wrong(torch.ones(1, 4)).sum().backward()


def test_what_a_custom_comm_must_be(cluster: Cluster) -> None:
    """One that averages although it is asked for a sum would scale every gradient: it raises."""
    cluster.run(check_misuse)


class Short(MyAllGather):
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size[0] - 1, dtype=dtype, device=device)


class Broken(MyAllGather):
    def __call__(self, **_: Any) -> None:
        raise RuntimeError("no link")


def check_failing(rank: int) -> None:
    model = fully_shard(nn.Linear(4, 4))
    model.set_custom_all_gather(Short())
    with pytest.raises(ValueError, match=r"Short.allocate must return a tensor of shape \(\d+,\), torch.float32; got"):
        model(torch.ones(1, 4))
    model = fully_shard(nn.Linear(4, 4))
    model.set_custom_all_gather(Broken())
    with pytest.raises(CommunicationError, match=r"gather of unit '\(root\)': Broken on rank \d with ranks .*no link"):
        model(torch.ones(1, 4))
    assert engine_of(model).scheduler.at_rest()


def test_custom_comm_that_fails(cluster: Cluster) -> None:
    cluster.run(check_failing)


def test_base_classes_are_those_that_torch_describes() -> None:
    for mine, theirs in ((AllGather, TorchAllGather),):
        assert set(mine.__abstractmethods__) == set(theirs.__abstractmethods__)
