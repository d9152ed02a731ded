"""What must come before what, whatever the tasks' durations."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from ..layout.layout import ChunkId
from ..schema.schedule import Buffer, BufferId, Lane, Part, Task, TaskId, TaskKind
from .case import Case, reject
from .collectives import check_collective_order
from .happens_before import HappensBefore, Occurrence

_EXAMINED = 1
"""The first iteration has no previous one; the second is like all that follow."""

_AT_THE_END = 2**62

Before = Callable[[TaskId, TaskId, int], bool]
"""Whether the first task surely ends before the second starts, so many iterations later."""


def check_order(case: Case, order: HappensBefore) -> None:
    """Raise ScheduleError unless lifetimes, data, slots and windows are safe for every timing."""

    def before(first: TaskId, second: TaskId, distance: int = 0) -> bool:
        return order.before(Occurrence(_EXAMINED, first), Occurrence(_EXAMINED + distance, second))

    for buffer in case.schedule.buffers:
        if buffer.is_static:
            _check_updates(case, before, buffer.id)
        else:
            _check_lifetime(case, before, buffer)
    _check_slots(case, before)
    steps = _steps(case)
    _check_gathers(case, before, steps)
    _check_gradients(case, before, steps)
    _check_swaps(case, before, steps)
    check_collective_order(case, before)


def _check_lifetime(case: Case, before: Before, buffer: Buffer) -> None:
    """Allocated, written, read, freed, in this order; gone before the next iteration allocates it again."""
    allocating, freeing = case.allocating[buffer.id], case.freeing[buffer.id]
    writers, readers = case.writers[buffer.id], case.readers[buffer.id]
    what = f"buffer {buffer.id} ({buffer.content})"
    for user in (*writers, *readers, freeing):
        if user != allocating and not before(allocating, user, 0):
            reject(f"{case.name(user)} may use {what} before {case.name(allocating)} allocates it")
        if user != freeing and not before(user, freeing, 0):
            reject(f"{case.name(freeing)} may free {what} while {case.name(user)} uses it")
    if writers[:1] != [allocating]:
        reject(f"{what} is not written by {case.name(allocating)}, which allocates it")
    for writer in writers[1:]:
        for user in sorted({*writers, *readers} - {writer}):
            first, second = sorted((writer, user))
            if not before(first, second, 0):
                reject(f"{case.name(first)} and {case.name(second)} race on {what}")
    if not before(freeing, allocating, 1):
        reject(f"{what} may be allocated again before {case.name(freeing)} frees it")


def _check_updates(case: Case, before: Before, buffer_id: BufferId) -> None:
    """Nothing touches a static buffer while it is written, and everyone sees the version that is meant."""
    for writer in case.writers[buffer_id]:
        for other in sorted({*case.writers[buffer_id], *case.readers[buffer_id]}):
            names = f"{case.name(other)} and {case.name(writer)}"
            first, second = sorted((writer, other), key=lambda user: _turn(case.schedule.tasks[user]))
            if other != writer and not before(first, second, 0):
                reject(f"{case.name(first)} may run after {case.name(second)} has touched buffer {buffer_id}")
            if not (before(other, writer, 1) and before(writer, other, 1)):
                reject(f"{names} of successive iterations race on buffer {buffer_id}")


def _turn(task: Task) -> tuple[int, int]:
    """Whose turn it is at a static buffer: micro-batch by micro-batch out, added or back, then the norm, then Adam.

    Parameters are read, by gathers and on the device, before this iteration's Adam writes them.
    """
    if task.kind in (TaskKind.CPU_ADAM, TaskKind.DEVICE_ADAM):
        return _AT_THE_END, 1
    if task.kind is TaskKind.GRADIENT_NORM:
        return _AT_THE_END, 0
    return task.micro_batch, task.kind in (TaskKind.GRADIENT_ACCUMULATE, TaskKind.ACTIVATION_FETCH)


def _check_slots(case: Case, before: Before) -> None:
    """Stays in one slot follow each other, and so do stays of one chunk, across iterations too."""
    by_slot: dict[int, list[Buffer]] = {}
    by_chunk: dict[ChunkId | None, list[Buffer]] = {}
    for buffer in case.schedule.buffers:
        if buffer.slot is not None:
            by_slot.setdefault(buffer.slot, []).append(buffer)
            by_chunk.setdefault(buffer.chunk, []).append(buffer)
    for stays in (*by_slot.values(), *by_chunk.values()):
        # What comes over several lanes stands in the list after what it waits for.
        stays.sort(key=lambda buffer: case.allocating[buffer.id])
        for stay, following in pairwise(stays):
            if not before(case.freeing[stay.id], case.allocating[following.id], 0):
                reject(f"{_both(stay, following)} at once")
        if not before(case.freeing[stays[-1].id], case.allocating[stays[0].id], 1):
            reject(f"{_both(stays[-1], stays[0])} at once when the next iteration begins")


def _both(stay: Buffer, other: Buffer) -> str:
    if stay.slot == other.slot:
        return f"slot {stay.slot} may hold chunks {stay.chunk} and {other.chunk}"
    return f"chunk {stay.chunk} may be in slots {stay.slot} and {other.slot}"


def _check_gathers(case: Case, before: Before, steps: list[list[TaskId]]) -> None:
    """No gather starts before the step ``prefetch_depth`` ahead of its first use has begun.

    With a depth beyond a whole iteration, it may still not start more than an iteration ahead.
    """
    step_of = {task: step for step, tasks in enumerate(steps) for task in tasks}
    alone = [task for task in case.tasks_of(TaskKind.ALL_GATHER) if task.chunk in case.sharded]
    for gather in (*case.tasks_of(TaskKind.GATHER), *alone):
        step = min(step_of[user] for user in case.on_compute(case.readers[gather.writes[0]]))
        limit = max(step - case.plan.prefetch_depth - 1, -len(steps))
        if not before(steps[limit][-1], gather.id, 0 if limit >= 0 else 1):
            reject(f"{gather.name} may run more than {case.plan.prefetch_depth} blocks ahead")


def _check_gradients(case: Case, before: Before, steps: list[list[TaskId]]) -> None:
    """Gradients on their way are gone ``prefetch_depth + 1`` steps after their chunk's last backward.

    To the host, or into the part that stays on the device.
    """
    num_steps = len(steps)
    steps_each = num_steps // case.plan.micro_batches
    alone = [task for task in case.tasks_of(TaskKind.REDUCE_SCATTER) if task.chunk in case.sharded]
    for offload in (*case.tasks_of(TaskKind.GRADIENT_OFFLOAD), *alone):
        assert offload.chunk is not None
        last_step = steps_each * (offload.micro_batch + 1) - 1 - min(case.layout.chunks[offload.chunk].blocks)
        distance, step = divmod(last_step + case.plan.prefetch_depth + 1, num_steps)
        # Beyond the next iteration the chunk's own next gather, which waits for its Adam, is the tighter bound.
        if distance <= 1 and not before(offload.id, steps[step][0], distance):
            reject(f"the gradients of chunk {offload.chunk} may wait too long for {offload.name}")


def _check_swaps(case: Case, before: Before, steps: list[list[TaskId]]) -> None:
    """What is swapped is gone ``prefetch_depth + 1`` steps after its forward, and comes back no sooner than a chunk."""
    step_of = {task: step for step, tasks in enumerate(steps) for task in tasks}
    depth = case.plan.prefetch_depth
    for task in case.tasks_of(TaskKind.ACTIVATION_OFFLOAD):
        later = step_of[case.allocating[task.reads[0]]] + depth + 1
        # Beyond this iteration the copy back, which waits for this one, is the tighter bound.
        if later < len(steps) and not before(task.id, steps[later][0], 0):
            reject(f"what block {task.section} swaps may wait too long for {task.name}")
    for task in case.tasks_of(TaskKind.ACTIVATION_FETCH):
        limit = min(step_of[user] for user in case.readers[task.writes[0]]) - depth - 1
        if limit >= 0 and not before(steps[limit][-1], task.id, 0):
            reject(f"{task.name} may run more than {depth} blocks ahead")


def _steps(case: Case) -> list[list[TaskId]]:
    """The compute tasks of every step: forwards of the blocks, then backwards with their recomputations."""
    steps: list[list[TaskId]] = []
    is_open = False
    for task in case.schedule.tasks:
        if task.lane is not Lane.COMPUTE or task.section is None or isinstance(task.section, Part):
            continue
        if is_open:
            steps[-1].append(task.id)
        else:
            steps.append([task.id])
        is_open = task.kind is TaskKind.RECOMPUTE
    return steps
