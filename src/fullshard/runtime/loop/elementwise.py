"""Which optimizers compute each element of a parameter from that element alone, so that pieces may be joined or cut."""

from __future__ import annotations

from typing import Any

import torch

from fullshard.errors import MisuseError

ELEMENTWISE = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
_WHOLE = {
    torch.optim.Adafactor: "keeps factors of whole rows and columns, and divides by norms of whole parameters",
    torch.optim.LBFGS: "takes dot products over all parameters",
    torch.optim.Muon: "orthogonalizes whole matrices",
    torch.optim.SparseAdam: "takes sparse gradients, and those of sharded parameters are dense",
}

# What an unknown optimizer is tried on: a matrix and a vector, each by itself and joined. Gradients of several sizes,
# so that a rule that begins at some norm (clipping, a trust ratio) is seen.
_SHAPES = ((6, 4), (5,))
_GRADIENT_SIZES = (1.0, 1e-4, 1e3, 1.0)


def is_known(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether it is one of torch's elementwise optimizers: all that its step remembers is in the parameters' state."""
    return any(kind is known or (issubclass(kind, known) and kind.step is known.step) for known in ELEMENTWISE)


def require_elementwise(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    """Refuse optimizers whose numbers would change if parameters were joined to one tensor.

    torch's own are known. Any other is tried out on a few numbers: elementwise ones do the same to tensors that are
    joined. An optimizer that cannot be tried needs the word of the user, see `flat`.

    Raises:
        MisuseError: It is not elementwise, or could not be tried.
    """
    if is_known(kind):
        return
    for known, why in _WHOLE.items():
        if issubclass(kind, known):
            raise MisuseError(
                f"{kind.__name__} cannot work on flat shards: it {why}, so it needs each parameter by itself. "
                f"Use {kind.__name__}(model.parameters(), ...) on the sharded parameters where that is possible, or an "
                "elementwise optimizer such as AdamW"
            )
    try:
        apart, joined = _tried(kind, options, joined=False), _tried(kind, options, joined=True)
    except Exception as error:
        raise MisuseError(
            f"whether {kind.__name__} is elementwise could not be tried out on a few numbers on the CPU "
            f"({type(error).__name__}: {error}). If it computes each element of a parameter from that element, its "
            "gradient and its state alone, pass elementwise=True; if not, use it on model.parameters() instead"
        ) from error
    if not torch.allclose(apart, joined, rtol=1e-9, atol=0.0):
        raise MisuseError(
            f"{kind.__name__} does not do the same to two parameters and to one tensor made of both, so it is not "
            "elementwise (it may use norms of parameters, their shapes, or blocks of them) and cannot work on flat "
            f"shards. Use {kind.__name__}(model.parameters(), ...) on the sharded parameters, or AdamW"
        )


def _tried(kind: type[torch.optim.Optimizer], options: dict[str, Any], *, joined: bool) -> torch.Tensor:
    """Values, 1-D float64, that a few steps of the optimizer make of always the same ones."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> list[torch.Tensor]:
        made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in _SHAPES]
        return [torch.cat([value.view(-1) for value in made])] if joined else made

    parameters = [torch.nn.Parameter(value) for value in draw()]
    maker: Any = kind
    optimizer = maker(parameters, **options)
    for size in _GRADIENT_SIZES:
        for parameter, gradient in zip(parameters, draw(), strict=True):
            parameter.grad = gradient * size
        optimizer.step()
    return torch.cat([parameter.detach().view(-1) for parameter in parameters])
