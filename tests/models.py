"""The menagerie: small deterministic models, each odd in one way, that every test of correctness goes through.

    model = make_model(case, torch.float64)
    for unit in case.unit_modules(model):
        fully_shard(unit)
    fully_shard(model)
    run_case(case, model, rank, step).backward()

A model's weights depend on the seed only, its inputs on rank and step only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from networks import (
    Blocks,
    CheckpointInside,
    CheckpointOutside,
    Conditional,
    ConvNet,
    DictOutput,
    Llama,
    ManyInputs,
    NoGradient,
    OneElement,
    Scaled,
    SharedBlock,
    SkippedUnit,
    Tied,
    TupleOutput,
    WithBuffers,
    frozen_mixed,
    mlp,
)

Units = list[nn.Module | list[nn.Module]]
"""What to shard, in order; an element that is a list is one unit made of several modules."""


@dataclass(frozen=True)
class Case:
    """One model of the menagerie."""

    name: str
    build: Callable[[], nn.Module]
    make_input: Callable[[int, int], tuple[Any, ...]]
    """(rank, step) -> positional arguments; floating-point tensors are float64, `run_case` casts them."""
    unit_modules: Callable[[nn.Module], Units]
    """model -> its units, inner before outer, without the root, which the caller shards last."""
    make_kwargs: Callable[[int, int], dict[str, Any]] = lambda _rank, _step: {}
    """(rank, step) -> keyword arguments."""
    gets_no_gradient: tuple[str, ...] = ()
    """Prefixes of the names of trainable parameters whose gradient stays None in some step."""
    torch_refuses: bool = False
    """torch's own fully_shard raises for this model, so that it cannot be compared with."""


def make_model(case: Case, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """Build the model with the weights that belong to `seed`, the same ones in every dtype up to rounding."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return case.build().to(dtype)


def run_case(case: Case, model: nn.Module, rank: int, step: int, dtype: torch.dtype | None = None) -> Tensor:
    """Forward pass on the input of (rank, step), cast to `dtype` or the dtype of the parameters; returns the loss."""
    dtype = dtype or next(model.parameters()).dtype
    args = [_cast(value, dtype) for value in case.make_input(rank, step)]
    kwargs = {name: _cast(value, dtype) for name, value in case.make_kwargs(rank, step).items()}
    return loss(model(*args, **kwargs))


def loss(output: Any) -> Tensor:
    """A scalar that depends on every floating-point tensor in `output`, on each differently."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    terms = [(leaf.square() + leaf).mean() * (index + 1) for index, leaf in enumerate(leaves)]
    return torch.stack(terms).sum()


def by_name(name: str) -> Case:
    """The case of that name."""
    return {case.name: case for case in CASES}[name]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _generator(rank: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * step + rank + 1)


def _floats(*shape: int) -> Callable[[int, int], tuple[Tensor]]:
    return lambda rank, step: (torch.randn(shape, generator=_generator(rank, step), dtype=torch.float64),)


def _tokens(vocabulary: int, *shape: int) -> Callable[[int, int], tuple[Tensor]]:
    return lambda rank, step: (torch.randint(vocabulary, shape, generator=_generator(rank, step)),)


def _children_of(*names: str) -> Callable[[nn.Module], Units]:
    """The submodules of these names; a ModuleList stands for its elements."""

    def units(model: nn.Module) -> Units:
        found: Units = []
        for name in names:
            module = model.get_submodule(name)
            found += list(module) if isinstance(module, nn.ModuleList) else [module]
        return found

    return units


def _linears(model: nn.Module) -> Units:
    return [module for module in model.children() if isinstance(module, nn.Linear)]


def _nested_units(model: nn.Module) -> Units:
    assert isinstance(model, Llama)
    return [unit for layer in model.layers for unit in (layer.get_submodule("self_attn"), layer)]


def _many_inputs(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = _generator(rank, step)
    return (
        torch.randn(2, 4, generator=generator, dtype=torch.float64),
        torch.randn(2, 3, generator=generator, dtype=torch.float64),
    )


def _many_kwargs(rank: int, step: int) -> dict[str, Any]:
    return {"weights": {"left": torch.tensor(2), "right": torch.tensor(rank + 3)}, "mask": None}


def _all_blocks_as_one_unit(model: nn.Module) -> Units:
    return [list(model.get_submodule("blocks").children())]


_HIDDEN: Sequence[int] = (2, 3, 4)
"""(batch, positions, width) of the inputs of models made of `Residual`."""

CASES: tuple[Case, ...] = (
    Case("mlp", lambda: mlp(8, 16, 8), _floats(2, 8), _linears),
    Case("uneven_mlp", lambda: mlp(5, 7, 3), _floats(2, 5), _linears),
    Case("narrow", lambda: mlp(64, 2, 8), _floats(2, 64), _linears),
    Case(
        "scalar",
        lambda: nn.Sequential(Scaled(), nn.Linear(6, 3)),
        _floats(2, 4),
        _children_of("0"),
        torch_refuses=True,
    ),
    Case("one_element", lambda: nn.Sequential(OneElement(), nn.Linear(4, 1)), _floats(2, 4), _children_of("0", "1")),
    Case("conv", ConvNet, _floats(2, 3, 5, 5), _children_of("first", "second")),
    Case("root_only", lambda: mlp(4, 6, 3), _floats(2, 4), lambda _model: []),
    Case("root_and_blocks", Blocks, _floats(*_HIDDEN), _children_of("blocks")),
    Case("grouped_unit", Blocks, _floats(*_HIDDEN), _all_blocks_as_one_unit),
    Case("no_parameters", lambda: mlp(4, 6, 3), _floats(2, 4), _children_of("0", "1")),
    Case("tied", Tied, _tokens(10, 2, 3), _children_of("block")),
    Case("llama", Llama, _tokens(11, 2, 5), _children_of("layers")),
    Case("nested", Llama, _tokens(11, 2, 5), _nested_units),
    Case(
        "unused_branch",
        Conditional,
        _floats(2, 4),
        _children_of("block"),
        gets_no_gradient=("block.second",),
    ),
    Case(
        "conditional",
        Conditional,
        _floats(2, 4),
        _children_of("block"),
        make_kwargs=lambda _rank, step: {"second": step % 2 == 1},
        gets_no_gradient=("block.first", "block.second"),
    ),
    Case(
        "skipped_unit",
        SkippedUnit,
        _floats(*_HIDDEN),
        _children_of("blocks"),
        make_kwargs=lambda _rank, step: {"skip": step % 2 == 1},
        gets_no_gradient=("blocks.1",),
    ),
    Case("shared_block", SharedBlock, _floats(*_HIDDEN), _children_of("block")),
    Case("no_gradient", NoGradient, _floats(*_HIDDEN), _children_of("probe", "block"), gets_no_gradient=("probe",)),
    Case(
        "checkpoint_inside",
        lambda: nn.Sequential(CheckpointInside(), CheckpointInside()),
        _floats(*_HIDDEN),
        _children_of("0", "1"),
    ),
    Case("checkpoint_outside", CheckpointOutside, _floats(*_HIDDEN), _children_of("blocks")),
    Case("dict_output", DictOutput, _floats(*_HIDDEN), _children_of("block")),
    Case("tuple_output", TupleOutput, _floats(2, 4), _children_of("block")),
    Case("many_inputs", ManyInputs, _many_inputs, _children_of("left", "right"), make_kwargs=_many_kwargs),
    Case("frozen", frozen_mixed, _floats(*_HIDDEN), _children_of("blocks")),
    Case("buffers", WithBuffers, _floats(*_HIDDEN), _children_of("block")),
)
