"""A trainer on fullshard's public API: configuration, data, model, loop, checkpoints."""
