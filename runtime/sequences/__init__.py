"""Sequences that several ranks share: each rank's tokens, and what attention exchanges."""
