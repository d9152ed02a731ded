"""Measuring a machine, fitting factors, judging them."""
