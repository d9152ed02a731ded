"""Lower bounds of the iteration time, from what lanes run and wait for, and from nothing else.

[Note: Stretches]
An *event* is the moment at which so many tasks of a lane have ended.  Take two events, the second of which cannot come
before the first, whatever the timing.  Some tasks are guaranteed to start after the first and to have ended by the
second (``sim/bounds/guaranteed_order.py``).  Their work lies in the stretch between the two, and [Note: Throughput
bound] in ``sim/bounds/throughput.py`` turns work of several lanes into a least time, contention included.  Where work
of two lanes is guaranteed to run side by side ([Note: Released together] in ``sim/bounds/side_by_side.py``), or work of
a lane while compute rests, that counts for more.

Stretches that follow each other add up.  In the steady state an event comes once in every period, so that the longest
chain of stretches from an event to its counterpart one iteration later is a lower bound of the period.  Any choice of
events gives one; a few of them, spread over the lanes, come within a percent of the best
(``python -m benchmarks.search --bounds``).  Besides, events are chosen where lanes hand over to each other: what first
comes after the last task of each lane.

Less work, fewer tasks and fewer waits can only lower the bound, whatever the events.  So the bound of one plan holds
for every plan that has its tasks and its waits and more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from ..kernels import lanes as kernels
from ..space.lane_programs import LanePrograms, LeftOut
from ..space.prices import FloatArray
from ..space.space import BoolArray, IntArray
from .guaranteed_order import NEVER, Events, GuaranteedOrder
from .longest_chains import TIE_FRAC, longest_chains
from .rounding import rounded_s
from .side_by_side import Releases, releases
from .throughput import SideBySide, Throughput

_COMPUTE: Final = 0
_BOUND_FRAC: Final = 1 - 1e-5
"""Covers what the simulator tolerates as periodic, and rounding."""
_COUNT_BITS: Final = 40
"""Of a lane and a count in one number."""
_SPREAD: Final = (32, 2, 2, 4, 3)
"""The usual number of events of every lane."""


def least_periods_s(programs: LanePrograms, throughput: Throughput, spread: Sequence[int] = _SPREAD) -> FloatArray:
    """(N, K) no plan takes less in the steady state; see [Note: Stretches].

    ``spread``: events that are spread evenly over every lane; over lanes of at most twice as many tasks, all of them.
    The longest chains are found for two rows of compute, the least and the most, and hold for all.
    """
    totals_s = programs.compute_s.sum(axis=2)
    extremes = np.stack([totals_s.argmin(axis=1), totals_s.argmax(axis=1)], axis=1)
    if kernels.is_available():
        rules = _rules(programs.lane_of, throughput, spread)
        found = kernels.least_periods_s(_lanes(programs), programs.compute_s, extremes, rules)
    else:
        found = _found_s(programs, throughput, extremes, spread)
    return rounded_s(found * _BOUND_FRAC)


def _lanes(programs: LanePrograms) -> kernels.LaneArrays:
    """The programs as the compiled function reads them."""
    num_left_out = np.zeros(len(programs.lengths), dtype=np.int64)
    repeats = np.zeros((*programs.lengths.shape, 2), dtype=np.int64)
    for plan, of_plan in enumerate(programs.left_out):
        if of_plan is not None:
            num_left_out[plan] = of_plan.num_micro_batches
            repeats[plan] = np.stack([of_plan.begins, of_plan.num_tasks], axis=1)
    return kernels.LaneArrays(programs.lengths, programs.waits, programs.known, programs.seconds, num_left_out, repeats)


def _rules(lane_of: Sequence[int], throughput: Throughput, spread: Sequence[int]) -> kernels.StretchRules:
    """What the compiled function asks of a machine."""
    weights = throughput.weights[:, lane_of]
    pairs = _pairs(lane_of, throughput)
    return kernels.StretchRules(
        weights=weights,
        pairs=np.array([(pair.lane, pair.beside) for pair in pairs], dtype=np.int64).reshape(-1, 2),
        ratios=np.array([pair.least_ratio for pair in pairs]),
        slack=np.array([pair.slack for pair in pairs]).reshape(len(pairs), len(weights)),
        spread=np.array([spread[lane] for lane in lane_of]),
        tie_frac=TIE_FRAC,
    )


def _pairs(lane_of: Sequence[int], throughput: Throughput) -> list[SideBySide]:
    """The pairs of lanes whose order is not open."""
    return [pair for pair in throughput.pairs if all(lane_of.count(lane) == 1 for lane in (pair.lane, pair.beside))]


def _found_s(programs: LanePrograms, throughput: Throughput, extremes: IntArray, spread: Sequence[int]) -> FloatArray:
    """(N, K) the bounds; ``extremes``: (N, R) rows of compute whose longest chains are looked for."""
    order = GuaranteedOrder(programs)
    stretches = _Stretches(order, _events(order, programs, spread))
    # Sequences of one lane share its throughput.
    of_compute, *of_others = throughput.weights[:, programs.lane_of].T
    work_s = [stretches.work_s(lane + 1, seconds) for lane, seconds in enumerate(programs.seconds)]
    others = np.stack(work_s, axis=-1) @ np.array(of_others)  # (N, E, E, V)
    more = [
        stretches.together_s(together, pair.beside)[..., None] * pair.slack
        for pair in _pairs(programs.lane_of, throughput)
        for together in [releases(order, programs, pair)]
        if together is not None
    ]
    if more:
        # Slack is there once: for the pair of lanes for which it counts most.
        others += np.maximum.reduce(more)
    compute_s = stretches.compute_s(np.take_along_axis(programs.compute_s, extremes[..., None], axis=1))
    least_s = _least_s(compute_s, others, of_compute)
    least_s[~np.broadcast_to(stretches.is_stretch[:, None], least_s.shape)] = -np.inf
    chains = longest_chains(least_s, stretches.events, programs.left_out)
    found = np.zeros(programs.compute_s.shape[:2])
    for row in range(extremes.shape[1]):
        begin, gap, times = (of[:, row] for of in (chains.begin, chains.gap, chains.times))
        compute_s = stretches.compute_at_s(programs.compute_s, begin, gap)
        hops_s = _least_s(compute_s, others[order.rows, begin, gap - 1], of_compute)
        np.maximum(found, (hops_s * times[:, None]).sum(axis=2), out=found)
    return found


def _events(order: GuaranteedOrder, programs: LanePrograms, spread: Sequence[int]) -> Events:
    """Events spread over the lanes, those at which lanes hand over, and those that micro-batches share."""
    lengths, lane_of = order.lengths, programs.lane_of
    lanes = [lane for lane in range(lengths.shape[1]) if lengths[:, lane].any()]
    columns = []
    for lane in lanes:
        usual, length = spread[lane_of[lane]], lengths[:, lane]
        num_spread = np.where(length <= 2 * usual, 2 * usual, usual)
        for number in range(1, int(num_spread.max()) + 1):
            columns.append((lane, np.rint(length * (np.minimum(number, num_spread) / num_spread)).astype(np.int64)))
    others = np.array([lane for lane in lanes if lane != _COMPUTE], dtype=np.int64)
    if len(others):
        # A lane that has no tasks has no events: the last one of each lane, which is there already, stands in for them.
        last = Events(np.broadcast_to(others, (len(lengths), len(others))), lengths[:, others])
        following = order.starts_after(last)
        for lane in lanes:
            for number, first in enumerate(following[lane].T):
                found = np.where(first < NEVER, first, 0)
                for more in (0, 1) if lane == _COMPUTE else (1,):
                    columns.append((lane, np.where(last.count[:, number] > 0, found + more, lengths[:, lane])))
    for plan, of_plan in enumerate(programs.left_out):
        if of_plan is not None:
            columns += _shared_events(lengths, plan, of_plan)
    lane_at = np.array([lane for lane, _ in columns], dtype=np.int64)
    count = np.stack([count for _, count in columns], axis=1)
    length = lengths[:, lane_at]
    is_there = length > 0
    count = (count - 1) % np.maximum(length, 1) + 1
    return _distinct(Events(np.where(is_there, lane_at, _COMPUTE), np.where(is_there, count, lengths[:, :1])))


def _distinct(events: Events) -> Events:
    """Each event once; where plans have fewer than others, the last one stands for those that are missing."""
    keys = np.sort((events.lane << _COUNT_BITS) + events.count, axis=1)
    is_new = np.append(np.ones((len(keys), 1), dtype=np.bool_), keys[:, 1:] != keys[:, :-1], axis=1)
    # Those that come again are put behind all others, which keep their order.
    keys = np.take_along_axis(keys, np.argsort(~is_new, axis=1, kind="stable"), axis=1)
    num_events = is_new.sum(axis=1)
    keys = np.where(np.arange(keys.shape[1]) < num_events[:, None], keys, keys.max(axis=1, keepdims=True))
    keys = keys[:, : num_events.max()]
    return Events(keys >> _COUNT_BITS, keys & ((1 << _COUNT_BITS) - 1))


def _shared_events(lengths: IntArray, plan: int, left_out: LeftOut) -> list[tuple[int, IntArray]]:
    """Events within a micro-batch that repeats, and their counterparts in the next one."""
    found = []
    for lane, (begin, num_tasks) in enumerate(zip(left_out.begins, left_out.num_tasks, strict=True)):
        if num_tasks and begin > 0:
            for more in {0, num_tasks // 2}:
                for count in (begin + more, begin + more + num_tasks):
                    column = lengths[:, lane].copy()
                    column[plan] = count
                    found.append((lane, column))
    return found


class _Stretches:
    """From each event (e) to each of those that follow it (g), up to its counterpart an iteration later: (N, E, E)."""

    def __init__(self, order: GuaranteedOrder, events: Events) -> None:
        ended = order.ended_before(events)
        # In an order that no guarantee contradicts: whatever comes later knows more.
        known = np.maximum(ended, -2 * order.lengths.T[:, :, None]).sum(axis=0)
        places = np.argsort(known, axis=1, kind="stable")
        self.events = events.in_order(places)
        self._order = order
        self._ended = np.take_along_axis(ended, places[None], axis=2)
        self._after = order.starts_after(self.events)
        num_events = places.shape[1]
        begin, gap = np.arange(num_events)[:, None], np.arange(1, num_events + 1)
        self._wraps, self._end = np.divmod(begin + gap, num_events)
        lane, rows = self.events.lane[:, :, None], order.rows[:, :, None]
        reached = self._ended[lane, rows, self._end] + self._wraps * order.lengths[rows, lane]
        self.is_stretch: BoolArray = reached >= self.events.count[:, :, None]

    def _bounds(self, lane: int) -> tuple[IntArray, IntArray, BoolArray, BoolArray]:
        """(N, E) tasks ended by each event and the first after it, and whether these are known."""
        ended, after = self._ended[lane], self._after[lane]
        is_ended, is_after = ended > -self._order.lengths[:, lane, None], after < NEVER
        return np.where(is_ended, ended, 0), np.where(is_after, after, 0), is_ended, is_after

    def work_s(self, lane: int, seconds: FloatArray) -> FloatArray:
        """(N, E, E) seconds of the lane's tasks that lie in each stretch; ``seconds``: (N, T)."""
        return self._work_s(lane, seconds[:, None])[:, 0]

    def compute_s(self, seconds: FloatArray) -> FloatArray:
        """(N, K, E, E) seconds of compute in each stretch; ``seconds``: (N, K, T)."""
        return self._work_s(_COMPUTE, seconds)

    def _work_s(self, lane: int, seconds: FloatArray) -> FloatArray:
        ended, after, is_ended, is_after = self._bounds(lane)
        sums = _Sums(seconds, self._order.lengths[:, lane])
        work_s = sums.until_s(ended)[:, :, self._end] + self._wraps * sums.total_s[..., None]
        work_s -= sums.until_s(after)[..., None]
        np.maximum(work_s, 0.0, out=work_s)
        work_s *= (is_ended[:, self._end] & is_after[:, :, None])[:, None]
        return work_s

    def compute_at_s(self, seconds: FloatArray, begin: IntArray, gap: IntArray) -> FloatArray:
        """(N, K, H) seconds of compute in the stretches from the events ``begin`` (N, H), over so many gaps."""
        ended, after, is_ended, is_after = self._bounds(_COMPUTE)
        sums, rows = _Sums(seconds, self._order.lengths[:, _COMPUTE]), self._order.rows
        wraps, end = np.divmod(begin + gap, ended.shape[1])
        work_s = sums.until_s(ended[rows, end]) + wraps[:, None] * sums.total_s - sums.until_s(after[rows, begin])
        return np.maximum(work_s, 0.0) * (is_ended[rows, end] & is_after[rows, begin])[:, None]

    def together_s(self, together: Releases, beside: int) -> FloatArray:
        """(N, E, E) seconds that two lanes are guaranteed side by side in each stretch."""
        ended, _, is_ended, _ = self._bounds(beside)
        _, first, _, is_after = self._bounds(_COMPUTE)
        # The end of a task is a moment of release, and of an event; what starts after an event ends later.
        after = np.where(self.events.lane == _COMPUTE, self.events.count, first + 1)[:, :, None]
        further = np.multiply(self._wraps, self._order.lengths[:, beside, None, None], dtype=np.int64)
        stop = np.add(ended[:, self._end], further, dtype=np.int64)
        is_known = is_ended[:, self._end] & is_after[:, :, None]
        return np.where(is_known, together.between_s(np.broadcast_to(after, stop.shape), stop), 0.0)


class _Sums:
    """Seconds of a lane until places of its endless program.  ``seconds``: (N, K, T) of an iteration."""

    def __init__(self, seconds: FloatArray, lengths: IntArray) -> None:
        self._until_s = np.concatenate([np.zeros((*seconds.shape[:2], 1)), seconds.cumsum(axis=2)], axis=2)
        self._lengths = np.maximum(lengths, 1)[:, None]
        self._rows, self._columns = np.arange(len(seconds))[:, None, None], np.arange(seconds.shape[1])[:, None]
        self.total_s: FloatArray = self._until_s[:, :, -1:]
        """(N, K, 1)"""

    def until_s(self, counts: IntArray) -> FloatArray:
        """(N, K, ...) of the first so many tasks; ``counts``: (N, ...)."""
        iteration, place = np.divmod(counts, self._lengths)
        found: FloatArray = self._until_s[self._rows, self._columns, place[:, None]]
        found += iteration[:, None] * self.total_s
        return found


def _least_s(compute_s: FloatArray, others: FloatArray, weights: FloatArray) -> FloatArray:
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
