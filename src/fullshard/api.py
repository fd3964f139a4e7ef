"""Settings of `FullyShardedDataParallel`."""

from fullshard.wrapper import settings
from fullshard.wrapper.settings import *  # noqa: F403 - every public one, as they are listed there

__all__ = settings.__all__
