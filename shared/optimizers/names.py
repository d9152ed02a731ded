"""Optimizers and their gradients as people write them."""

from __future__ import annotations

from ..basics.errors import PlanError
from ..basics.suggestions import did_you_mean
from ..schema.optimizer import HostGradients, Optimizer


def optimizer_named(name: str) -> Optimizer:
    """The optimizer that people call so: ``adamw-8bit``, ``AdamW8bit``.  Raises PlanError if there is none."""
    try:
        return Optimizer(name)
    except ValueError:
        raise PlanError(f"there is no optimizer {name!r}. {did_you_mean(name, tuple(Optimizer))}") from None


def host_gradients_named(name: str) -> HostGradients:
    """The element type of gradients on the host that people call so.  Raises PlanError if there is none."""
    try:
        return HostGradients(name.strip().casefold())
    except ValueError:
        raise PlanError(
            f"there are no host gradients {name!r}. Choose {' or '.join(HostGradients)}: bfloat16 ones are those of "
            f"bfloat16 parameters."
        ) from None
