"""Fake tensors in the place of a model's weights and of a machine's kernels."""
