"""What every task of a record waited for: the edges that the report shows where one points at a task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..schema.record import Record, TaskTiming
from ..schema.schedule import Schedule, TaskId


@dataclass(frozen=True, slots=True)
class Waits:
    """What one task waited for, by the ids of tasks."""

    after: tuple[TaskId, ...]
    """Of this iteration, the last to end first."""
    earlier: tuple[TaskId, ...]
    """Of the previous iteration."""
    held_up_by: TaskId | None
    """The last to end of all of them and of the task before it on its lane; None if that is not known."""
    is_held_by_lane: bool
    """Whether that is the task before it on its lane alone."""


def waits_of(record: Record, schedule: Schedule) -> dict[int, Waits]:
    """The waits of every task of the record, as its schedule has them and its times order them.

    A task of the previous iteration ended one iteration before its counterpart in the record.  Edges to tasks that the
    record lacks are left out.
    """
    ends_s = {timing.task: timing.end_s for timing in record.tasks}
    before_on_lane = _before_on_lane(record.tasks)
    found = {}
    for timing in record.tasks:
        task = schedule.tasks[timing.task]
        after = sorted((t for t in task.after if t in ends_s), key=lambda t: (-ends_s[t], t))
        earlier = sorted((t for t in task.after_previous if t in ends_s), key=lambda t: (-ends_s[t], t))
        candidates = [(ends_s[t], 2, t) for t in after[:1]]
        candidates += [(ends_s[t] - record.iteration_s, 1, t) for t in earlier[:1]]
        on_lane = before_on_lane.get(timing.task)
        if on_lane is not None:
            candidates.append((ends_s[on_lane], 0, TaskId(on_lane)))
        held = max(candidates, default=None)
        found[timing.task] = Waits(
            after=tuple(after),
            earlier=tuple(earlier),
            held_up_by=held[2] if held is not None else None,
            is_held_by_lane=held is not None and held[1] == 0,
        )
    return found


def _before_on_lane(timings: Sequence[TaskTiming]) -> dict[int, int]:
    """The task before each on its lane, by the order of their starts."""
    last: dict[str, int] = {}
    found = {}
    for timing in sorted(timings, key=lambda t: (t.start_s, t.end_s, t.task)):
        if timing.lane in last:
            found[timing.task] = last[timing.lane]
        last[timing.lane] = timing.task
    return found
