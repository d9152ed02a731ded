"""What the lanes of one plan run, as arrays instead of tasks.

[Note: Fused tasks]
Small chunks make many tasks that follow each other without a gap, and one task of their joint length does the same:
nothing else can tell the difference as long as no lane waits for an inner end, and every inner task may start as soon
as the one before it has ended.  The latter holds where a task waits for nothing that its lane has not waited for
before.  It also holds for CPU Adam of a chunk if its gradients are guaranteed to have arrived when the chunk before it
is stepped.
Take any chunk v stepped before: that began, at the earliest, when v's gradients had arrived.  From then on compute and
the copies wait for nothing but each other and the gathers of the steps down to the chunk's block.  If all of that takes
no longer, even at its slowest and one after the other, than CPU Adam from v on, the copy has ended in time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ..engine.folding import Repeating
from ..space.compute_table import FloatArray
from ..space.lane_order import NOTHING, Waits
from ..space.side_lanes import COLLECTIVE, COMPUTE, CPU_OPTIM, D2H, H2D, SideLanes
from ..space.space import BoolArray, IntArray

_ALONE: Final = (
    (H2D, D2H, CPU_OPTIM),
    (COMPUTE, CPU_OPTIM, D2H),
    (COMPUTE, CPU_OPTIM, CPU_OPTIM),
    (D2H, COMPUTE, COMPUTE),
)
_TOGETHER: Final = (
    (COLLECTIVE, D2H, H2D, CPU_OPTIM),
    (COMPUTE, CPU_OPTIM, D2H, D2H),
    (COLLECTIVE, COMPUTE, CPU_OPTIM, CPU_OPTIM),
    (D2H, COLLECTIVE, COMPUTE, COMPUTE),
    (COMPUTE, H2D, CPU_OPTIM, CPU_OPTIM),
)
WAITS_FOR: Final = {len(of_lanes): np.array(of_lanes) for of_lanes in (_ALONE, _TOGETHER)}
"""By the number of lanes, the lanes that tasks of each may wait for: the columns of their waits, the usual first."""
_COLUMN: Final = {
    (num_lanes, lane, other): column
    for num_lanes, of_lanes in WAITS_FOR.items()
    for lane, others in enumerate(of_lanes.tolist())
    for column, other in reversed([*enumerate(others)])
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


def copy_programs(side_lanes: SideLanes, depth: int, slowest: FloatArray) -> tuple[LaneProgram, ...]:
    """The programs of all lanes, in their order, with tasks fused.

    ``slowest``: the largest slowdown of each lane.
    """
    work, positions = side_lanes.work(depth), side_lanes.positions
    lanes, num_lanes = work.waits, len(work.waits)
    met = {id(column): _is_met(column) for lane in lanes for column in lane.values()}

    def joins(lane: int) -> BoolArray:
        all_met = np.ones(len(work.seconds[lane]), dtype=np.bool_)
        for column in lanes[lane].values():
            all_met &= met[id(column)]
        # The first task begins a lane.
        all_met[:1] = False
        return all_met

    cpu_joins = joins(CPU_OPTIM)
    cpu_joins |= _steps_in_time(side_lanes, slowest)

    def awaited(other: int) -> list[IntArray]:
        """What waits for tasks of ``other`` for which its lane has not waited before."""
        found = []
        for lane, columns in enumerate(lanes):
            waits = columns.get(other)
            if waits is None:
                continue
            if lane == CPU_OPTIM:
                # CPU Adam waits for each copy, unless it is guaranteed to come in time.
                waits = waits[~cpu_joins]
                found.append(waits[~_is_met(waits)])
            else:
                found.append(waits[~met[id(waits)]])
        return found

    # Whoever waits for several tasks of a lane in a row: CPU Adam first, since what it waits for depends on it.
    _part(cpu_joins, *awaited(CPU_OPTIM))
    joined_of = {CPU_OPTIM: cpu_joins, COMPUTE: _compute_joins(side_lanes, lanes[COMPUTE], met)}
    for lane in range(num_lanes):
        if lane != CPU_OPTIM:
            if lane != COMPUTE:
                joined_of[lane] = joins(lane)
            _part(joined_of[lane], *awaited(lane))
    numbers = {lane: _numbers(joined) for lane, joined in joined_of.items()}
    of_compute = {}
    begins = np.append(positions.step_begin(np.arange(positions.num_steps)), positions.device_adam)
    for other, waits in lanes[COMPUTE].items():
        of_compute[other] = np.full(positions.length, NOTHING)
        of_compute[other][begins] = waits
    fused = []
    num_columns = WAITS_FOR[num_lanes].shape[1]
    for lane, columns in enumerate((of_compute, *lanes[1:])):
        begins = np.flatnonzero(~joined_of[lane])
        kept = np.full((len(begins), num_columns), NOTHING)
        for other, waits in columns.items():
            kept[:, _COLUMN[num_lanes, lane, other]] = _renumbered(waits[begins], numbers[other])
        seconds = work.seconds[lane]
        durations_s = np.zeros(0) if lane == COMPUTE or not len(begins) else np.add.reduceat(seconds, begins)
        fused.append(LaneProgram(begins, durations_s, kept))
    return tuple(fused)


def repeating_programs(side_lanes: SideLanes, programs: tuple[LaneProgram, ...]) -> Repeating | None:
    """Where the fused programs of all lanes repeat, micro-batch after micro-batch; None if they do not."""
    middle = side_lanes.positions.micro_batches - 3
    num_fused = []
    for program, (first, num_tasks) in zip(programs, side_lanes.micro_batch_places(middle), strict=True):
        before, within, after = (
            program.begins[(program.begins >= begin) & (program.begins < begin + num_tasks)] - begin
            for begin in (first - num_tasks, first, first + num_tasks)
        )
        if not (np.array_equal(before, within) and np.array_equal(within, after)):
            return None
        num_fused.append(len(within))
    mark = int(np.searchsorted(programs[COMPUTE].begins, (middle + 1) * side_lanes.positions.micro_length)) - 1
    return Repeating(tuple(num_fused), mark)


def _compute_joins(side_lanes: SideLanes, waits: Waits, met: dict[int, BoolArray]) -> BoolArray:
    """(L,) whether a compute task waits for nothing new; ``waits``: of steps, and of device Adam."""
    positions = side_lanes.positions
    joins = np.ones(positions.length, dtype=np.bool_)
    begins = np.zeros(positions.num_steps, dtype=np.bool_)
    for of_step in waits.values():
        begins |= (~met[id(of_step)] & (of_step > NOTHING))[:-1]
    joins[positions.step_begin(np.flatnonzero(begins))] = False
    # Device Adam is what the length of an iteration is read off.
    joins[[0, -1]] = False
    # Micro-batches are told apart by a task that ends with each ([Note: Folded iterations]).
    joins[: -1 : positions.micro_length] = False
    return joins


def _steps_in_time(side_lanes: SideLanes, slowest: FloatArray) -> BoolArray:
    """(Y,) whether a copy is guaranteed to have ended when the chunk before is stepped; see [Note: Fused tasks]."""
    residency, step = side_lanes.residency, side_lanes.residency.table.step
    in_time = np.zeros(side_lanes.cpu_length, dtype=np.bool_)
    is_plain = step.num_ranks == 1 and not step.accumulates and not step.limits_norm
    if not is_plain or len(side_lanes.swapped) or len(in_time) < 2:
        return in_time
    table, positions, num_blocks = residency.table, side_lanes.positions, side_lanes.positions.num_blocks
    first_block = table.first_block[residency.update_chunk]
    offload_s, adam_s = (of_chunk[residency.update_chunk] for of_chunk in (table.offload_s, table.cpu_adam_s))
    blocks = np.arange(num_blocks)
    at = positions.backward(blocks)
    compute_s = (side_lanes.compute.seconds[:, at - 1] + side_lanes.compute.seconds[:, at]).max(axis=0)
    gather_s = np.bincount(side_lanes.h2d_step, side_lanes.h2d_s, minlength=2 * num_blocks)[2 * num_blocks - 1 - blocks]
    until_s = np.append(0.0, (slowest[COMPUTE] * compute_s + slowest[H2D] * gather_s).cumsum())
    copies_s = slowest[D2H] * offload_s.cumsum()
    ahead_s = adam_s.cumsum() - adam_s + until_s[first_block] - copies_s
    in_time[1:] = ahead_s[1:] >= np.minimum.accumulate(ahead_s)[:-1]
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
