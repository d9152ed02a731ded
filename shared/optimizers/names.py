"""Optimizers as people write them."""

from __future__ import annotations

from ..basics.errors import PlanError
from ..basics.suggestions import did_you_mean
from ..schema.optimizer import Optimizer


def optimizer_named(name: str) -> Optimizer:
    """The optimizer that people call so: ``adamw-8bit``, ``AdamW8bit``.  Raises PlanError if there is none."""
    try:
        return Optimizer(name)
    except ValueError:
        raise PlanError(f"there is no optimizer {name!r}. {did_you_mean(name, tuple(Optimizer))}") from None
