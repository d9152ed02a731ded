"""The learning rate of every step of a bypass training: a warm-up, then half a cosine to a least rate.

Steps count from 1, unlike those of full training, whose warm-up begins with a rate of 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...shared.basics.errors import PlanError


@dataclass(frozen=True, slots=True)
class CosineRate:
    """A pure function of the step, so that a resumed run goes on without any state."""

    peak: float
    """The rate that the warm-up ends with."""
    warmup_steps: int
    decay_steps: int
    """The step that has the least rate, as all later ones do."""
    least_frac: float = 0.0
    """The least rate as a part of the peak."""

    def __post_init__(self) -> None:
        """Raise PlanError if the rate would be negative or not finite, or would rise again."""
        if not (self.peak > 0 and math.isfinite(self.peak)):
            raise PlanError(f"a learning rate of {self.peak} is impossible. Give a positive number.")
        if not 0 <= self.least_frac <= 1:
            raise PlanError(f"a least learning rate of {self.least_frac} of the peak must be from 0 to 1 of it.")
        if self.warmup_steps < 0 or self.decay_steps < 0:
            raise PlanError(f"{min(self.warmup_steps, self.decay_steps)} steps are impossible. Give 0 or more.")

    def at(self, step: int) -> float:
        """The rate of ``step``, counted from 1.

        peak · step / W up to the end of the warm-up, W steps; then least + (peak − least) (1 + cos π (step − W) /
        (D − W)) / 2 up to step D, and the least rate from there.  Where D ≤ W, the peak throughout.
        """
        warmup, decay = self.warmup_steps, self.decay_steps
        if decay <= warmup:
            return self.peak
        if step <= warmup:
            return self.peak * step / warmup if warmup else self.peak
        least = self.peak * self.least_frac
        if step >= decay:
            return least
        return least + (self.peak - least) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (decay - warmup)))
