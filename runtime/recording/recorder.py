"""What a run measured: spans of every task, memory of every iteration, and the Record made of them.

[Note: Typical iterations]
Times on a shared machine scatter, and to the slow side.  A median of every task would be robust, but medians do not
add: the sum over a lane then falls short of the iteration by several percent, and a calibration that is fitted to
tasks inherits that.  So iterations are chosen, not numbers: all times are means over the same middle half of the
iterations, ordered by duration (an interquartile mean).  Tasks then add up to their iteration, and keep their order.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from ...shared.basics.errors import ProtwinError
from ...shared.records.flops import hardware_flops, model_flops
from ...shared.records.phase_times import phase_times_s
from ...shared.records.phase_waits import phase_waits, repeating
from ...shared.records.question import question_of
from ...shared.schema.plan import Plan
from ...shared.schema.record import ChunkCounts, Holding, LaneUse, MemoryCurve, Origin, Record, TaskTiming
from ...shared.schema.schedule import Content, Lane, Memory, Schedule, Task, TaskId, TaskKind
from ...shared.schema.workload import Workload
from ...shared.verify.guaranteed_peak import guaranteed_device_peak
from ..devices.device import TrainingDevice
from ..devices.lanes import Span
from ..model.identity import software_versions
from .iteration_memory import Floats, Ints, IterationMemory, MemoryOverTime
from .rank_meetings import Meetings, RankStamps, clock_name, groups_of
from .timed_iterations import WARM_UP, why_no_record

_MAX_CURVE_POINTS: Final = 2000
_KEPT_LOGS: Final = 200
"""Iterations whose times are kept."""


@dataclass
class IterationLog:
    """One iteration as it happened.  Stamps belong to the device."""

    index: int
    started: Any = None
    spans: dict[TaskId, Any] = field(default_factory=dict)
    exchanged: dict[TaskId, list[tuple[TaskId, list[tuple[Any, Any]]]]] = field(default_factory=dict)
    """By task of the collective lane that happens within compute tasks: each of these, and when exchanges within it
    began and ended.  Until ``Recorder`` takes them apart."""
    is_metered: bool = False
    follows_pause: bool = False
    memory: IterationMemory | None = None


@dataclass(frozen=True, slots=True)
class _Joined:
    """Collectives that one rank did with others."""

    came_s: Mapping[TaskId, Sequence[float]]
    """When the last of the ranks came to each, one moment per iteration."""
    waited_s: Mapping[TaskId, float]
    """Mean seconds that this rank had waited by then."""


class Recorder:
    """Keeps the logs of the last iterations and makes a Record of them."""

    def __init__(
        self,
        schedule: Schedule,
        plan: Plan,
        workload: Workload,
        device: TrainingDevice,
        *,
        chunks: ChunkCounts,
        meter_every: int | None = None,
    ) -> None:
        self._schedule = schedule
        self._plan = plan
        self._workload = workload
        self._device = device
        self._chunks = chunks
        self._meter_every = meter_every
        self.logs: list[IterationLog] = []
        self._interrupted = -1

    def interrupt(self, iteration: int) -> None:
        """Training pauses before ``iteration``: what lies on either side of the pause is no steady state."""
        self._interrupted = iteration

    def add(self, log: IterationLog) -> None:
        """Keep the log of a completed iteration; of the oldest ones, none."""
        log.follows_pause = log.index == self._interrupted
        self.logs.append(log)
        del self.logs[:-_KEPT_LOGS]
        if self._device.runs_behind and len(self.logs) > 2:
            self._take_apart(self.logs[-3])
            self._settle(self.logs[-3])

    def _take_apart(self, log: IterationLog) -> None:
        """Give exchanges within compute tasks a span of their own, ahead of what else these do, as in schedules."""
        seconds = self._device.seconds
        while log.exchanged:
            exchange, parts = log.exchanged.popitem()
            remaining_s = sum(seconds(end) - seconds(begin) for _, times in parts for begin, end in times)
            begin_s = seconds(log.spans[parts[0][0]].start)
            log.spans[exchange] = Span(begin_s)
            log.spans[exchange].end = begin_s + remaining_s
            for task, times in parts:
                span = log.spans[task]
                span.start = seconds(span.start) + remaining_s
                remaining_s -= sum(seconds(end) - seconds(begin) for begin, end in times)
                span.end = seconds(span.end) + remaining_s

    def _settle(self, log: IterationLog) -> None:
        """Turn the stamps of a finished iteration into seconds, so that 200 of them keep no thousands of events."""
        log.started = self._device.settled(log.started)
        for span in log.spans.values():
            span.start, span.end = self._device.settled(span.start), self._device.settled(span.end)

    def record(self, *, hardware_name: str = "", since: int = 0, until: int | None = None) -> Record:
        """The Record of the iterations from ``since`` on and before ``until``.

        Times are means over the typical ones after the very first three, of those that nobody metered.

        Raises ProtwinError if there are fewer than two such iterations in a row.
        """
        timed = self._timed(since, until)
        periods = self._periods(timed)
        logs = [timed[place][0] for place in middle_half(periods)]
        return self._record(hardware_name, logs, periods, [periods[place] for place in middle_half(periods)])

    @property
    def rank_groups(self) -> Ints:
        """(R, C): of the collectives, as ``groups_of`` gives them."""
        return groups_of(self._schedule)

    def stamps(self, *, since: int = 0, until: int | None = None) -> RankStamps:
        """When the iterations that may count began, and what this rank did in them with others.

        Raises as ``record``.
        """
        seconds = self._device.seconds
        timed = self._timed(since, until)
        program = self._schedule.lanes[Lane.COLLECTIVE]

        def table(stamp: Callable[[Any], Any]) -> Floats:
            rows = [[seconds(stamp(log.spans[task])) for task in program] for log, _ in timed]
            return np.array(rows, dtype=np.float64).reshape(len(timed), len(program))

        return RankStamps(
            clock=clock_name(),
            iterations=np.array([log.index for log, _ in timed]),
            begins_s=np.array([seconds(log.started) for log, _ in timed]),
            periods_s=np.array(self._periods(timed)),
            starts_s=table(lambda span: span.start),
            ends_s=table(lambda span: span.end),
        )

    def record_of_rank(self, meetings: Meetings, rank: int, *, hardware_name: str = "") -> Record:
        """What this ``rank`` did in the typical iterations of ``meetings``.

        A collective starts when the last of its ranks has come to it.
        """
        counted, typical = set(meetings.iterations.tolist()), set(meetings.typical.tolist())
        pairs = [pair for pair in zip(self.logs, self.logs[1:], strict=False) if pair[0].index in counted]
        periods = self._periods(pairs)
        logs = [log for log, _ in pairs if log.index in typical]
        program = self._schedule.lanes[Lane.COLLECTIVE]
        joined = _Joined(
            dict(zip(program, meetings.came_s[rank].T.tolist(), strict=True)),
            dict(zip(program, meetings.waited_s[rank].tolist(), strict=True)),
        )
        own = [period for (log, _), period in zip(pairs, periods, strict=True) if log.index in typical]
        return self._record(hardware_name, logs, periods, own, joined)

    def _timed(self, since: int, until: int | None) -> list[tuple[IterationLog, IterationLog]]:
        """The iterations that count, each with the next one."""
        warm = [
            (log, following)
            for log, following in zip(self.logs, self.logs[1:], strict=False)
            if max(WARM_UP, since) <= log.index and (until is None or log.index < until)
        ]
        for log in self.logs:
            self._take_apart(log)
        timed = [pair for pair in warm if not any(log.is_metered or log.follows_pause for log in pair)]
        if not timed:
            disturbed = ((any(a.is_metered for a in pair), any(a.follows_pause for a in pair)) for pair in warm)
            raise ProtwinError(why_no_record(len(self.logs), self._meter_every, disturbed))
        return timed

    def _periods(self, pairs: Sequence[tuple[IterationLog, IterationLog]]) -> list[float]:
        seconds = self._device.seconds
        return [seconds(following.started) - seconds(log.started) for log, following in pairs]

    def _record(
        self,
        hardware_name: str,
        logs: Sequence[IterationLog],
        periods: Sequence[float],
        typical: Sequence[float],
        joined: _Joined | None = None,
    ) -> Record:
        """The Record of ``logs``, whose periods are ``typical``; ``periods`` are those of all that count."""
        joined = joined or _Joined({}, {})
        iteration_s = statistics.fmean(typical)
        noise = statistics.median(abs(period - iteration_s) for period in periods) / iteration_s
        timings = self._timings(logs, joined.came_s)
        forward_s, backward_s = phase_times_s(self._schedule, [timing.end_s for timing in timings])
        needed = model_flops(self._workload)
        return Record(
            origin=Origin.MEASURED,
            plan=self._plan,
            plan_id=self._schedule.plan_id,
            model_name=self._workload.model_name,
            hardware_name=hardware_name or self._device.description,
            machine=self._device.description,
            software=software_versions(),
            emulated=self._device.emulated,
            num_samples=self._workload.num_samples * self._plan.num_batches,
            num_tokens=self._workload.num_tokens * self._plan.num_batches,
            iteration_s=iteration_s,
            iteration_noise_frac=noise,
            num_iterations=len(periods),
            forward_s=forward_s,
            backward_s=backward_s,
            optimizer_s=max(0.0, iteration_s - forward_s - backward_s),
            waits=phase_waits(self._schedule, repeating(timings, iteration_s), (0.0, iteration_s), joined.waited_s),
            tasks=timings,
            lanes=self._lanes(timings),
            memory=self._memory(logs, timings),
            guaranteed_peak_device_bytes=guaranteed_device_peak(self._schedule).size_bytes,
            model_flops=None if needed is None else needed * self._plan.micro_batches,
            hardware_flops=hardware_flops(self._schedule),
            chunks=self._chunks,
            num_gathers=sum(task.kind is TaskKind.GATHER for task in self._schedule.tasks),
            num_cpu_adam_steps=sum(task.kind is TaskKind.CPU_ADAM for task in self._schedule.tasks),
            question=question_of(self._workload, self._plan),
        )

    def _timings(
        self, logs: Sequence[IterationLog], came_s: Mapping[TaskId, Sequence[float]]
    ) -> tuple[TaskTiming, ...]:
        """``came_s``: when collectives begin that ranks come to at different times, one for each of ``logs``."""
        timings = []
        seconds = self._device.seconds
        for task in self._schedule.tasks:
            starts, durations = [], []
            for place, log in enumerate(logs):
                span = log.spans[task.id]
                start, end = seconds(span.start), seconds(span.end)
                if task.id in came_s:
                    start = came_s[task.id][place]
                starts.append(start - seconds(log.started))
                durations.append(max(0.0, end - start))
            start_s, duration_s = statistics.fmean(starts), statistics.fmean(durations)
            timings.append(
                TaskTiming(
                    task=task.id,
                    name=task.name,
                    kind=task.kind,
                    lane=task.lane,
                    start_s=start_s,
                    end_s=start_s + duration_s,
                    duration_s=duration_s,
                )
            )
        return tuple(timings)

    def _lanes(self, timings: Sequence[TaskTiming]) -> tuple[LaneUse, ...]:
        by_lane: dict[Lane, list[Task]] = {lane: [] for lane in Lane}
        for task in self._schedule.tasks:
            by_lane[task.lane].append(task)
        return tuple(
            LaneUse(
                lane=lane,
                num_tasks=len(tasks),
                busy_s=sum(timings[task.id].duration_s for task in tasks),
                moved_bytes=sum(task.moved_bytes for task in tasks),
            )
            for lane, tasks in by_lane.items()
        )

    def _memory(self, logs: Sequence[IterationLog], timings: Sequence[TaskTiming]) -> tuple[MemoryCurve, ...]:
        """The device curve of the one of ``logs`` whose peak is the median of theirs, and pinned memory.

        The curve is laid over ``timings``, their means, from one compute task's beginning and end to the next.
        """
        curves = []
        found = [(memory, log) for log in logs for memory in [self._over_time(log)] if memory is not None]
        if found:
            memory, log = sorted(found, key=lambda pair: pair[0].peak_bytes)[(len(found) - 1) // 2]
            times_s = self._on_mean_times(memory.times_s, log, timings)
            points = _thin(list(zip(times_s.tolist(), memory.levels_bytes.tolist(), strict=True)))
            curves.append(
                MemoryCurve(
                    memory=Memory.DEVICE,
                    times_s=tuple(time for time, _ in points),
                    levels_bytes=tuple(level for _, level in points),
                    peak_bytes=memory.peak_bytes,
                    peak_at=memory.peak_at,
                    alive_at_peak=memory.alive,
                )
            )
        pinned = self._schedule.static_bytes(Memory.PINNED_HOST)
        curves.append(
            MemoryCurve(
                memory=Memory.PINNED_HOST,
                times_s=(0.0,),
                levels_bytes=(pinned,),
                peak_bytes=pinned,
                peak_at=self._schedule.tasks[0].name,
                alive_at_peak=_holdings(self._schedule, Memory.PINNED_HOST),
            )
        )
        return tuple(curves)

    def _over_time(self, log: IterationLog) -> MemoryOverTime | None:
        if log.memory is None:
            return None
        seconds = self._device.seconds
        return log.memory.over_time(lambda task: (seconds(log.spans[task].start), seconds(log.spans[task].end)))

    def _on_mean_times(self, times_s: Floats, log: IterationLog, timings: Sequence[TaskTiming]) -> Floats:
        """Moments of one iteration as moments of the mean iteration, in which each compute task has its mean times."""
        seconds = self._device.seconds
        program = self._schedule.lanes[Lane.COMPUTE]
        own = np.array([seconds(at) for task in program for at in (log.spans[task].start, log.spans[task].end)])
        mean = np.array([at for task in program for at in (timings[task].start_s, timings[task].end_s)])
        laid_over: Floats = np.interp(times_s, own, mean)
        # Before the first task and after the last, the same distance from them.
        laid_over = np.where(times_s < own[0], mean[0] + (times_s - own[0]), laid_over)
        laid_over = np.where(times_s > own[-1], mean[-1] + (times_s - own[-1]), laid_over)
        return laid_over


def middle_half(values: Sequence[float]) -> list[int]:
    """Places of ``values`` without the smallest quarter and the largest, see [Note: Typical iterations]; never none."""
    order = sorted(range(len(values)), key=values.__getitem__)
    cut = len(order) // 4
    return order[cut : len(order) - cut]


def _holdings(schedule: Schedule, memory: Memory) -> tuple[Holding, ...]:
    totals: dict[Content, int] = {}
    for buffer in schedule.buffers:
        if buffer.is_static and buffer.memory is memory:
            totals[buffer.content] = totals.get(buffer.content, 0) + buffer.size_bytes
    return tuple(Holding(content=content, size_bytes=size) for content, size in totals.items())


def _thin(points: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """At most ``_MAX_CURVE_POINTS`` points; of each stretch of time the highest level stays."""
    if len(points) <= _MAX_CURVE_POINTS:
        return points
    stride = -(-len(points) // _MAX_CURVE_POINTS)
    groups = [points[i : i + stride] for i in range(0, len(points), stride)]
    return [(group[0][0], max(level for _, level in group)) for group in groups]
