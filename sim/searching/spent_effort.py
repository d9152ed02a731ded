"""How much a search has looked at, and what it still tries to prove then.

[Note: Widening]
Bounds are weak where gradients of several micro-batches fall behind, and ten thousands of plans may lie below the limit
that the tolerance draws.  Their differences are then far below what a prediction is worth.  So after a first allowance
of work the search asks for less: with every further one the share doubles by which a plan that is left out may be
faster.  The certificate says which share was proven.  Searches of one micro-batch prove what was asked for, whatever it
takes, and so does a tolerance of 0.
"""

from __future__ import annotations

from typing import Final

_FIRST: Final = 8_000
"""Micro-batches that are replayed before the search asks for less: about 1,300 plans that settle at once."""
_FURTHER: Final = 4_000
"""Those until it asks for half of that again."""
_OF_LONGER: Final = 3
"""Plans whose micro-batches do not settle are replayed for three iterations, others for little more than one."""
_OF_SIMULATION: Final = 64
"""A simulated plan costs as much as so many that are replayed."""
MOST_LEFT_OUT_FRAC: Final = 0.5
"""The search does not ask for less."""


class SpentEffort:
    """The work of all spaces of one search together.  ``widens``: whether it has a limit."""

    def __init__(self, *, widens: bool) -> None:
        self._widens = widens
        self._num_micro_batches = 0

    def add_replayed(self, num_micro_batches: int, *, settles: bool) -> None:
        """Count micro-batches that were replayed; ``settles``: of plans that are expected to settle at once."""
        self._num_micro_batches += num_micro_batches * (1 if settles else _OF_LONGER)

    def add_simulated(self, num_micro_batches: int) -> None:
        """Count the micro-batches of a plan that was simulated."""
        self._num_micro_batches += num_micro_batches * _OF_SIMULATION

    def left_out_frac(self, tolerance_frac: float) -> float:
        """By which share plans that are left out may be faster, where ``tolerance_frac`` was asked for."""
        beyond = self._num_micro_batches - _FIRST
        if not self._widens or beyond < 0:
            return tolerance_frac
        # The cap is reached long before the power overflows.
        doublings = min(1 + beyond // _FURTHER, 64)
        return max(tolerance_frac, min(tolerance_frac * 2.0**doublings, MOST_LEFT_OUT_FRAC))
