"""What the lanes of one plan run, as arrays instead of tasks.

[Note: Fused tasks]
Small chunks make many tasks that follow each other without a gap, and one task of their joint length does the same:
nothing else can tell the difference as long as no lane waits for an inner end, and every inner task may start as soon
as the one before it has ended.  The latter holds where a task waits for nothing that its lane has not waited for
before.  It also holds for CPU Adam of a chunk if its gradients have surely arrived when the chunk before it is stepped.
Take any chunk v stepped before: that began, at the earliest, when v's gradients had arrived.  From then on compute and
the copies wait for nothing but each other and the gathers of the steps down to the chunk's block.  If all of that takes
no longer, even at its slowest and one after the other, than CPU Adam from v on, the copy has ended in time.
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

    begins: IntArray
    """(T,) the first of the tasks that each is fused of."""
    durations_s: FloatArray
    """(T,); empty for COMPUTE, whose seconds depend on more."""
    waits: IntArray
    """(T, 3) how many tasks the lanes of ``WAITS_FOR`` must have ended, counted within the iteration; below 1 for
    tasks of the iterations before, ``NOTHING`` for no wait."""


def copy_programs(traffic: Traffic, depth: int, slowest: FloatArray) -> tuple[LaneProgram, ...]:
    """The programs of all lanes, in their order, with tasks fused.

    ``slowest``: the largest slowdown of each lane.
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
    cpu_joins |= _steps_in_time(traffic, slowest)
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

    positions = traffic.positions
    compute_joins = _compute_joins(traffic, [of_step for of_step in compute.values() if len(of_step)], met)
    awaited = [binding(lane[COMPUTE]) for lane in (h2d, d2h, cpu) if COMPUTE in lane]
    _part(compute_joins, *awaited)
    joined_of = {COMPUTE: compute_joins, H2D: h2d_joins, D2H: d2h_joins, CPU_OPTIM: cpu_joins}
    numbers = {lane: _numbers(joined) for lane, joined in joined_of.items()}
    step_begins = positions.step_begin(np.arange(positions.num_steps))
    of_compute = {}
    for other, waits in compute.items():
        of_compute[other] = np.full(positions.length, NOTHING)
        of_compute[other][step_begins] = waits
    if norm_wait is not None:
        of_compute[CPU_OPTIM] = np.full(positions.length, NOTHING)
        of_compute[CPU_OPTIM][-1] = norm_wait[0]
    fused = []
    for lane, columns, seconds in (
        (COMPUTE, of_compute, None),
        (H2D, h2d, traffic.h2d_s),
        (D2H, d2h, traffic.d2h_s),
        (CPU_OPTIM, cpu, traffic.cpu_s),
    ):
        begins = np.flatnonzero(~joined_of[lane])
        kept = np.full((len(begins), 3), NOTHING)
        for other, waits in columns.items():
            kept[:, _COLUMN[lane, other]] = _renumbered(waits[begins], numbers[other])
        durations_s = np.zeros(0) if seconds is None or not len(begins) else np.add.reduceat(seconds, begins)
        fused.append(LaneProgram(begins, durations_s, kept))
    return tuple(fused)


def _compute_joins(traffic: Traffic, of_steps: list[IntArray], met: dict[int, BoolArray]) -> BoolArray:
    """(L,) whether a compute task waits for nothing new; ``of_steps``: (S,) what steps wait for."""
    positions = traffic.positions
    joins = np.ones(positions.length, dtype=np.bool_)
    waits = np.zeros(positions.num_steps, dtype=np.bool_)
    for of_step in of_steps:
        waits |= ~met[id(of_step)] & (of_step > NOTHING)
    joins[positions.step_begin(np.flatnonzero(waits))] = False
    # Device Adam is what the length of an iteration is read off.
    joins[[0, -1]] = False
    return joins


def _steps_in_time(traffic: Traffic, slowest: FloatArray) -> BoolArray:
    """(Y,) whether a copy has surely ended when CPU Adam has stepped the chunk before; see [Note: Fused tasks]."""
    residency, rule = traffic.residency, traffic.residency.table.rule
    in_time = np.zeros(traffic.cpu_length, dtype=np.bool_)
    if rule.accumulates or rule.limits_norm or len(traffic.swapped) or len(in_time) < 2:
        return in_time
    table, positions, num_blocks = residency.table, traffic.positions, traffic.positions.num_blocks
    first_block = table.first_block[residency.update_chunk]
    offload_s, adam_s = (of_chunk[residency.update_chunk] for of_chunk in (table.offload_s, table.cpu_adam_s))
    blocks = np.arange(num_blocks)
    at = positions.backward(blocks)
    compute_s = (traffic.compute.seconds[:, at - 1] + traffic.compute.seconds[:, at]).max(axis=0)
    gather_s = np.bincount(traffic.h2d_step, traffic.h2d_s, minlength=2 * num_blocks)[2 * num_blocks - 1 - blocks]
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
