"""Memory over one steady-state iteration, computed after the fact from the schedule and the times of its tasks.

[Note: Levels from changes]
A level is the static bytes plus every change up to a time.  Buffers change it when they come and go: those of a
compute task come when it ends and those of a copy when it starts, all go when the task that frees them ends (see
[Note: Memory of compute tasks] in ``shared/compile/compile.py``).  While a compute task runs, its phase's curve lies
on top.  Changes at one instant count together: what a task frees as it ends makes room for what another allocates then.
A phase that takes no time at all therefore shows nothing of its curve.

Neighbouring iterations reach into the window: chunks gathered ahead for the next one, gradients of the previous one
that have not left yet.  They are there because the changes of all simulated iterations are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...shared.schema.record import Holding, MemoryCurve
from ...shared.schema.schedule import Allocation, Content, Lane, Memory, Schedule, Task, TaskId
from .timing import Seconds, Timing

_ORDER: Final = tuple(Content)
Levels = NDArray[np.int64]
TaskIds = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class _Changes:
    """Level changes, in any order."""

    times_s: Seconds
    sizes_bytes: Levels


@dataclass(frozen=True, eq=False)
class _Stays:
    """Stays of buffers: one row per simulated iteration, one column per buffer."""

    begins_s: Seconds
    ends_s: Seconds
    sizes_bytes: Levels

    @property
    def changes(self) -> _Changes:
        sizes = np.broadcast_to(self.sizes_bytes, self.begins_s.shape).ravel()
        return _Changes(np.concatenate([self.begins_s.ravel(), self.ends_s.ravel()]), np.concatenate([sizes, -sizes]))


@dataclass(frozen=True, eq=False)
class _Buffers:
    """What comes and goes on the device.  (B,) each."""

    sizes_bytes: Levels
    made_by: TaskIds
    is_made_at_end: NDArray[np.bool_]
    """Of the task that makes it; else at its start."""
    freed_by: TaskIds


@dataclass(frozen=True, eq=False)
class _Steps:
    """The steps of all curves of compute tasks.  (S,) each."""

    tasks: TaskIds
    fractions: NDArray[np.float64]
    """Of the task's time."""
    sizes_bytes: Levels


@dataclass(frozen=True, eq=False)
class DeviceMemory:
    """Device memory of a simulated schedule, over the timing's window."""

    schedule: Schedule
    timing: Timing

    def at(self, timing: Timing) -> DeviceMemory:
        """The memory of the same schedule under another timing; what no timing changes is not found again."""
        other = DeviceMemory(self.schedule, timing)
        other.__dict__.update(_buffers=self._buffers, _coming=self._coming, _steps=self._steps)
        return other

    @cached_property
    def window_s(self) -> tuple[float, float]:
        """From the window's first compute task to the next iteration's, or to the window's end if there is none."""
        return window_s(self.schedule, self.timing)

    @cached_property
    def levels(self) -> tuple[Seconds, Levels]:
        """Times within the window, the first one its start, and the level from each to the next.  Bytes."""
        stays, curves = self._stays.changes, self._curve_changes()
        times_s = np.concatenate([stays.times_s, curves.times_s])
        order = np.argsort(times_s, kind="stable")
        times_s = times_s[order]
        sums = np.cumsum(np.concatenate([stays.sizes_bytes, curves.sizes_bytes])[order])
        is_last = np.append(times_s[1:] != times_s[:-1], True)
        times_s, levels = times_s[is_last], sums[is_last] + self.schedule.static_bytes(Memory.DEVICE)
        begin_s, end_s = self.window_s
        first = max(0, int(np.searchsorted(times_s, begin_s, side="right")) - 1)
        stop = max(first + 1, int(np.searchsorted(times_s, end_s, side="left")))
        times_s, levels = np.maximum(times_s[first:stop], begin_s), levels[first:stop]
        is_change = np.append(True, levels[1:] != levels[:-1])
        return times_s[is_change], levels[is_change]

    @property
    def peak_bytes(self) -> int:
        """The highest level in the window."""
        return int(self.levels[1].max())

    def curve(self) -> MemoryCurve:
        """The level over the window, with what was alive at its peak; seconds since the window's start."""
        times_s, levels = self.levels
        begin_s, end_s = self.window_s
        place = int(levels.argmax())
        peak_bytes = int(levels[place])
        task, is_running = self._compute_task_at(float(times_s[place]))
        return MemoryCurve(
            memory=Memory.DEVICE,
            times_s=(*(float(time_s) for time_s in times_s - begin_s), end_s - begin_s),
            levels_bytes=(*(int(level) for level in levels), int(levels[-1])),
            peak_bytes=peak_bytes,
            peak_at=task.name,
            alive_at_peak=self._alive_at(float(times_s[place]), peak_bytes, task if is_running else None),
        )

    @cached_property
    def _buffers(self) -> list[Allocation]:
        return [b for b in self.schedule.buffers if not b.is_static and b.memory is Memory.DEVICE]

    @cached_property
    def _coming(self) -> _Buffers:
        allocating = {buffer: task for task in self.schedule.tasks for buffer in task.allocates}
        freeing = {buffer: task.id for task in self.schedule.tasks for buffer in task.frees}
        makers = [allocating[buffer.id] for buffer in self._buffers]
        return _Buffers(
            sizes_bytes=np.array([buffer.size_bytes for buffer in self._buffers], dtype=np.int64),
            made_by=np.array([maker.id for maker in makers], dtype=np.intp),
            is_made_at_end=np.array([maker.lane is Lane.COMPUTE for maker in makers], dtype=np.bool_),
            freed_by=np.array([freeing[buffer.id] for buffer in self._buffers], dtype=np.intp),
        )

    @cached_property
    def _stays(self) -> _Stays:
        timing, coming = self.timing, self._coming
        return _Stays(
            begins_s=np.where(
                coming.is_made_at_end, timing.ends_s[:, coming.made_by], timing.starts_s[:, coming.made_by]
            ),
            ends_s=timing.ends_s[:, coming.freed_by],
            sizes_bytes=coming.sizes_bytes,
        )

    @cached_property
    def _steps(self) -> _Steps:
        """Up and down through the stretches of every compute task's curve, and away at its end."""
        tasks: list[int] = []
        fractions: list[float] = []
        sizes: list[int] = []
        for task_id in self.schedule.lanes[Lane.COMPUTE]:
            previous_bytes, begin_frac = 0, 0.0
            for end_frac, level_bytes in self._stretches(self.schedule.tasks[task_id]):
                tasks.append(task_id)
                fractions.append(begin_frac)
                sizes.append(level_bytes - previous_bytes)
                previous_bytes, begin_frac = level_bytes, end_frac
            tasks.append(task_id)
            fractions.append(1.0)
            sizes.append(-previous_bytes)
        return _Steps(np.array(tasks, dtype=np.intp), np.array(fractions), np.array(sizes, dtype=np.int64))

    def _curve_changes(self) -> _Changes:
        """When the steps of the window's curves come, and how large they are: others have come to nothing by then."""
        steps, row = self._steps, self.timing.window
        starts_s, ends_s = self.timing.starts_s[row, steps.tasks], self.timing.ends_s[row, steps.tasks]
        fracs = steps.fractions
        # The last step must fall on the very instant at which the task's buffers come and go.
        times_s = np.where(fracs == 1.0, ends_s, np.minimum(starts_s + fracs * (ends_s - starts_s), ends_s))
        return _Changes(times_s, steps.sizes_bytes)

    def _stretches(self, task: Task) -> list[tuple[float, int]]:
        """A task's curve: (end of stretch as a fraction, bytes above the level at its start).

        A task cannot release more than it frees, so that is where its curve ends below.
        """
        if task.phase is None:
            return []
        freed_bytes = sum(self.schedule.buffers[buffer].size_bytes for buffer in task.frees)
        return [(end_frac, max(level_bytes, -freed_bytes)) for end_frac, level_bytes in task.phase.curve]

    def _compute_task_at(self, time_s: float) -> tuple[Task, bool]:
        """The compute task that runs at ``time_s``, else the one that starts next; and whether it runs."""
        program = list(self.schedule.lanes[Lane.COMPUTE])
        ends_s = self.timing.ends_s[:, program].ravel()
        place = min(int(np.searchsorted(ends_s, time_s, side="right")), ends_s.size - 1)
        task = self.schedule.tasks[TaskId(program[place % len(program)])]
        return task, bool(self.timing.starts_s[:, program].ravel()[place] <= time_s)

    def _alive_at(self, time_s: float, level_bytes: int, running: Task | None) -> tuple[Holding, ...]:
        """Buffers alive at ``time_s`` by content, and what the running task holds beyond them.

        Together they make up the level.  Where the running task has already released part of what it frees, that is
        taken off those contents.
        """
        stays = self._stays
        rows = (stays.begins_s <= time_s) & (time_s < stays.ends_s)
        alive = [self._buffers[place] for place in np.nonzero(rows)[1]]
        alive += [b for b in self.schedule.buffers if b.is_static and b.memory is Memory.DEVICE]
        held = _by_content(alive)
        transient_bytes = level_bytes - held.total()
        if transient_bytes < 0:
            assert running is not None
            freed = _by_content(self.schedule.buffers[b] for b in running.frees)
            for content in (Content.ACTIVATIONS, *_ORDER):
                released = min(-transient_bytes, freed[content])
                held[content] -= released
                freed[content] -= released
                transient_bytes += released
        return _holdings(held, transient_bytes)


def window_s(schedule: Schedule, timing: Timing) -> tuple[float, float]:
    """When the iteration that stands for the steady state begins and ends, by its first compute task."""
    first = schedule.lanes[Lane.COMPUTE][0]
    begin_s = float(timing.starts_s[timing.window, first])
    if timing.window + 1 < timing.num_iterations:
        return begin_s, float(timing.starts_s[timing.window + 1, first])
    return begin_s, float(timing.ends_s[timing.window].max())


def pinned_host_curve(schedule: Schedule, timing: Timing) -> MemoryCurve:
    """Pinned host memory over the window: nothing in it comes or goes but in places that are there for good."""
    begin_s, end_s = window_s(schedule, timing)
    static = [b for b in schedule.buffers if b.is_static and b.memory is Memory.PINNED_HOST]
    assert all(b.is_static or b.slot is not None for b in schedule.buffers if b.memory is Memory.PINNED_HOST)
    size_bytes = schedule.static_bytes(Memory.PINNED_HOST)
    return MemoryCurve(
        memory=Memory.PINNED_HOST,
        times_s=(0.0, end_s - begin_s),
        levels_bytes=(size_bytes, size_bytes),
        peak_bytes=size_bytes,
        peak_at=schedule.tasks[schedule.lanes[Lane.COMPUTE][0]].name,
        alive_at_peak=_holdings(_by_content(static), 0),
    )


def _by_content(buffers: Iterable[Allocation]) -> Counter[Content]:
    held: Counter[Content] = Counter()
    for buffer in buffers:
        held[buffer.content] += buffer.size_bytes
    return held


def _holdings(held: Counter[Content], transient_bytes: int) -> tuple[Holding, ...]:
    """What is held, in the order of ``Content``, the transient part last; nothing of size 0."""
    holdings = [Holding(content=content, size_bytes=held[content]) for content in _ORDER if held[content]]
    if transient_bytes:
        holdings.append(Holding(content=None, size_bytes=transient_bytes))
    return tuple(holdings)
