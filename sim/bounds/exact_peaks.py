"""The guaranteed device peak of plans, exactly as ``shared/verify/guaranteed_peak.py`` finds it in their schedules.

Shapes: D prefetch depths, L tasks and P positions of the compute lane in an iteration, M micro-batches, W positions of
one of them, B buffers that tasks make and free, K rows of activation modes.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ..space.lane_order import starts_after
from ..space.plan_family import COMPUTE, PlanFamily
from ..space.space import IntArray

_LAID_OUT: Final = 3


def family_peaks(family: PlanFamily, modes: IntArray) -> IntArray:
    """(D, K) guaranteed device peaks: of every compute task, and of the pause before it.

    ``modes``: (K,) choices of the family's.
    """
    running, pausing = _by_position(family, *_held_bytes(family))
    levels, positions = family.levels, family.positions
    shape = (len(running), positions.micro_batches, positions.micro_length)
    at_end = np.maximum(running[:, -1] + family.draft.at_end_bytes, pausing[:, -1])
    peaks: IntArray = at_end[:, None] + levels.end_bytes[modes]
    running, pausing = running[:, :-1].reshape(shape), pausing[:, :-1].reshape(shape)
    for kind in range(levels.alive_bytes.shape[1]):
        micro_batches = levels.kind == kind
        alive = levels.alive_bytes[modes, kind]
        during = running[:, micro_batches].max(axis=1)[:, None] + (alive + levels.task_peaks(kind, family.adds)[modes])
        before = pausing[:, micro_batches].max(axis=1)[:, None] + alive
        peaks = np.maximum(peaks, np.maximum(during, before).max(axis=2))
    return peaks


def _by_position(family: PlanFamily, running: IntArray, pausing: IntArray) -> tuple[IntArray, IntArray]:
    """(D, P) levels at the positions of compute, of (D, L) at its tasks.

    What a method runs between two positions leaves the level as it is: it counts as a pause before the second one, with
    what it adds while it runs.  Behind the last position follows the first one of the next iteration.
    """
    places = family.place_at
    at_positions, before = running[:, places], pausing[:, places]
    if len(places) < running.shape[1]:
        made = np.zeros(running.shape[1], dtype=np.int64)
        for tasks, size_bytes in family.draft.between_bytes:
            made[family.lanes.place[0, tasks]] = size_bytes
        every = np.arange(running.shape[1])
        following = np.searchsorted(places, every) % len(places)
        highest = np.maximum(running + made, pausing)
        is_between = places[following] != every
        for place in np.flatnonzero(is_between).tolist():
            before[:, following[place]] = np.maximum(before[:, following[place]], highest[:, place])
    return at_positions, before


def _held_bytes(family: PlanFamily) -> tuple[IntArray, IntArray]:
    """(D, L) the highest level of all but activations that stay, while each task runs and in the pause before it.

    Room for a buffer is made at the first position of compute at which the task that makes it may run, and it is gone
    at the first that is guaranteed to come after the task that frees it.  In the pause before that position, it is
    still there.
    """
    lanes, buffers, length = family.lanes, family.buffers, family.lanes.lengths[COMPUTE]
    begin, end = _positions(family, buffers.made_by, is_made=True), _positions(family, buffers.freed_by, is_made=False)
    replacing = np.flatnonzero(buffers.replaces >= 0)
    gone = end[:, buffers.replaces[replacing]]
    begin[:, replacing] = np.maximum(begin[:, replacing], gone)
    sizes = np.broadcast_to(buffers.size_bytes, begin.shape)
    changes = np.concatenate([begin, end], axis=1), np.concatenate([sizes, -sizes], axis=1)
    # Intervals may begin in the iteration before and end in the next one: three are laid out, and folded into one.
    level = _sums(length, *changes).cumsum(axis=1)
    # What replaces a buffer at once counts instead of it.
    leaving = sizes * (lanes.lane[buffers.freed_by] != COMPUTE)
    leaving[:, buffers.replaces[replacing]] *= begin[:, replacing] > gone
    shape = (len(level), _LAID_OUT, length)
    held = level[:, :-1].reshape(shape).sum(axis=1) + family.static_bytes
    return held, held + _sums(length, end, leaving)[:, :-1].reshape(shape).sum(axis=1)


def _positions(family: PlanFamily, tasks: IntArray, *, is_made: bool) -> IntArray:
    """(D, B) positions of compute from which on buffers are there, or no longer, by the tasks that make or free them.

    Below 0 in the iteration before, from L on in the next one.
    """
    lanes = family.lanes
    of_task, place = lanes.lane[tasks], lanes.place[:, tasks]
    found: IntArray = place + 1
    for lane in sorted({*of_task.tolist()} - {COMPUTE}):
        at = np.flatnonzero(of_task == lane)
        if is_made:
            positions = family.known[lane][:, COMPUTE]
        else:
            positions = starts_after(family.known[COMPUTE][:, lane], lanes.lengths[lane])
        found[:, at] = np.take_along_axis(positions, place[:, at], axis=1)
    return found


def _sums(length: int, positions: IntArray, sizes: IntArray) -> IntArray:
    """(D, 3 L + 1) the sum of ``sizes`` at each position of the iteration before and the two after; (D, n) each."""
    shape = (len(positions), _LAID_OUT * length + 1)
    table = np.zeros(shape, dtype=np.int64)
    rows = np.arange(len(positions))[:, None] * shape[1]
    np.add.at(table.reshape(-1), (rows + positions + length).ravel(), sizes.ravel())
    return table
