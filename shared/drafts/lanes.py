"""From groups of tasks to one order and to lanes, in arrays: what these run, and what each task waits for.

It knows no policy.

[Note: Waits of lanes]
Every lane runs its tasks in order, so whatever a task waits for is one number per other lane: how many of that lane's
tasks must have ended, counted within the iteration; below 1 for tasks of the iterations before.  A lane has a place for
every task that any choice of modes has; where a plan does not have it, it takes no time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from ..schema.schedule import LANES_ALONE, Lane, Memory
from .program import NOT_THERE, BoolArray, Draft, IntArray, Part, spread

LANE_NUMBER: Final = {lane: number for number, lane in enumerate(LANES_ALONE)} | dict.fromkeys(
    (Lane.COLLECTIVE, Lane.DISK), len(LANES_ALONE)
)
"""In the order of ``lanes_of``: several ranks have no disk, and one rank alone has no collectives."""
NOTHING: Final = -(2**40)
"""A wait that is always over."""


def task_order(draft: Draft) -> IntArray:
    """(D, N) or (1, N) all tasks in the order of the schedule, those included that some modes do not have."""
    num_rows = max(group.position.shape[0] if group.position.ndim > 1 else 1 for _, group in draft.groups)
    keys = np.empty((num_rows, draft.num_tasks), dtype=np.int64)
    within = np.empty(draft.num_tasks, dtype=np.int64)
    for ids, group in draft.groups:
        if len(ids):
            here = slice(int(ids[0]), int(ids[-1]) + 1)
            keys[:, here] = group.position * len(Part) + group.part
            within[here] = group.within
    keys *= int(within.max(initial=0)) + 1
    keys += within
    order: IntArray = np.argsort(keys, axis=1, kind="stable")
    return order


def lanes_of_tasks(draft: Draft) -> IntArray:
    """(N,) the number of every task's lane, in the order of ``lanes_of``."""
    lanes = [LANE_NUMBER[group.kind.lane] for _, group in draft.groups]
    return np.repeat(np.array(lanes), [len(ids) for ids, _ in draft.groups])


def sequences_of_tasks(draft: Draft, num_lanes: int) -> tuple[IntArray, tuple[int, ...]]:
    """(N,) the sequence of every task, and the lane of every sequence; a lane's own one has its number.

    A lane beside compute in which some tasks bring something and others take something away has two: how the two are
    merged may depend on the look-ahead and on room, and each alone keeps its order.
    """
    sequence = lanes_of_tasks(draft)
    lane_of = list(range(num_lanes))
    for lane in range(1, num_lanes):
        here = [(ids, group.part) for ids, group in draft.groups if LANE_NUMBER[group.kind.lane] == lane]
        parts = {part for _, part in here}
        if Part.COMES in parts and parts & {Part.LEADS, Part.LEAVES}:
            for ids, part in here:
                if part is Part.COMES:
                    sequence[ids] = len(lane_of)
            lane_of.append(lane)
    return sequence, tuple(lane_of)


def heirs(order: IntArray, lanes: IntArray, is_there: BoolArray) -> IntArray:
    """(N,) every task, or the next one of its lane where the plan does not have it.

    What is absent takes no time: whoever follows it in its lane waits for what it would wait for.  ``order``: (N,).
    """
    heir = np.arange(len(order))
    for lane in set(lanes[~is_there].tolist()):
        program = order[lanes[order] == lane]
        there = np.where(is_there[program], np.arange(len(program)), len(program))
        following = np.minimum.accumulate(there[::-1])[::-1]
        assert following.max(initial=0) < len(program), "a lane ends with a task that every plan has"
        heir[program] = program[following]
    return heir


def is_there(draft: Draft, is_checkpoint: BoolArray) -> BoolArray:
    """(N,) whether a plan has each task; (n,) the blocks that it checkpoints."""
    found = np.ones(draft.num_tasks, dtype=np.bool_)
    for ids, group in draft.groups:
        if group.checkpointed is not None:
            found[ids] = group.rows_in(is_checkpoint[None])[0] != NOT_THERE
    return found


@dataclass(frozen=True, eq=False)
class FamilyLanes:
    """Shapes: D prefetch depths, N tasks of an iteration, T tasks of a lane; lanes are numbered as in ``lanes_of``."""

    lane: IntArray
    """(N,) of every task."""
    place: IntArray
    """(D, N) of every task in its lane."""
    tasks: tuple[IntArray, ...]
    """(D, T) of every lane, in order."""
    waits: Mapping[tuple[int, int], IntArray]
    """By lane and another one that it waits for, (D, T): see [Note: Waits of lanes]; ``NOTHING`` for no wait."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tasks of every lane in an iteration."""
        return tuple(tasks.shape[1] for tasks in self.tasks)

    def waits_of(self, lane: int, depth: int) -> dict[int, IntArray]:
        """By lane that is waited for, (T,): what the tasks of ``lane`` wait for at the depth of this number."""
        return {other: found[depth] for (of, other), found in self.waits.items() if of == lane}

    @classmethod
    def of(cls, draft: Draft, num_lanes: int, num_depths: int, *, lane: IntArray | None = None) -> FamilyLanes:
        """The lanes of the family in ``draft``.  ``lane``: (N,) of every task, where it is not its kind's."""
        lane = lanes_of_tasks(draft) if lane is None else lane
        order = np.broadcast_to(task_order(draft), (num_depths, draft.num_tasks))
        in_order = lane[order]
        tasks = tuple(order[in_order == number].reshape(num_depths, -1) for number in range(num_lanes))
        place = np.empty((num_depths, draft.num_tasks), dtype=np.int64)
        for of_lane in tasks:
            np.put_along_axis(place, of_lane, np.arange(of_lane.shape[1])[None], axis=1)
        return cls(lane, place, tasks, _waits(draft, lane, place, tasks))


@dataclass(frozen=True, eq=False)
class DeviceBuffers:
    """What tasks make on the device and others free, but for what sections hand to each other.  (B,) each."""

    size_bytes: IntArray
    made_by: IntArray
    """Tasks."""
    freed_by: IntArray
    """Tasks."""
    replaces: IntArray
    """The buffer that is gone before each comes; ``NOT_THERE`` for none."""

    @classmethod
    def of(cls, draft: Draft) -> DeviceBuffers:
        """The buffers of the family in ``draft``."""
        groups = [
            (group.size_bytes, group.made_by, group.freed_by, spread(group.replaces, ids.shape), ids)
            for ids, group in draft.buffer_groups
            if group.memory is Memory.DEVICE and group.made_by is not None and group.freed_by is not None
        ]
        columns = zip(*groups, strict=True) if groups else ([np.zeros(0, dtype=np.int64)] for _ in range(5))
        size_bytes, made_by, freed_by, replaces, ids = (np.concatenate(column) for column in columns)
        number = np.full(draft.num_buffers + 1, NOT_THERE)  # the last entry stands for no buffer
        number[ids] = np.arange(len(ids))
        return cls(size_bytes, made_by, freed_by, number[replaces])


def _waits(
    draft: Draft, lane: IntArray, place: IntArray, tasks: tuple[IntArray, ...]
) -> dict[tuple[int, int], IntArray]:
    """The most that tasks wait for of every other lane."""
    num_depths, num_tasks = place.shape
    lengths = np.array([of_lane.shape[1] for of_lane in tasks])
    waiting, others, past = _edges(draft, num_depths)
    awaited = lane[others]
    counts = np.take_along_axis(place, others, axis=1) + 1 - np.where(past, lengths[awaited], 0)
    # Whatever a lane would wait for of itself its order brings about.
    is_wait = (waiting >= 0) & (others >= 0) & (awaited != lane[waiting])
    table = np.full((len(tasks), num_depths, num_tasks), NOTHING)
    row = np.arange(num_depths)[:, None]
    at = (awaited * num_depths + row) * num_tasks + waiting
    np.maximum.at(table.reshape(-1), at[is_wait], counts[is_wait])
    pairs = np.zeros((len(tasks), len(tasks)), dtype=np.bool_)
    pairs[lane[waiting[is_wait]], awaited[is_wait]] = True
    return {
        (number, other): np.take_along_axis(table[other], tasks[number], axis=1)
        for number, other in np.argwhere(pairs).tolist()
    }


def _edges(draft: Draft, num_depths: int) -> tuple[IntArray, IntArray, BoolArray]:
    """(D, E) tasks that wait, and others that they wait for; (E,) whether these are of the previous iteration."""
    widths = [max(wait.tasks.shape[-1], wait.others.shape[-1]) for wait in draft.waits]
    edges = np.empty((2, num_depths, sum(widths)), dtype=np.int64)
    begin = 0
    for wait, width in zip(draft.waits, widths, strict=True):
        edges[0, :, begin : begin + width] = wait.tasks
        edges[1, :, begin : begin + width] = wait.others
        begin += width
    past = np.repeat(np.array([wait.is_previous for wait in draft.waits], dtype=np.bool_), widths)
    return edges[0], edges[1], past
