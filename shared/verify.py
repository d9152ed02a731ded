"""Proof that a schedule is safe, before anything runs.

The verifier shares no code with the compiler beyond the data types: it derives what must hold from plan, workload and
layout, and checks it with the happens-before relation of the unrolled program, so that it holds for every timing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from .errors import ScheduleError
from .layout import ChunkId, Layout
from .memory_bound import guaranteed_device_peak
from .order import HappensBefore, Occurrence, OrderError
from .plan import ActivationMode, Plan
from .schedule import (
    Buffer,
    BufferId,
    Content,
    Lane,
    Memory,
    Part,
    Schedule,
    Section,
    Task,
    TaskId,
    TaskKind,
)
from .units import format_bytes
from .workload import BlockId, Workload

_ITERATIONS = 4


def verify_schedule(
    schedule: Schedule,
    plan: Plan,
    workload: Workload,
    layout: Layout,
    *,
    device_limit_bytes: int | None = None,
    pinned_limit_bytes: int | None = None,
) -> None:
    """Raise ScheduleError unless ``schedule`` carries out ``plan`` safely for every timing.

    Checked: the compute lane runs the model's sections in order; lanes cannot deadlock; every buffer is allocated
    before it is used and freed after its last use, once; every read sees the write that it is meant to see; compute
    has its chunks resident and current; every trainable chunk is stepped once by one Adam, after all of its
    gradients; buffers of one slot never overlap; gathers and gradients keep to the prefetch window; the memory that
    no timing can exceed stays under the limits.
    """
    _Verifier(schedule, plan, workload, layout).run(device_limit_bytes, pinned_limit_bytes)


class _Verifier:
    def __init__(self, schedule: Schedule, plan: Plan, workload: Workload, layout: Layout) -> None:
        self.schedule = schedule
        self.plan = plan
        self.workload = workload
        self.layout = layout
        self.modes = plan.modes(workload.num_blocks)
        self.persistent = layout.persistent(plan.n_persist)

    def run(self, device_limit_bytes: int | None, pinned_limit_bytes: int | None) -> None:
        self._check_program()
        try:
            self.order = HappensBefore(self.schedule, _ITERATIONS)
        except OrderError as error:
            raise ScheduleError(f"the schedule deadlocks: {error}.") from error
        self._collect_accesses()
        self._check_lifetimes()
        self._check_dataflow()
        self._check_sizes()
        self._check_parameters()
        self._check_updates()
        self._check_slots()
        self._check_window()
        self._check_limits(device_limit_bytes, pinned_limit_bytes)

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _buffer(self, buffer_id: BufferId) -> Buffer:
        return self.schedule.buffers[buffer_id]

    def _fail(self, message: str) -> None:
        raise ScheduleError(f"the schedule is unsafe: {message}.")

    def _ordered(self, first: TaskId, second: TaskId, *, distance: int = 0) -> bool:
        """Whether ``first`` surely ends before ``second`` starts ``distance`` iterations later."""
        return self.order.before(Occurrence(1, first), Occurrence(1 + distance, second))

    def _name(self, task_id: TaskId) -> str:
        return self.schedule.tasks[task_id].name

    def _of_kind(self, kind: TaskKind) -> Iterator[Task]:
        return (task for task in self.schedule.tasks if task.kind is kind)

    # -- the program -------------------------------------------------------------------------------------------------

    def _check_program(self) -> None:
        """Ids are places; the compute lane is forward through all sections and backward through them."""
        for place, task in enumerate(self.schedule.tasks):
            if task.id != place:
                self._fail(f"task {task.id} stands at place {place}")
        for place, buffer in enumerate(self.schedule.buffers):
            if buffer.id != place:
                self._fail(f"buffer {buffer.id} stands at place {place}")
        for task in self.schedule.tasks:
            for buffer_id in (*task.allocates, *task.frees, *task.reads, *task.writes):
                if not 0 <= buffer_id < len(self.schedule.buffers):
                    self._fail(f"{task.name} names buffer {buffer_id}, which does not exist")
        found = [
            (task.kind, task.section) for task in self.schedule.tasks if task.lane is Lane.COMPUTE
        ]
        expected: list[tuple[TaskKind, Section | None]] = [(TaskKind.FORWARD, Part.PROLOGUE)]
        blocks = [BlockId(block) for block in range(self.workload.num_blocks)]
        expected += [(TaskKind.FORWARD, block) for block in blocks]
        expected += [(TaskKind.FORWARD, Part.EPILOGUE), (TaskKind.BACKWARD, Part.EPILOGUE)]
        for block in reversed(blocks):
            if self.modes[block] is ActivationMode.CHECKPOINT:
                expected.append((TaskKind.RECOMPUTE, block))
            expected.append((TaskKind.BACKWARD, block))
        expected += [(TaskKind.BACKWARD, Part.PROLOGUE), (TaskKind.DEVICE_ADAM, None)]
        if found != expected:
            place = next(
                (i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b),
                min(len(found), len(expected)),
            )
            shown = [" ".join(str(x) for x in e[place]) if place < len(e) else "nothing" for e in (found, expected)]
            self._fail(f"compute task {place} is {shown[0]}, the plan asks for {shown[1]}")

    def _collect_accesses(self) -> None:
        self.allocated_by: dict[BufferId, TaskId] = {}
        self.freed_by: dict[BufferId, TaskId] = {}
        self.readers: dict[BufferId, list[TaskId]] = {b.id: [] for b in self.schedule.buffers}
        self.writers: dict[BufferId, list[TaskId]] = {b.id: [] for b in self.schedule.buffers}
        for task in self.schedule.tasks:
            for buffer_id in task.allocates:
                if buffer_id in self.allocated_by or self._buffer(buffer_id).is_static:
                    self._fail(f"{task.name} allocates buffer {buffer_id}, which is there already")
                self.allocated_by[buffer_id] = task.id
            for buffer_id in task.frees:
                if buffer_id in self.freed_by or self._buffer(buffer_id).is_static:
                    self._fail(f"{task.name} frees buffer {buffer_id} a second time, or it is static")
                self.freed_by[buffer_id] = task.id
            for buffer_id in task.reads:
                self.readers[buffer_id].append(task.id)
            for buffer_id in task.writes:
                self.writers[buffer_id].append(task.id)

    def _check_lifetimes(self) -> None:
        """Allocated, then used, then freed; everything that is allocated is freed in the same iteration."""
        for buffer in self.schedule.buffers:
            if buffer.is_static:
                continue
            allocating, freeing = self.allocated_by.get(buffer.id), self.freed_by.get(buffer.id)
            if allocating is None or freeing is None:
                self._fail(f"buffer {buffer.id} ({buffer.content}) is never {'allocated' if allocating is None else 'freed'}")
                return
            for user in (*self.readers[buffer.id], *self.writers[buffer.id], freeing):
                if user != allocating and not self._ordered(allocating, user):
                    self._fail(f"{self._name(user)} may use buffer {buffer.id} before {self._name(allocating)} allocates it")
                if user != freeing and not self._ordered(user, freeing):
                    self._fail(f"{self._name(freeing)} may free buffer {buffer.id} while {self._name(user)} uses it")

    def _check_dataflow(self) -> None:
        """Every access is ordered against every write of the same buffer; what is read was written."""
        for buffer in self.schedule.buffers:
            writers = self.writers[buffer.id]
            accesses = sorted({*writers, *self.readers[buffer.id]})
            if self.readers[buffer.id] and not writers and not buffer.is_static:
                self._fail(f"buffer {buffer.id} ({buffer.content}) is read but never written")
            for writer in writers:
                for other in accesses:
                    if other == writer:
                        continue
                    if not (self._ordered(writer, other) or self._ordered(other, writer)):
                        self._fail(f"{self._name(writer)} and {self._name(other)} race on buffer {buffer.id}")
                for other in accesses:
                    if buffer.is_static and not self._ordered(other, writer, distance=1):
                        self._fail(
                            f"{self._name(writer)} may write buffer {buffer.id} of the next iteration while "
                            f"{self._name(other)} uses it"
                        )
                    if buffer.is_static and not self._ordered(writer, other, distance=1):
                        self._fail(
                            f"{self._name(other)} may use buffer {buffer.id} before the previous iteration's "
                            f"{self._name(writer)} has written it"
                        )
            if not buffer.is_static:
                for reader in self.readers[buffer.id]:
                    if not any(writer == reader or self._ordered(writer, reader) for writer in writers):
                        self._fail(f"{self._name(reader)} reads buffer {buffer.id} before it is written")

    def _check_sizes(self) -> None:
        """Buffers of chunks and copies have the layout's sizes."""
        for buffer in self.schedule.buffers:
            if buffer.content is Content.PARAMETERS:
                assert buffer.chunk is not None
                if buffer.size_bytes != self.layout.chunks[buffer.chunk].size_bytes:
                    self._fail(f"buffer {buffer.id} has another size than chunk {buffer.chunk}")
        for task in self._of_kind(TaskKind.GATHER):
            if task.moved_bytes != self.layout.chunks[_chunk(task)].size_bytes:
                self._fail(f"{task.name} moves {task.moved_bytes} bytes")

    # -- chunks ------------------------------------------------------------------------------------------------------

    def _check_parameters(self) -> None:
        """Each section reads its chunks on the device: persistent ones in place, others from a gather."""
        homes = {
            buffer.chunk: buffer
            for buffer in self.schedule.buffers
            if buffer.content is Content.PARAMETERS and buffer.is_static
        }
        for chunk in self.layout.chunks:
            expected = Memory.DEVICE if chunk.id in self.persistent else Memory.PINNED_HOST
            home = homes.get(chunk.id)
            if home is None or home.memory is not expected:
                self._fail(f"chunk {chunk.id} has no home in {expected} memory")
        for task in self.schedule.tasks:
            if task.kind in (TaskKind.FORWARD, TaskKind.RECOMPUTE, TaskKind.BACKWARD):
                self._check_reads(task)
        for task in self._of_kind(TaskKind.GATHER):
            chunk = _chunk(task)
            home = homes[chunk]
            written = [self._buffer(b) for b in task.writes]
            if home.id not in task.reads or home.memory is not Memory.PINNED_HOST:
                self._fail(f"{task.name} does not read the chunk's home")
            if [b.chunk for b in written] != [chunk] or written[0].content is not Content.PARAMETERS:
                self._fail(f"{task.name} writes something else than chunk {chunk}")

    def _check_reads(self, task: Task) -> None:
        reads = [self._buffer(b) for b in task.reads]
        parameters = {b.chunk for b in reads if b.content is Content.PARAMETERS and b.memory is Memory.DEVICE}
        assert task.section is not None
        if isinstance(task.section, Part):
            needed: set[ChunkId] = set(self.layout.unowned)
        else:
            needed = set(self.layout.chunks_of_block[task.section])
        missing = needed - parameters
        if missing:
            self._fail(f"{task.name} runs without chunk {min(missing)}")
        if any(b.memory is not Memory.DEVICE for b in reads):
            self._fail(f"{task.name} reads host memory")
        contents = Counter(b.content for b in reads)
        if task.kind is TaskKind.BACKWARD:
            expected_input = 0 if task.section is Part.EPILOGUE else 1
            if contents[Content.INCOMING_GRADIENT] != expected_input:
                self._fail(f"{task.name} reads {contents[Content.INCOMING_GRADIENT]} incoming gradients")
            if task.section is not Part.PROLOGUE and contents[Content.ACTIVATIONS] != 1:
                self._fail(f"{task.name} reads {contents[Content.ACTIVATIONS]} saved activations")
        if task.section is not Part.PROLOGUE and contents[Content.OUTPUT] != 1:
            self._fail(f"{task.name} reads {contents[Content.OUTPUT]} outputs of the section before")

    def _check_updates(self) -> None:
        """One Adam per trainable chunk, after all its gradients, and seen by the next iteration's first use."""
        device_adam = next(self._of_kind(TaskKind.DEVICE_ADAM))
        adams = {_chunk(task): task for task in self._of_kind(TaskKind.CPU_ADAM)}
        offloads = {_chunk(task): task for task in self._of_kind(TaskKind.GRADIENT_OFFLOAD)}
        for kind, tasks in ((TaskKind.CPU_ADAM, adams), (TaskKind.GRADIENT_OFFLOAD, offloads)):
            if len(tasks) != sum(1 for _ in self._of_kind(kind)):
                self._fail(f"a chunk has two tasks of kind {kind}")
        for chunk in self.layout.chunks:
            is_offloaded = chunk.id not in self.persistent and chunk.is_trainable
            if is_offloaded != (chunk.id in adams) or is_offloaded != (chunk.id in offloads):
                self._fail(f"chunk {chunk.id} has {'no' if is_offloaded else 'a'} CPU Adam or gradient offload")
            if not chunk.is_trainable:
                continue
            gradients = {
                b.id: b
                for b in self.schedule.buffers
                if b.content is Content.GRADIENTS and b.chunk == chunk.id and not b.is_static
            }
            found = {b.section: b.size_bytes for b in gradients.values()}
            expected = {
                block: size for block, size in zip(chunk.blocks, chunk.gradient_bytes, strict=False) if size
            }
            if found != expected:
                self._fail(f"the gradients of chunk {chunk.id} are {found}, the layout says {expected}")
            consumer = offloads[chunk.id] if is_offloaded else device_adam
            if not set(gradients) <= set(consumer.reads):
                self._fail(f"{consumer.name} leaves out gradients of chunk {chunk.id}")
            for buffer in gradients.values():
                writers = [self.schedule.tasks[t] for t in self.writers[buffer.id]]
                if [(w.kind, w.section) for w in writers] != [(TaskKind.BACKWARD, buffer.section)]:
                    self._fail(f"gradients of chunk {chunk.id} are not written by their block's backward")
            if is_offloaded:
                self._check_cpu_adam(offloads[chunk.id], adams[chunk.id], chunk.id)
            else:
                home = [b.id for b in self.schedule.buffers if b.is_static and b.chunk == chunk.id]
                if not set(home) <= set(device_adam.writes):
                    self._fail(f"device Adam leaves out chunk {chunk.id}")

    def _check_cpu_adam(self, offload: Task, adam: Task, chunk: ChunkId) -> None:
        staged = [b for b in offload.writes if self._buffer(b).memory is Memory.PINNED_HOST]
        if len(staged) != 1 or staged[0] not in adam.reads:
            self._fail(f"{adam.name} does not read what {offload.name} writes")
        if not self._ordered(offload.id, adam.id):
            self._fail(f"{adam.name} may start before {offload.name} has ended")
        homes = [
            b.id
            for b in self.schedule.buffers
            if b.is_static and b.chunk == chunk and b.content in (Content.PARAMETERS, Content.OPTIMIZER_STATE)
        ]
        if not set(homes) <= set(adam.writes):
            self._fail(f"{adam.name} does not write the chunk's parameters and state")

    # -- places and windows ------------------------------------------------------------------------------------------

    def _check_slots(self) -> None:
        """Offloaded chunks sit in slots, and stays in one slot follow each other, across iterations too."""
        by_slot: dict[int, list[Buffer]] = {}
        for buffer in self.schedule.buffers:
            gathered = buffer.content is Content.PARAMETERS and not buffer.is_static
            if gathered != (buffer.slot is not None):
                self._fail(f"buffer {buffer.id} ({buffer.content}) has slot {buffer.slot}")
            if buffer.slot is not None:
                if not 0 <= buffer.slot < self.plan.n_buffer:
                    self._fail(f"buffer {buffer.id} has slot {buffer.slot} of {self.plan.n_buffer}")
                by_slot.setdefault(buffer.slot, []).append(buffer)
        for slot, buffers in by_slot.items():
            stays = sorted(buffers, key=lambda b: self.order.position(Occurrence(0, self.allocated_by[b.id])))
            for stay, following in zip(stays, stays[1:], strict=False):
                if not self._ordered(self.freed_by[stay.id], self.allocated_by[following.id]):
                    self._fail(f"slot {slot} may hold chunks {stay.chunk} and {following.chunk} at once")
            if not self._ordered(self.freed_by[stays[-1].id], self.allocated_by[stays[0].id], distance=1):
                self._fail(f"slot {slot} may still hold chunk {stays[-1].chunk} when the next iteration begins")

    def _check_window(self) -> None:
        """No gather starts more than ``prefetch_depth`` blocks ahead, no gradient stays more than that behind."""
        ends, begins = self._steps()
        num_steps = len(ends)
        step_of_begin = {task: step for step, task in enumerate(begins)}
        for gather in self._of_kind(TaskKind.GATHER):
            users = [t for b in gather.writes for t in self.readers[b]]
            steps = [step_of_begin[t] for t in users if t in step_of_begin]
            if not steps:
                self._fail(f"{gather.name} is gathered for nobody")
            limit = max(min(steps) - self.plan.prefetch_depth - 1, -num_steps)
            if not self._ordered(ends[limit], gather.id, distance=0 if limit >= 0 else 1):
                self._fail(f"{gather.name} may run more than {self.plan.prefetch_depth} blocks ahead")
        for offload in self._of_kind(TaskKind.GRADIENT_OFFLOAD):
            filled = max(ends.index(t) for b in offload.reads for t in self.writers[b])
            limit = filled + self.plan.prefetch_depth + 1
            if limit < 2 * num_steps:
                if not self._ordered(offload.id, begins[limit % num_steps], distance=limit // num_steps):
                    self._fail(f"the gradients of chunk {offload.chunk} may wait too long for {offload.name}")

    def _steps(self) -> tuple[list[TaskId], list[TaskId]]:
        """Last and first compute task of every step: forwards of the blocks, then backwards."""
        ends, begins = [], []
        for task in self.schedule.tasks:
            if task.kind is TaskKind.FORWARD and not isinstance(task.section, Part):
                begins.append(task.id)
                ends.append(task.id)
            elif task.kind is TaskKind.RECOMPUTE:
                begins.append(task.id)
            elif task.kind is TaskKind.BACKWARD and not isinstance(task.section, Part):
                if len(begins) == len(ends):
                    begins.append(task.id)
                ends.append(task.id)
        return ends, begins

    def _check_limits(self, device_limit_bytes: int | None, pinned_limit_bytes: int | None) -> None:
        if device_limit_bytes is not None:
            peak = guaranteed_device_peak(self.schedule, self.order)
            if peak.size_bytes > device_limit_bytes:
                raise ScheduleError(
                    f"device memory may reach {format_bytes(peak.size_bytes)} during {self._name(peak.task)} but the "
                    f"limit is {format_bytes(device_limit_bytes)}. Keep fewer chunks persistent, or checkpoint more."
                )
        pinned_bytes = self.schedule.static_bytes(Memory.PINNED_HOST)
        if pinned_limit_bytes is not None and pinned_bytes > pinned_limit_bytes:
            raise ScheduleError(
                f"pinned host memory reaches {format_bytes(pinned_bytes)} but the limit is "
                f"{format_bytes(pinned_limit_bytes)}. Keep more chunks persistent."
            )


def _chunk(task: Task) -> ChunkId:
    assert task.chunk is not None, f"{task.name} names no chunk"
    return task.chunk
