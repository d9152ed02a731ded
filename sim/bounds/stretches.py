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

Where micro-batches are left out, stretches of one of them count once for each, or a span holds all of them at once
([Note: Spans] in ``sim/bounds/spans.py``): the longer chain counts.

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
from ..space.space import IntArray
from .guaranteed_order import NEVER, Events, GuaranteedOrder
from .longest_chains import TIE_FRAC, Chains, Longest
from .rounding import rounded_s
from .side_by_side import releases
from .spans import Cuts, Spans
from .stretch_work import Stretches, least_s
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
    cuts = Cuts.of(programs)
    return kernels.LaneArrays(
        programs.lengths,
        programs.waits,
        programs.known,
        programs.seconds,
        num_left_out=cuts.num_micro_batches,
        repeats=np.stack([cuts.begin, cuts.num_tasks], axis=2),
        cuts=np.stack([cuts.early, cuts.late], axis=2),
    )


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
    stretches = Stretches(order, _events(order, programs, spread))
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
    of_stretches_s = least_s(compute_s, others, of_compute)
    of_stretches_s[~np.broadcast_to(stretches.is_stretch[:, None], of_stretches_s.shape)] = -np.inf
    longest = Longest.of(of_stretches_s)

    def chain_s(chains: Chains, row: int) -> FloatArray:
        """(N, K) the chains of one of the extremes, for every row of compute."""
        begin, gap, times = (of[:, row] for of in (chains.begin, chains.gap, chains.times))
        compute_s = stretches.compute_at_s(programs.compute_s, begin, gap)
        hops_s = least_s(compute_s, others[order.rows, begin, gap - 1], of_compute)
        around_s: FloatArray = (hops_s * times[:, None]).sum(axis=2)
        return around_s

    around = longest.around(stretches.events, programs.left_out)
    found = np.zeros(programs.compute_s.shape[:2])
    for row in range(extremes.shape[1]):
        np.maximum(found, chain_s(around, row), out=found)
    if any(programs.left_out):
        spans = Spans(stretches, programs, throughput.weights[:, programs.lane_of])
        best = spans.longest(extremes, longest.rest_s)
        rest = longest.after(best.begin, best.gap)
        for row in range(extremes.shape[1]):
            np.maximum(found, spans.with_rest_s(best.of_row(row), chain_s(rest, row)), out=found)
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
