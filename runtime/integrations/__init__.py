"""Plans in the loops of others: the Trainer of transformers and those made of it, and Accelerate."""
