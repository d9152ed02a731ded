"""The peak that a schedule can never exceed, whatever its tasks' durations.

Buffers of compute tasks live for a stretch of the compute lane that the program fixes.  A gathered chunk may be there
as soon as everything that its gather waits for has ended, and gradients on their way to the host may be there until a
task that waits for their copy starts; both ends are read off the happens-before relation.  So every compute task has
a largest possible level, and the largest of these bounds the device's memory for every timing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .order import HappensBefore, Occurrence
from .schedule import BufferId, Lane, Memory, Schedule, Task, TaskId

_COMPUTE = tuple(Lane).index(Lane.COMPUTE)
_MIDDLE = 1
_ITERATIONS = 3


@dataclass(frozen=True, slots=True)
class GuaranteedPeak:
    """An upper bound of device memory, with the compute task that attains it."""

    size_bytes: int
    task: TaskId
    alive: tuple[BufferId, ...]
    """Buffers that may be alive during the task, static ones included."""
    transient_bytes: int
    """What the task itself may add at its highest."""


def guaranteed_device_peak(schedule: Schedule, order: HappensBefore | None = None) -> GuaranteedPeak:
    """The device peak that no timing can exceed, in the steady state.  Bytes."""
    if order is None or order.num_iterations < _ITERATIONS:
        order = HappensBefore(schedule, _ITERATIONS)
    compute = schedule.lanes[Lane.COMPUTE]
    start, stop = _MIDDLE * len(compute), (_MIDDLE + 1) * len(compute)
    static_bytes = schedule.static_bytes(Memory.DEVICE)
    change = [0] * (stop - start + 1)
    intervals: list[tuple[int, int, BufferId]] = []
    allocating, freeing = _lifetimes(schedule)
    for buffer in schedule.buffers:
        if buffer.is_static or buffer.memory is not Memory.DEVICE:
            continue
        for iteration in range(order.num_iterations):
            first = _first_position(order, schedule.tasks[allocating[buffer.id]], iteration)
            last = _last_position(order, schedule.tasks[freeing[buffer.id]], iteration, compute)
            first, last = max(first, start), min(last, stop - 1)
            if first <= last:
                change[first - start] += buffer.size_bytes
                change[last - start + 1] -= buffer.size_bytes
                intervals.append((first, last, buffer.id))
    best, level = GuaranteedPeak(-1, compute[0], (), 0), static_bytes
    for offset, task_id in enumerate(compute):
        level += change[offset]
        phase = schedule.tasks[task_id].phase
        transient = phase.peak_bytes if phase is not None else 0
        if level + transient > best.size_bytes:
            best = GuaranteedPeak(level + transient, task_id, (), transient)
    position = start + compute.index(best.task)
    alive = [b.id for b in schedule.buffers if b.is_static and b.memory is Memory.DEVICE]
    alive += [buffer for first, last, buffer in intervals if first <= position <= last]
    return GuaranteedPeak(best.size_bytes, best.task, tuple(alive), best.transient_bytes)


def _lifetimes(schedule: Schedule) -> tuple[dict[BufferId, TaskId], dict[BufferId, TaskId]]:
    allocating = {buffer: task.id for task in schedule.tasks for buffer in task.allocates}
    freeing = {buffer: task.id for task in schedule.tasks for buffer in task.frees}
    return allocating, freeing


def _first_position(order: HappensBefore, task: Task, iteration: int) -> int:
    """The first compute position at which a buffer allocated by ``task`` may be alive."""
    at = Occurrence(iteration, task.id)
    if task.lane is Lane.COMPUTE:
        return order.position(at) + 1
    return order.reached(at)[_COMPUTE]


def _last_position(order: HappensBefore, task: Task, iteration: int, compute: Sequence[TaskId]) -> int:
    """The last compute position at which a buffer freed by ``task`` may be alive."""
    at = Occurrence(iteration, task.id)
    if task.lane is Lane.COMPUTE:
        return order.position(at)
    total = order.num_iterations * len(compute)
    low, high = 0, total
    while low < high:
        middle = (low + high) // 2
        occurrence = Occurrence(middle // len(compute), compute[middle % len(compute)])
        if order.before(at, occurrence):
            high = middle
        else:
            low = middle + 1
    return low - 1
