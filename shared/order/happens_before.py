"""What a schedule guarantees about order, whatever its tasks' durations: the happens-before relation.

Every lane is totally ordered.  So one number per lane tells which tasks are guaranteed to have ended before a task
starts: how far the lane's program is guaranteed to have come.  These vectors are computed over a few iterations of the
periodic program.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from ..schema.schedule import Lane, Schedule, TaskId

_LANES = tuple(Lane)


@dataclass(frozen=True, slots=True)
class Occurrence:
    """A task in one of the unrolled iterations."""

    iteration: int
    task: TaskId


class OrderError(Exception):
    """The program can never run: it waits for itself, or for a task that does not exist."""


class HappensBefore:
    """The order that ``num_iterations`` consecutive runs of ``schedule`` guarantee.

    Raises OrderError if some task can never start.
    """

    def __init__(self, schedule: Schedule, num_iterations: int) -> None:
        self.schedule = schedule
        self.num_iterations = num_iterations
        self.num_tasks = len(schedule.tasks)
        lanes = schedule.lanes
        self.lane_length = {lane: len(lanes[lane]) for lane in _LANES}
        self._lane_of = [_LANES.index(task.lane) for task in schedule.tasks]
        self._place = [0] * self.num_tasks
        for program in lanes.values():
            for place, task_id in enumerate(program):
                self._place[task_id] = place
        lengths = [self.lane_length[lane] for lane in _LANES]
        self._lengths = lengths
        self._reached = self._propagate()
        self._along: dict[tuple[int, int], list[int]] = {}

    def reached(self, at: Occurrence) -> tuple[int, ...]:
        """How many tasks of each lane, in the order of ``Lane``, are guaranteed to have ended before ``at`` starts."""
        return self._reached[at.iteration * self.num_tasks + at.task]

    def position(self, at: Occurrence) -> int:
        """The place of ``at`` in its lane's unrolled program."""
        return at.iteration * self._lengths[self._lane_of[at.task]] + self._place[at.task]

    def before(self, first: Occurrence, second: Occurrence) -> bool:
        """Whether ``first`` is guaranteed to have ended before ``second`` starts."""
        return self.reached(second)[self._lane_of[first.task]] > self.position(first)

    def first_after(self, at: Occurrence, lane: Lane) -> int:
        """The place of the first task of ``lane`` that is guaranteed to start after ``at`` has ended.

        In the lane's unrolled program; its length if there is none.
        """
        return bisect_right(self._reached_along(_LANES.index(lane), self._lane_of[at.task]), self.position(at))

    def _reached_along(self, lane: int, other: int) -> list[int]:
        """How many tasks of ``other`` are guaranteed to have ended when each of ``lane`` starts; it never falls."""
        known = self._along.get((lane, other))
        if known is None:
            program, iterations = self.schedule.lanes[_LANES[lane]], range(self.num_iterations)
            known = [self._reached[i * self.num_tasks + task_id][other] for i in iterations for task_id in program]
            self._along[lane, other] = known
        return known

    def _propagate(self) -> list[tuple[int, ...]]:
        """Vectors of all unrolled tasks: the highest of what their sources had reached, the sources included."""
        sources = self._sources()
        num_tasks, lengths, lane_of, places = self.num_tasks, self._lengths, self._lane_of, self._place
        reached: list[tuple[int, ...]] = [()] * len(sources)
        ended: list[tuple[int, ...]] = [()] * len(sources)
        nothing = (0,) * len(_LANES)
        for index in self._runnable_order(sources):
            waits = sources[index]
            if len(waits) > 1:
                vector = tuple(map(max, *[ended[source] for source in waits]))
            else:
                vector = ended[waits[0]] if waits else nothing
            iteration, task_id = divmod(index, num_tasks)
            lane = lane_of[task_id]
            done = [*vector]
            done[lane] = iteration * lengths[lane] + places[task_id] + 1
            reached[index] = vector
            ended[index] = tuple(done)
        return reached

    def _sources(self) -> list[list[int]]:
        """Per unrolled task, unrolled indices of everything that it waits for, its lane's previous task included."""
        num_tasks = self.num_tasks
        previous: list[int] = [0] * num_tasks
        """The task before each in its lane, of the iteration before for the first one: negative then."""
        for program in self.schedule.lanes.values():
            for place, task_id in enumerate(program):
                previous[task_id] = program[place - 1] if place else program[-1] - num_tasks
        first: list[list[int]] = []
        others: list[list[int]] = []
        """Of the first iteration, and of any other one as if it were the first."""
        for task in self.schedule.tasks:
            of_lane = previous[task.id]
            first.append([*task.after, of_lane] if of_lane >= 0 else [*task.after])
            others.append([*task.after, *[source - num_tasks for source in task.after_previous], of_lane])
        sources = first
        for iteration in range(1, self.num_iterations):
            base = iteration * num_tasks
            sources += [[base + source for source in waits] for waits in others]
        return sources

    def _runnable_order(self, sources: list[list[int]]) -> Sequence[int]:
        """An order in which the tasks can run."""
        num_tasks, is_in_order = self.num_tasks, True
        for task in self.schedule.tasks:
            for named in task.after:
                if not 0 <= named < task.id:
                    is_in_order = False
            for named in (*task.after, *task.after_previous):
                if not 0 <= named < num_tasks:
                    raise OrderError(f"{task.name} waits for task {named}, which does not exist")
        if is_in_order:
            # Lanes keep the order of the schedule, and what waits for an earlier iteration comes after it.
            return range(len(sources))
        waiting = [len(waits) for waits in sources]
        followers: list[list[int]] = [[] for _ in sources]
        for index, waits in enumerate(sources):
            for source in waits:
                followers[source].append(index)
        ready = [index for index, count in enumerate(waiting) if count == 0]
        order: list[int] = []
        while ready:
            index = ready.pop()
            order.append(index)
            for follower in followers[index]:
                waiting[follower] -= 1
                if waiting[follower] == 0:
                    ready.append(follower)
        if len(order) < len(sources):
            stuck = next(index for index, count in enumerate(waiting) if count)
            name = self.schedule.tasks[stuck % self.num_tasks].name
            raise OrderError(f"{name} can never start: its waits form a cycle")
        return order
