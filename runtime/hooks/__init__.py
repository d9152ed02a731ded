"""Hooks on a running model: where it is, what it recomputes, what it swaps."""
