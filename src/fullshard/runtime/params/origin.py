"""Whether ranks started from the same values: exactly where they hold the same rows, by samples taken when sharding.

Once a parameter is sharded no rank can tell whether the others built the same one. So a few elements of the full
parameter are remembered in short, and compared at the first forward if nothing was written since.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fullshard.runtime.dtensors import local_of

_SAMPLES = 64
_SHOWN = 5
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Sums of the bits of tensors as integers, which do not depend on the order of addition; 0 on the meta device."""
    return [0 if tensor.is_meta else int(_bits(tensor)) for tensor in tensors]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    words = tensor.detach().contiguous().view(-1).view(_WORDS[tensor.element_size()])
    return words.sum(dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class Origin:
    """What a parameter held when it was sharded.

    Attributes:
        checksum: Of some elements of the full parameter, 0-d int64.
        sharded: Identity of the sharded parameter.
        versions: Versions of the sharded parameter and of its local tensor then.
    """

    checksum: torch.Tensor
    sharded: int
    versions: tuple[int, int]

    @classmethod
    def of(cls, full: torch.Tensor, sharded: torch.Tensor) -> Origin | None:
        """The origin of a parameter; None if it has no values yet or is no ordinary tensor."""
        if full.is_meta or type(full) not in (torch.Tensor, torch.nn.Parameter) or not full.numel():
            return None
        step = max(1, full.numel() // _SAMPLES)
        samples = full.detach().reshape(-1)[::step] if full.is_contiguous() else full.detach()
        return cls(_bits(samples), id(sharded), _versions(sharded))

    def checksum_if_untouched(self, sharded: torch.Tensor) -> int | None:
        """The checksum, if the parameter is the same and nobody has written into it."""
        same = id(sharded) == self.sharded and _versions(sharded) == self.versions
        return int(self.checksum) if same else None


def _versions(sharded: torch.Tensor) -> tuple[int, int]:
    return sharded._version, local_of(sharded)._version


def warn_of_other_origins(ranks: list[int], origins: list[dict[str, int | None]]) -> None:
    """Name parameters of which ranks have built different values, and that nothing was loaded into since.

    Args:
        ranks: The ranks of a group.
        origins: What each of them says, by parameter name: a checksum, or None if it cannot say.
    """
    differ = [
        name
        for name, mine in origins[0].items()
        if any(None not in (mine, other.get(name)) and other[name] != mine for other in origins[1:])
    ]
    if differ:
        more = f" and {len(differ) - _SHOWN} more" if len(differ) > _SHOWN else ""
        warnings.warn(
            f"ranks {ranks} built parameters {differ[:_SHOWN]}{more} with different values, so the sharded model is a "
            "mixture of them. Set the same seed on every rank before the model is built, load a state dict after it is "
            "sharded, or use FSDP(..., sync_module_states=True)",
            stacklevel=2,
        )
