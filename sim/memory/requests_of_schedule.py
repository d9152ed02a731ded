"""What the runtime asks of the device's allocator: once, before and in the first step, and in every iteration.

Compute tasks make and free what they name themselves; when memory of copies comes and goes says
``shared/order/memory_events.py`` ([Note: Memory on one stream]), for the runtime and for this replay alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import accumulate

from ...shared.order.happens_before import HappensBefore
from ...shared.order.memory_events import Copying, memory_events
from ...shared.schema.schedule import AllocationId, Content, Lane, Memory, Schedule, Task, TaskKind


class Act(IntEnum):
    """What happens to device memory."""

    MAKE = 0
    """A buffer that a copy fills."""
    FREE = 1
    """A buffer that a copy has read."""
    BEGIN = 2
    """A compute task; the buffers are those that it frees."""
    LEVEL = 3
    """The level within it, above that at its start; bytes."""
    STEP = 4
    """Within the task before its end: device Adam; the first one begins with the optimizer's state."""
    END = 5
    """A compute task; the buffers are those that it leaves, those made last first."""


@dataclass(frozen=True, slots=True)
class Step:
    """One entry of the program."""

    act: Act
    buffers: tuple[AllocationId, ...] = ()
    level_bytes: int = 0
    stays: bool = False
    """Whether the tensor by which the level rises is known to stay (``Phase.staying_tensors``)."""
    iterations_later: int = 0
    """Of the copy, after the iteration in which this happens; negative if it belongs to an earlier one."""


@dataclass(frozen=True)
class AllocationProgram:
    """The program of every iteration, and what comes before the first."""

    steps: tuple[Step, ...]
    before: tuple[Step, ...]
    """Room for copies that the iteration before the first would have made."""
    sizes_bytes: tuple[int, ...]
    """Of every buffer of the schedule."""
    contents: tuple[Content, ...]
    """Of the same."""


def allocation_program(
    schedule: Schedule, order: HappensBefore | None = None, *, by_curve: bool = False, parts_apart: bool = False
) -> AllocationProgram:
    """The steps of one iteration of ``schedule``.

    ``by_curve``: levels are those of phases' curves, tensors or not.  ``parts_apart``: as of ``Segments``.
    ``order`` spares computing the happens-before relation again; it must be over at least three iterations.
    """
    events = memory_events(schedule, order)
    counted = [
        b.memory is Memory.DEVICE
        and not b.is_static
        and b.size_bytes > 0
        and not (parts_apart and b.content is Content.REDUCED_GRADIENTS)
        for b in schedule.buffers
    ]

    def made(copies: Iterable[Copying]) -> Iterable[Step]:
        for copy in copies:
            if buffers := tuple(b for b in schedule.tasks[copy.task].allocates if counted[b]):
                yield Step(Act.MAKE, buffers, iterations_later=copy.iterations_later)

    def freed(copies: Iterable[Copying]) -> Iterable[Step]:
        for copy in copies:
            if buffers := tuple(b for b in schedule.tasks[copy.task].frees if counted[b]):
                yield Step(Act.FREE, buffers, iterations_later=copy.iterations_later)

    steps: list[Step] = []
    for task_id in schedule.lanes[Lane.COMPUTE]:
        task = schedule.tasks[task_id]
        frees = _parameters_first(schedule, [b for b in task.frees if counted[b]])
        steps += freed(events.gone_at_begin.get(task_id, ()))
        steps.append(Step(Act.BEGIN, frees))
        least_bytes = -sum(schedule.buffers[buffer].size_bytes for buffer in frees)
        steps += _levels(task, least_bytes, by_curve=by_curve)
        if task.kind is TaskKind.DEVICE_ADAM:
            steps.append(Step(Act.STEP))
        # The last named first: outputs come after what was saved on the way to them.
        steps.append(Step(Act.END, tuple(b for b in reversed(task.allocates) if counted[b])))
        steps += made(events.room_at_end.get(task_id, ()))
    before = tuple(made(events.room_at_start))
    sizes_bytes, contents = (tuple(getattr(b, name) for b in schedule.buffers) for name in ("size_bytes", "content"))
    return AllocationProgram(tuple(steps), before, sizes_bytes, contents)


def _levels(task: Task, least_bytes: int, *, by_curve: bool) -> Iterable[Step]:
    """The levels within a task; it cannot release more than it frees."""
    if task.phase is None:
        return ()
    if task.phase.changes and not by_curve:
        return _steps_of(tuple(accumulate(task.phase.changes)), least_bytes, task.phase.staying_tensors)
    return _steps_of(tuple(level for _, level in task.phase.curve), least_bytes, ())


@lru_cache(maxsize=1024)  # equal blocks have the same
def _steps_of(levels: tuple[int, ...], least_bytes: int, final: tuple[int, ...]) -> tuple[Step, ...]:
    found: list[Step] = []
    before_bytes = stated_bytes = 0
    finals, num_rises = frozenset(final), 0
    for level_bytes in levels:
        level, is_rise = max(level_bytes, least_bytes), level_bytes > stated_bytes
        if level != before_bytes:
            found.append(Step(Act.LEVEL, level_bytes=level, stays=is_rise and num_rises in finals))
        num_rises += is_rise
        before_bytes, stated_bytes = level, level_bytes
    return tuple(found)


def _parameters_first(schedule: Schedule, buffers: list[AllocationId]) -> tuple[AllocationId, ...]:
    """Gathered chunks first, since they go last."""
    return tuple(sorted(buffers, key=lambda buffer: schedule.buffers[buffer].content is not Content.PARAMETERS))
