"""Plain evaluation of a schedule: every task starts when the last of what it waits for has ended.

Without contention this is what the simulator computes, by a different road: one pass over the unrolled program, no
events, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from protwin.shared.schema.schedule import Lane, Schedule
from protwin.sim.engine.timing import Timeline


def longest_path_s(schedule: Schedule, durations_s: Sequence[float], num_iterations: int) -> Timeline:
    """Start and end of every task in each of ``num_iterations`` iterations, the first of which starts at 0.

    start = max over the lane's previous task, ``after`` in this iteration and ``after_previous`` in the one before;
    end = start + duration.  O(iterations * (tasks + waits)).
    """
    num_tasks = len(schedule.tasks)
    starts_s = np.zeros((num_iterations, num_tasks))
    ends_s = np.zeros((num_iterations, num_tasks))
    lane_free_s = dict.fromkeys(Lane, 0.0)
    previous = [0.0] * num_tasks
    for iteration in range(num_iterations):
        starts, ends = [0.0] * num_tasks, [0.0] * num_tasks
        for task in schedule.tasks:
            lane = task.lane
            start = lane_free_s[lane]
            for source in task.after:
                assert source < task.id, "the program's order respects every wait within the iteration"
                start = max(start, ends[source])
            for source in task.after_previous:
                start = max(start, previous[source])
            starts[task.id] = start
            ends[task.id] = lane_free_s[lane] = start + durations_s[task.id]
        starts_s[iteration], ends_s[iteration] = starts, ends
        previous = ends
    return Timeline(starts_s, ends_s)
