"""Checkpoints without a training: what they are, and the same for other readers and other numbers of ranks."""
