"""The lanes of a schedule as SimPy processes, of one group of equal ranks or of several unlike ones in one world.

[Note: When time passes]
Nothing happens in this world but tasks that end, and what follows from that at the same instant.  So between two
instants the set of running tasks is fixed, and the one that ends first is known: when every lane is asleep (holding
itself for a task, or waiting for another lane) the progress of all running tasks is brought up to date, the rates of
the new set are applied, and only the ends that come first are put into SimPy's queue.  Nothing in the queue is ever
stale, no process is interrupted, and a task costs one event, two if some lane waits for it.

[Note: Waits are places in programs]
Every lane runs its tasks in order, so "task t of this iteration has ended" says that its lane has come past t's place.
What a task waits for is thus one number per other lane: how many of its tasks, since the beginning, must have ended.

[Note: Where groups meet]
One rank stands for all ranks of its group.  Of several groups each has lanes of its own, but for the lane of
collectives, which is one for all: its next task begins when the last group has ended what it waits for, and ends for
all at once.  It takes as long as in the slowest group, and progresses at the pace of the group that slows it most.  A
group that waits for the others draws on nothing meanwhile.  A collective of one shard group, or of one part's replicas,
counts as one of all ranks: whoever is late holds up the others' groups too, in the next reduction at the latest.  One
group alone meets nobody, and its collectives are a
lane like any other.

Rates of a group change with its own tasks and with those of all together, so each instant looks at the groups in which
something has changed, and at the first end of every other one.  An iteration costs O(groups * tasks) events, and one
comparison per group at each of them.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import combinations, count
from math import inf
from typing import Final

from simpy import Environment, Event

from ...shared.basics.errors import ScheduleError
from ...shared.schema.schedule import Lane, Schedule, Task
from ..costs.contention import ContentionModel

_LANES: Final = tuple(Lane)
_COLLECTIVE: Final = _LANES.index(Lane.COLLECTIVE)
_NEVER: Final = -(2**62)
SIMULTANEOUS: Final = 1 + 1e-12
"""Ends closer than this, as a ratio, are one instant: rounding must not part what the schedule puts side by side."""


@dataclass(frozen=True, slots=True)
class LaneTask:
    """A task as its lane sees it."""

    duration_s: float
    waits: tuple[tuple[int, int], ...]
    """(lane, place): in iteration i, ``place + i * length`` tasks of that lane must have ended; see [Note: Waits are
    places in programs]."""


class End(Event):
    """The end of a running task, put into the queue once it is known to come next; its value is its time."""

    def comes_at(self, time_s: float, delay_s: float) -> None:
        """Put it into the queue, ``delay_s`` from now, at ``time_s``."""
        self._ok = True
        self._value = time_s
        self.env.schedule(self, delay=delay_s)


class LaneProcesses:
    """A schedule in motion: every lane of every group runs its program, iteration after iteration.

    ``durations_s``, ``contentions``: of each group.
    """

    def __init__(
        self, schedule: Schedule, durations_s: Sequence[Sequence[float]], contentions: Sequence[ContentionModel]
    ) -> None:
        self._schedule = schedule
        busy = [lane for lane, name in enumerate(_LANES) if schedule.lanes[name]]
        self._busy_lanes = busy
        together = _COLLECTIVE if len(durations_s) > 1 and _COLLECTIVE in busy else None
        own = [lane for lane in busy if lane != together]
        self.environment = Environment()
        self.groups = [
            GroupLanes(self, programs_of(schedule, durations), _slowdowns_by_mask(contention, busy, together))
            for durations, contention in zip(durations_s, contentions, strict=True)
        ]
        self.num_iterations = 0
        """Iterations that every lane has completed."""
        self._iteration_ends = self.environment.event()
        self._together_runs = False
        self._awake = len(self.groups) * len(own) + (together is not None)
        for group in self.groups:
            for lane in own:
                self.environment.process(group.run_lane(lane))
        if together is not None:
            self.environment.process(self._run_together())

    def run_iteration(self) -> None:
        """Let time pass until every lane has completed one more iteration.

        Raises ScheduleError if the lanes wait for each other.
        """
        self.environment.run(until=self._iteration_ends)

    def _run_together(self) -> Generator[Event, float, None]:
        """Carry out what several groups do together: each task when the last of them has come to it.

        The first group keeps the running task; starts and ends are noted in all.
        """
        groups = self.groups
        now_s = 0.0
        for iteration in count():
            for tasks in zip(*(group.programs[_COLLECTIVE] for group in groups), strict=True):
                for group, task in zip(groups, tasks, strict=True):
                    for other, place in task.waits:
                        target = place + iteration * group.lengths[other]
                        if group.ended[other] < target:
                            now_s = yield group.until_ended(other, target)
                for group in groups:
                    group.starts_s[_COLLECTIVE].append(now_s)
                    group.running |= 1 << _COLLECTIVE
                    group.has_changed = True
                self._together_runs = True
                now_s = yield groups[0].hold(_COLLECTIVE, max(task.duration_s for task in tasks), now_s)
                for group in groups:
                    group.ends_s[_COLLECTIVE].append(now_s)
                    group.tell_ended(_COLLECTIVE, now_s)

    def wake(self) -> None:
        """A sleeping lane goes on at this instant."""
        self._awake += 1

    def fall_asleep(self) -> None:
        """The lane that runs goes to sleep; time passes when it was the last one awake."""
        self._awake -= 1
        if self._awake == 0:
            self._let_time_pass()

    def complete_iteration(self) -> None:
        """A lane has completed an iteration; it may have been the last one."""
        completed = min(group.ended[lane] // group.lengths[lane] for group in self.groups for lane in self._busy_lanes)
        if completed > self.num_iterations:
            self.num_iterations += 1
            self._iteration_ends.succeed()
            self._iteration_ends = self.environment.event()

    def _let_time_pass(self) -> None:
        """Apply the rates of what now runs, and queue the ends that come first."""
        now_s = self.environment.now
        first_s = inf
        for group in self.groups:
            # A group in which nothing has begun or ended keeps its rates, and the first of its ends.
            if group.has_changed:
                group.apply_rates(now_s)
            if group.first_s < first_s:
                first_s = group.first_s
        if self._together_runs:
            # What all do together is slowed by each group's own tasks: it keeps to the slowest.
            keeper = self.groups[0]
            keeper.slow(
                _COLLECTIVE, max(group.slowdowns[group.running][1][_COLLECTIVE] for group in self.groups), now_s
            )
            first_s = min(first_s, keeper.end_s[_COLLECTIVE])
        if first_s == inf:
            raise ScheduleError(self._deadlock())
        # Rounding must not part ends that the schedule puts side by side: all up to here are one instant.
        last_s = first_s * SIMULTANEOUS
        delay_s = max(0.0, first_s - now_s)
        for group in self.groups:
            if group.first_s <= last_s:
                self._awake += group.finish(last_s, now_s + delay_s, delay_s)
        if self._together_runs and keeper.end_s[_COLLECTIVE] <= last_s:
            keeper.finish_task(_COLLECTIVE, now_s + delay_s, delay_s)
            self._awake += 1
            self._together_runs = False
            for group in self.groups:
                group.running &= ~(1 << _COLLECTIVE)
                group.has_changed = True

    def _deadlock(self) -> str:
        stuck = [self._next_task(lane).name for lane in self._busy_lanes]
        return f"the schedule deadlocks: {', '.join(stuck)} wait for each other. Compile it again from its plan."

    def _next_task(self, lane: int) -> Task:
        program = self._schedule.lanes[_LANES[lane]]
        return self._schedule.tasks[program[self.groups[0].ended[lane] % len(program)]]


class GroupLanes:
    """The lanes of one group of equal ranks in the world of ``lanes``.

    ``starts_s`` and ``ends_s`` grow as tasks start and end: per lane (in the order of ``Lane``), task by task.
    """

    def __init__(self, lanes: LaneProcesses, programs: list[list[LaneTask]], slowdowns: dict[int, _Slowdowns]) -> None:
        self._lanes = lanes
        self._environment = lanes.environment
        self.programs = programs
        self.lengths = [len(program) for program in programs]
        self.slowdowns = slowdowns
        """Of every set of running lanes, as bits."""
        self.starts_s: list[list[float]] = [[] for _ in _LANES]
        self.ends_s: list[list[float]] = [[] for _ in _LANES]
        self.ended = [0] * len(_LANES)
        """Tasks of each lane that have ended."""
        self._waiting: list[list[tuple[int, Event]]] = [[] for _ in _LANES]
        """By the lane that is waited for: how many of its tasks must have ended, and the event of the waiting lane."""
        self.running = 0
        """Lanes that hold themselves for a task, as bits."""
        self.has_changed = True
        """Whether ``running`` has changed since rates were applied."""
        self.first_s = inf
        """When the first running task ends, what all groups do together aside."""
        self._end: list[End | None] = [None] * len(_LANES)
        self.end_s = [0.0] * len(_LANES)
        """When each running task ends if nothing changes."""
        self._slowdown = [1.0] * len(_LANES)

    def run_lane(self, lane: int) -> Generator[Event, float, None]:
        """Carry out the lane's program over and over."""
        lengths, ended = self.lengths, self.ended
        starts_s, ends_s = self.starts_s[lane], self.ends_s[lane]
        now_s = 0.0
        for iteration in count():
            for task in self.programs[lane]:
                for other, place in task.waits:
                    target = place + iteration * lengths[other]
                    if ended[other] < target:
                        now_s = yield self.until_ended(other, target)
                starts_s.append(now_s)
                now_s = yield self.hold(lane, task.duration_s, now_s)
                ends_s.append(now_s)
                self.tell_ended(lane, now_s)

    def until_ended(self, other: int, target: int) -> Event:
        """Fall asleep until lane ``other`` has ended ``target`` tasks."""
        event = self._environment.event()
        self._waiting[other].append((target, event))
        self._lanes.fall_asleep()
        return event

    def hold(self, lane: int, duration_s: float, now_s: float) -> Event:
        """Fall asleep until the lane's task has made ``duration_s`` of progress."""
        end = self._end[lane] = End(self._environment)
        self.end_s[lane] = now_s + duration_s
        self._slowdown[lane] = 1.0
        self.running |= 1 << lane
        self.has_changed = True
        self._lanes.fall_asleep()
        return end

    def tell_ended(self, lane: int, now_s: float) -> None:
        """Count the end of the lane's task and wake whoever waits for it."""
        ended = self.ended[lane] = self.ended[lane] + 1
        if self._waiting[lane]:
            still_waiting = []
            for target, event in self._waiting[lane]:
                if target <= ended:
                    self._lanes.wake()
                    event.succeed(now_s)
                else:
                    still_waiting.append((target, event))
            self._waiting[lane] = still_waiting
        if ended % self.lengths[lane] == 0:
            self._lanes.complete_iteration()

    def apply_rates(self, now_s: float) -> None:
        """Bring the running tasks up to date, and find the one that ends first."""
        members, slowdowns = self.slowdowns[self.running]
        end_s, current = self.end_s, self._slowdown
        first_s = inf
        for lane in members:
            slowdown = slowdowns[lane]
            if slowdown != current[lane]:
                end_s[lane] = now_s + (end_s[lane] - now_s) * (slowdown / current[lane])
                current[lane] = slowdown
            if end_s[lane] < first_s:
                first_s = end_s[lane]
        self.first_s = first_s
        self.has_changed = False

    def slow(self, lane: int, slowdown: float, now_s: float) -> None:
        """The lane's task goes on with this slowdown."""
        current = self._slowdown[lane]
        if slowdown != current:
            self.end_s[lane] = now_s + (self.end_s[lane] - now_s) * (slowdown / current)
            self._slowdown[lane] = slowdown

    def finish(self, last_s: float, time_s: float, delay_s: float) -> int:
        """Queue the ends of all tasks that end up to ``last_s``; how many they are."""
        num_finished = 0
        for lane in self.slowdowns[self.running][0]:
            if self.end_s[lane] <= last_s:
                self.finish_task(lane, time_s, delay_s)
                num_finished += 1
        return num_finished

    def finish_task(self, lane: int, time_s: float, delay_s: float) -> None:
        """Queue the end of the lane's task."""
        end = self._end[lane]
        assert end is not None
        end.comes_at(time_s, delay_s)
        self.running &= ~(1 << lane)
        self.has_changed = True


def programs_of(schedule: Schedule, durations_s: Sequence[float]) -> list[list[LaneTask]]:
    """The program of every lane.  Waits that an earlier one of the same lane implies are left out."""
    lanes, places = [0] * len(schedule.tasks), [0] * len(schedule.tasks)
    for lane, program in enumerate(schedule.lanes[lane] for lane in _LANES):
        for place, task_id in enumerate(program):
            lanes[task_id], places[task_id] = lane, place
    lengths = [len(schedule.lanes[lane]) for lane in _LANES]
    programs: list[list[LaneTask]] = [[] for _ in _LANES]
    waited = [[_NEVER] * len(_LANES) for _ in _LANES]
    for task in schedule.tasks:
        lane = lanes[task.id]
        seen = waited[lane]
        waits: dict[int, int] = {}
        for distance, sources in ((0, task.after), (1, task.after_previous)):
            for source in sources:
                other = lanes[source]
                place = places[source] + 1 - distance * lengths[other]
                is_implied = place <= (places[task.id] if other == lane else seen[other])
                if not is_implied:
                    waits[other] = max(waits.get(other, place), place)
        for other, place in waits.items():
            seen[other] = place
        programs[lane].append(LaneTask(durations_s[task.id], tuple(sorted(waits.items()))))
    return programs


_Slowdowns = tuple[tuple[int, ...], tuple[float, ...]]
"""A set's lanes, but for the one that groups have together, and the slowdown of every lane (1 outside the set)."""


def _slowdowns_by_mask(contention: ContentionModel, busy: Sequence[int], together: int | None) -> dict[int, _Slowdowns]:
    """For every set of the lanes that have tasks, as bits; ``together``: the lane that several groups share."""
    table: dict[int, _Slowdowns] = {}
    for size in range(len(busy) + 1):
        for members in combinations(busy, size):
            rates = contention.rates(frozenset(_LANES[lane] for lane in members))
            slowdowns = tuple(1 / rates[lane] if lane in rates else 1.0 for lane in _LANES)
            own = tuple(lane for lane in members if lane != together)
            table[sum(1 << lane for lane in members)] = own, slowdowns
    return table
