"""What is guaranteed to have ended when a task starts, for lanes that are given as waits.

Every lane runs its tasks in order, so a chain of waits that comes back to a lane adds nothing there.  So what a task of
one lane knows of another is the most that its own waits and those of the lanes it waits for bring, which are followed
until nothing new comes.  ``shared/order/happens_before.py`` finds the same in a compiled schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from ...shared.drafts.lanes import NOTHING
from ..kernels import lanes as kernels
from .space import IntArray

__all__ = ["NOTHING", "Waits", "known_before", "starts_after"]

Waits = Mapping[int, IntArray]
"""By lane that is waited for, (D, T): how many of its tasks must have ended before each task starts, counted
within the iteration; below 1 for tasks of the iterations before."""


def known_before(waits: Sequence[Waits], lengths: Sequence[int], num_depths: int) -> tuple[IntArray, ...]:
    """By lane, (D, L, T): how many tasks of every lane, of L, are guaranteed to have ended before each task starts.

    Counted as waits are, and not further back than one iteration.  ``waits`` and ``lengths``: of every lane.
    """
    if kernels.is_available():
        pairs = {(lane, other): found for lane, of_lane in enumerate(waits) for other, found in of_lane.items()}
        return kernels.known_before(pairs, lengths, num_depths)
    per_iteration = np.array(lengths)[:, None]
    known = []
    for lane, of_lane in enumerate(waits):
        direct = np.full((num_depths, len(lengths), lengths[lane]), NOTHING)
        direct[:, lane] = np.arange(lengths[lane])
        for other, found in of_lane.items():
            direct[:, other] = found
        known.append(_carried(direct, per_iteration))
    awaited = {
        (lane, other): _Awaited.of(found, lengths[other], per_iteration)
        for lane, of_lane in enumerate(waits)
        for other, found in of_lane.items()
    }
    # What lanes have learnt since others looked.
    news = {lane: set(of_lane) for lane, of_lane in enumerate(waits)}
    while any(news.values()):
        for lane in range(len(waits)):
            learnt = known[lane]
            for other in news[lane]:
                learnt = np.maximum(learnt, awaited[lane, other].known(known[other]))
            news[lane] = set()
            if learnt is not known[lane]:
                learnt = _carried(learnt, per_iteration)
                if not np.array_equal(learnt, known[lane]):
                    known[lane] = learnt
                    for listener, of_lane in enumerate(waits):
                        if lane in of_lane:
                            news[listener].add(lane)
    return tuple(known)


@dataclass(frozen=True, eq=False)
class _Awaited:
    """The tasks of one lane that those of another wait for."""

    place: IntArray
    """(D, 1, T)"""
    ended: IntArray
    """(D, L, T) what to add for the iteration that they are of; below everything where there is no wait."""

    @classmethod
    def of(cls, waits: IntArray, num_tasks: int, per_iteration: IntArray) -> Self:
        """``waits``: (D, T) for a lane of ``num_tasks`` tasks."""
        iteration, place = np.divmod(np.maximum(waits, -num_tasks) - 1, num_tasks)
        ended = np.where((waits > NOTHING)[:, None], iteration[:, None] * per_iteration, NOTHING)
        return cls(place[:, None], ended)

    def known(self, known: IntArray) -> IntArray:
        """(D, L, T) what tasks know by these waits; ``known``: (D, L, T') what the others knew."""
        found: IntArray = np.take_along_axis(known, self.place, axis=2) + self.ended
        return found


def starts_after(over: IntArray, num_gone: int) -> IntArray:
    """(D, X) the first task of a lane guaranteed to start after each of ``num_gone`` tasks of another one has ended.

    ``over``: (D, T) how many of these are guaranteed to have ended before each of the lane's tasks starts.  Counted on
    into the next iteration; two iterations' length where none is sure.
    """
    both = np.maximum.accumulate(np.concatenate([over, over + num_gone], axis=1), axis=1)
    counts = np.arange(1, num_gone + 1)
    return np.stack([np.searchsorted(row, counts) for row in both])


def _carried(known: IntArray, per_iteration: IntArray) -> IntArray:
    """What tasks know, with what the tasks before them in the lane knew, those of the iteration before included."""
    known = np.maximum(known, -per_iteration)
    if not known.shape[-1]:
        return known
    within: IntArray = np.maximum.accumulate(known, axis=-1)
    carried: IntArray = np.maximum(within, within[..., -1:] - per_iteration)
    return carried
