"""What a task costs its lane: from when it could begin until it has ended.

A lane's clock reads when the task's own work began.  Before that come a thread's wake-up, hooks, the freeing of what
the task before has left, and launches: time in which the lane does nothing else.  The simulator starts a task as soon
as it may, so all of this is part of what a task takes there.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from ...shared.schema.record import Record
from ...shared.schema.schedule import Lane, Schedule, TaskId


def seconds_since_ready(measured: Record, schedule: Schedule) -> dict[TaskId, float]:
    """Seconds of every task of ``measured`` from when its lane was free, and all that it waits for had ended.

    The first task on the compute lane has its own span alone: what passes between iterations is not its doing.  Times
    of a record are means, so a task may begin before the mean of what it waits for; it has its own span then, too.
    """
    ends_s = {timing.task: timing.start_s + timing.duration_s for timing in measured.tasks}
    before = dict(_before_on_lane(schedule))
    found: dict[TaskId, float] = {}
    for timing in measured.tasks:
        task = schedule.tasks[timing.task]
        ready_s = [ends_s[other] for other in task.after]
        ready_s += [ends_s[other] - measured.iteration_s for other in task.after_previous]
        if task.id in before:
            ready_s.append(ends_s[before[task.id]])
        elif task.lane is not Lane.COMPUTE:
            ready_s.append(ends_s[schedule.lanes[task.lane][-1]] - measured.iteration_s)
        is_first = task.lane is Lane.COMPUTE and task.id not in before
        begun_s = timing.start_s if is_first else min(timing.start_s, max(ready_s, default=timing.start_s))
        found[task.id] = ends_s[timing.task] - begun_s
    return found


def _before_on_lane(schedule: Schedule) -> Iterator[tuple[TaskId, TaskId]]:
    """Every task that has one before it on its lane, with that one."""
    for program in schedule.lanes.values():
        for earlier, later in pairwise(program):
            yield later, earlier
