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
    compute = _compute_waits(traffic, depths)
    h2d = _columns(traffic.h2d_waits_compute(depths)[0], traffic.h2d_waits_cpu, traffic.h2d_waits_d2h)
    d2h = _columns(traffic.d2h_waits_compute, traffic.d2h_waits_cpu)
    cpu = _columns(traffic.cpu_waits_d2h, traffic.cpu_waits_compute)

    # Whoever waits for several tasks of a lane in a row: CPU Adam first, since it waits for each copy.
    cpu_joins = _is_met(cpu).all(axis=1)
    cpu_joins |= _steps_in_time(traffic, slowest_offload)
    cpu_joins &= ~_is_awaited(len(cpu), h2d[:, 1], d2h[:, 1], compute[:, 2])
    cpu_starts = cpu[~cpu_joins]
    d2h_joins = _is_met(d2h).all(axis=1)
    d2h_joins &= ~_is_awaited(len(d2h), compute[:, 1], cpu_starts[:, 0], h2d[:, 2])
    h2d_joins = _is_met(h2d).all(axis=1)
    h2d_joins &= ~_is_awaited(len(h2d), compute[:, 0])

    numbers = {H2D: _numbers(h2d_joins), D2H: _numbers(d2h_joins), CPU_OPTIM: _numbers(cpu_joins)}
    fused = []
    for lane, waits, joins, seconds in (
        (COMPUTE, compute, None, None),
        (H2D, h2d, h2d_joins, traffic.h2d_s),
        (D2H, d2h, d2h_joins, traffic.d2h_s),
        (CPU_OPTIM, cpu, cpu_joins, traffic.cpu_s),
    ):
        kept = waits if joins is None else waits[~joins]
        for column, other in enumerate(WAITS_FOR[lane].tolist()):
            if other in numbers:
                kept[:, column] = _renumbered(kept[:, column], numbers[other])
        if joins is None or seconds is None:
            fused.append(LaneProgram(np.zeros(0), kept))
        else:
            begins = np.flatnonzero(~joins)
            fused.append(LaneProgram(np.add.reduceat(seconds, begins) if len(begins) else seconds, kept))
    return tuple(fused)


def _compute_waits(traffic: Traffic, depths: IntArray) -> IntArray:
    """(L, 3)."""
    positions = traffic.positions
    waits = np.full((positions.length, 3), NOTHING)
    begins = positions.step_begin(np.arange(positions.num_steps))
    waits[begins, 0] = traffic.step_waits_h2d
    waits[begins, 1] = traffic.step_waits_d2h(depths)[0]
    if traffic.norm_place is not None:
        waits[-1, 2] = traffic.norm_place + 1
    return waits


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


def _columns(*columns: IntArray) -> IntArray:
    """(T, 3)."""
    waits = np.full((len(columns[0]), 3), NOTHING)
    for number, column in enumerate(columns):
        waits[:, number] = column
    return waits


def _is_met(waits: IntArray) -> BoolArray:
    """(T, ...) whether an earlier task of the lane has already waited for as much, or there is no wait."""
    met: BoolArray = waits == NOTHING
    met[:1] = False
    met[1:] |= waits[1:] <= np.maximum.accumulate(waits, axis=0)[:-1]
    return met


def _is_awaited(num_tasks: int, *waits: IntArray) -> BoolArray:
    """(T,) whether another lane waits for the end of the task before; ``waits``: what each of them waits for."""
    awaited = np.zeros(num_tasks, dtype=np.bool_)
    for of_lane in waits:
        if len(of_lane) and num_tasks:
            binding = of_lane[~_is_met(of_lane)]
            awaited[np.mod(binding[binding > NOTHING], num_tasks)] = True
    return awaited


def _numbers(joins: BoolArray) -> IntArray:
    """(T + 1,) how many fused tasks the first so many tasks are."""
    return np.append(0, np.cumsum(~joins))


def _renumbered(waits: IntArray, numbers: IntArray) -> IntArray:
    """The same waits, counted in fused tasks."""
    num_tasks = len(numbers) - 1
    if not num_tasks:
        return np.where(waits > 0, waits, NOTHING)
    iteration, within = np.divmod(np.maximum(waits, -2 * num_tasks), num_tasks)
    return np.where(waits > NOTHING, numbers[within] + iteration * numbers[-1], NOTHING)
