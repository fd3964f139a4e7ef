"""`ShardedGradScaler` under the module name that it has in torch."""

from fullshard.runtime.scaler import ShardedGradScaler

__all__ = ["ShardedGradScaler"]
