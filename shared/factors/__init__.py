"""Weights in factors, without torch: which, of what sizes, and what their products do in the place of dense ones."""
