"""Blocks whose memory depends on values: which they are, and what they take at most."""
