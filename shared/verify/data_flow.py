"""Data flow: who uses a buffer before whom, whatever the tasks' durations."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from itertools import pairwise

from ..schema.schedule import Allocation, AllocationId, Task, TaskId, TaskKind
from .claim import Claim, reject

Turn = tuple[int, int]
"""When a task uses a static buffer, in the order that is meant."""

_AT_THE_END = 2**62
_TURNS_OF_OWNERS = {
    TaskKind.GRADIENTS_TO_OWNERS: -2,
    TaskKind.GRADIENTS_FROM_OWNERS: -1,
    TaskKind.PARAMETERS_TO_OWNERS: 2,
    TaskKind.PARAMETERS_FROM_OWNERS: 3,
}


def check_no_deadlock(claim: Claim) -> None:
    """Every task can start: waits and lanes form no cycle."""
    assert claim.order.num_tasks == len(claim.schedule.tasks)


def turn(task: Task) -> Turn:
    """Whose turn it is at a static buffer: micro-batch by micro-batch out, added or back, then the norm, then Adam.

    Gradients are projected before the norm, parameters behind Adam.  Those in parts come from their owners then, which
    they have been sent to before.

    A part of the gradients that stays is added up over groups of ranks after its reduce-scatter.

    Parameters are read, by gathers, from the disk and on the device, before this iteration's Adam writes them, or, on
    the disk, before it is written what Adam has made.
    """
    if task.kind in (TaskKind.GRADIENT_PROJECTION, TaskKind.HOST_GRADIENT_PROJECTION):
        return _AT_THE_END, -1
    if task.kind in (TaskKind.PARAMETER_PROJECTION, TaskKind.HOST_PARAMETER_PROJECTION):
        return _AT_THE_END, 2
    if task.kind in _TURNS_OF_OWNERS:
        return _AT_THE_END, _TURNS_OF_OWNERS[task.kind]
    if task.kind in (TaskKind.CPU_ADAM, TaskKind.DEVICE_ADAM, TaskKind.DISK_WRITE):
        return _AT_THE_END, 1
    if task.kind is TaskKind.GRADIENT_NORM:
        return _AT_THE_END, 0
    later = (TaskKind.GRADIENT_ACCUMULATE, TaskKind.ACTIVATION_FETCH, TaskKind.ALL_REDUCE)
    return task.micro_batch, task.kind in later


def check_data_flow(claim: Claim, *, turn_of: Callable[[Task], Turn] = turn) -> None:
    """Every buffer is there when it is used, and every read sees the write that is meant, for every timing.

    Buffers that come and go are allocated, written, read and freed in this order, and are gone before the next
    iteration allocates them again.  Static ones are used in the order of turns (``turn_of``), in successive
    iterations too.  A task that writes a buffer is alone with it.
    """
    for buffer in claim.schedule.buffers:
        if buffer.is_static:
            _check_versions(claim, buffer.id, turn_of)
        else:
            _check_lifetime(claim, buffer)


def _check_lifetime(claim: Claim, buffer: Allocation) -> None:
    """Allocated, written, read, freed, in this order; gone before the next iteration allocates it again."""
    allocating, freeing = claim.allocating[buffer.id], claim.freeing[buffer.id]
    writers, readers = claim.writers[buffer.id], claim.readers[buffer.id]
    what = f"buffer {buffer.id} ({buffer.content})"
    for user in (*writers, *readers, freeing):
        if user != allocating and not claim.before(allocating, user):
            reject(f"{claim.name(user)} may use {what} before {claim.name(allocating)} allocates it")
        if user != freeing and not claim.before(user, freeing):
            reject(f"{claim.name(freeing)} may free {what} while {claim.name(user)} uses it")
    if writers[:1] != [allocating]:
        reject(f"{what} is not written by {claim.name(allocating)}, which allocates it")
    if any(writer < allocating for writer in writers[1:]):
        reject(f"{claim.name(allocating)} and {claim.name(min(writers))} race on {what}")
    for first, second in _neighbours(sorted({*writers, *readers} - {allocating}), set(writers)):
        if not claim.before(first, second):
            reject(f"{claim.name(first)} and {claim.name(second)} race on {what}")
    if not claim.before(freeing, allocating, 1):
        reject(f"{what} may be allocated again before {claim.name(freeing)} frees it")


def _check_versions(claim: Claim, buffer_id: AllocationId, turn_of: Callable[[Task], Turn]) -> None:
    """Nothing touches a static buffer while it is written, and everyone sees the version that is meant."""
    writers = set(claim.writers[buffer_id])
    if not writers:
        return

    def place_of(user: TaskId) -> tuple[Turn, bool]:
        """Who reads at a writer's turn reads what it has written."""
        return turn_of(claim.schedule.tasks[user]), user not in writers

    users = sorted({*writers, *claim.readers[buffer_id]}, key=lambda user: (place_of(user), user))
    places = [place for place, user in enumerate(users) if user in writers]
    for one, other in pairwise(users[place] for place in places):
        if place_of(one) == place_of(other):
            reject(f"{claim.name(one)} and {claim.name(other)} race on buffer {buffer_id}")
    for first, second in _neighbours(users, writers):
        if not claim.before(first, second):
            reject(f"{claim.name(first)} may run after {claim.name(second)} has touched buffer {buffer_id}")
    # From the last writer of an iteration to the first one of the next.
    first_writer, last_writer = users[places[0]], users[places[-1]]
    across = [(user, first_writer) for user in users[places[-1] :]]
    across += [(last_writer, user) for user in users[: places[0]]]
    for first, second in across:
        if not claim.before(first, second, 1):
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
