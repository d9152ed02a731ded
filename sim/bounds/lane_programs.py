"""What the lanes of one plan run, as arrays instead of tasks.

[Note: Fused tasks]
Small tasks follow each other without a gap in many places, and one task of their joint length does the same: nothing
else can tell the difference as long as no lane waits for an inner end, and every inner task may start as soon as the
one before it has ended.  The latter holds where a task waits for nothing that its lane has not waited for before.

It also holds for a task, say i, if all that it waits for is guaranteed to come in time.  Take any task v of the lane
before it.  Whatever v knows to have ended has ended when v starts.  What i waits for needs some tasks of other lanes
beyond these.  If it needs none of its own lane in this iteration, they wait for nothing but each other, and at any
moment one of them at least runs.  If all of them together take no longer, even at their slowest and one after the
other, than the lane's tasks from v up to i, the wait is over in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ..engine.folding import Repeating
from ..space.lane_order import NOTHING
from ..space.plan_family import COLLECTIVE, COMPUTE, CPU_OPTIM, D2H, H2D, PlanFamily
from ..space.prices import FloatArray
from ..space.space import BoolArray, IntArray

_ALONE: Final = (
    (H2D, D2H, CPU_OPTIM),
    (COMPUTE, CPU_OPTIM, D2H),
    (COMPUTE, CPU_OPTIM, H2D),
    (D2H, COMPUTE, H2D),
)
_TOGETHER: Final = (
    (COLLECTIVE, D2H, H2D, CPU_OPTIM),
    (COMPUTE, CPU_OPTIM, D2H, COLLECTIVE),
    (COLLECTIVE, COMPUTE, CPU_OPTIM, H2D),
    (D2H, COLLECTIVE, COMPUTE, H2D),
    (COMPUTE, H2D, CPU_OPTIM, D2H),
)
WAITS_FOR: Final = {len(of_lanes): np.array(of_lanes) for of_lanes in (_ALONE, _TOGETHER)}
"""By the number of lanes, the other lanes of each: the columns of their waits, the usual first."""
_COLUMN: Final = {
    (num_lanes, lane, other): column
    for num_lanes, of_lanes in WAITS_FOR.items()
    for lane, others in enumerate(of_lanes.tolist())
    for column, other in enumerate(others)
}


@dataclass(frozen=True, eq=False)
class LaneProgram:
    """One lane: T tasks per iteration."""

    begins: IntArray
    """(T,) the first of the tasks that each is fused of."""
    durations_s: FloatArray
    """(T,); empty for COMPUTE, whose seconds depend on more."""
    waits: IntArray
    """(T, columns) how many tasks the lanes of ``WAITS_FOR`` must have ended, counted within the iteration; below 1 for
    tasks of the iterations before, ``NOTHING`` for no wait."""


def copy_programs(family: PlanFamily, depth: int, slowest: FloatArray) -> tuple[LaneProgram, ...]:
    """The programs of all lanes at the depth of this number, in their order, with tasks fused.

    ``slowest``: the largest slowdown of each lane.
    """
    num_lanes = family.num_lanes
    lanes = [family.lanes.waits_of(lane, depth) for lane in range(num_lanes)]
    met = [{other: _is_met(waits) for other, waits in columns.items()} for columns in lanes]
    joined_of = [_joins(length, of_lane) for length, of_lane in zip(family.lanes.lengths, met, strict=True)]
    _begin_afresh(family, joined_of[COMPUTE])
    joined_of[CPU_OPTIM] |= _in_time(family, depth, slowest)

    def awaited(other: int) -> list[IntArray]:
        """What waits for tasks of ``other`` for which its lane has not waited before."""
        found = []
        for lane, columns in enumerate(lanes):
            waits = columns.get(other)
            if waits is None:
                continue
            if lane == CPU_OPTIM:
                # Its tasks wait, unless what they wait for is guaranteed to come in time.
                waits = waits[~joined_of[CPU_OPTIM]]
                found.append(waits[~_is_met(waits)])
            else:
                found.append(waits[~met[lane][other]])
        return found

    # Whoever waits for several tasks of a lane in a row: that lane first whose waits depend on it.
    _part(joined_of[CPU_OPTIM], *awaited(CPU_OPTIM))
    for lane in range(num_lanes):
        if lane != CPU_OPTIM:
            _part(joined_of[lane], *awaited(lane))
    numbers = [_numbers(joined) for joined in joined_of]
    fused = []
    for lane, columns in enumerate(lanes):
        begins = np.flatnonzero(~joined_of[lane])
        kept = np.full((len(begins), num_lanes - 1), NOTHING)
        for other, waits in columns.items():
            kept[:, _COLUMN[num_lanes, lane, other]] = _renumbered(waits[begins], numbers[other])
        durations_s = np.zeros(0)
        if lane != COMPUTE and len(begins):
            durations_s = np.add.reduceat(family.seconds(lane, depth), begins)
        fused.append(LaneProgram(begins, durations_s, kept))
    return tuple(fused)


def repeating_programs(family: PlanFamily, begins_of: Sequence[IntArray]) -> Repeating | None:
    """Where the fused programs of all lanes repeat, micro-batch after micro-batch; None if they do not.

    ``begins_of``: by lane, (T,) the first of the tasks that each fused task consists of.
    """
    middle = family.positions.micro_batches - 3
    num_fused = []
    for begins, (first, num_tasks) in zip(begins_of, family.micro_batch_places(middle), strict=True):
        before, within, after = (
            begins[(begins >= begin) & (begins < begin + num_tasks)] - begin
            for begin in (first - num_tasks, first, first + num_tasks)
        )
        if not (np.array_equal(before, within) and np.array_equal(within, after)):
            return None
        num_fused.append(len(within))
    following = family.place_at[(middle + 1) * family.positions.micro_length]
    mark = int(np.searchsorted(begins_of[COMPUTE], following)) - 1
    return Repeating(tuple(num_fused), mark)


def _joins(length: int, met: dict[int, BoolArray]) -> BoolArray:
    """(T,) whether a task waits for nothing new."""
    joins = np.ones(length, dtype=np.bool_)
    for of_other in met.values():
        joins &= of_other
    # The first task begins a lane.
    joins[:1] = False
    return joins


def _begin_afresh(family: PlanFamily, joins: BoolArray) -> None:
    """Compute tasks that stay apart: device Adam, which the length of an iteration is read off, and others."""
    joins[-1] = False
    # Micro-batches are told apart by a task that ends with each ([Note: Folded iterations]).
    joins[family.place_at[: -1 : family.positions.micro_length]] = False


def _in_time(family: PlanFamily, depth: int, slowest: FloatArray) -> BoolArray:
    """(T,) whether all that a task of CPU_OPTIM waits for is over when the task before it ends; [Note: Fused tasks]."""
    lengths, own, lane = family.lanes.lengths, family.lanes.waits_of(CPU_OPTIM, depth), CPU_OPTIM
    in_time = np.zeros(lengths[lane], dtype=np.bool_)
    if len(in_time) < 2 or not own:
        return in_time
    until_s = np.zeros(len(in_time))
    for other, length in enumerate(lengths):
        if other != lane and length:
            seconds = family.slowest_compute_s if other == COMPUTE else family.seconds(other, depth)
            both_s = np.append(0.0, np.tile(seconds, 2).cumsum())
            until_s += slowest[other] * both_s[family.known[lane][depth, other] + length]
    begin_s = family.seconds(lane, depth).cumsum() - family.seconds(lane, depth)
    ahead_s = begin_s - until_s
    in_time[1:] = ahead_s[1:] >= np.minimum.accumulate(ahead_s)[:-1]
    for other, waits in own.items():
        # Tasks of the lane itself that what it waits for needs: none of this iteration.
        iteration, place = np.divmod(np.maximum(waits, -lengths[other]) - 1, lengths[other])
        needed = family.known[other][depth, lane][place] + iteration * lengths[lane]
        in_time &= (needed <= 0) | (waits <= NOTHING)
    return in_time


def _is_met(waits: IntArray) -> BoolArray:
    """(T,) whether an earlier task of the lane has already waited for as much; there is no less than ``NOTHING``."""
    met = np.zeros(len(waits), dtype=np.bool_)
    np.less_equal(waits[1:], np.maximum.accumulate(waits)[:-1], out=met[1:])
    return met


def _part(joins: BoolArray, *waits: IntArray) -> None:
    """A task joins none that another lane waits for; ``waits``: what each of them waits for."""
    num_tasks = len(joins)
    if num_tasks:
        for of_lane in waits:
            joins[np.mod(of_lane[of_lane > NOTHING], num_tasks)] = False


def _numbers(joins: BoolArray) -> IntArray:
    """How many fused tasks so many tasks are: from two iterations before to the end of this one."""
    within = np.append(0, np.cumsum(~joins))
    return np.concatenate([within[:-1] - 2 * within[-1], within[:-1] - within[-1], within])


def _renumbered(waits: IntArray, numbers: IntArray) -> IntArray:
    """The same waits, counted in fused tasks; ``numbers``: as of ``_numbers``."""
    num_tasks = len(numbers) // 3
    if not num_tasks:
        return np.where(waits > 0, waits, NOTHING)
    return np.where(waits > NOTHING, numbers[np.maximum(waits + 2 * num_tasks, 0)], NOTHING)
