"""The lanes of a schedule as SimPy processes.

[Note: When time passes]
Nothing happens in this world but tasks that end, and what follows from that at the same instant.  So between two
instants the set of running tasks is fixed, and the one that ends first is known: when every lane is asleep (holding
itself for a task, or waiting for another lane) the progress of all running tasks is brought up to date, the rates of
the new set are applied, and only the ends that come first are put into SimPy's queue.  Nothing in the queue is ever
stale, no process is interrupted, and a task costs one event, two if some lane waits for it.

[Note: Waits are places in programs]
Every lane runs its tasks in order, so "task t of this iteration has ended" says that its lane has come past t's place.
What a task waits for is thus one number per other lane: how many of its tasks, since the beginning, must have ended.
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
    """A schedule in motion: every lane runs its program, iteration after iteration.

    ``starts_s`` and ``ends_s`` grow as tasks start and end: per lane (in the order of ``Lane``), task by task.
    """

    def __init__(self, schedule: Schedule, durations_s: Sequence[float], contention: ContentionModel) -> None:
        self._schedule = schedule
        self._programs = programs_of(schedule, durations_s)
        self._lengths = [len(program) for program in self._programs]
        self.starts_s: list[list[float]] = [[] for _ in _LANES]
        self.ends_s: list[list[float]] = [[] for _ in _LANES]

        self._environment = Environment()
        self._ended = [0] * len(_LANES)
        self._waiting: list[list[tuple[int, Event]]] = [[] for _ in _LANES]
        self._running = 0
        """Lanes that hold themselves for a task, as bits."""
        self._end: list[End | None] = [None] * len(_LANES)
        self._end_s = [0.0] * len(_LANES)
        self._slowdown = [1.0] * len(_LANES)
        self._busy_lanes = [lane for lane, length in enumerate(self._lengths) if length]
        self._slowdowns = slowdowns_by_mask(contention, self._busy_lanes)
        self._awake = len(self._busy_lanes)
        self.num_iterations = 0
        """Iterations that every lane has completed."""
        self._iteration_ends = self._environment.event()
        for lane in self._busy_lanes:
            self._environment.process(self._run_lane(lane))

    def run_iteration(self) -> None:
        """Let time pass until every lane has completed one more iteration.

        Raises ScheduleError if the lanes wait for each other.
        """
        self._environment.run(until=self._iteration_ends)

    def _run_lane(self, lane: int) -> Generator[Event, float, None]:
        """Carry out the lane's program over and over."""
        lengths, ended = self._lengths, self._ended
        starts_s, ends_s = self.starts_s[lane], self.ends_s[lane]
        now_s = 0.0
        for iteration in count():
            for stint in self._programs[lane]:
                for other, place in stint.waits:
                    target = place + iteration * lengths[other]
                    if ended[other] < target:
                        now_s = yield self._until_ended(other, target)
                starts_s.append(now_s)
                now_s = yield self._hold(lane, stint.duration_s, now_s)
                ends_s.append(now_s)
                self._tell_ended(lane, now_s)

    def _until_ended(self, other: int, target: int) -> Event:
        """Fall asleep until lane ``other`` has ended ``target`` tasks."""
        event = self._environment.event()
        self._waiting[other].append((target, event))
        self._fall_asleep()
        return event

    def _hold(self, lane: int, duration_s: float, now_s: float) -> Event:
        """Fall asleep until the lane's task has made ``duration_s`` of progress."""
        end = self._end[lane] = End(self._environment)
        self._end_s[lane] = now_s + duration_s
        self._slowdown[lane] = 1.0
        self._running |= 1 << lane
        self._fall_asleep()
        return end

    def _tell_ended(self, lane: int, now_s: float) -> None:
        """Count the end of the lane's task and wake whoever waits for it."""
        ended = self._ended[lane] = self._ended[lane] + 1
        if self._waiting[lane]:
            still_waiting = []
            for target, event in self._waiting[lane]:
                if target <= ended:
                    self._awake += 1
                    event.succeed(now_s)
                else:
                    still_waiting.append((target, event))
            self._waiting[lane] = still_waiting
        if ended % self._lengths[lane] == 0 and self._completed_iterations() > self.num_iterations:
            self.num_iterations += 1
            self._iteration_ends.succeed()
            self._iteration_ends = self._environment.event()

    def _completed_iterations(self) -> int:
        return min(self._ended[lane] // self._lengths[lane] for lane in self._busy_lanes)

    def _fall_asleep(self) -> None:
        self._awake -= 1
        if self._awake == 0:
            self._let_time_pass()

    def _let_time_pass(self) -> None:
        """Apply the rates of the lanes that now run, and queue the ends that come first."""
        members, slowdowns = self._slowdowns[self._running]
        if not members:
            raise ScheduleError(self._deadlock())
        now_s, end_s, current = self._environment.now, self._end_s, self._slowdown
        first_s = inf
        for lane in members:
            slowdown = slowdowns[lane]
            if slowdown != current[lane]:
                end_s[lane] = now_s + (end_s[lane] - now_s) * (slowdown / current[lane])
                current[lane] = slowdown
            if end_s[lane] < first_s:
                first_s = end_s[lane]
        delay_s = max(0.0, first_s - now_s)
        for lane in members:
            if end_s[lane] <= first_s * SIMULTANEOUS:
                end = self._end[lane]
                assert end is not None
                end.comes_at(now_s + delay_s, delay_s)
                self._running &= ~(1 << lane)
                self._awake += 1

    def _deadlock(self) -> str:
        stuck = [self._next_task(lane).name for lane in self._busy_lanes]
        return f"the schedule deadlocks: {', '.join(stuck)} wait for each other. Compile it again from its plan."

    def _next_task(self, lane: int) -> Task:
        program = self._schedule.lanes[_LANES[lane]]
        return self._schedule.tasks[program[self._ended[lane] % len(program)]]


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


Slowdowns = tuple[tuple[int, ...], tuple[float, ...]]
"""Members of a set of lanes, and the slowdown of every lane (1 for those outside)."""


def slowdowns_by_mask(contention: ContentionModel, busy: Sequence[int]) -> dict[int, Slowdowns]:
    """For every set of the lanes that have tasks, as bits."""
    table: dict[int, Slowdowns] = {}
    for size in range(len(busy) + 1):
        for members in combinations(busy, size):
            rates = contention.rates(frozenset(_LANES[lane] for lane in members))
            slowdowns = tuple(1 / rates[lane] if lane in rates else 1.0 for lane in _LANES)
            table[sum(1 << lane for lane in members)] = members, slowdowns
    return table
