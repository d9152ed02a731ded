"""Tests of kernels that may leave CUDA unusable; the proof gives each file a process of its own."""
