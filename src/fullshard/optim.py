"""Optimizers for sharded models: any of torch works on sharded parameters, `flat` makes elementwise ones fast."""

from fullshard.runtime.loop.flat import flat

__all__ = ["flat"]
