"""Hypothesis strategies for everything that the schema describes, each in the module of its subject."""
