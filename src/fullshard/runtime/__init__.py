"""Acts on commands: tensors, streams and process groups. Takes no scheduling decision."""
