"""What is guaranteed to have ended when something happens, and what is guaranteed to start after it.

Every lane runs its tasks in order, so what a task knows of another lane is one number: how many of that lane's tasks
have ended.  So is what comes after a task: the first task of the lane that starts later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ..space.lane_programs import LanePrograms
from ..space.space import BoolArray, IntArray

NEVER: Final = 2**40
"""A task that is not guaranteed to come."""
_APART: Final = 2**44
"""More than any number of tasks: numbers of several plans share one sorted array."""
_SHIFTS: Final = np.arange(-1, 2)
"""Iterations that are searched for what starts after an event."""


@dataclass(frozen=True, eq=False)
class Events:
    """Moments of the iterations of N plans: when so many tasks of a lane have ended.  (N, E) each."""

    lane: IntArray
    count: IntArray

    def in_order(self, places: IntArray) -> Events:
        """The same events; ``places``: (N, E)."""
        return Events(*(np.take_along_axis(of, places, axis=1) for of in (self.lane, self.count)))


class GuaranteedOrder:
    """Shapes: N plans, T tasks of a lane, L lanes, E events."""

    def __init__(self, programs: LanePrograms) -> None:
        self.lengths = programs.lengths
        self.rows = np.arange(len(self.lengths))[:, None]
        widths = np.array([known.shape[2] for known in programs.known])
        self._begin = widths.cumsum() - widths
        self._known = np.concatenate(programs.known, axis=2)  # (N, L, sum of T)
        self._after = [
            (known[:, :, None] + _SHIFTS[:, None] * self.lengths[:, :, None, None]) for known in programs.known
        ]
        """By lane, (N, L, iterations, T)."""

    def ended_before(self, events: Events) -> IntArray:
        """(L, N, E) how many tasks of every lane are guaranteed to have ended by each event."""
        place = self._begin[events.lane] + np.maximum(events.count - 1, 0)
        known = self._known[self.rows, :, place].transpose(2, 0, 1).copy()
        known[events.lane, self.rows, np.arange(place.shape[1])] = events.count
        return known

    def is_known(self, ended: IntArray) -> BoolArray:
        """(L, N, E) whether these counts say anything: not that all of the iteration before the last one has ended."""
        found: BoolArray = ended > -self.lengths.T[:, :, None]
        return found

    def starts_after(self, events: Events) -> IntArray:
        """(L, N, E) the first task of every lane that is guaranteed to start after each event; ``NEVER`` if none is."""
        first = np.full((len(self._begin), *events.lane.shape), NEVER)
        columns = np.arange(events.lane.shape[1])
        for lane, after in enumerate(self._after):
            width = after.shape[3]
            if not width:
                continue
            # (N, E) rows of one sorted array: each plan's knowledge of each lane.
            pair = self.rows * after.shape[1] + events.lane
            apart = _APART * np.arange(after.shape[0] * after.shape[1])[:, None]
            flat = (after.reshape(len(apart), -1) + apart).ravel()
            found = np.searchsorted(flat, events.count + _APART * pair) - pair * len(_SHIFTS) * width
            iteration, place = np.divmod(found, width)
            task = place + (iteration - 1) * self.lengths[:, lane, None]
            first[lane] = np.where(iteration < len(_SHIFTS), task, NEVER)
        first[events.lane, self.rows, columns] = events.count
        return first
