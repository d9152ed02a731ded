"""Start and end of every task over several iterations, and when they have become periodic.

[Note: Steady state]
Iterations overlap without a barrier, and the first ones differ from the rest: nothing was prefetched for them, and a
lane that is slower than the others may take a while to become the one that everybody waits for.  Looking at the time
between the ends of successive iterations is not enough: it can stay constant while CPU Adam falls behind a little more
each time, until its backlog holds the compute lane.  So an iteration counts as steady only when *every* task of it ends
one and the same period after its counterpart.  Without contention that is a proof: starts and ends are maxima of sums
of the previous iteration's, so that one common shift repeats for ever (max-plus algebra: Baccelli, Cohen, Olsder,
Quadrat, "Synchronization and Linearity", 1992, section 3.7).  The regime may also repeat only every second or third
iteration; then the period is the mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...shared.schema.schedule import TaskId
from .kept_schedule import KeptSchedule

Seconds = NDArray[np.float64]

_TOLERANCE_FRAC: Final = 1e-6
_LONGEST_CYCLE: Final = 3
_NUM_AVERAGED: Final = 4


@dataclass(frozen=True, eq=False)
class Timeline:
    """Seconds since the simulation began, per iteration (rows) and task (columns)."""

    starts_s: Seconds
    ends_s: Seconds

    @property
    def num_iterations(self) -> int:
        """Rows."""
        return len(self.starts_s)


@dataclass(frozen=True, eq=False)
class Fold:
    """Micro-batches that are left out of the window; see [Note: Folded iterations] in ``sim/engine/folding.py``."""

    kept: KeptSchedule
    cuts: tuple[int, ...]
    """By lane, the first task of the micro-batch that those left out are like."""
    begin_s: float
    """Since the simulation began: when that micro-batch begins."""
    period_s: float
    """How long it takes, and each of those left out."""


@dataclass(frozen=True, eq=False)
class Timing(Timeline):
    """A timeline that reaches into the steady state."""

    iteration_s: float
    """Period of the steady state."""
    is_steady: bool
    """Whether the tasks became periodic; if not, ``iteration_s`` is that of the lane which falls behind."""
    fold: Fold | None = None
    """Where the timeline leaves micro-batches out, which ``iteration_s`` has."""
    rank_waits_s: Mapping[TaskId, float] = field(default_factory=dict)
    """Of the window's collectives that begin when the last of unlike ranks has come to them, what these wait before."""

    @property
    def window(self) -> int:
        """The iteration that stands for the steady state: the last one whose successor is there too."""
        return max(0, self.num_iterations - 2)


def steady_period_s(ends_s: Sequence[Seconds]) -> float | None:
    """The period, if the last of these iterations is periodic; ``ends_s`` has one entry per iteration.

    The last iteration is compared with the one before it, and the one two and three before it.
    """
    last = ends_s[-1]
    for cycle in range(1, min(_LONGEST_CYCLE, len(ends_s) - 1) + 1):
        shift_s = last - ends_s[-1 - cycle]
        period_s = float(shift_s[-1]) / cycle
        if np.abs(shift_s - shift_s[-1]).max() <= _TOLERANCE_FRAC * period_s:
            return period_s
    return None


def slowest_period_s(ends_s: Sequence[Seconds]) -> float:
    """The mean period, over the last few iterations, of the task that is delayed most from one to the next.

    Where tasks have not become periodic, some lane falls behind the others, and in the end all wait for it.
    """
    num_averaged = min(_NUM_AVERAGED, len(ends_s) - 1)
    return float((ends_s[-1] - ends_s[-1 - num_averaged]).max()) / num_averaged
