"""The class `FullyShardedDataParallel` and its settings."""

from fullshard.wrapper import settings
from fullshard.wrapper.settings import *  # noqa: F403 - every public one, as they are listed there
from fullshard.wrapper.wrapper import FullyShardedDataParallel

__all__ = ["FullyShardedDataParallel", *settings.__all__]  # noqa: PLE0604
