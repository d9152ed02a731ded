"""Measuring a machine and fitting factors to it."""
