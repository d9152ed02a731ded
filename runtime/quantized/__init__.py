"""Linear maps whose frozen weights are packed into few bits: what they consist of, how they are made, what they run."""
