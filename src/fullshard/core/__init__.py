"""Decisions without side effects: integers and frozen dataclasses in, the same out. Standard library only."""
