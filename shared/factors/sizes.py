"""How large the factors of a weight are, and what they are called ([Note: Subspaces] in ``phases/subspaces.py``)."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Final

from ..basics.errors import WorkloadError

FACTOR_NAMES: Final = ("u_high", "s_high", "v_high", "u_low", "s_low", "v_low")
"""What the factors are called, those of the frozen part first."""
FACTORISED_CLASS: Final = "OrthogonalLinear"
"""What the class of a factorised map is called."""


def check_ratio(unfreeze_rank_ratio: float) -> None:
    """Raise WorkloadError unless it is a number from 0 to 1."""
    is_number = isinstance(unfreeze_rank_ratio, int | float) and not isinstance(unfreeze_rank_ratio, bool)
    if not is_number or not 0 <= unfreeze_rank_ratio <= 1:
        raise WorkloadError(
            f"unfreeze_rank_ratio is {unfreeze_rank_ratio!r}; it is the part of the directions that are trained, and "
            f"must be a number from 0 to 1."
        )


def num_frozen(num_out: int, num_in: int, unfreeze_rank_ratio: float) -> int:
    """Directions of a weight (num_out x num_in) that stay as they are: floor(min (1 - ratio)), at most min - 1.

    The ratio is the decimal number that is written, so that 0.9 of 10 leaves 1 and not 0.
    """
    least = min(num_out, num_in)
    return min(math.floor(least * (1 - Fraction(repr(unfreeze_rank_ratio)))), least - 1)


def factor_shapes(num_out: int, num_in: int, frozen: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the six, by name: (n, k), (k,), (k, m), (n, r), (r,), (r, m); k may be 0."""
    trained = min(num_out, num_in) - frozen
    shapes = ((num_out, frozen), (frozen,), (frozen, num_in), (num_out, trained), (trained,), (trained, num_in))
    return dict(zip(FACTOR_NAMES, shapes, strict=True))
