"""The steady state's period: where the tasks of a record lie within one iteration, those that reach beyond it included.

A record has every task of one iteration once.  Some begin before its first compute task (chunks gathered ahead), some
end after the next iteration began (copies, CPU Adam).  In the steady state every iteration is alike, so within one of
them a lane does the part of its own tasks that lies there, and the rest on behalf of its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from ..schema.record import TaskTiming

_INSTANT_FRAC: Final = 1e-9
"""Of the period: times that are closer are one, but for rounding."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a task that lies within one period; most tasks are one piece."""

    timing: TaskTiming
    start_s: float
    end_s: float
    iteration: int
    """Whose task it is: 0 for this iteration, -1 for the previous one, 1 for the next one."""


def folded(timings: Iterable[TaskTiming], period_s: float) -> Iterator[Piece]:
    """The pieces of the tasks within [0, ``period_s``]: whatever lies elsewhere is moved there by whole periods.

    The pieces of a task together are as long as the task, or as the period if that is shorter.
    """
    for timing in timings:
        long_s = timing.end_s - timing.start_s
        if not long_s < period_s:
            yield Piece(timing, 0.0, period_s, 0)
            continue
        periods = math.floor(timing.start_s / period_s + _INSTANT_FRAC)
        start_s = max(0.0, timing.start_s - periods * period_s)
        end_s = start_s + long_s
        beyond_s = end_s - period_s
        yield Piece(timing, start_s, min(end_s, period_s), -periods)
        if beyond_s > _INSTANT_FRAC * period_s:
            yield Piece(timing, 0.0, beyond_s, -periods - 1)
