"""The interval of a predicted figure."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from .documents import FrozenModel


class Interval(FrozenModel):
    """Where a predicted figure is expected to be found in nine cases out of ten: its central 90 %.

    One figure in twenty lies below ``low``, one in twenty above ``high``.  Both have the unit that the name of the
    field says.
    """

    low: float
    """At most ``high``."""
    high: float
    """At least ``low``."""

    @model_validator(mode="after")
    def _is_ordered(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low is {self.low}, above high, {self.high}")
        return self

    def contains(self, value: float) -> bool:
        """Whether ``value`` lies inside, the ends included."""
        return self.low <= value <= self.high

    def half_width_frac(self, value: float) -> float:
        """Half of the width over ``value``, the figure that the interval belongs to."""
        return (self.high - self.low) / (2 * value)
