"""What a schedule guarantees about order, whatever its tasks' durations: the happens-before relation.

Every lane is totally ordered, so "which tasks have surely ended before this one starts" is one number per lane: how
far that lane's program has surely come.  These vectors are computed over a few iterations of the periodic program.
"""

from __future__ import annotations

from dataclasses import dataclass

from .schedule import Lane, Schedule, Task, TaskId

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

    def reached(self, at: Occurrence) -> list[int]:
        """How many tasks of each lane, in the order of ``Lane``, have surely ended before ``at`` starts."""
        return self._reached[at.iteration * self.num_tasks + at.task]

    def position(self, at: Occurrence) -> int:
        """The place of ``at`` in its lane's unrolled program."""
        return at.iteration * self._lengths[self._lane_of[at.task]] + self._place[at.task]

    def before(self, first: Occurrence, second: Occurrence) -> bool:
        """Whether ``first`` has surely ended before ``second`` starts."""
        return self.reached(second)[self._lane_of[first.task]] > self.position(first)

    def _propagate(self) -> list[list[int]]:
        tasks = self.schedule.tasks
        order = self._topological_order()
        zero = [0] * len(_LANES)
        reached: list[list[int]] = [zero] * (self.num_tasks * self.num_iterations)
        lanes = [self.schedule.lanes[lane] for lane in _LANES]
        for index in order:
            iteration, task_id = divmod(index, self.num_tasks)
            vector = zero.copy()
            for source in self._sources(iteration, tasks[task_id], lanes):
                earlier = reached[source]
                vector = [a if a > b else b for a, b in zip(vector, earlier, strict=True)]
                source_iteration, source_task = divmod(source, self.num_tasks)
                lane = self._lane_of[source_task]
                done = source_iteration * self._lengths[lane] + self._place[source_task] + 1
                if done > vector[lane]:
                    vector[lane] = done
            reached[index] = vector
        return reached

    def _sources(self, iteration: int, task: Task, lanes: list[tuple[TaskId, ...]]) -> list[int]:
        """Unrolled indices of everything that the task waits for, its lane's previous task included."""
        base = iteration * self.num_tasks
        sources: list[int] = [base + source for source in task.after]
        if iteration > 0:
            sources += [base - self.num_tasks + source for source in task.after_previous]
        place = self._place[task.id]
        program = lanes[self._lane_of[task.id]]
        if place > 0:
            sources.append(base + program[place - 1])
        elif iteration > 0:
            sources.append(base - self.num_tasks + program[-1])
        return sources

    def _topological_order(self) -> list[int]:
        tasks = self.schedule.tasks
        for task in tasks:
            for named in (*task.after, *task.after_previous):
                if not 0 <= named < self.num_tasks:
                    raise OrderError(f"{task.name} waits for task {named}, which does not exist")
        lanes = [self.schedule.lanes[lane] for lane in _LANES]
        total = self.num_tasks * self.num_iterations
        waiting = [0] * total
        followers: list[list[int]] = [[] for _ in range(total)]
        for iteration in range(self.num_iterations):
            for task in tasks:
                index = iteration * self.num_tasks + task.id
                sources = self._sources(iteration, task, lanes)
                waiting[index] = len(sources)
                for source in sources:
                    followers[source].append(index)
        ready = [index for index in range(total) if waiting[index] == 0]
        order: list[int] = []
        while ready:
            index = ready.pop()
            order.append(index)
            for follower in followers[index]:
                waiting[follower] -= 1
                if waiting[follower] == 0:
                    ready.append(follower)
        if len(order) < total:
            stuck = next(index for index in range(total) if waiting[index])
            raise OrderError(f"{tasks[stuck % self.num_tasks].name} can never start: its waits form a cycle")
        return order
