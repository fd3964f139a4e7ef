"""Parameters and optimizer state as whole tensors, outside of forward and backward."""
