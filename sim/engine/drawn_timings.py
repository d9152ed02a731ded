"""One schedule under many drawn durations: when its tasks end then, by the compiled replay.

What the simulator says of the durations that are expected is known.  A draw asks what it would say of others, so the
rules are the simulator's, and a period is told as a multiple of what the same replay gives for the expected durations:
what a replay of few iterations misses cancels.  Without the compiled replay the simulator's own lanes run, which takes
many times as long and gives the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...shared.schema.schedule import Lane, Schedule
from ..costs.contention import ContentionModel
from ..kernels import lanes as kernels
from .folding import find_folds
from .kept_schedule import KeptSchedule
from .lanes import LaneProcesses, programs_of
from .timing import Seconds, Timing, slowest_period_s, steady_period_s

FloatArray = NDArray[np.float64]

_NO_WAIT: Final = -(2**40)
_MOST_ITERATIONS: Final = 6
"""Of a draw: tasks that are not periodic by then have the mean period of the last."""


class DrawnTimings:
    """The timings of ``schedule`` under other durations than those that ``timing`` was simulated with.

    ``durations_s``: of its tasks.
    """

    def __init__(
        self, schedule: Schedule, durations_s: Sequence[float], contention: ContentionModel, timing: Timing
    ) -> None:
        self.schedule = schedule
        self.timing = timing
        self.durations_s = np.array(durations_s, dtype=np.float64)
        self._contention = contention
        self._kept: KeptSchedule | None = None if timing.fold is None else timing.fold.kept
        self._lanes = contention.lanes
        self._programs = [np.array(schedule.lanes[lane], dtype=np.intp) for lane in self._lanes]
        self._lengths = tuple(len(program) for program in self._programs)
        self._order = np.concatenate(self._programs)
        """The tasks lane by lane."""
        self._num_iterations = min(_MOST_ITERATIONS, max(3, timing.num_iterations))

    @cached_property
    def _slowdowns(self) -> FloatArray:
        return self._contention.table()

    @cached_property
    def _waits(self) -> dict[tuple[int, int], NDArray[np.int64]]:
        """By lane and another one that it waits for; [Note: Waits of lanes] in ``shared/drafts/lanes.py``."""
        numbers = {tuple(Lane).index(lane): number for number, lane in enumerate(self._lanes)}
        found: dict[tuple[int, int], NDArray[np.int64]] = {}
        programs = programs_of(self.schedule, self.durations_s.tolist())
        for of_all, number in numbers.items():
            for place, task in enumerate(programs[of_all]):
                for other, target in task.waits:
                    key = number, numbers[other]
                    if key not in found:
                        found[key] = np.full(self._lengths[number], _NO_WAIT)
                    found[key][place] = target
        return found

    def drawn(self, factors: FloatArray, excess: float = 1.0) -> tuple[Seconds, float]:
        """Ends of all tasks with every duration times its factor, and the period over that of no factors.

        ``factors``: (N,) by task.  ``excess``: of the excess over 1 of every slowdown by other lanes, so many times.
        Ends: (iterations, N) by task, micro-batches that are left out left out.
        """
        ends_s = self._ends_s(self.durations_s * factors, excess)
        return self._by_task(ends_s), self._period_ratio(ends_s)

    def _period_ratio(self, ends_s: Seconds) -> float:
        folded_s = self._folded_period_s(ends_s)
        if folded_s is not None and self._base_folded_s is not None:
            return folded_s / self._base_folded_s
        return _period_s(ends_s) / _period_s(self._base_s)

    @cached_property
    def _base_s(self) -> Seconds:
        return self._ends_s(self.durations_s, 1.0)

    @cached_property
    def _base_folded_s(self) -> float | None:
        return self._folded_period_s(self._base_s)

    def _ends_s(self, durations_s: FloatArray, excess: float) -> Seconds:
        """(iterations, N) lane by lane."""
        num = self._num_iterations
        if not kernels.is_available():
            return self._simulated_ends_s(durations_s, self._contention.exceeding(excess))
        seconds = [durations_s[program] for program in self._programs]
        replayable = kernels.Replayable(self._lengths, self._waits, tuple(seconds[1:]))
        targets = [num * length for length in self._lengths]
        return replayable.ends_s(seconds[0], 1 + excess * (self._slowdowns - 1), targets, num_iterations=num)

    def _simulated_ends_s(self, durations_s: FloatArray, contention: ContentionModel) -> Seconds:
        lanes = LaneProcesses(self.schedule, [durations_s.tolist()], [contention])
        (group,) = lanes.groups
        for _ in range(self._num_iterations):
            lanes.run_iteration()
        of_lanes = []
        for lane, length in zip(self._lanes, self._lengths, strict=True):
            ends_s = np.array(group.ends_s[tuple(Lane).index(lane)][: self._num_iterations * length])
            of_lanes.append(ends_s.reshape(self._num_iterations, length))
        return np.concatenate(of_lanes, axis=1)

    def _folded_period_s(self, ends_s: Seconds) -> float | None:
        """With all micro-batches; None where none is left out, or those kept do not tell."""
        if self._kept is None:
            return None
        stops = np.cumsum(self._lengths)[:-1]
        noted_s = []
        for row in ends_s:
            known = dict(zip(self._lanes, np.split(row, stops), strict=True))
            noted_s.append([known.get(lane, np.zeros(0)) for lane in Lane])
        folds = find_folds(noted_s, self._kept.repeating)
        if folds is None:
            return None
        lengths = [len(of_lane) for of_lane in noted_s[0]]
        shifted = [
            np.concatenate(row) + folds.shifts_s(self._kept.num_left_out, iteration, lengths)
            for iteration, row in enumerate(noted_s)
        ]
        return _period_s(np.stack(shifted))

    def _by_task(self, ends_s: Seconds) -> Seconds:
        by_task = np.empty_like(ends_s)
        by_task[:, self._order] = ends_s
        return by_task

    def timing_of(self, ends_s: Seconds) -> Timing:
        """The timing in which tasks end so; ``ends_s``: as of ``drawn``."""
        of_lanes = [ends_s[:, program] for program in self._programs]
        starts_s = np.zeros_like(ends_s)
        for number, (program, own_s) in enumerate(zip(self._programs, of_lanes, strict=True)):
            if not len(program):
                continue
            begins_s = np.append(0.0, own_s.ravel()[:-1]).reshape(own_s.shape)
            for other in range(len(self._programs)):
                places = self._waits.get((number, other))
                if places is None:
                    continue
                flat_s = np.append(0.0, of_lanes[other].ravel())
                at = places[None] + np.arange(len(ends_s))[:, None] * self._lengths[other]
                begins_s = np.maximum(begins_s, flat_s[np.clip(at, 0, len(flat_s) - 1)])
            starts_s[:, program] = begins_s
        return Timing(starts_s, ends_s, iteration_s=_period_s(ends_s), is_steady=True)


def _period_s(ends_s: Seconds) -> float:
    rows = list(ends_s)
    return steady_period_s(rows) or slowest_period_s(rows)
