"""Orthogonal subspace fine-tuning: factorised linear maps, and what keeps the trained factors orthogonal."""
