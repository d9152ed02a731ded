"""Families of workloads: figures as polynomials of the batch's shape, of tiles, of ranks and of models' sizes."""
