"""Demos: a model trained by a plan before your eyes, and the lessons that they share."""
