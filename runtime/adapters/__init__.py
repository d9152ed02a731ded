"""Adapters of PEFT on a model that a plan is carried out on: which are active, and what they may not do meanwhile."""
