"""The learning rate of every step: it rises in a warm-up, and stays or falls to 0.

The factors are those of ``transformers.get_scheduler``: step 0 of a warm-up has rate 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .run_options import Schedule


@dataclass(frozen=True, slots=True)
class LearningRates:
    """A pure function of the step, so that a resumed run goes on without any state."""

    peak: float
    schedule: Schedule = Schedule.CONSTANT
    warmup_steps: int = 0

    def at(self, step: int, num_steps: int) -> float:
        """The rate of ``step``, counted from 0, of ``num_steps``."""
        if step < self.warmup_steps:
            return self.peak * (step / max(1, self.warmup_steps))
        if self.schedule is Schedule.CONSTANT:
            return self.peak
        left = num_steps - self.warmup_steps
        if self.schedule is Schedule.LINEAR:
            return self.peak * max(0.0, (num_steps - step) / max(1, left))
        progress = (step - self.warmup_steps) / max(1, left)
        return self.peak * max(0.0, 0.5 * (1 + math.cos(math.pi * progress)))
