"""Families of workloads: figures as polynomials of the batch's shape, of tiles and of ranks that share it."""
