"""Kernels of packages beside PyTorch, as fake tensors see them: what they read, write, keep and multiply."""
