"""Work of two lanes that is guaranteed to run side by side.

[Note: Released together]
A lane *has released* a task when everything that the task waits for has ended and so have the waits of all tasks of
its lane before it: from then on the lane works until the task has ended.  Where two lanes, A and B, have tasks that
are released by the end of the same compute task e, both get work at that instant, say ``in[e]`` and ``out[e]`` seconds.

Let W and V be what the two lanes have released and not yet done, R and S their rates while both are active, and rho
the least R / S beside any other lanes.  Let t be the work of A that was done while B was active.  Then

    t + min(W, rho * V)

never falls: while both lanes are active, t grows by R dt, W falls by as much and rho * V by no more; while only one is
active, the other has nothing and the minimum is 0.  And it grows by at least min(in[e], rho * out[e]) at every release.
Let V count only the first tasks of B, up to one that has ended: B runs these before all others.  Then V = 0, and at
least the sum over e of min(in[e], rho * out[e]) was done side by side, however the tasks were timed.  Where lanes slow
each other that costs more than any other arrangement.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ...shared.drafts.lanes import NOTHING
from ..space.lane_programs import LanePrograms
from ..space.prices import FloatArray
from ..space.space import BoolArray, IntArray
from .guaranteed_order import NEVER, GuaranteedOrder
from .throughput import SideBySide

_COMPUTE: Final = 0
UNKNOWN: Final = NOTHING // 2
"""Counts below it say nothing."""


@dataclass(frozen=True, eq=False)
class Releases:
    """Shapes: N plans, C compute tasks, T tasks of the lane beside."""

    until_s: FloatArray
    """(N, C + 1) seconds that are guaranteed side by side, of the releases by the first so many compute tasks."""
    next_release: IntArray
    """(N, T) compute tasks that have ended when the first task from each place on is released."""
    num_compute: IntArray
    """(N,)"""
    num_beside: IntArray
    """(N,)"""

    def between_s(self, after: IntArray, num_ended: IntArray) -> FloatArray:
        """(N, ...) seconds guaranteed side by side in a stretch.

        ``after``: (N, ...) releases by the end of this many compute tasks or of more lie in the stretch.
        ``num_ended``: (N, ...) tasks of the lane beside that have ended at its end.
        """
        shape = (-1, *[1] * (after.ndim - 1))
        plan, num_compute = np.arange(len(self.until_s)).reshape(shape), self.num_compute.reshape(shape)
        iteration, place = np.divmod(num_ended, self.num_beside.reshape(shape))
        stop = np.asarray(self.next_release[plan, place] + iteration * num_compute - 1, dtype=np.int64)

        def at_s(count: IntArray) -> FloatArray:
            iteration, place = np.divmod(count, num_compute)
            seconds: FloatArray = self.until_s[plan, place] + iteration * self.until_s[plan, num_compute]
            return seconds

        found: FloatArray = np.where(stop >= after, at_s(stop) - at_s(after - 1), 0.0)
        return found


def releases(order: GuaranteedOrder, programs: LanePrograms, pair: SideBySide) -> Releases | None:
    """What the two lanes of ``pair`` are released together; None if nothing is."""
    if any((lane, _COMPUTE) not in programs.waits for lane in (pair.lane, pair.beside)):
        return None
    own, other = (_release(order, programs, lane) for lane in (pair.lane, pair.beside))
    own_s, other_s = (
        _released_s(order, programs, lane, *release) for lane, release in ((pair.lane, own), (pair.beside, other))
    )
    least_s = np.minimum(own_s, pair.least_ratio * other_s)
    if not least_s.any():
        return None
    until_s = np.concatenate([np.zeros((len(least_s), 1)), least_s.cumsum(axis=1)], axis=1)
    count, is_known = other
    num_compute = order.lengths[:, _COMPUTE]
    known = np.where(is_known, count, NEVER)
    both = np.concatenate([known, np.minimum(known + num_compute[:, None], NEVER)], axis=1)
    following = np.minimum.accumulate(both[:, ::-1], axis=1)[:, ::-1][:, : count.shape[1]]
    following = np.minimum(following, 2 * num_compute[:, None])
    return Releases(until_s, following, num_compute, np.maximum(order.lengths[:, pair.beside], 1))


def _release(order: GuaranteedOrder, programs: LanePrograms, lane: int) -> tuple[IntArray, BoolArray]:
    """(N, T) after how many compute tasks each task is released, and whether that is the moment, whatever the timing.

    It is if all else that the task or one before it waits for is over when that compute task starts.
    """
    count = _carried(order, programs, lane, _COMPUTE)
    is_known = (count > UNKNOWN) & (np.arange(count.shape[1]) < order.lengths[:, lane, None])
    iteration, place = np.divmod(np.where(is_known, count, 1) - 1, order.lengths[:, _COMPUTE, None])
    for other in range(_COMPUTE + 1, order.lengths.shape[1]):
        if (lane, other) in programs.waits:
            over = programs.known[_COMPUTE][order.rows, other, place] + iteration * order.lengths[:, other, None]
            is_known &= _carried(order, programs, lane, other) <= over
    return count, is_known


def _carried(order: GuaranteedOrder, programs: LanePrograms, lane: int, other: int) -> IntArray:
    """(N, T) tasks of another lane that each task or one before it waits for."""
    carried = np.maximum.accumulate(programs.waits[lane, other], axis=1)
    return np.maximum(carried, carried[:, -1:] - order.lengths[:, other, None])


def _released_s(
    order: GuaranteedOrder, programs: LanePrograms, lane: int, count: IntArray, is_known: BoolArray
) -> FloatArray:
    """(N, C) seconds of the lane's tasks that the end of each compute task releases."""
    width = programs.compute_s.shape[2]
    place = (np.where(is_known, count, 1) - 1) % order.lengths[:, _COMPUTE, None] + width * order.rows
    seconds = np.where(is_known, programs.seconds[lane - 1], 0.0)
    found = np.bincount(place.ravel(), seconds.ravel(), minlength=width * len(count))
    return found.astype(np.float64).reshape(len(count), width)
