"""From groups of tasks to one order and to lanes; knows no policy."""

from __future__ import annotations

from typing import Final

import numpy as np

from ..schema.schedule import LANES_ALONE, Lane
from .program import NOT_THERE, BoolArray, Draft, IntArray, Part

LANE_NUMBER: Final = {lane: number for number, lane in enumerate(LANES_ALONE)} | dict.fromkeys(
    (Lane.COLLECTIVE, Lane.DISK), len(LANES_ALONE)
)
"""In the order of ``lanes_of``: several ranks have no disk, and one rank alone has no collectives."""


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
        if {Part.COMES, Part.LEAVES} <= {part for _, part in here}:
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
