"""What the lanes of one plan run, as arrays instead of tasks.

[Note: Fused tasks]
Small chunks make many tasks that follow each other without a gap, and one task of their joint length does the same:
nothing else can tell the difference as long as no lane waits for an inner end, and every inner task may start as soon
as the one before it has ended.  That holds for

- gathers of one step, if the later ones wait for nothing that the lane has not waited for before: compute tasks wait
  for all gathers of their step;
- CPU Adam of chunks whose gradients leave together, if each copy takes no longer, even at its slowest, than the step
  on the chunk before it: then the copy has always ended in time, since both began when the copy before it ended.  No
  gather may wait for an inner one;
- the copies of these gradients but for the first, for which that group waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from .compute_table import FloatArray
from .residency import Residency
from .space import BoolArray, IntArray

NOTHING: Final = -(2**40)
"""A wait that is always over."""


@dataclass(frozen=True)
class LaneProgram:
    """One lane: T tasks per iteration."""

    durations_s: FloatArray
    """(T,)"""
    waits: IntArray
    """(T, 2) how many tasks two other lanes must have ended, counted within the iteration; below 1 for tasks of the
    iterations before.  COMPUTE waits for H2D and D2H, H2D for COMPUTE and CPU_OPTIM, D2H for COMPUTE alone, CPU_OPTIM
    for D2H alone; the second is then ``NOTHING``."""


@dataclass(frozen=True)
class CopyPrograms:
    """All lanes but compute, of the plans with one residency.  Shapes: D prefetch depths, L compute positions."""

    compute_waits: IntArray
    """(D, L, 2) waits of the compute lane."""
    h2d: tuple[LaneProgram, ...]
    """One per depth."""
    d2h: LaneProgram
    cpu_optim: LaneProgram


def copy_programs(residency: Residency, depths: IntArray, slowest_offload: float) -> CopyPrograms:
    """The programs for every depth.  ``slowest_offload``: the largest slowdown of the D2H lane."""
    d2h, cpu_optim, gone_by_step, adam_wait = _updates(residency, slowest_offload)
    positions = residency.positions
    opened = residency.gather_wait(depths)
    joins = _met_before(opened) & (_same_as_before(residency.gather_step) & _met_before(residency.gather_update))
    numbers = np.zeros((len(depths), opened.shape[1] + 1), dtype=np.int64)
    np.cumsum(~joins, axis=1, out=numbers[:, 1:])
    steps = np.arange(len(gone_by_step))
    begins = positions.step_begin(steps)
    waits = np.full((len(depths), positions.length, 2), NOTHING)
    waits[:, begins, 0] = numbers[:, np.searchsorted(residency.gather_step, steps, side="right")]
    # A step waits for the gradients of the step d + 1 before it: of this iteration, or of the one before.
    filled = steps - depths[:, None] - 1
    before = filled + len(steps)
    gone_before = np.where(before >= 0, gone_by_step[np.maximum(np.minimum(before, steps[-1]), 0)], 0)
    waits[:, begins, 1] = np.where(filled >= 0, gone_by_step[np.maximum(filled, 0)], gone_before - gone_by_step[-1])
    gather_s = residency.table.gather_s[residency.gather_chunk]
    h2d = tuple(_fused(gather_s, opened[row], adam_wait, joins[row]) for row in range(len(depths)))
    return CopyPrograms(waits, h2d, d2h, cpu_optim)


def _updates(residency: Residency, slowest_offload: float) -> tuple[LaneProgram, LaneProgram, IntArray, IntArray]:
    """D2H, CPU_OPTIM, and what other lanes wait for on them.

    (2n,) tasks of D2H that have ended when the gradients of each step, and of those before, have left; and (G,) tasks
    of CPU_OPTIM, in the iteration before, that each gather waits for.
    """
    table, updates = residency.table, residency.update_chunk
    num_steps = 2 * table.layout.num_blocks
    offload_s, adam_s = table.offload_s[updates], table.cpu_adam_s[updates]
    joins_adam = _same_as_before(residency.update_ready)
    joins_adam[1:] &= offload_s[1:] * slowest_offload <= adam_s[:-1]
    is_awaited = np.zeros(len(updates) + 1, dtype=np.bool_)
    is_awaited[residency.gather_update[~_met_before(residency.gather_update)]] = True
    joins_adam[1:] &= ~is_awaited[1:-1]
    joins_offload = joins_adam.copy()
    joins_offload[1:] &= joins_adam[:-1]

    offload_number, adam_number = (np.append(0, np.cumsum(~joins)) for joins in (joins_offload, joins_adam))
    update_step = num_steps - 1 - table.first_block[updates]
    gone_by_step = offload_number[np.searchsorted(update_step, np.arange(num_steps), side="right")]
    waited = residency.gather_update
    adam_wait = np.where(waited > 0, adam_number[waited] - adam_number[-1], NOTHING)
    nothing = np.full(len(updates), NOTHING)
    return (
        _fused(offload_s, residency.update_ready, nothing, joins_offload),
        _fused(adam_s, offload_number[1:], nothing, joins_adam),
        gone_by_step,
        adam_wait,
    )


def _fused(seconds: FloatArray, first: IntArray, second: IntArray, joins: BoolArray) -> LaneProgram:
    """The lane whose tasks join the one before them where ``joins`` says so."""
    begins = (~joins).nonzero()[0]
    if not len(begins):
        return LaneProgram(seconds, np.zeros((0, 2), dtype=np.int64))
    return LaneProgram(np.add.reduceat(seconds, begins), np.stack([first[begins], second[begins]], axis=1))


def _met_before(waits: IntArray) -> BoolArray:
    """Whether an earlier task of the lane, along the last axis, has already waited for as much."""
    met = np.zeros(waits.shape, dtype=np.bool_)
    met[..., 1:] = waits[..., 1:] <= np.maximum.accumulate(waits, axis=-1)[..., :-1]
    return met


def _same_as_before(values: IntArray) -> BoolArray:
    same = np.zeros(len(values), dtype=np.bool_)
    same[1:] = values[1:] == values[:-1]
    return same
