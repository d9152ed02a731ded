"""Pipelines of ranks: the plan of every stage, and what is predicted of all stages together."""
