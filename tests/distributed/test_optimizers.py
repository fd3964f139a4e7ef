"""Every optimizer of torch on shards: the unsharded numbers, or an error before the first step."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference import full
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import Shard

from cluster import Cluster
from fullshard import MixedPrecisionPolicy, fully_shard, split_param_groups
from fullshard.errors import MisuseError


class Odd(nn.Module):
    """Uneven, empty (one row on three ranks), 0-d and tied parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.middle = nn.Linear(7, 7)
        self.tied = nn.Linear(7, 7, bias=False)
        self.tied.weight = self.middle.weight
        self.last = nn.Linear(7, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x)) * self.scale
        return self.last(torch.tanh(self.tied(torch.tanh(self.middle(x)))))


def inputs(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 5, dtype=torch.float64, generator=generator)


def make_pair(dtype: torch.dtype = torch.float64, **options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    reference = Odd().to(dtype)
    ours = deepcopy(reference)
    fully_shard(ours.middle, **options)
    return reference, fully_shard(ours, **options)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def reference_loss(model: nn.Module, step: int) -> torch.Tensor:
    return torch.stack([loss_of(model, inputs(r, step)) for r in range(dist.get_world_size())]).mean()


def assert_equal(ours: nn.Module, reference: nn.Module, what: str, tolerance: float = 1e-10) -> None:
    for (name, got), want in zip(ours.named_parameters(), reference.parameters(), strict=True):
        message = f"{what}: {name}\n{{}}".format
        torch.testing.assert_close(full(got.detach()), want.detach(), atol=tolerance, rtol=tolerance, msg=message)


WORKING: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"foreach": False}, {"foreach": True, "momentum": 0.9, "nesterov": True}, {"weight_decay": 0.1}],
    "Adam": [{"foreach": False}, {"foreach": True, "amsgrad": True, "weight_decay": 0.1}, {"fused": True}],
    "AdamW": [{"foreach": False}, {"foreach": True}, {"fused": True, "amsgrad": True}],
    "Adagrad": [{"foreach": False}, {"foreach": True}],
    "Adadelta": [{"foreach": False}, {"foreach": True}],
    "Adamax": [{"foreach": False}, {"foreach": True}],
    "NAdam": [{"foreach": False}, {"foreach": True, "decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [{"foreach": False}, {"foreach": True}],
    "ASGD": [{"foreach": False}, {"foreach": True}],
    "RMSprop": [{"foreach": False, "centered": True}, {"foreach": True, "momentum": 0.9}],
}


def check_optimizers(rank: int, name: str) -> None:
    for options in WORKING[name]:
        reference, ours = make_pair()
        pair = [getattr(torch.optim, name)(model.parameters(), lr=0.01, **options) for model in (reference, ours)]
        rates = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for optimizer in pair]
        for step in range(3):
            reference_loss(reference, step).backward()
            loss_of(ours, inputs(rank, step)).backward()
            for optimizer, rate in zip(pair, rates, strict=True):
                optimizer.step()
                rate.step()
                optimizer.zero_grad(set_to_none=step % 2 == 0)
            assert_equal(ours, reference, f"{name} {options}, step {step}")


@pytest.mark.parametrize("name", list(WORKING))
def test_optimizer_equals_unsharded(cluster: Cluster, name: str) -> None:
    """On three ranks, one of which holds nothing of some parameters; with a schedule and both ways of zero_grad."""
    cluster.run(check_optimizers, name, world_size=3)


def check_closures(rank: int) -> None:
    reference, ours = make_pair()
    pair = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (reference, ours)]
    for step in range(3):

        def closure(model: nn.Module, loss: Callable[[], torch.Tensor]) -> torch.Tensor:
            model.zero_grad()
            value = loss()
            value.backward()
            return value

        pair[0].step(lambda: closure(reference, lambda: reference_loss(reference, step)))  # noqa: B023
        got = pair[1].step(lambda: closure(ours, lambda: loss_of(ours, inputs(rank, step))))  # noqa: B023
        assert got.shape == ()
        assert_equal(ours, reference, f"step {step}")


def test_closures(cluster: Cluster) -> None:
    """A closure runs the model inside of `step`: shards are read before it and written after it."""
    cluster.run(check_closures)


def check_lbfgs(rank: int) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    ours = deepcopy(reference)
    fully_shard(ours)
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)
    for model in (reference, ours):
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

        def closure(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
    assert_equal(ours, reference, "LBFGS")


def test_lbfgs_on_even_shards(cluster: Cluster) -> None:
    """Its dot products are global; what does not divide evenly is refused."""
    cluster.run(check_lbfgs)


class Flattened(nn.Module):
    """Sharded dims that torch flattens, and one that it does not."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(rows, columns))
        self.bias = nn.Parameter(torch.rand(1))


FLATTENED = [((4, 3), 0, True), ((3, 4), 0, False), ((3, 4), 1, True), ((1, 4), 1, True), ((4, 1), 1, False)]


def check_lbfgs_layouts(rank: int) -> None:
    world = dist.get_world_size()
    for shape, dim, works in [*FLATTENED, ((1, 4), 0, False)]:
        model = Flattened(*shape)
        model.bias.requires_grad_(False)
        fully_shard(model, shard_placement_fn=lambda _: Shard(dim) if _.dim() > 1 else None)  # noqa: B023
        model.weight.grad = torch.ones_like(model.weight)
        optimizer = torch.optim.LBFGS([model.weight], lr=0.5, max_iter=1)
        before = full(model.weight.detach()).clone()
        if works or (world == 1 and shape[dim] > 1):
            optimizer.step(lambda: torch.ones(()))
            assert bool((full(model.weight.detach()) < before).all())
        else:
            with pytest.raises(MisuseError, match=r"LBFGS cannot update .* divide evenly over the ranks, or whose"):
                optimizer.step(lambda: torch.ones(()))
            torch.testing.assert_close(full(model.weight.detach()), before, rtol=0, atol=0)


@pytest.mark.parametrize("world_size", [1, 2])
def test_lbfgs_is_refused_where_torch_cannot_flatten(cluster: Cluster, world_size: int) -> None:
    """A sharded dim of size 1 cannot be flattened either, not even on one rank."""
    cluster.run(check_lbfgs_layouts, world_size=world_size)


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices, AdamW for the rest, as is usual."""
    matrices = [model.first.weight, model.middle.weight]
    rest = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    return [torch.optim.Muon(matrices, lr=0.05), torch.optim.AdamW(rest, lr=0.01)]


def check_muon(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # Orthogonalization in bfloat16 depends on the order of sums, by some percent; in float64 it must be equal.
        patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
        reference, ours = make_pair()
        pair = [muon_and_adamw(model) for model in (reference, ours)]
        for step in range(3):
            reference_loss(reference, step).backward()
            loss_of(ours, inputs(rank, step)).backward()
            for optimizer in (*pair[0], *pair[1]):
                optimizer.step()
                optimizer.zero_grad()
            assert_equal(ours, reference, f"step {step}")


def test_muon_orthogonalizes_whole_matrices(cluster: Cluster) -> None:
    """B67: its norms and products are those of the whole matrix, on shards of 3, 3 and 1 rows."""
    cluster.run(check_muon, world_size=3)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("Muon", {}, r"torch.optim.Muon cannot .* fewer rows than ranks, such as one of shape \(1, 7\)"),
    ("Adafactor", {}, r"torch.optim.Adafactor cannot update .* roots of norms in place"),
    ("Rprop", {}, r"torch.optim.Rprop cannot update"),
    ("LBFGS", {}, r"torch.optim.LBFGS cannot update .* such as one of shape \(7, 5\)"),
    ("SGD", {"fused": True}, r"torch has no fused SGD for sharded parameters; make it with foreach=True"),
    ("Adagrad", {"fused": True}, r"torch has no fused Adagrad"),
]


def check_refused(rank: int) -> None:
    """What torch cannot do on this layout, it would stop in the middle of: some parameters updated, others not."""
    _, ours = make_pair()
    before = [full(parameter).clone() for parameter in ours.parameters()]
    loss_of(ours, inputs(rank, 0)).backward()
    for name, options, match in REFUSED:
        matrices = [parameter for parameter in ours.parameters() if name != "Muon" or parameter.dim() == 2]
        optimizer = getattr(torch.optim, name)(matrices, **options)
        for _ in range(2):
            with pytest.raises(MisuseError, match=match):
                optimizer.step(lambda: torch.zeros(()))
    for parameter, old in zip(ours.parameters(), before, strict=True):
        torch.testing.assert_close(full(parameter), old, rtol=0, atol=0)
    plain = nn.Linear(3, 3, bias=False)  # none of this is about optimizers of other models
    plain(torch.ones(3)).sum().backward()
    torch.optim.Muon(plain.parameters()).step()


def test_optimizers_that_need_whole_parameters_are_refused_before_the_first_step(cluster: Cluster) -> None:
    cluster.run(check_refused)


def state_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[Any]:
    states = [optimizer.state[parameter] for parameter in model.parameters()]
    return [{name: full(value) for name, value in state.items()} for state in states]


def real_step(how: str, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
    """A step of the user that looks like one that only allocates state."""
    loss().backward()
    if how == "zero gradients":
        for parameter in model.parameters():
            parameter.grad.zero_()
    if how == "learning rate zero":
        optimizer.param_groups[0]["lr"] = 0.0
    if how == "asked with gradients":
        get_optimizer_state_dict(model, optimizer)
    optimizer.step(loss if how == "closure" else None)
    optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = 0.01


def check_real_steps(rank: int) -> None:
    for how in ("zero gradients", "learning rate zero", "closure", "asked with gradients"):
        reference, ours = make_pair()
        pair = [torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1) for model in (reference, ours)]
        for step in range(2):
            real_step(how, reference, pair[0], lambda: reference_loss(reference, step))  # noqa: B023
            real_step(how, ours, pair[1], lambda: loss_of(ours, inputs(rank, step)))  # noqa: B023
            assert_equal(ours, reference, f"{how}, step {step}")
            left, right = state_of(pair[1], ours), state_of(pair[0], reference)
            torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12)
            assert all(state["step"] == step + 1 for state in left)


def test_a_real_step_is_never_undone(cluster: Cluster) -> None:
    """B64: only the step that torch's state-dict tools take themselves does not count."""
    cluster.run(check_real_steps)


def check_resumed(rank: int, kind: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    reference = Odd().double()
    ours = deepcopy(reference)
    fully_shard(ours, ignored_params={ours.first.bias}, average_ignored_grads=True)
    make = [
        lambda model=model: getattr(torch.optim, kind)(model.parameters(), lr=0.01, **options)
        for model in (reference, ours)
    ]
    pair = [make[0](), make[1]()]
    get_optimizer_state_dict(ours, pair[1])
    for step in range(3):
        reference_loss(reference, step).backward()
        loss_of(ours, inputs(rank, step)).backward()
        for optimizer in pair:
            optimizer.step()
            optimizer.zero_grad()
        assert_equal(ours, reference, f"step {step}")
        assert all(state.get("step", step + 1) == step + 1 for state in state_of(pair[1], ours))
        fresh = make[1]()
        set_optimizer_state_dict(ours, fresh, get_optimizer_state_dict(ours, pair[1]))
        pair[1] = fresh


@pytest.mark.parametrize(
    ("kind", "options"),
    [("AdamW", {"weight_decay": 0.1, "fused": None}), ("SGD", {"momentum": 0.9, "weight_decay": 0.1})],
)
def test_state_set_into_a_fresh_optimizer_continues(cluster: Cluster, kind: str, options: dict[str, Any]) -> None:
    """B64: for ignored parameters in the same optimizer, too."""
    cluster.run(check_resumed, kind, options)


def check_mixed(rank: int) -> None:
    torch.manual_seed(0)
    reference = Odd().double()
    made: list[dict[str, Any]] = [{"foreach": True, "momentum": 0.9}, {"fused": True}, {"foreach": None}]
    for options in made:
        unsharded, ours = deepcopy(reference), deepcopy(reference)
        fully_shard(ours, ignored_params={ours.first.bias, ours.last.bias}, average_ignored_grads=False)
        kind = torch.optim.SGD if "momentum" in options else torch.optim.AdamW
        x = inputs(0, 0)  # the same everywhere: gradients of ignored parameters are each rank's own
        for model in (unsharded, ours):
            loss_of(model, x).backward()
        if options.get("foreach") is not None or options.get("fused"):
            with pytest.raises(MisuseError, match=r"mixes 5 sharded .* with 2 plain ones .*split_param_groups"):
                kind(ours.parameters(), lr=0.1, **options).step()
        kind(unsharded.parameters(), lr=0.1, **options).step()
        groups = split_param_groups(ours.parameters()) if options.get("foreach", True) else ours.parameters()
        kind(groups, lr=0.1, **options).step()
        assert_equal(ours, unsharded, str(options))
    groups = split_param_groups([{"params": list(ours.parameters()), "lr": 0.1}, {"params": []}])
    assert [(len(group["params"]), group.get("lr")) for group in groups] == [(5, 0.1), (2, 0.1)]


def test_sharded_and_ignored_parameters_in_one_optimizer(cluster: Cluster) -> None:
    """B59."""
    cluster.run(check_mixed)


class Toy(torch.optim.Optimizer):
    """Communicates in its step, and chooses by the size of a parameter, as 8-bit optimizers do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.large = 0

    def step(self, closure: None = None) -> None:  # type: ignore[override] # noqa: ARG002
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self.large = sum(parameter.numel() >= 7 for parameter in parameters)
        if parameters:
            dist.all_reduce(torch.zeros(1))


def check_toy(rank: int) -> None:
    model = nn.Sequential(nn.Linear(5, 2), nn.Linear(2, 7))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model[0].bias.requires_grad_(True)
    fully_shard(model)
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trainable == ["0.bias"]
    optimizer = Toy(parameter for parameter in model.parameters() if parameter.requires_grad)
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    everything = Toy(model.parameters())
    everything.step()
    assert everything.large == 3  # sizes are those of whole parameters, whatever the number of ranks


@pytest.mark.parametrize("world_size", [1, 4])
def test_every_rank_lists_every_parameter_with_its_global_size(cluster: Cluster, world_size: int) -> None:
    """B22, B66: a rank without rows of a parameter has it too, so no optimizer leaves early or decides by rank."""
    cluster.run(check_toy, world_size=world_size)


def check_master(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 3).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    model = model.float()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    output = model(torch.ones(2, 5))
    assert output.dtype is torch.bfloat16
    output.sum().backward()
    optimizer.step()
    for parameter in model.parameters():
        assert parameter.dtype is optimizer.state[parameter]["exp_avg"].dtype is parameter.grad.dtype is torch.float32
    weight = full(model.weight.detach())
    assert bool((weight < 1).all())  # a bfloat16 weight would not move
    assert bool((weight > 0.9998).all())


def test_master_weights_are_float32(cluster: Cluster) -> None:
    """B52."""
    cluster.run(check_master)
