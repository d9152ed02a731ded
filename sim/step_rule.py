"""What a search holds fixed about the optimizer's step: its micro-batches, and the limit of its gradients' norm."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Final

from ..shared.errors import PlanError

MOST_MICRO_BATCHES: Final = 4096
"""An iteration of more has millions of tasks."""


@dataclass(frozen=True)
class StepRule:
    """Knobs of a plan that say what is trained rather than how; the search takes them as they are.

    Raises PlanError if they are out of range.
    """

    micro_batches: int = 1
    """Forwards and backwards per step."""
    max_gradient_norm: float | None = None
    """Limit of the norm of all gradients; None for no limit."""

    def __post_init__(self) -> None:
        if not 1 <= self.micro_batches <= MOST_MICRO_BATCHES:
            raise PlanError(
                f"micro_batches is {self.micro_batches}; it must be at least 1 and at most {MOST_MICRO_BATCHES}."
            )
        if self.max_gradient_norm is not None and not (self.max_gradient_norm > 0 and isfinite(self.max_gradient_norm)):
            raise PlanError(f"max_gradient_norm is {self.max_gradient_norm}; it must be above 0, and finite.")

    @property
    def limits_norm(self) -> bool:
        """Whether CPU Adam waits for the norm of all gradients."""
        return self.max_gradient_norm is not None

    @property
    def accumulates(self) -> bool:
        """Whether gradients of several micro-batches are added up."""
        return self.micro_batches > 1
