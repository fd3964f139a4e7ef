"""`ShardedGradScaler` under the module name that it has in torch."""

from fullshard.runtime.loop.scaler import ShardedGradScaler

__all__ = ["ShardedGradScaler"]
