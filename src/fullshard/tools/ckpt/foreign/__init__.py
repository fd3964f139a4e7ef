"""Checkpoints of other programs. Their files are data: nothing in them is imported or called."""
