"""A schedule in the making: its tasks, its buffers, and the steps that the compiler's policies speak of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ..schema.schedule import Allocation, AllocationId, ChunkId, Content, Memory, Section, Task, TaskId, TaskKind
from ..schema.workload import Phase


class ScheduleBuilder:
    """Tasks in the order of the schedule.  Ids are places."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.buffers: list[Allocation] = []
        self.step_begin: list[TaskId] = []
        """The first compute task of every step."""
        self.step_end: list[TaskId] = []
        """The last compute task of every step."""
        self.micro_batch = 0
        """The one that tasks and buffers are added for."""

    def buffer(
        self,
        content: Content,
        memory: Memory,
        size_bytes: int,
        *,
        chunk: ChunkId | None = None,
        section: Section | None = None,
        slot: int | None = None,
        is_static: bool = False,
    ) -> AllocationId:
        """Add a buffer."""
        buffer_id = AllocationId(len(self.buffers))
        micro_batch = 0 if is_static else self.micro_batch
        self.buffers.append(
            Allocation(buffer_id, content, memory, size_bytes, chunk, section, micro_batch, slot, is_static)
        )
        return buffer_id

    def task(
        self,
        kind: TaskKind,
        *,
        section: Section | None = None,
        chunk: ChunkId | None = None,
        after: Iterable[TaskId] = (),
        makes: Iterable[AllocationId] = (),
        reads: Iterable[AllocationId] = (),
        updates: Iterable[AllocationId] = (),
        frees: Iterable[AllocationId] = (),
        phase: Phase | None = None,
        moved_bytes: int = 0,
        num_stepped: int = 0,
        stepped_bytes: int = 0,
        num_ranks: int = 1,
    ) -> TaskId:
        """Add a task; ``makes`` is allocated and written, ``updates`` was there before and is written."""
        task_id = TaskId(len(self.tasks))
        made = tuple(makes)
        self.tasks.append(
            Task(
                task_id,
                kind,
                section=section,
                chunk=chunk,
                micro_batch=self.micro_batch,
                after=ascending(after),
                allocates=made,
                frees=tuple(frees),
                reads=tuple(reads),
                writes=(*made, *updates),
                phase=phase,
                moved_bytes=moved_bytes,
                num_stepped=num_stepped,
                stepped_bytes=stepped_bytes,
                num_ranks=num_ranks,
            )
        )
        return task_id

    def end_step(self, begin: TaskId, end: TaskId) -> None:
        """State that the compute tasks from ``begin`` to ``end`` are the next step."""
        self.step_begin.append(begin)
        self.step_end.append(end)

    def wait_for_previous(self, waits: Mapping[TaskId, Sequence[TaskId]]) -> None:
        """Add what tasks wait for in the previous iteration."""
        for task_id, others in waits.items():
            if not others:
                continue
            task = self.tasks[task_id]
            self.tasks[task_id] = replace(task, after_previous=ascending((*task.after_previous, *others)))


def ascending(ids: Iterable[TaskId]) -> tuple[TaskId, ...]:
    """Each id once, in ascending order."""
    return tuple(sorted(set(ids)))
