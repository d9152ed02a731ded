"""The work of lanes in stretches, and the least time that it takes; see [Note: Stretches] in ``stretches.py``."""

from __future__ import annotations

from typing import Final

import numpy as np

from ..space.prices import FloatArray
from ..space.space import BoolArray, IntArray
from .guaranteed_order import NEVER, Events, GuaranteedOrder
from .side_by_side import Releases

_COMPUTE: Final = 0


class Stretches:
    """From each event (e) to each of those that follow it (g), up to its counterpart an iteration later: (N, E, E)."""

    def __init__(self, order: GuaranteedOrder, events: Events) -> None:
        ended = order.ended_before(events)
        # In an order that no guarantee contradicts: whatever comes later knows more.
        known = np.maximum(ended, -2 * order.lengths.T[:, :, None]).sum(axis=0)
        places = np.argsort(known, axis=1, kind="stable")
        self.events = events.in_order(places)
        self.order = order
        self._ended = np.take_along_axis(ended, places[None], axis=2)
        self._after = order.starts_after(self.events)
        num_events = places.shape[1]
        begin, gap = np.arange(num_events)[:, None], np.arange(1, num_events + 1)
        self._wraps, self._end = np.divmod(begin + gap, num_events)
        lane, rows = self.events.lane[:, :, None], order.rows[:, :, None]
        reached = self._ended[lane, rows, self._end] + self._wraps * order.lengths[rows, lane]
        self.is_stretch: BoolArray = reached >= self.events.count[:, :, None]

    def bounds(self, lane: int) -> tuple[IntArray, IntArray, BoolArray, BoolArray]:
        """(N, E) tasks ended by each event and the first after it, and whether these are known."""
        ended, after = self._ended[lane], self._after[lane]
        is_ended, is_after = ended > -self.order.lengths[:, lane, None], after < NEVER
        return np.where(is_ended, ended, 0), np.where(is_after, after, 0), is_ended, is_after

    def work_s(self, lane: int, seconds: FloatArray) -> FloatArray:
        """(N, E, E) seconds of the lane's tasks that lie in each stretch; ``seconds``: (N, T)."""
        return self._work_s(lane, seconds[:, None])[:, 0]

    def compute_s(self, seconds: FloatArray) -> FloatArray:
        """(N, K, E, E) seconds of compute in each stretch; ``seconds``: (N, K, T)."""
        return self._work_s(_COMPUTE, seconds)

    def _work_s(self, lane: int, seconds: FloatArray) -> FloatArray:
        ended, after, is_ended, is_after = self.bounds(lane)
        sums = Sums(seconds, self.order.lengths[:, lane])
        work_s = sums.until_s(ended)[:, :, self._end] + self._wraps * sums.total_s[..., None]
        work_s -= sums.until_s(after)[..., None]
        np.maximum(work_s, 0.0, out=work_s)
        work_s *= (is_ended[:, self._end] & is_after[:, :, None])[:, None]
        return work_s

    def compute_at_s(self, seconds: FloatArray, begin: IntArray, gap: IntArray) -> FloatArray:
        """(N, K, H) seconds of compute in the stretches from the events ``begin`` (N, H), over so many gaps."""
        ended, after, is_ended, is_after = self.bounds(_COMPUTE)
        sums, rows = Sums(seconds, self.order.lengths[:, _COMPUTE]), self.order.rows
        wraps, end = np.divmod(begin + gap, ended.shape[1])
        work_s = sums.until_s(ended[rows, end]) + wraps[:, None] * sums.total_s - sums.until_s(after[rows, begin])
        return np.maximum(work_s, 0.0) * (is_ended[rows, end] & is_after[rows, begin])[:, None]

    def together_s(self, together: Releases, beside: int) -> FloatArray:
        """(N, E, E) seconds that two lanes are guaranteed side by side in each stretch."""
        ended, _, is_ended, _ = self.bounds(beside)
        _, first, _, is_after = self.bounds(_COMPUTE)
        # The end of a task is a moment of release, and of an event; what starts after an event ends later.
        after = np.where(self.events.lane == _COMPUTE, self.events.count, first + 1)[:, :, None]
        further = np.multiply(self._wraps, self.order.lengths[:, beside, None, None], dtype=np.int64)
        stop = np.add(ended[:, self._end], further, dtype=np.int64)
        is_known = is_ended[:, self._end] & is_after[:, :, None]
        return np.where(is_known, together.between_s(np.broadcast_to(after, stop.shape), stop), 0.0)


class Sums:
    """Seconds of a lane until places of its endless program.  ``seconds``: (N, K, T) of an iteration."""

    def __init__(self, seconds: FloatArray, lengths: IntArray) -> None:
        self._until_s = np.concatenate([np.zeros((*seconds.shape[:2], 1)), seconds.cumsum(axis=2)], axis=2)
        self._lengths = np.maximum(lengths, 1)[:, None]
        self._rows, self._columns = np.arange(len(seconds))[:, None, None], np.arange(seconds.shape[1])[:, None]
        self.total_s: FloatArray = self._until_s[:, :, -1:]
        """(N, K, 1)"""

    def until_s(self, counts: IntArray) -> FloatArray:
        """(N, K, ...) of the first so many tasks; ``counts``: (N, ...)."""
        iteration, place = np.divmod(counts.reshape(len(counts), -1), self._lengths)
        found: FloatArray = self._until_s[self._rows, self._columns, place[:, None]]
        found += iteration[:, None] * self.total_s
        return found.reshape(*found.shape[:2], *counts.shape[1:])


def least_s(compute_s: FloatArray, others: FloatArray, weights: FloatArray) -> FloatArray:
    """(N, K, ...) the least time of every stretch: the largest of its weighted work.

    Where nothing slows compute, few weights count it, and the others say the same for every row of compute.

    Args:
        compute_s: (N, K, ...) work of compute.
        others: (N, ..., V) weighted work of all other lanes.
        weights: (V,) of compute.
    """
    counts = weights > 0
    without_s = others[..., ~counts].max(axis=-1, initial=0.0)
    least_s: FloatArray = np.maximum(without_s[:, None], np.zeros_like(compute_s))
    for vertex in np.flatnonzero(counts):
        weighed = weights[vertex] * compute_s
        weighed += others[:, None, ..., vertex]
        np.maximum(least_s, weighed, out=least_s)
    return least_s
