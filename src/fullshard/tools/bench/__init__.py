"""Measures this machine: the link between ranks, matrix products, memory, and whole steps."""
