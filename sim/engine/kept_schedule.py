"""The schedule of a few micro-batches, which stands for one of many; see [Note: Folded iterations]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...shared.compile.compile import POLICIES, Policies, compile_schedule
from ...shared.layout.layout import Layout
from ...shared.schema.plan import Plan
from ...shared.schema.schedule import AllocationId, Lane, Schedule, Task, TaskId, TaskKind
from ...shared.schema.workload import Workload
from .folding import Repeating, kept_micro_batches


@dataclass(frozen=True)
class KeptSchedule:
    """A schedule whose middle micro-batches are alike, with others of the same kind left out."""

    schedule: Schedule
    num_left_out: int
    """Micro-batches."""
    repeating: Repeating
    """Lanes in the order of ``Lane``."""
    num_tasks: int
    """Of one of them, on all lanes: how much later the same task of the next one stands in the schedule."""
    left_over: tuple[AllocationId, ...]
    """What the last of the repeated micro-batches leaves on the device until the step."""

    @property
    def left_over_bytes(self) -> int:
        """By how much the level rises from one micro-batch to the next."""
        return _bytes(self.schedule, self.left_over)

    def with_all_left_over(self, rounded_bytes: Callable[[int], int] = int) -> Schedule:
        """The schedule with everything on the device that those left out leave until the step.

        ``rounded_bytes``: what a buffer takes of the device.
        """
        if not self.left_over_bytes:
            return self.schedule
        buffers = list(self.schedule.buffers)
        for buffer in self.left_over:
            size_bytes = buffers[buffer].size_bytes
            whole_bytes = size_bytes + self.num_left_out * rounded_bytes(size_bytes)
            buffers[buffer] = replace(buffers[buffer], size_bytes=whole_bytes)
        return replace(self.schedule, buffers=tuple(buffers))


def memory_schedule(
    plan: Plan,
    workload: Workload,
    layout: Layout | None = None,
    *,
    policies: Policies | None = None,
    rounded_bytes: Callable[[int], int] = int,
) -> Schedule:
    """A schedule that takes as much of every memory as that of ``plan``: of few micro-batches where these tell of all.

    ``rounded_bytes``: what a buffer takes of the device.  Errors as of ``compile_schedule``.
    """
    policies = policies or POLICIES[plan.method]
    positions = policies.sections.positions_of(workload)
    num_kept = kept_micro_batches(plan.micro_batches, positions.micro_steps, plan.prefetch_depth)
    if num_kept < plan.micro_batches:
        few = compile_schedule(plan.model_copy(update={"micro_batches": num_kept}), workload, layout, policies=policies)
        kept = kept_schedule(few, plan.micro_batches - num_kept)
        if kept is not None:
            return kept.with_all_left_over(rounded_bytes)
    return compile_schedule(plan, workload, layout, policies=policies)


def kept_schedule(schedule: Schedule, num_left_out: int) -> KeptSchedule | None:
    """``schedule`` as one that stands for so many micro-batches more; None if its middle ones are not alike.

    The third and the second from last must have the same tasks, which name the same tasks one micro-batch on, move the
    same bytes, and put the same chunks into the same slots: then all between would be like them.
    """
    last = schedule.micro_batches - 2
    one, other = (_tasks_of(schedule, micro_batch) for micro_batch in (last - 1, last))
    num_tasks = len(other)
    if [_kind(schedule, task, num_tasks) for task in one] != [_kind(schedule, task) for task in other]:
        return None
    lanes = [task.lane for task in other]
    compute = schedule.lanes[Lane.COMPUTE]
    left_over, following = (_left_over(schedule, of) for of in (one, other))
    if _bytes(schedule, left_over) != _bytes(schedule, following):
        return None
    return KeptSchedule(
        schedule=schedule,
        num_left_out=num_left_out,
        repeating=Repeating(
            tuple(lanes.count(lane) for lane in Lane),
            max(place for place, task in enumerate(compute) if schedule.tasks[task].micro_batch == last - 1),
            tuple(_until(schedule.lanes[lane], other[0].id, lanes.count(lane), num_tasks) for lane in Lane),
        ),
        num_tasks=num_tasks,
        left_over=left_over,
    )


def _until(program: Sequence[TaskId], first: TaskId, length: int, num_tasks: int) -> int:
    """The place of the first task, from ``first`` on, that is not the one of a micro-batch before, counted on."""
    places = (place for place, task in enumerate(program) if task >= first)
    others = (place for place in places if place < length or program[place] != program[place - length] + num_tasks)
    return next(others, len(program))


def _tasks_of(schedule: Schedule, micro_batch: int) -> list[Task]:
    return [task for task in schedule.tasks if task.micro_batch == micro_batch]


def _kind(schedule: Schedule, task: Task, num_later: int = 0) -> tuple[object, ...]:
    """All that a task is but for its micro-batch; as it would be so many tasks later in the schedule."""

    def contents(buffers: tuple[AllocationId, ...]) -> tuple[object, ...]:
        found = (schedule.buffers[buffer] for buffer in buffers)
        return tuple((one.content, one.memory, one.size_bytes, one.chunk, one.section, one.slot) for one in found)

    return (
        task.id + num_later,
        task.kind,
        task.section,
        task.chunk,
        tuple(other + num_later for other in task.after),
        task.after_previous,
        contents(task.allocates),
        contents(task.frees),
        task.phase,
        (task.moved_bytes, task.num_stepped, task.stepped_bytes, task.num_tensors, task.flops, task.stated_s),
        (task.num_ranks, task.axis, task.arrived_bytes),
    )


def _left_over(schedule: Schedule, tasks: list[Task]) -> tuple[AllocationId, ...]:
    """What is left until the step, by a later micro-batch than the first: gradients are added to those of that one."""
    (step,) = (task for task in schedule.tasks if task.kind is TaskKind.DEVICE_ADAM)
    freed = frozenset(step.frees)
    return tuple(buffer for task in tasks for buffer in task.allocates if buffer in freed)


def _bytes(schedule: Schedule, buffers: tuple[AllocationId, ...]) -> int:
    return sum(schedule.buffers[buffer].size_bytes for buffer in buffers)
