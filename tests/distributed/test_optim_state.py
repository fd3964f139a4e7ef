"""State of optimizers by parameter names: complete, in every form, at any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from cluster import Cluster
from fullshard import full_parameters, full_tensor, fully_shard
from fullshard.runtime.whole.forms import Form, Kind
from fullshard.runtime.whole.optim_state import read_optimizer, rekey, write_optimizer

WORLD_SIZES = [1, 2, 3, 4]


class Odd(nn.Module):
    """Dims 1, 2, 3, 5, 7 and 0, a 0-d parameter, a tied pair, a frozen layer, one that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 3)
        self.narrow = nn.Linear(3, 1)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 2))
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.second(self.first(self.embedding(tokens)).relu()) * self.scale)
        return self.head(x) * self.narrow(x)


def make_model(sharded: bool = True) -> Odd:
    torch.manual_seed(0)
    model = Odd().double()
    if sharded:
        fully_shard(model.first)
        fully_shard([model.second, model.narrow])
        fully_shard(model)
    return model


def make_optimizer(model: Odd, name: str = "AdamW") -> torch.optim.Optimizer:
    first = list(model.first.parameters())
    rest = [p for p in model.parameters() if all(p is not other for other in first)]
    cls: Any = getattr(torch.optim, name)
    return cls([{"params": rest, "lr": 0.01}, {"params": first, "lr": 0.02, "weight_decay": 0.1}])


def step(model: Odd, optimizer: torch.optim.Optimizer, times: int = 1) -> None:
    """Steps on the same batch on every rank, so that the number of ranks does not matter."""
    for _ in range(times):
        model(torch.arange(7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def put_values(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    with full_parameters(model), torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])


def full_values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full_tensor(p, name) for name, p in model.named_parameters()}


def assert_same(got: Any, want: Any, where: str = "", tolerance: float = 1e-12) -> None:
    """The same values, types and structure."""
    if isinstance(want, dict):
        assert sorted(got) == sorted(want), where
        for key in want:
            assert_same(got[key], want[key], f"{where}.{key}", tolerance)
    elif isinstance(want, torch.Tensor):
        assert type(got) is type(want), where
        if where.endswith("mu_product"):  # torch itself casts it to the parameter's dtype when it is loaded
            got = got.to(want.dtype)
        assert (got.dtype, got.shape) == (want.dtype, want.shape), where
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance, msg=(where + "\n{}").format)
    elif isinstance(want, list):
        assert len(got) == len(want), where
        for number, (one, other) in enumerate(zip(got, want, strict=True)):
            assert_same(one, other, f"{where}[{number}]", tolerance)
    else:
        assert got == want, (where, got, want)


def reference(name: str = "AdamW", steps: int = 2) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Full state by names, and values, of the unsharded model after some steps."""
    model = make_model(sharded=False)
    optimizer = make_optimizer(model, name)
    step(model, optimizer, steps)
    return write_optimizer(model, optimizer, Form()), full_values(model)


# Any number of ranks


def save(rank: int, name: str) -> Any:
    model = make_model()
    optimizer = make_optimizer(model, name)
    step(model, optimizer, 2)
    state = write_optimizer(model, optimizer, Form())
    assert_same(state, reference(name)[0])
    return state, full_values(model)


def load_and_go_on(rank: int, name: str, saved: list[Any]) -> None:
    want = reference(name, steps=3)
    for state, values in saved:
        model = make_model()
        optimizer = make_optimizer(model, name)
        put_values(model, values)
        optimizer.load_state_dict(read_optimizer(model, optimizer, Form(), state))
        assert_same(write_optimizer(model, optimizer, Form()), state)
        step(model, optimizer)
        tolerance = 1e-12 if name == "AdamW" else 1e-6  # NAdam's product is float32 at first
        assert_same(write_optimizer(model, optimizer, Form()), want[0], tolerance=tolerance)
        assert_same(full_values(model), want[1], tolerance=tolerance)


@pytest.mark.parametrize("name", ["AdamW", "NAdam"])
def test_full_state_saved_at_any_number_of_ranks_continues_at_any_other(cluster: Cluster, name: str) -> None:
    """B105, B102: 16 pairs; empty shards, tied, frozen, 0-d and never stepped parameters, groups with their own lr."""
    sizes = WORLD_SIZES if name == "AdamW" else [1, 3]
    saved = [cluster.run(save, name, world_size=size)[0] for size in sizes]
    for size in sizes:
        cluster.run(load_and_go_on, name, saved, world_size=size)


def check_plain_optimizer(rank: int) -> None:
    state, values = save(rank, "AdamW")
    model = make_model(sharded=False)
    optimizer = make_optimizer(model)
    model.load_state_dict(values, strict=False)
    numbered = rekey(state, False, model, optimizer)
    optimizer.load_state_dict(numbered)
    step(model, optimizer)
    want = reference(steps=3)
    assert_same(full_values(model), want[1])
    # And back: the plain optimizer's own state dict, with names, fits the sharded one.
    named = rekey(optimizer.state_dict(), True, model, optimizer)
    ours = make_model()
    other = make_optimizer(ours)
    other.load_state_dict(read_optimizer(ours, other, Form(), named))
    assert_same(write_optimizer(ours, other, Form()), want[0])
    assert rekey(named, True, model, optimizer) == named
    with pytest.raises(ValueError, match="keys of several types"):
        rekey({"state": {0: {}, "a": {}}, "param_groups": []}, True, model, optimizer)
    with pytest.raises(ValueError, match="no parameters 'x'"):
        rekey({"state": {}, "param_groups": [{"params": ["x"]}]}, False, model, optimizer)


def test_full_state_fits_the_plain_models_optimizer_and_back(cluster: Cluster) -> None:
    cluster.run(check_plain_optimizer)


# Forms


def check_forms(rank: int) -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    step(model, optimizer, 2)
    full = write_optimizer(model, optimizer, Form())
    for form in (Form(Kind.SHARDED), Form(Kind.SHARDED, offload_to_cpu=True)):
        state = write_optimizer(model, optimizer, form)
        average = state["state"]["first.weight"]["exp_avg"]
        assert isinstance(average, DTensor)
        assert average.shape == (5, 3)
        assert type(state["state"]["first.weight"]["step"]) is torch.Tensor
        other = make_optimizer(model)
        other.load_state_dict(read_optimizer(model, other, form, state))
        assert_same(write_optimizer(model, other, Form()), full)
    first = write_optimizer(model, optimizer, Form(rank0_only=True))
    assert_same(first, full if rank == 0 else {})
    # What was saved stays as it was.
    step(model, optimizer)
    assert_same(first, full if rank == 0 else {})
    assert full["state"]["scale"]["step"] == 2.0


def test_each_form_is_what_it_says_and_is_read_back(cluster: Cluster) -> None:
    cluster.run(check_forms)


def check_memory(rank: int) -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    step(model, optimizer)
    full = write_optimizer(model, optimizer, Form())
    state = read_optimizer(model, optimizer, Form(), full)
    for values in state["state"].values():
        for value in values.values():
            if isinstance(value, DTensor) and value.dim():
                assert value.to_local().untyped_storage().nbytes() == value.to_local().numel() * 8


def test_loaded_state_does_not_keep_whole_tensors_in_memory(cluster: Cluster) -> None:
    cluster.run(check_memory)


# Which state there is


def check_frozen_later(rank: int) -> None:
    results = []
    for sharded in (True, False):
        model = make_model(sharded)
        optimizer = make_optimizer(model)
        step(model, optimizer)
        model.first.requires_grad_(False)
        model.frozen.requires_grad_(True)
        step(model, optimizer)
        results.append(write_optimizer(model, optimizer, Form()))
        other = make_optimizer(model)
        other.load_state_dict(read_optimizer(model, other, Form(), results[-1]))
        assert_same(write_optimizer(model, other, Form()), results[-1])
    assert results[0]["state"]["first.weight"]["step"] == 1.0
    assert results[0]["state"]["frozen.weight"]["step"] == 1.0
    assert "unused.weight" not in results[0]["state"]
    assert_same(*results)


def test_state_of_parameters_frozen_after_a_step_is_kept(cluster: Cluster) -> None:
    """B102."""
    cluster.run(check_frozen_later)


def check_before_first_step(rank: int) -> None:
    model, plain = make_model(), make_model(sharded=False)
    optimizer, reference_optimizer = make_optimizer(model), make_optimizer(plain)
    empty = write_optimizer(model, optimizer, Form())
    assert empty["state"] == {}
    optimizer.load_state_dict(read_optimizer(model, optimizer, Form(), empty))
    step(model, optimizer)
    step(plain, reference_optimizer)
    assert_same(full_values(model), full_values(plain))
    assert write_optimizer(model, optimizer, Form())["state"]["scale"]["step"] == 1.0


def test_state_is_not_made_by_a_step(cluster: Cluster) -> None:
    """B64: getting and setting state before the first step."""
    cluster.run(check_before_first_step)


# What does not fit


def check_refused(rank: int) -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    step(model, optimizer)
    full = write_optimizer(model, optimizer, Form())
    swapped = {**full, "param_groups": full["param_groups"][::-1]}
    assert [g["lr"] for g in read_optimizer(model, optimizer, Form(), swapped)["param_groups"]] == [0.01, 0.02]
    with pytest.raises(ValueError, match=r"Not saved: 'first.bias', 'first.weight'. Saved, but not in .*: none"):
        read_optimizer(model, optimizer, Form(), {**full, "param_groups": full["param_groups"][:1]})
    one = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=r"parameters of group 0 .* were saved in 2 groups"):
        read_optimizer(model, one, Form(), full)
    part = torch.optim.AdamW(model.first.parameters())
    with pytest.raises(ValueError, match=r"Not saved: none. Saved, but not in the optimizer: 'embedding.weight'"):
        read_optimizer(model, part, Form(), full)
    full["state"]["first.weight"]["exp_avg"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"'exp_avg' of parameter 'first.weight' has shape \(2, 2\), but .* \(5, 3\)"):
        read_optimizer(model, optimizer, Form(), full)
    stranger = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"parameter 0 of the SGD \(shape \(2, 2\)\) and 1 more are not parameters of"):
        write_optimizer(model, stranger, Form())
    assert dist.get_world_size() == 2


def test_state_that_does_not_fit_is_refused(cluster: Cluster) -> None:
    """B104."""
    cluster.run(check_refused)
