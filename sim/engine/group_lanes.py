"""The lanes of several unlike groups of ranks as SimPy processes of one world.

[Note: Where groups meet]
Every group has lanes of its own, and one rank stands for all of its ranks.  The lane of collectives is one for all: its
next task begins when the last group has ended what it waits for, and ends for all at once.  It takes as long as in the
slowest group, and progresses at the pace of the group that slows it most.  A group that waits for the others draws on
nothing meanwhile.

Rates of a group change with its own tasks and with those of all together, so each instant looks at the groups in which
something has changed, and at the first end of every other one.  An iteration costs O(groups * tasks) events, and one
comparison per group at each of them.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import count
from math import inf
from typing import Final

from simpy import Environment, Event

from ...shared.basics.errors import ScheduleError
from ...shared.schema.schedule import Lane, Schedule
from ..costs.contention import ContentionModel
from .lanes import SIMULTANEOUS, End, LaneTask, programs_of, slowdowns_by_mask

_LANES: Final = tuple(Lane)
_TOGETHER: Final = _LANES.index(Lane.COLLECTIVE)
_TOGETHER_BIT: Final = 1 << _TOGETHER


class GroupLanes:
    """One schedule in motion in several groups; ``starts_s[group][lane]`` and ``ends_s`` grow task by task.

    ``durations_s``, ``contentions``: of every group.
    """

    def __init__(
        self, schedule: Schedule, durations_s: Sequence[Sequence[float]], contentions: Sequence[ContentionModel]
    ) -> None:
        self._schedule = schedule
        self._num_groups = len(durations_s)
        groups = range(self._num_groups)
        self._programs = [programs_of(schedule, durations) for durations in durations_s]
        self._lengths = [len(schedule.lanes[lane]) for lane in _LANES]
        busy = [lane for lane, length in enumerate(self._lengths) if length]
        self._slowdowns = [slowdowns_by_mask(contention, busy) for contention in contentions]
        self._busy_lanes = busy
        together: tuple[list[float], list[float]] = [], []
        self.starts_s = [[together[0] if lane == _TOGETHER else [] for lane in range(len(_LANES))] for _ in groups]
        self.ends_s = [[together[1] if lane == _TOGETHER else [] for lane in range(len(_LANES))] for _ in groups]

        self._environment = Environment()
        self._ended = [[0] * len(_LANES) for _ in groups]
        self._waiting: list[list[list[tuple[int, Event]]]] = [[[] for _ in _LANES] for _ in groups]
        self._running = [0] * self._num_groups
        """Lanes of each group that hold themselves for a task, as bits; the one of all together in every group."""
        self._changed = set(groups)
        """Groups whose set of running lanes has changed since time last passed."""
        self._end: list[list[End | None]] = [[None] * len(_LANES) for _ in groups]
        self._end_s = [[0.0] * len(_LANES) for _ in groups]
        self._slowdown = [[1.0] * len(_LANES) for _ in groups]
        self._first_s = [inf] * self._num_groups
        """When the first task of each group ends, those of all together aside."""
        self._pace = [1.0] * self._num_groups
        """How much each group slows what all do together."""
        own = [lane for lane in busy if lane != _TOGETHER]
        self._awake = self._num_groups * len(own) + (_TOGETHER in busy)
        self.num_iterations = 0
        """Iterations that every lane of every group has completed."""
        self._iteration_ends = self._environment.event()
        for group in groups:
            for lane in own:
                self._environment.process(self._run_lane(group, lane))
        if _TOGETHER in busy:
            self._environment.process(self._run_together())

    def run_iteration(self) -> None:
        """Let time pass until every lane has completed one more iteration.

        Raises ScheduleError if the lanes wait for each other.
        """
        self._environment.run(until=self._iteration_ends)

    def _run_lane(self, group: int, lane: int) -> Generator[Event, float, None]:
        """Carry out a lane of one group over and over."""
        starts_s, ends_s = self.starts_s[group][lane], self.ends_s[group][lane]
        now_s = 0.0
        for iteration in count():
            for stint in self._programs[group][lane]:
                for other, target in self._targets(stint, iteration):
                    if self._ended[group][other] < target:
                        now_s = yield self._until_ended(group, other, target)
                starts_s.append(now_s)
                now_s = yield self._hold(group, lane, stint.duration_s, now_s)
                ends_s.append(now_s)
                self._tell_ended(group, lane, now_s)

    def _run_together(self) -> Generator[Event, float, None]:
        """Carry out what all groups do together: each task when the last of them has come to it."""
        starts_s, ends_s = self.starts_s[0][_TOGETHER], self.ends_s[0][_TOGETHER]
        now_s = 0.0
        for iteration in count():
            for stints in zip(*(programs[_TOGETHER] for programs in self._programs), strict=True):
                for group, stint in enumerate(stints):
                    for other, target in self._targets(stint, iteration):
                        if self._ended[group][other] < target:
                            now_s = yield self._until_ended(group, other, target)
                starts_s.append(now_s)
                now_s = yield self._hold_all(max(stint.duration_s for stint in stints), now_s)
                ends_s.append(now_s)
                for group in range(self._num_groups):
                    self._tell_ended(group, _TOGETHER, now_s)

    def _targets(self, stint: LaneTask, iteration: int) -> list[tuple[int, int]]:
        return [(other, place + iteration * self._lengths[other]) for other, place in stint.waits]

    def _until_ended(self, group: int, other: int, target: int) -> Event:
        event = self._environment.event()
        self._waiting[group][other].append((target, event))
        self._fall_asleep()
        return event

    def _hold(self, group: int, lane: int, duration_s: float, now_s: float) -> Event:
        end = self._end[group][lane] = End(self._environment)
        self._end_s[group][lane] = now_s + duration_s
        self._slowdown[group][lane] = 1.0
        self._running[group] |= 1 << lane
        self._changed.add(group)
        self._fall_asleep()
        return end

    def _hold_all(self, duration_s: float, now_s: float) -> Event:
        """The common task is kept as one of the first group; it runs in all."""
        for group in range(self._num_groups):
            self._running[group] |= _TOGETHER_BIT
        self._changed.update(range(self._num_groups))
        return self._hold(0, _TOGETHER, duration_s, now_s)

    def _tell_ended(self, group: int, lane: int, now_s: float) -> None:
        ended = self._ended[group][lane] = self._ended[group][lane] + 1
        waiting = self._waiting[group]
        if waiting[lane]:
            still_waiting = []
            for target, event in waiting[lane]:
                if target <= ended:
                    self._awake += 1
                    event.succeed(now_s)
                else:
                    still_waiting.append((target, event))
            waiting[lane] = still_waiting
        if ended % self._lengths[lane] == 0 and self._completed_iterations() > self.num_iterations:
            self.num_iterations += 1
            self._iteration_ends.succeed()
            self._iteration_ends = self._environment.event()

    def _completed_iterations(self) -> int:
        return min(ended[lane] // self._lengths[lane] for ended in self._ended for lane in self._busy_lanes)

    def _fall_asleep(self) -> None:
        self._awake -= 1
        if self._awake == 0:
            self._let_time_pass()

    def _let_time_pass(self) -> None:
        """Apply the rates of what now runs, and queue the ends that come first."""
        now_s = self._environment.now
        for group in self._changed:
            self._rate(group, now_s)
        self._changed.clear()
        first_s = min(self._first_s)
        if self._running[0] & _TOGETHER_BIT:
            self._slow(0, _TOGETHER, max(self._pace), now_s)
            first_s = min(first_s, self._end_s[0][_TOGETHER])
        if first_s == inf:
            raise ScheduleError(self._deadlock())
        delay_s = max(0.0, first_s - now_s)
        last_s = first_s * SIMULTANEOUS
        for group in range(self._num_groups):
            if self._first_s[group] <= last_s:
                for lane in self._slowdowns[group][self._running[group]][0]:
                    if lane != _TOGETHER and self._end_s[group][lane] <= last_s:
                        self._finish(group, lane, now_s, delay_s)
        if self._running[0] & _TOGETHER_BIT and self._end_s[0][_TOGETHER] <= last_s:
            self._finish(0, _TOGETHER, now_s, delay_s)
            for group in range(self._num_groups):
                self._running[group] &= ~_TOGETHER_BIT
            self._changed.update(range(self._num_groups))

    def _rate(self, group: int, now_s: float) -> None:
        """Bring a group's own lanes up to date, and how much it slows what all do together."""
        members, slowdowns = self._slowdowns[group][self._running[group]]
        first_s = inf
        for lane in members:
            if lane != _TOGETHER:
                self._slow(group, lane, slowdowns[lane], now_s)
                first_s = min(first_s, self._end_s[group][lane])
        self._first_s[group] = first_s
        self._pace[group] = slowdowns[_TOGETHER]

    def _slow(self, group: int, lane: int, slowdown: float, now_s: float) -> None:
        current = self._slowdown[group][lane]
        if slowdown != current:
            end_s = self._end_s[group][lane]
            self._end_s[group][lane] = now_s + (end_s - now_s) * (slowdown / current)
            self._slowdown[group][lane] = slowdown

    def _finish(self, group: int, lane: int, now_s: float, delay_s: float) -> None:
        end = self._end[group][lane]
        assert end is not None
        end.comes_at(now_s + delay_s, delay_s)
        self._running[group] &= ~(1 << lane)
        self._changed.add(group)
        self._awake += 1

    def _deadlock(self) -> str:
        stuck = []
        for lane in self._busy_lanes:
            program = self._schedule.lanes[_LANES[lane]]
            stuck.append(self._schedule.tasks[program[self._ended[0][lane] % len(program)]].name)
        return f"the schedule deadlocks: {', '.join(stuck)} wait for each other. Compile it again from its plan."
