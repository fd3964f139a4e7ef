"""What a checkpoint is, as integers: which part of which tensor lies in which file."""
