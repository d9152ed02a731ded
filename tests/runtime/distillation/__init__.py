"""Tests of bypass distillation on PyTorch."""
