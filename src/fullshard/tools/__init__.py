"""Looks at runs and machines; never on the path of a training step."""
