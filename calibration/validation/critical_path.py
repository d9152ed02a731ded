"""What an iteration's seconds were spent on: the cycle of tasks that it could not have been shorter than.

From the end of a task the chain goes back to what that one waited for longest, be it in the iteration before, and so
on.  In steady state every iteration is like the one before, so the chain comes to a task that it has met before: from
there on it is a cycle, of one iteration or of a few, whose seconds are those of these iterations.  What a prediction
makes of them differently is the iteration's error; how long tasks beside the cycle take makes no difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from ...shared.schema.record import Record
from ...shared.schema.schedule import Lane, Schedule, TaskId, TaskKind

Occurrence = tuple[int, TaskId]
"""A task in an iteration: 0 is the one that is looked at, -1 the one before."""


def critical_seconds(record: Record, schedule: Schedule) -> dict[TaskKind, float]:
    """Seconds of one iteration of ``record`` by the kind of task that they passed with; they add up to it.

    A task has the time from the end of what it waited for longest to its own.  What passes before an iteration begins
    belongs to the task that ends one, as it does in a calibration.
    """
    chain = _Chain(record, schedule)
    program = schedule.lanes[Lane.COMPUTE]
    found: dict[TaskKind, float] = {}
    cycle = chain.cycle(program[-1])
    num_iterations = cycle[0][0] - cycle[-1][0]
    for occurrence, held_up_by in pairwise(cycle):
        task = occurrence[1]
        begin_s = end_s = chain.end_s(held_up_by)
        if task == program[0]:
            begin_s = max(end_s, chain.start_s(occurrence))
            last = schedule.tasks[program[-1]].kind
            found[last] = found.get(last, 0.0) + (begin_s - end_s) / num_iterations
        kind = schedule.tasks[task].kind
        found[kind] = found.get(kind, 0.0) + (chain.end_s(occurrence) - begin_s) / num_iterations
    return found


class _Chain:
    """What each task waited for longest."""

    def __init__(self, record: Record, schedule: Schedule) -> None:
        self._schedule = schedule
        self._period_s = record.iteration_s
        self._spans_s = {timing.task: (timing.start_s, timing.end_s) for timing in record.tasks}
        self._before: dict[TaskId, Occurrence] = {}
        for program in schedule.lanes.values():
            for place, task in enumerate(program):
                self._before[task] = (0, program[place - 1]) if place else (-1, program[-1])

    def start_s(self, occurrence: Occurrence) -> float:
        """When its own work began."""
        iteration, task = occurrence
        return self._spans_s[task][0] + iteration * self._period_s

    def end_s(self, occurrence: Occurrence) -> float:
        """When it ended."""
        iteration, task = occurrence
        return self._spans_s[task][1] + iteration * self._period_s

    def cycle(self, task: TaskId) -> list[Occurrence]:
        """Back from ``task``: the first cycle, from one occurrence of a task to an earlier one of the same."""
        chain = [(0, task)]
        met = {task: 0}
        while True:
            chain.append(self._held_up_by(chain[-1]))
            begun = met.setdefault(chain[-1][1], len(chain) - 1)
            if begun < len(chain) - 1:
                return chain[begun:]

    def _held_up_by(self, occurrence: Occurrence) -> Occurrence:
        """What ended last of all that it waits for, the task before it on its lane included."""
        return max(self._waited_for(occurrence), key=self.end_s)

    def _waited_for(self, occurrence: Occurrence) -> Iterator[Occurrence]:
        iteration, task = occurrence
        earlier, before = self._before[task]
        yield iteration + earlier, before
        yield from ((iteration, other) for other in self._schedule.tasks[task].after)
        yield from ((iteration - 1, other) for other in self._schedule.tasks[task].after_previous)
