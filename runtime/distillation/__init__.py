"""Bypass distillation: blocks of a student that learn from the teacher's, each by a loss of its own."""
