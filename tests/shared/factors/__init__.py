"""Weights in factors, without torch."""
