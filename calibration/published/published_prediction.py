"""One prediction of a published figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from pydantic import PositiveFloat

from ...shared.basics.documents import FrozenModel
from .runs import Quantity


class Prediction(FrozenModel):
    """A published figure as the simulator sees it, as a range over what is unknown; units of ``quantity``."""

    row: str
    case: str
    quantity: Quantity
    variant: str = ""
    """Which of several readings of the case; empty for the one that counts."""
    low: PositiveFloat
    likely: PositiveFloat
    high: PositiveFloat
    how: str
    """What is modelled, and how."""
    is_given: bool = False
    """Whether the measurement itself was put in, so that agreement says nothing."""

    @classmethod
    def of(
        cls,
        row: str,
        case: str,
        quantity: Quantity,
        readings: Sequence[float],
        *,
        how: str,
        variant: str = "",
        is_given: bool = False,
    ) -> Self:
        """From the favourable, the likely and the unfavourable reading."""
        _, likely, _ = readings
        return cls(
            row=row,
            case=case,
            quantity=quantity,
            variant=variant,
            low=min(readings),
            likely=likely,
            high=max(readings),
            how=how,
            is_given=is_given,
        )

    def error_frac(self, measured: float) -> float:
        """Signed: positive where more was predicted than measured."""
        return self.likely / measured - 1

    def reaches(self, readings: Sequence[float], within_frac: float = 0.0) -> bool:
        """Whether some reading of what is unknown comes as near as ``within_frac`` to a reading of the measurement."""
        return any(
            self.low <= reading * (1 + within_frac) and self.high >= reading * (1 - within_frac) for reading in readings
        )
