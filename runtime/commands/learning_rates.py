"""The learning rate of every step: it rises in a warm-up, and stays or falls to 0.

The factors are those of ``transformers.get_scheduler``: step 0 of a warm-up has rate 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer


class Schedule(StrEnum):
    """How the learning rate goes on after its warm-up."""

    CONSTANT = "constant"
    """As it is."""
    LINEAR = "linear"
    """Down to 0 at the last step, in a line."""
    COSINE = "cosine"
    """Down to 0 at the last step, along half a wave."""


@dataclass(frozen=True, slots=True)
class LearningRates:
    """A pure function of the step, so that a resumed run goes on without any state.

    See [Note: Groups of options] in ``shared/cli/option_groups.py``.
    """

    peak: Annotated[float, typer.Option("--learning-rate", metavar="RATE", min=0.0, help="Rate of the optimizer.")] = (
        1e-4
    )
    schedule: Annotated[Schedule, typer.Option("--schedule", help="How the rate goes on after the warm-up.")] = (
        Schedule.CONSTANT
    )
    warmup_steps: Annotated[
        int, typer.Option("--warmup-steps", metavar="N", min=0, help="Steps in which the rate rises from 0, in a line.")
    ] = 0

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
