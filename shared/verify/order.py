"""What must come before what, whatever the tasks' durations."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from itertools import pairwise

from ..schema.schedule import Allocation, AllocationId, ChunkId, Lane, OuterSection, Task, TaskId, TaskKind
from .claim import Claim, reject
from .collectives import check_collective_order
from .happens_before import HappensBefore, Occurrence

_EXAMINED = 1
"""The first iteration has no previous one; the second is like all that follow."""

_AT_THE_END = 2**62

Before = Callable[[TaskId, TaskId, int], bool]
"""Whether the first task is guaranteed to end before the second starts, so many iterations later."""


def check_order(claim: Claim, order: HappensBefore) -> None:
    """Raise ScheduleError unless lifetimes, data, slots and windows are safe for every timing."""

    def before(first: TaskId, second: TaskId, distance: int = 0) -> bool:
        return order.before(Occurrence(_EXAMINED, first), Occurrence(_EXAMINED + distance, second))

    for buffer in claim.schedule.buffers:
        if buffer.is_static:
            _check_updates(claim, before, buffer.id)
        else:
            _check_lifetime(claim, before, buffer)
    _check_slots(claim, before)
    steps = _steps(claim)
    _check_gathers(claim, before, steps)
    _check_gradients(claim, before, steps)
    _check_swaps(claim, before, steps)
    check_collective_order(claim, before)


def _check_lifetime(claim: Claim, before: Before, buffer: Allocation) -> None:
    """Allocated, written, read, freed, in this order; gone before the next iteration allocates it again."""
    allocating, freeing = claim.allocating[buffer.id], claim.freeing[buffer.id]
    writers, readers = claim.writers[buffer.id], claim.readers[buffer.id]
    what = f"buffer {buffer.id} ({buffer.content})"
    for user in (*writers, *readers, freeing):
        if user != allocating and not before(allocating, user, 0):
            reject(f"{claim.name(user)} may use {what} before {claim.name(allocating)} allocates it")
        if user != freeing and not before(user, freeing, 0):
            reject(f"{claim.name(freeing)} may free {what} while {claim.name(user)} uses it")
    if writers[:1] != [allocating]:
        reject(f"{what} is not written by {claim.name(allocating)}, which allocates it")
    if any(writer < allocating for writer in writers[1:]):
        reject(f"{claim.name(allocating)} and {claim.name(min(writers))} race on {what}")
    for first, second in _neighbours(sorted({*writers, *readers} - {allocating}), set(writers)):
        if not before(first, second, 0):
            reject(f"{claim.name(first)} and {claim.name(second)} race on {what}")
    if not before(freeing, allocating, 1):
        reject(f"{what} may be allocated again before {claim.name(freeing)} frees it")


def _check_updates(claim: Claim, before: Before, buffer_id: AllocationId) -> None:
    """Nothing touches a static buffer while it is written, and everyone sees the version that is meant."""
    writers = set(claim.writers[buffer_id])
    if not writers:
        return

    def turn(user: TaskId) -> tuple[tuple[int, int], bool]:
        """Who reads at a writer's turn reads what it has written."""
        return _turn(claim.schedule.tasks[user]), user not in writers

    users = sorted({*writers, *claim.readers[buffer_id]}, key=lambda user: (turn(user), user))
    places = [place for place, user in enumerate(users) if user in writers]
    for one, other in pairwise(users[place] for place in places):
        if turn(one) == turn(other):
            reject(f"{claim.name(one)} and {claim.name(other)} race on buffer {buffer_id}")
    for first, second in _neighbours(users, writers):
        if not before(first, second, 0):
            reject(f"{claim.name(first)} may run after {claim.name(second)} has touched buffer {buffer_id}")
    # From the last writer of an iteration to the first one of the next.
    first_writer, last_writer = users[places[0]], users[places[-1]]
    across = [(user, first_writer) for user in users[places[-1] :]]
    across += [(last_writer, user) for user in users[: places[0]]]
    for first, second in across:
        if not before(first, second, 1):
            names = f"{claim.name(second)} and {claim.name(first)}"
            reject(f"{names} of successive iterations race on buffer {buffer_id}")


def _neighbours(users: Sequence[TaskId], writers: Container[TaskId]) -> Iterator[tuple[TaskId, TaskId]]:
    """Pairs of ``users`` whose order implies that of every writer and every other user; as many as users, about.

    ``users`` come in the order that is meant.  A writer follows all readers since the writer before it, or that writer
    where there is none, and every reader follows the last writer: happens-before is transitive.
    """
    writer: TaskId | None = None
    readers: list[TaskId] = []
    for user in users:
        if user not in writers:
            readers.append(user)
            if writer is not None:
                yield writer, user
            continue
        yield from ((reader, user) for reader in readers)
        if writer is not None and not readers:
            yield writer, user
        writer, readers = user, []


def _turn(task: Task) -> tuple[int, int]:
    """Whose turn it is at a static buffer: micro-batch by micro-batch out, added or back, then the norm, then Adam.

    Parameters are read, by gathers and on the device, before this iteration's Adam writes them.
    """
    if task.kind in (TaskKind.CPU_ADAM, TaskKind.DEVICE_ADAM):
        return _AT_THE_END, 1
    if task.kind is TaskKind.GRADIENT_NORM:
        return _AT_THE_END, 0
    return task.micro_batch, task.kind in (TaskKind.GRADIENT_ACCUMULATE, TaskKind.ACTIVATION_FETCH)


def _check_slots(claim: Claim, before: Before) -> None:
    """Stays in one slot follow each other, and so do stays of one chunk, across iterations too."""
    by_slot: dict[int, list[Allocation]] = {}
    by_chunk: dict[ChunkId | None, list[Allocation]] = {}
    for buffer in claim.schedule.buffers:
        if buffer.slot is not None:
            by_slot.setdefault(buffer.slot, []).append(buffer)
            by_chunk.setdefault(buffer.chunk, []).append(buffer)
    for stays in (*by_slot.values(), *by_chunk.values()):
        # What comes over several lanes stands in the list after what it waits for.
        stays.sort(key=lambda buffer: claim.allocating[buffer.id])
        for stay, following in pairwise(stays):
            if not before(claim.freeing[stay.id], claim.allocating[following.id], 0):
                reject(f"{_both(stay, following)} at once")
        if not before(claim.freeing[stays[-1].id], claim.allocating[stays[0].id], 1):
            reject(f"{_both(stays[-1], stays[0])} at once when the next iteration begins")


def _both(stay: Allocation, other: Allocation) -> str:
    if stay.slot == other.slot:
        return f"slot {stay.slot} may hold chunks {stay.chunk} and {other.chunk}"
    return f"chunk {stay.chunk} may be in slots {stay.slot} and {other.slot}"


def _check_gathers(claim: Claim, before: Before, steps: list[list[TaskId]]) -> None:
    """No gather starts before the step ``prefetch_depth`` ahead of its first use has begun.

    With a depth beyond a whole iteration, it may still not start more than an iteration ahead.
    """
    step_of = {task: step for step, tasks in enumerate(steps) for task in tasks}
    alone = [task for task in claim.tasks_of(TaskKind.ALL_GATHER) if task.chunk in claim.sharded]
    for gather in (*claim.tasks_of(TaskKind.GATHER), *alone):
        step = min(step_of[user] for user in claim.on_compute(claim.readers[gather.writes[0]]))
        limit = max(step - claim.plan.prefetch_depth - 1, -len(steps))
        if not before(steps[limit][-1], gather.id, 0 if limit >= 0 else 1):
            reject(f"{gather.name} may run more than {claim.plan.prefetch_depth} blocks ahead")


def _check_gradients(claim: Claim, before: Before, steps: list[list[TaskId]]) -> None:
    """Gradients on their way are gone ``prefetch_depth + 1`` steps after their chunk's last backward.

    To the host, or into the part that stays on the device.
    """
    num_steps = len(steps)
    steps_each = num_steps // claim.plan.micro_batches
    alone = [task for task in claim.tasks_of(TaskKind.REDUCE_SCATTER) if task.chunk in claim.sharded]
    for offload in (*claim.tasks_of(TaskKind.GRADIENT_OFFLOAD), *alone):
        assert offload.chunk is not None
        last_step = steps_each * (offload.micro_batch + 1) - 1 - min(claim.layout.chunks[offload.chunk].blocks)
        distance, step = divmod(last_step + claim.plan.prefetch_depth + 1, num_steps)
        # Beyond the next iteration the chunk's own next gather, which waits for its Adam, is the tighter bound.
        if distance <= 1 and not before(offload.id, steps[step][0], distance):
            reject(f"the gradients of chunk {offload.chunk} may wait too long for {offload.name}")


def _check_swaps(claim: Claim, before: Before, steps: list[list[TaskId]]) -> None:
    """What is swapped is gone ``prefetch_depth + 1`` steps after its forward, and comes back no sooner than a chunk."""
    step_of = {task: step for step, tasks in enumerate(steps) for task in tasks}
    depth = claim.plan.prefetch_depth
    for task in claim.tasks_of(TaskKind.ACTIVATION_OFFLOAD):
        later = step_of[claim.allocating[task.reads[0]]] + depth + 1
        # Beyond this iteration the copy back, which waits for this one, is the tighter bound.
        if later < len(steps) and not before(task.id, steps[later][0], 0):
            reject(f"what block {task.section} swaps may wait too long for {task.name}")
    for task in claim.tasks_of(TaskKind.ACTIVATION_FETCH):
        limit = min(step_of[user] for user in claim.readers[task.writes[0]]) - depth - 1
        if limit >= 0 and not before(steps[limit][-1], task.id, 0):
            reject(f"{task.name} may run more than {depth} blocks ahead")


def _steps(claim: Claim) -> list[list[TaskId]]:
    """The compute tasks of every step: forwards of the blocks, then backwards with their recomputations."""
    steps: list[list[TaskId]] = []
    is_open = False
    for task in claim.schedule.tasks:
        if task.lane is not Lane.COMPUTE or task.section is None or isinstance(task.section, OuterSection):
            continue
        if is_open:
            steps[-1].append(task.id)
        else:
            steps.append([task.id])
        is_open = task.kind is TaskKind.RECOMPUTE
    return steps
