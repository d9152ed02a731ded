"""Single faults of a schedule: everything that one slip in a compiler, or one flipped field in a file, could do.

*Data faults* change what a task or buffer is; none of them may pass.  *Order faults* change only who waits for whom,
or which slot a stay has; an oracle decides whether they harm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Any

from protwin.shared.schema.schedule import (
    Allocation,
    AllocationId,
    ChunkId,
    Content,
    Lane,
    Memory,
    OuterSection,
    RankAxis,
    Schedule,
    Section,
    Task,
    TaskId,
    TaskKind,
)
from protwin.shared.schema.workload import BlockId, Phase


@dataclass(frozen=True)
class Fault:
    """One change, made on demand."""

    name: str
    make: Callable[[], Schedule]

    def __repr__(self) -> str:
        return self.name


def with_task(schedule: Schedule, task: TaskId, **changes: Any) -> Schedule:
    """The schedule with some fields of one task changed."""
    tasks = list(schedule.tasks)
    tasks[task] = replace(tasks[task], **changes)
    return replace(schedule, tasks=tuple(tasks))


def with_buffer(schedule: Schedule, buffer: AllocationId, **changes: Any) -> Schedule:
    """The schedule with some fields of one buffer changed."""
    buffers = list(schedule.buffers)
    buffers[buffer] = replace(buffers[buffer], **changes)
    return replace(schedule, buffers=tuple(buffers))


def renumbered(schedule: Schedule, tasks: Sequence[Task]) -> Schedule:
    """The schedule with ``tasks`` in this order, under ids that are places again; waits for absent tasks go."""
    place = {task.id: TaskId(index) for index, task in enumerate(tasks)}

    def moved(ids: Iterable[TaskId]) -> tuple[TaskId, ...]:
        return tuple(place[task] for task in ids if task in place)

    return replace(
        schedule,
        tasks=tuple(
            replace(task, id=place[task.id], after=moved(task.after), after_previous=moved(task.after_previous))
            for task in tasks
        ),
    )


def without(items: Sequence[Any], item: Any) -> tuple[Any, ...]:
    """``items`` without the first ``item``."""
    index = items.index(item)
    return (*items[:index], *items[index + 1 :])


# -- order -----------------------------------------------------------------------------------------------------------


def dropped_dependencies(schedule: Schedule) -> Iterator[Fault]:
    """Every wait, left out."""
    for task in schedule.tasks:
        for field in ("after", "after_previous"):
            for other in getattr(task, field):
                yield Fault(
                    f"{task.id} {task.name} no longer waits ({field}) for {other} {schedule.tasks[other].name}",
                    lambda task=task, field=field, other=other: with_task(  # type: ignore[misc]
                        schedule, task.id, **{field: without(getattr(task, field), other)}
                    ),
                )


def retargeted_dependencies(schedule: Schedule) -> Iterator[Fault]:
    """Every wait, aimed at the task before or after the right one, or put off to the previous iteration."""
    for task in schedule.tasks:
        for field in ("after", "after_previous"):
            for other in getattr(task, field):
                for target in (other - 1, other + 1):
                    if 0 <= target < len(schedule.tasks) and (field == "after_previous" or target < task.id):
                        yield Fault(
                            f"{task.id} {task.name} waits ({field}) for {target}, not for {other}",
                            lambda task=task, field=field, other=other, target=target: with_task(  # type: ignore[misc]
                                schedule, task.id, **{field: (*without(getattr(task, field), other), target)}
                            ),
                        )
        for other in task.after:
            yield Fault(
                f"{task.id} {task.name} waits for {other} of the previous iteration",
                lambda task=task, other=other: with_task(  # type: ignore[misc]
                    schedule,
                    task.id,
                    after=without(task.after, other),
                    after_previous=(*without((*task.after_previous, other), other), other),
                ),
            )


def swapped_neighbours(schedule: Schedule) -> Iterator[Fault]:
    """Every two tasks that follow each other in a lane, exchanged; the list waits for nothing to come, if it can."""
    for program in schedule.lanes.values():
        for first, second in pairwise(program):

            def swap(first: TaskId = first, second: TaskId = second) -> Schedule:
                tasks = list(schedule.tasks)
                tasks[first], tasks[second] = tasks[second], tasks[first]
                return renumbered(schedule, _listed_after_waits(tasks))

            yield Fault(f"{schedule.tasks[first].name} and {schedule.tasks[second].name} swapped", swap)


def postponed_tasks(schedule: Schedule) -> Iterator[Fault]:
    """Every wait, turned round: what was waited for waits itself, and those that read its data later wait for it.

    The task that comes first then waits for what the other waited for.
    """
    for task in schedule.tasks:
        for other in task.after:

            def postpone(task: Task = task, other: TaskId = other) -> Schedule:
                late = schedule.tasks[other]
                changed = with_task(schedule, task.id, after=tuple({*task.after, *late.after} - {other}))
                changed = with_task(changed, other, after=(*late.after, task.id))
                for user in schedule.tasks[task.id + 1 :]:
                    if not {*late.writes}.isdisjoint(user.reads):
                        changed = with_task(changed, user.id, after=(*user.after, other))
                return renumbered(changed, _listed_after_waits(changed.tasks))

            yield Fault(f"{other} {schedule.tasks[other].name} comes after {task.id} {task.name}", postpone)


def _listed_after_waits(tasks: Sequence[Task]) -> Sequence[Task]:
    """The tasks with each lane in this order and every task after those it waits for; as they are if they deadlock."""
    waiting = {lane: [task for task in tasks if task.lane is lane] for lane in Lane}
    listed: dict[TaskId, Task] = {}
    while any(waiting.values()):
        ready = [queue for queue in waiting.values() if queue and all(other in listed for other in queue[0].after)]
        if not ready:
            return tasks
        task = min(ready, key=lambda queue: queue[0].id).pop(0)
        listed[task.id] = task
    return tuple(listed.values())


def merged_slots(schedule: Schedule) -> Iterator[Fault]:
    """Every two places that share out one memory, made one; every stay, put into another of its places."""
    pools: dict[object, list[Allocation]] = {}
    for buffer in schedule.buffers:
        if buffer.slot is not None and not buffer.is_static:
            # On the device, all that is gathered shares slots; on the host, each content has places of its own.
            pools.setdefault((buffer.memory, buffer.memory is Memory.DEVICE or buffer.content), []).append(buffer)
    for stays in pools.values():
        used = sorted({buffer.slot for buffer in stays if buffer.slot is not None})
        for kept, gone in combinations(used, 2):
            moved = {buffer.id for buffer in stays if buffer.slot == gone}
            yield Fault(
                f"slot {gone} merged into {kept}",
                lambda kept=kept, moved=moved: replace(  # type: ignore[misc]
                    schedule,
                    buffers=tuple(replace(b, slot=kept) if b.id in moved else b for b in schedule.buffers),
                ),
            )
        for buffer in stays:
            for slot in used:
                if buffer.slot != slot:
                    yield Fault(
                        f"buffer {buffer.id} in slot {slot}, not {buffer.slot}",
                        lambda buffer=buffer, slot=slot: with_buffer(schedule, buffer.id, slot=slot),  # type: ignore[misc]
                    )


def order_faults(schedule: Schedule) -> list[Fault]:
    """All order faults but dropped dependencies."""
    return [*retargeted_dependencies(schedule), *swapped_neighbours(schedule), *merged_slots(schedule)]


# -- data ------------------------------------------------------------------------------------------------------------


def missing_tasks(schedule: Schedule) -> Iterator[Fault]:
    """Every task, left out or listed twice."""
    for task in schedule.tasks:
        yield Fault(
            f"{task.id} {task.name} is missing",
            lambda task=task: renumbered(schedule, without(schedule.tasks, task)),  # type: ignore[misc]
        )
        yield Fault(
            f"{task.id} {task.name} occurs twice",
            lambda task=task: replace(  # type: ignore[misc]
                schedule, tasks=(*schedule.tasks, replace(task, id=TaskId(len(schedule.tasks))))
            ),
        )


def changed_buffer_lists(schedule: Schedule) -> Iterator[Fault]:
    """Every buffer that a task names, left out, exchanged for another, or named by one more task."""
    last = len(schedule.buffers)
    for task in schedule.tasks:
        for field in ("allocates", "frees", "reads", "writes"):
            named: tuple[AllocationId, ...] = getattr(task, field)
            for buffer in named:
                rest = without(named, buffer)
                yield Fault(
                    f"{task.id} {task.name} {field} all but {buffer}",
                    lambda task=task, field=field, rest=rest: with_task(schedule, task.id, **{field: rest}),  # type: ignore[misc]
                )
                for other in (buffer - 1, buffer + 1, _namesake(schedule, buffer)):
                    if other is not None and 0 <= other <= last and other not in named:
                        yield Fault(
                            f"{task.id} {task.name} {field} {other}, not {buffer}",
                            lambda task=task, field=field, rest=rest, other=other: with_task(  # type: ignore[misc]
                                schedule, task.id, **{field: (*rest, other)}
                            ),
                        )
            for buffer in {
                *task.reads,
                *task.allocates,
                *task.frees,
                AllocationId(task.id % last),
                AllocationId(-1),
            } - {*named}:
                yield Fault(
                    f"{task.id} {task.name} also {field} {buffer}",
                    lambda task=task, field=field, named=named, buffer=buffer: with_task(  # type: ignore[misc]
                        schedule, task.id, **{field: (*named, buffer)}
                    ),
                )


def _namesake(schedule: Schedule, buffer_id: AllocationId) -> AllocationId | None:
    """Another buffer for the same thing: a second gather of the chunk, its home, its staging buffer."""
    buffer = schedule.buffers[buffer_id]
    for other in schedule.buffers:
        if other.id != buffer_id and (other.content, other.chunk) == (buffer.content, buffer.chunk):
            return other.id
    return None


def moved_frees(schedule: Schedule) -> Iterator[Fault]:
    """Every free, moved to each other task; every use, repeated by the task after the free."""
    for task in schedule.tasks:
        for buffer in task.frees:
            stripped = with_task(schedule, task.id, frees=without(task.frees, buffer))
            for other in schedule.tasks:
                if other.id != task.id:
                    yield Fault(
                        f"{other.id} {other.name} frees {buffer} instead of {task.id} {task.name}",
                        lambda stripped=stripped, other=other, buffer=buffer: with_task(  # type: ignore[misc]
                            stripped, other.id, frees=(*other.frees, buffer)
                        ),
                    )
            if task.id + 1 < len(schedule.tasks):
                later = schedule.tasks[task.id + 1]
                yield Fault(
                    f"{later.id} {later.name} reads {buffer} after it has gone",
                    lambda later=later, buffer=buffer: with_task(  # type: ignore[misc]
                        schedule, later.id, reads=(*later.reads, buffer)
                    ),
                )


def merged_buffers(schedule: Schedule) -> Iterator[Fault]:
    """Every buffer, replaced everywhere by its neighbour or by another buffer for the same thing."""
    for buffer in schedule.buffers:
        for other in {AllocationId(max(0, buffer.id - 1)), _namesake(schedule, buffer.id)} - {buffer.id, None}:
            assert other is not None
            if not any(buffer.id in (*task.reads, *task.writes) for task in schedule.tasks):
                continue

            def merge(gone: AllocationId = buffer.id, kept: AllocationId = other) -> Schedule:
                def renamed(ids: Iterable[AllocationId]) -> tuple[AllocationId, ...]:
                    return tuple(dict.fromkeys(kept if b == gone else b for b in ids))

                return replace(
                    schedule,
                    tasks=tuple(
                        replace(
                            task,
                            allocates=renamed(task.allocates),
                            frees=renamed(task.frees),
                            reads=renamed(task.reads),
                            writes=renamed(task.writes),
                        )
                        for task in schedule.tasks
                    ),
                )

            yield Fault(f"buffer {other} stands for {buffer.id}", merge)


def changed_task_fields(schedule: Schedule) -> Iterator[Fault]:
    """Every field of every task but its waits and buffers."""
    other_phase = Phase(net_bytes=12_345, curve=((1.0, 54_321),))
    for task in schedule.tasks:
        changes: list[dict[str, Any]] = [
            *({"kind": kind} for kind in TaskKind if kind is not task.kind),
            *({"section": section} for section in _sections(schedule) if section != task.section),
            *({"chunk": chunk} for chunk in (None, ChunkId(0), ChunkId(1), ChunkId(99)) if chunk != task.chunk),
            *(
                {field: getattr(task, field) + 1}
                for field in (
                    "moved_bytes",
                    "num_stepped",
                    "stepped_bytes",
                    "num_tensors",
                    "flops",
                    "num_ranks",
                    "arrived_bytes",
                )
            ),
            *({"axis": axis} for axis in RankAxis if axis is not task.axis),
            {"micro_batch": task.micro_batch + 1},
            {"phase": other_phase if task.phase != other_phase else None},
            {"stated_s": 1.0},
            {"id": TaskId(task.id + 1)},
            {"after": (*task.after, task.id)},
            {"after": (*task.after, TaskId(len(schedule.tasks)))},
            {"after_previous": (*task.after_previous, TaskId(-1))},
        ]
        for change in changes:
            yield Fault(
                f"{task.id} {task.name} with {change}",
                lambda task=task, change=change: with_task(schedule, task.id, **change),  # type: ignore[misc]
            )


def changed_buffer_fields(schedule: Schedule) -> Iterator[Fault]:
    """Every field of every buffer but valid slots."""
    for buffer in schedule.buffers:
        changes: list[dict[str, Any]] = [
            *({"content": content} for content in Content if content is not buffer.content),
            *({"memory": memory} for memory in Memory if memory is not buffer.memory),
            *({"size_bytes": size} for size in (buffer.size_bytes + 1, buffer.size_bytes - 1, -buffer.size_bytes - 1)),
            *({"section": section} for section in _sections(schedule) if section != buffer.section),
            *({"chunk": chunk} for chunk in (None, ChunkId(0), ChunkId(1), ChunkId(99)) if chunk != buffer.chunk),
            {"micro_batch": buffer.micro_batch + 1},
            {"slot": schedule.num_slots if buffer.slot is not None else 0},
            {"slot": None if buffer.slot is not None else -1},
            {"is_static": not buffer.is_static},
            {"id": AllocationId(buffer.id + 1)},
        ]
        for change in changes:
            yield Fault(
                f"buffer {buffer.id} ({buffer.content}) with {change}",
                lambda buffer=buffer, change=change: with_buffer(schedule, buffer.id, **change),  # type: ignore[misc]
            )
        yield Fault(
            f"buffer {buffer.id} ({buffer.content}) listed twice",
            lambda buffer=buffer: replace(  # type: ignore[misc]
                schedule, buffers=(*schedule.buffers, replace(buffer, id=AllocationId(len(schedule.buffers))))
            ),
        )


def _sections(schedule: Schedule) -> list[Section | None]:
    return [None, *OuterSection, *(BlockId(block) for block in range(-1, schedule.num_blocks + 1))]


def changed_heads(schedule: Schedule) -> Iterator[Fault]:
    """Every field of the schedule itself."""
    yield Fault("another plan", lambda: replace(schedule, plan_id="0" * 16))
    for field in ("num_slots", "num_blocks", "prefetch_depth"):
        yield Fault(
            f"another {field}",
            lambda field=field: replace(schedule, **{field: getattr(schedule, field) + 1}),  # type: ignore[misc]
        )
    groups = None if schedule.shard_ranks is not None else 2
    yield Fault("other shard groups", lambda: replace(schedule, shard_ranks=groups))
    yield Fault("no tasks", lambda: replace(schedule, tasks=()))
    yield Fault("no buffers", lambda: replace(schedule, buffers=()))


DATA_FAULTS: tuple[Callable[[Schedule], Iterator[Fault]], ...] = (
    missing_tasks,
    changed_buffer_lists,
    moved_frees,
    merged_buffers,
    changed_task_fields,
    changed_buffer_fields,
    changed_heads,
)
