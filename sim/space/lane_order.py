"""What is guaranteed to have ended when a task starts, for lanes that are given as waits.

Every lane runs its tasks in order, so a chain of waits that comes back to a lane adds nothing there.  So what a task of
one lane knows of another is the most that its own waits and those of the lanes it waits for bring, which are followed
until nothing new comes.  ``shared/verify/happens_before.py`` finds the same in a compiled schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from .space import BoolArray, IntArray

NOTHING: Final = -(2**40)
"""A wait that is always over."""
Waits = Mapping[int, IntArray]
"""By lane that is waited for, (T,) or (D, T): how many of its tasks must have ended before each task starts, counted
within the iteration; below 1 for tasks of the iterations before."""


def reached_before(
    target: int, waits: Sequence[Waits], lengths: Sequence[int], *, among: Sequence[int]
) -> dict[int, IntArray]:
    """(D, T) tasks of ``target`` guaranteed to have ended before each task of the lanes ``among`` starts.

    Counted as waits are, and not further back than one iteration.  ``waits`` and ``lengths``: of every lane.
    """
    per_iteration = lengths[target]
    reached = {lane: _carried(_direct(waits[lane], target), per_iteration) for lane in among}
    is_new = True
    while is_new:
        is_new = False
        for lane in among:
            found = reached[lane]
            for other in among:
                if other in waits[lane]:
                    found = np.maximum(found, ended_with(reached[other], waits[lane][other], per_iteration))
            found = _carried(found, per_iteration)
            is_new |= not np.array_equal(found, reached[lane])
            reached[lane] = found
    return reached


def ended_with(reached: IntArray, waits: IntArray, per_iteration: int) -> IntArray:
    """(D, T) what tasks know by waiting for others; ``reached``: (D, T') what these knew, in one iteration."""
    num_tasks = reached.shape[1]
    if not num_tasks:
        return np.full(waits.shape, NOTHING)
    iteration, place = np.divmod(np.maximum(waits, -num_tasks) - 1, num_tasks)
    is_wait: BoolArray = waits > NOTHING
    return np.where(is_wait, np.take_along_axis(reached, place, axis=1) + iteration * per_iteration, NOTHING)


def _direct(waits: Waits, target: int) -> IntArray:
    some = next(iter(waits.values()))
    return waits.get(target, np.full(some.shape, NOTHING))


def _carried(known: IntArray, per_iteration: int) -> IntArray:
    """What tasks know, with what the tasks before them in the lane knew, those of the iteration before included."""
    known = np.maximum(known, -per_iteration)
    both = np.concatenate([known - per_iteration, known], axis=1)
    carried: IntArray = np.maximum.accumulate(both, axis=1)[:, known.shape[1] :]
    return carried
