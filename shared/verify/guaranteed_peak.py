"""The peak that a schedule can never exceed, whatever its tasks' durations.

Buffers of compute tasks live for a stretch of the compute lane that the program fixes.  A gathered chunk may be there
as soon as everything that its gather waits for has ended, and gradients on their way to the host may be there until a
task that waits for their copy starts; both ends are read off the happens-before relation.  So every compute task has
a largest possible level, and so has the pause before it, in which gradients that it waits for are still there beside
chunks that were gathered since the task before it ended.  The largest of these bounds the device's memory for every
timing.

What a block swaps is on the device twice in an iteration, on its way out and when it has come back.  The two may reach
for the same compute task, but never at once: the way back begins when the way out has ended.  They count once.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..order.happens_before import HappensBefore, Occurrence
from ..schema.schedule import AllocationId, Content, Lane, Memory, Schedule, Section, Task, TaskId

_COMPUTE = tuple(Lane).index(Lane.COMPUTE)
_MIDDLE = 1
_ITERATIONS = 3


@dataclass(frozen=True, slots=True)
class GuaranteedPeak:
    """An upper bound of device memory, with the compute task during which, or before which, it is attained."""

    size_bytes: int
    task: TaskId
    alive: tuple[AllocationId, ...]
    """Buffers that may be alive during the task, static ones included."""
    transient_bytes: int
    """What the task itself may add at its highest; 0 if the peak comes in the pause before it."""


def guaranteed_device_peak(schedule: Schedule, order: HappensBefore | None = None) -> GuaranteedPeak:
    """The device peak that no timing can exceed, in the steady state.  Bytes."""
    if order is None or order.num_iterations < _ITERATIONS:
        order = HappensBefore(schedule, _ITERATIONS)
    compute = schedule.lanes[Lane.COMPUTE]
    start, stop = _MIDDLE * len(compute), (_MIDDLE + 1) * len(compute)
    static_bytes = schedule.static_bytes(Memory.DEVICE)
    running, pausing = [0] * (stop - start + 1), [0] * (stop - start + 1)
    intervals: list[tuple[int, int, int, int, AllocationId]] = []
    gone_out: dict[tuple[int, int, Section | None], tuple[int, int]] = {}
    allocating, freeing = _lifetimes(schedule)
    for buffer in schedule.buffers:
        if buffer.is_static or buffer.memory is not Memory.DEVICE:
            continue
        freed_by = schedule.tasks[freeing[buffer.id]]
        for iteration in range(order.num_iterations):
            first = max(_first_position(order, schedule.tasks[allocating[buffer.id]], iteration), start)
            last = _last_position(order, freed_by, iteration)
            last_pause = min(last if freed_by.lane is Lane.COMPUTE else last + 1, stop - 1)
            last = min(last, stop - 1)
            first_pause = first
            if buffer.content is Content.SWAPPED:
                trip = (iteration, buffer.micro_batch, buffer.section)
                if freed_by.lane is not Lane.COMPUTE:
                    gone_out[trip] = (last, last_pause)
                else:
                    first, first_pause = (max(first, end + 1) for end in gone_out[trip])
            for change, begin, end in ((running, first, last), (pausing, first_pause, last_pause)):
                if begin <= end:
                    change[begin - start] += buffer.size_bytes
                    change[end - start + 1] -= buffer.size_bytes
            intervals.append((first, last, first_pause, last_pause, buffer.id))
    best, is_pause = GuaranteedPeak(-1, compute[0], (), 0), False
    level = pause_level = static_bytes
    for offset, task_id in enumerate(compute):
        level += running[offset]
        pause_level += pausing[offset]
        phase = schedule.tasks[task_id].phase
        transient = phase.peak_bytes if phase is not None else 0
        if level + transient > best.size_bytes:
            best, is_pause = GuaranteedPeak(level + transient, task_id, (), transient), False
        if pause_level > best.size_bytes:
            best, is_pause = GuaranteedPeak(pause_level, task_id, (), 0), True
    position = start + compute.index(best.task)
    alive = [b.id for b in schedule.buffers if b.is_static and b.memory is Memory.DEVICE]
    for first, last, first_pause, last_pause, buffer_id in intervals:
        if (first_pause <= position <= last_pause) if is_pause else (first <= position <= last):
            alive.append(buffer_id)
    return GuaranteedPeak(best.size_bytes, best.task, tuple(alive), best.transient_bytes)


def _lifetimes(schedule: Schedule) -> tuple[dict[AllocationId, TaskId], dict[AllocationId, TaskId]]:
    allocating = {buffer: task.id for task in schedule.tasks for buffer in task.allocates}
    freeing = {buffer: task.id for task in schedule.tasks for buffer in task.frees}
    return allocating, freeing


def _first_position(order: HappensBefore, task: Task, iteration: int) -> int:
    """The first compute position at which a buffer allocated by ``task`` may be alive."""
    at = Occurrence(iteration, task.id)
    if task.lane is Lane.COMPUTE:
        return order.position(at) + 1
    return order.reached(at)[_COMPUTE]


def _last_position(order: HappensBefore, task: Task, iteration: int) -> int:
    """The last compute position at which a buffer freed by ``task`` may be alive."""
    at = Occurrence(iteration, task.id)
    if task.lane is Lane.COMPUTE:
        return order.position(at)
    return order.first_after(at, Lane.COMPUTE) - 1
