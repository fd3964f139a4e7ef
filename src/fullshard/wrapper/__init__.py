"""The class `FullyShardedDataParallel` on the engine: settings, wrap policies and the module that wraps another one."""
