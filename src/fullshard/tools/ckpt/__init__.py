"""Checkpoints looked at and converted, by one process and through one buffer: `fullshard ckpt`."""
