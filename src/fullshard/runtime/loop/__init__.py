"""What a training loop uses beside the engine: clipping, loss scaling, batches, checks of optimizers."""
