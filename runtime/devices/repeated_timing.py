"""Seconds of a piece of work that is repeated, on a machine that others use too.

[Note: Disturbed measurements]
Another process takes a core away for a quantum of the scheduler, some milliseconds.  To work that is shorter than that,
most calls are untouched and the others take many times as long: with threads that wait for each other a thousand times,
and next to a busy process they can be nine calls of ten.  Neither a mean nor a median of few calls says what the work
takes; the lower decile of many does, as long as one call in ten is left alone.  Longer work has its share of others in
every call, as training will have, and its median is what it takes.  Calls are spread over all of the time given, for
what disturbs lasts a while.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

_QUANTUM_S: Final = 0.004
"""Linux's scheduler lets a process run for 3 ms to 4 ms where others wait (kernel/sched/fair.c)."""
_FEWEST_SHORT: Final = 50
_FEWEST_LONG: Final = 3
_MOST: Final = 20_000
_PATIENCE: Final = 4
"""How many times the time given may pass until the fewest calls are done."""


def repeated_s(once: Callable[[], float], budget_s: float, *, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call, which ``once`` makes and times; see [Note: Disturbed measurements].

    Takes about ``budget_s``; longer where that is too short for a few calls.  The first call is not counted.
    """
    once()
    times: list[float] = []
    start_s = clock()
    while not _is_enough(times, clock() - start_s, budget_s):
        times.append(once())
    return undisturbed_s(times)


def _is_enough(times: Sequence[float], elapsed_s: float, budget_s: float) -> bool:
    if len(times) < _FEWEST_LONG:
        return False
    if len(times) < _FEWEST_SHORT and min(times) < _QUANTUM_S:
        return elapsed_s >= _PATIENCE * budget_s
    return elapsed_s >= budget_s or len(times) >= _MOST


def undisturbed_s(times: Sequence[float]) -> float:
    """What the work takes by itself where it is shorter than a scheduler's quantum, else the median."""
    decile_s = sorted(times)[(len(times) - 1) // 10]
    return decile_s if decile_s < _QUANTUM_S else statistics.median(times)
