"""What a unit has: its parameters, where they lie, how they look outside, and the way of their gradients."""
