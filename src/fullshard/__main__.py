"""`python -m fullshard`."""

from fullshard.cli import run

run()
