"""What the lanes of one plan run, as arrays instead of tasks.

[Note: Fused tasks]
Small chunks make many tasks that follow each other without a gap, and one task of their joint length does the same:
nothing else can tell the difference as long as no lane waits for an inner end, and every inner task may start as soon
as the one before it has ended.  The latter holds where a task waits for nothing that its lane has not waited for
before.  It also holds for CPU Adam of chunks whose gradients leave together, if each copy takes no longer, even at its
slowest, than the step on the chunk before it: then the copy has always ended in time, since both began when the copy
before it ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ..shared.schedule import Lane
from .compute_table import FloatArray
from .space import BoolArray, IntArray
from .traffic import NOTHING, Traffic

COMPUTE, H2D, D2H, CPU_OPTIM = (tuple(Lane).index(lane) for lane in (Lane.COMPUTE, Lane.H2D, Lane.D2H, Lane.CPU_OPTIM))
WAITS_FOR = np.array(
    [[H2D, D2H, CPU_OPTIM], [COMPUTE, CPU_OPTIM, D2H], [COMPUTE, CPU_OPTIM, CPU_OPTIM], [D2H, COMPUTE, COMPUTE]]
)
"""The lanes that tasks of each lane may wait for: the columns of their waits."""
_COLUMN: Final = {
    (lane, other): column
    for lane, others in enumerate(WAITS_FOR.tolist())
    for column, other in reversed([*enumerate(others)])
}


@dataclass(frozen=True, eq=False)
class LaneProgram:
    """One lane: T tasks per iteration."""

    durations_s: FloatArray
    """(T,); empty for COMPUTE, whose seconds depend on more."""
    waits: IntArray
    """(T, 3) how many tasks the lanes of ``WAITS_FOR`` must have ended, counted within the iteration; below 1 for
    tasks of the iterations before, ``NOTHING`` for no wait."""


def copy_programs(traffic: Traffic, depth: int, slowest_offload: float) -> tuple[LaneProgram, ...]:
    """The programs of all lanes, in their order, with tasks fused.

    ``slowest_offload``: the largest slowdown of the D2H lane.
    """
    depths = np.array([depth])
    # What nothing waits for is left out: most plans swap nothing and limit no norm.
    compute = {H2D: traffic.step_waits_h2d, D2H: traffic.step_waits_d2h(depths)[0]}
    h2d = {COMPUTE: traffic.h2d_waits_compute(depths)[0], CPU_OPTIM: traffic.h2d_waits_cpu}
    d2h = {COMPUTE: traffic.d2h_waits_compute}
    cpu = {D2H: traffic.cpu_waits_d2h}
    if len(traffic.swapped):
        h2d[D2H] = traffic.h2d_waits_d2h
    if traffic.positions.micro_batches > 1:
        d2h[CPU_OPTIM] = traffic.d2h_waits_cpu
    norm_wait = None
    if traffic.norm_place is not None:
        cpu[COMPUTE] = traffic.cpu_waits_compute
        norm_wait = np.array([traffic.norm_place + 1])

    # Whoever waits for several tasks of a lane in a row: CPU Adam first, since it waits for each copy.
    met = {id(column): _is_met(column) for lane in (compute, h2d, d2h, cpu) for column in lane.values()}

    def binding(waits: IntArray) -> IntArray:
        return waits[~met[id(waits)]]

    def joins(lane: dict[int, IntArray], num_tasks: int) -> BoolArray:
        all_met = np.ones(num_tasks, dtype=np.bool_)
        for column in lane.values():
            all_met &= met[id(column)]
        # The first task begins a lane.
        all_met[:1] = False
        return all_met

    cpu_joins = joins(cpu, traffic.cpu_length)
    cpu_joins |= _steps_in_time(traffic, slowest_offload)
    awaited = [binding(h2d[CPU_OPTIM])]
    if CPU_OPTIM in d2h:
        awaited.append(binding(d2h[CPU_OPTIM]))
    if norm_wait is not None:
        awaited.append(norm_wait)
    _part(cpu_joins, *awaited)
    d2h_joins = joins(d2h, len(traffic.d2h_step))
    starts = cpu[D2H][~cpu_joins]
    awaited = [binding(compute[D2H]), starts[~_is_met(starts)]]
    if D2H in h2d:
        awaited.append(binding(h2d[D2H]))
    _part(d2h_joins, *awaited)
    h2d_joins = joins(h2d, len(traffic.h2d_step))
    _part(h2d_joins, binding(compute[H2D]))

    numbers = {H2D: _numbers(h2d_joins), D2H: _numbers(d2h_joins), CPU_OPTIM: _numbers(cpu_joins)}
    positions = traffic.positions
    compute_waits = np.full((positions.length, 3), NOTHING)
    begins = positions.step_begin(np.arange(positions.num_steps))
    for other, waits in compute.items():
        compute_waits[begins, _COLUMN[COMPUTE, other]] = _renumbered(waits, numbers[other])
    if norm_wait is not None:
        compute_waits[-1, _COLUMN[COMPUTE, CPU_OPTIM]] = _renumbered(norm_wait, numbers[CPU_OPTIM])[0]
    fused = [LaneProgram(np.zeros(0), compute_waits)]
    for lane, columns, lane_joins, seconds in (
        (H2D, h2d, h2d_joins, traffic.h2d_s),
        (D2H, d2h, d2h_joins, traffic.d2h_s),
        (CPU_OPTIM, cpu, cpu_joins, traffic.cpu_s),
    ):
        begins = np.flatnonzero(~lane_joins)
        kept = np.full((len(begins), 3), NOTHING)
        for other, waits in columns.items():
            waits = waits[begins]
            kept[:, _COLUMN[lane, other]] = _renumbered(waits, numbers[other]) if other in numbers else waits
        fused.append(LaneProgram(np.add.reduceat(seconds, begins) if len(begins) else seconds, kept))
    return tuple(fused)


def _steps_in_time(traffic: Traffic, slowest_offload: float) -> BoolArray:
    """(Y,) whether a copy has surely ended when CPU Adam has stepped the chunk before; see [Note: Fused tasks]."""
    residency, rule = traffic.residency, traffic.residency.table.rule
    in_time = np.zeros(traffic.cpu_length, dtype=np.bool_)
    if not rule.accumulates and not rule.limits_norm:
        first_block = residency.table.first_block[residency.update_chunk]
        offload_s, adam_s = (
            of_chunk[residency.update_chunk] for of_chunk in (residency.table.offload_s, residency.table.cpu_adam_s)
        )
        in_time[1:] = (first_block[1:] == first_block[:-1]) & (offload_s[1:] * slowest_offload <= adam_s[:-1])
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
