"""Checkpoints and finished models on disk."""
