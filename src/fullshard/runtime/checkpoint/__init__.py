"""Sharded checkpoints: every rank writes and reads its own part; see docs/checkpoint-format.md."""
