"""Seconds without their last bits, in which ways to compute them differ."""

from __future__ import annotations

from typing import Final

import numpy as np

from ..space.prices import FloatArray

_BITS: Final = 32
"""Sums in another order differ in about the last 10 of 53 bits."""


def rounded_s(seconds: FloatArray) -> FloatArray:
    """The seconds to 32 significant bits, 1.2e-10 of them away at most.

    Plans of equal times stay equal then, whatever order their sums are taken in: a search takes them in the same order
    with compiled functions and without, and gives the same answer.
    """
    mantissa, exponent = np.frexp(seconds)
    found: FloatArray = np.ldexp(np.rint(mantissa * 2.0**_BITS), exponent - _BITS)
    return found
