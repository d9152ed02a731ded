"""What the verifier examines, and the tables and checks that its parts share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NoReturn

from ..basics.errors import ScheduleError
from ..layout.keeping import AS_PLANNED, Keeping
from ..layout.layout import Chunk, Layout
from ..layout.travelling_inputs import input_bytes
from ..order.happens_before import HappensBefore, Occurrence, OrderError
from ..schema.plan import ActivationMode, Plan, ProjectionPlace, TrainingMethod
from ..schema.schedule import (
    Allocation,
    AllocationId,
    ChunkId,
    Content,
    Lane,
    Memory,
    OuterSection,
    Schedule,
    Section,
    Task,
    TaskId,
    TaskKind,
)
from ..schema.workload import BlockId, Uses, Workload
from .steps import Held, held

_OF_SECTIONS: Final = (
    TaskKind.FORWARD,
    TaskKind.RECOMPUTE,
    TaskKind.BACKWARD,
    TaskKind.TEACHER_FORWARD,
    TaskKind.LOSS,
)
ITERATIONS: Final = 3
"""The first, the one that is examined, and the one after it; dependencies reach no further."""
_EXAMINED: Final = 1
"""The first iteration has no previous one; the second is like all that follow."""


@dataclass(frozen=True)
class Claim:
    """A schedule, and what it claims to carry out."""

    schedule: Schedule
    plan: Plan
    workload: Workload
    layout: Layout
    keeping: Keeping = AS_PLANNED

    @cached_property
    def order(self) -> HappensBefore:
        """What the schedule guarantees about order.  Raises ScheduleError if some task can never start."""
        try:
            return HappensBefore(self.schedule, ITERATIONS)
        except OrderError as error:
            raise ScheduleError(f"the schedule deadlocks: {error}.") from error

    def before(self, first: TaskId, second: TaskId, distance: int = 0) -> bool:
        """Whether ``first`` is guaranteed to end before ``second`` starts, ``distance`` iterations later."""
        return self.order.before(Occurrence(_EXAMINED, first), Occurrence(_EXAMINED + distance, second))

    @cached_property
    def steps(self) -> list[list[TaskId]]:
        """The compute tasks of every step: a forward, a backward with its recomputation, or both of the epilogue.

        In bypass distillation all tasks of a section.
        """
        steps: list[list[TaskId]] = []
        is_open = False
        for task in self.tasks_of(*_OF_SECTIONS):
            if is_open:
                steps[-1].append(task.id)
            else:
                steps.append([task.id])
            is_at_turn = task.kind is TaskKind.FORWARD and task.section is OuterSection.EPILOGUE
            if self.plan.method is TrainingMethod.BYPASS:
                is_open = task.kind in (TaskKind.FORWARD, TaskKind.LOSS)
            else:
                is_open = task.kind is TaskKind.RECOMPUTE or is_at_turn
        return steps

    @cached_property
    def step_of(self) -> dict[TaskId, int]:
        """The step of every compute task of a section."""
        return {task: step for step, tasks in enumerate(self.steps) for task in tasks}

    @cached_property
    def backward_steps(self) -> dict[tuple[int, int | OuterSection | None], int]:
        """The step of every section's backward, by micro-batch."""
        return {(t.micro_batch, t.section): self.step_of[t.id] for t in self.tasks_of(TaskKind.BACKWARD)}

    @cached_property
    def sections(self) -> list[Section]:
        """All sections, in the order of forward."""
        blocks = (BlockId(block) for block in range(self.workload.num_blocks))
        return [OuterSection.PROLOGUE, *blocks, OuterSection.EPILOGUE]

    @cached_property
    def used_forward(self) -> dict[Section, set[ChunkId]]:
        """The chunks that each section's forward runs with."""
        return self._used(lambda uses: uses.forward)

    @cached_property
    def used_backward(self) -> dict[Section, set[ChunkId]]:
        """The chunks that each section's backward and its recomputation run with."""
        return self._used(lambda uses: uses.backward)

    def _used(self, sections_of: Callable[[Uses], Sequence[int | OuterSection]]) -> dict[Section, set[ChunkId]]:
        found: dict[Section, set[ChunkId]] = {section: set() for section in self.sections}
        for chunk in self.layout.chunks:
            for placed in chunk.parameters:
                uses = self.uses_of(placed.index)
                for section in sections_of(uses):
                    if section is OuterSection.PROLOGUE and placed.index in self.looked_up_rows:
                        continue
                    found[section if isinstance(section, OuterSection) else BlockId(section)].add(chunk.id)
                if OuterSection.EPILOGUE in (*uses.forward, *uses.backward):
                    # Its forward and backward are one step.
                    found[OuterSection.EPILOGUE].add(chunk.id)
        return found

    def uses_of(self, parameter: int) -> Uses:
        """Who uses a parameter, by its place among the workload's."""
        found = self.workload.parameters[parameter]
        if found.block is not None:
            return Uses(forward=(found.block,), backward=(found.block,), gradient=found.block)
        ends = (OuterSection.PROLOGUE, OuterSection.EPILOGUE)
        return found.uses or Uses(forward=ends, backward=ends, gradient=ends[0])

    @cached_property
    def looked_up_rows(self) -> dict[int, int]:
        """The rows that one forward of the prologue looks up on the host, by their embedding among the parameters."""
        lookups = self.workload.row_lookups if self.plan.looks_up_rows else None
        return {} if lookups is None else {table.parameter: table.num_rows for table in lookups.tables}

    @cached_property
    def looked_up(self) -> list[ChunkId]:
        """The chunks of which the prologue looks rows up on the host."""
        members = ((chunk.id, {placed.index for placed in chunk.parameters}) for chunk in self.layout.chunks)
        return [chunk for chunk, indices in members if indices & self.looked_up_rows.keys()]

    def completing(self, parameter: int) -> int | OuterSection | None:
        """The section whose backward completes what the device has of a parameter's gradient; None: it has none.

        Where rows are looked up on the host, gradients of these are no part of it.
        """
        uses = self.uses_of(parameter)
        if parameter not in self.looked_up_rows:
            return uses.gradient
        others = {*uses.forward, *uses.backward} - {OuterSection.PROLOGUE}
        return next((s for s in self.sections if s in others), None)

    @cached_property
    def completed(self) -> dict[Section, dict[ChunkId, int]]:
        """Bytes of the gradients that each section's backward completes, by chunk; none where these are 0."""
        found: dict[Section, dict[ChunkId, int]] = {section: {} for section in self.sections}
        for chunk in self.layout.chunks:
            for placed in chunk.parameters:
                parameter = self.workload.parameters[placed.index]
                if parameter.trainable and parameter.size_bytes:
                    section = self.completing(placed.index)
                    if section is None:
                        continue
                    of_section = found[section if isinstance(section, OuterSection) else BlockId(section)]
                    of_section[chunk.id] = of_section.get(chunk.id, 0) + parameter.size_bytes
        return found

    @cached_property
    def modes(self) -> tuple[ActivationMode, ...]:
        """The activation mode of every block."""
        return self.plan.modes(self.workload.num_blocks)

    @cached_property
    def persistent(self) -> frozenset[ChunkId]:
        """The chunks that stay on the device, whole, with all that they are stepped with, if anything steps them."""
        first, kept = self.plan.n_persist, self.plan.n_persist + self.plan.n_host_stepped
        is_kept = (c.id < first or (c.id < kept and not c.is_trainable) for c in self.layout.chunks)
        return frozenset(c.id for c, stays in zip(self.layout.chunks, is_kept, strict=True) if stays)

    @cached_property
    def host_stepped(self) -> frozenset[ChunkId]:
        """The chunks whose parameters stay on the device, whole, and which CPU Adam steps on the host."""
        first, number = self.plan.n_persist, self.plan.n_host_stepped
        return frozenset(c.id for c in self.layout.chunks if first <= c.id < first + number and c.is_trainable)

    @cached_property
    def sharded(self) -> frozenset[ChunkId]:
        """The chunks of which every device has its part for good."""
        first, number = self.plan.n_persist + self.plan.n_host_stepped, self.plan.n_shard
        return frozenset(c.id for c in self.layout.chunks if first <= c.id < first + number)

    @cached_property
    def on_disk(self) -> frozenset[ChunkId]:
        """The chunks whose parameters lie on the disk: the last ones."""
        first = len(self.layout.chunks) - self.plan.n_disk
        return frozenset(c.id for c in self.layout.chunks if c.id >= first)

    @cached_property
    def stepped_from_disk(self) -> frozenset[ChunkId]:
        """The chunks whose optimizer state lies on the disk: those of the last ones that are stepped at all."""
        first = len(self.layout.chunks) - self.plan.n_disk_state
        return frozenset(c.id for c in self.layout.chunks if c.id >= first and c.is_trainable)

    @property
    def gradients_pass(self) -> bool:
        """Whether gradients of chunks that are stepped from the disk arrive in places that these share.

        Those that others are added to, or that a norm of all reads, have places of their own.
        """
        return self.plan.micro_batches == 1 and self.plan.max_gradient_norm is None

    @cached_property
    def passing(self) -> dict[tuple[Content, Memory, ChunkId | None], list[Allocation]]:
        """What comes and goes in host memory, by what it is of which chunk."""
        found: dict[tuple[Content, Memory, ChunkId | None], list[Allocation]] = {}
        for buffer in self.schedule.buffers:
            if not buffer.is_static and buffer.memory is not Memory.DEVICE:
                found.setdefault((buffer.content, buffer.memory, buffer.chunk), []).append(buffer)
        return found

    def stepped_in(self, content: Content, chunk: ChunkId) -> Allocation:
        """Where CPU Adam finds parameters, optimizer state or gradients of ``chunk``: its home, or a shared place.

        Raises ScheduleError if what should pass through such a place does so several times, or never.
        """
        shared = {
            Content.PARAMETERS: chunk in self.on_disk,
            Content.OPTIMIZER_STATE: True,
            Content.GRADIENTS: self.gradients_pass,
        }
        if chunk not in self.stepped_from_disk or not shared[content]:
            return self.homes[content, chunk]
        memory = Memory.PINNED_HOST if content is Content.GRADIENTS else Memory.HOST
        found = self.passing.get((content, memory, chunk), [])
        if content is Content.PARAMETERS:
            # Gradients may be projected against them before, in another stay.
            found = [b for b in found if self.schedule.tasks[self.freeing[b.id]].kind is TaskKind.DISK_WRITE]
        if len(found) != 1:
            reject(f"{content} of chunk {chunk} are brought {len(found)} times to be stepped, not once")
        return found[0]

    @cached_property
    def allocating(self) -> dict[AllocationId, TaskId]:
        """The task that allocates each buffer."""
        return {buffer: task.id for task in self.schedule.tasks for buffer in task.allocates}

    @cached_property
    def freeing(self) -> dict[AllocationId, TaskId]:
        """The task that frees each buffer."""
        return {buffer: task.id for task in self.schedule.tasks for buffer in task.frees}

    @cached_property
    def readers(self) -> dict[AllocationId, list[TaskId]]:
        """The tasks that read each buffer, in the order of the program."""
        return self._users([task.reads for task in self.schedule.tasks])

    @cached_property
    def writers(self) -> dict[AllocationId, list[TaskId]]:
        """The tasks that write each buffer, in the order of the program."""
        return self._users([task.writes for task in self.schedule.tasks])

    def _users(self, used: Sequence[Sequence[AllocationId]]) -> dict[AllocationId, list[TaskId]]:
        users: dict[AllocationId, list[TaskId]] = {buffer.id: [] for buffer in self.schedule.buffers}
        for place, buffers in enumerate(used):
            for buffer in buffers:
                users[buffer].append(TaskId(place))
        return users

    @cached_property
    def homes(self) -> dict[tuple[Content, ChunkId | None], Allocation]:
        """The static buffer for each content of each chunk: of one that the host steps, those on the host."""
        static = [buffer for buffer in self.schedule.buffers if buffer.is_static and buffer.slot is None]
        return {(b.content, b.chunk): b for b in static if b.memory is not Memory.DEVICE or not self._is_kept(b)}

    @cached_property
    def parts(self) -> dict[ChunkId | None, Allocation]:
        """The rank's part of the gradients of each chunk that is sharded over the devices: of the whole step."""
        found = (b for b in self.schedule.buffers if b.content is Content.REDUCED_GRADIENTS and not b.micro_batch)
        return {b.chunk: b for b in found if b.chunk in self.sharded and b.is_static is not self.keeping.parts_go}

    @cached_property
    def places(self) -> dict[ChunkId | None, Allocation]:
        """Where each chunk that the host steps stays on the device."""
        static = [buffer for buffer in self.schedule.buffers if buffer.is_static]
        return {b.chunk: b for b in static if b.memory is Memory.DEVICE and self._is_kept(b)}

    def _is_kept(self, buffer: Allocation) -> bool:
        if buffer.content is not Content.PARAMETERS:
            return False
        is_part = self.keeping.parts_stay and buffer.chunk not in self.persistent | self.sharded
        return buffer.chunk in self.host_stepped or (is_part and buffer.memory is Memory.DEVICE)

    @cached_property
    def gradients(self) -> dict[tuple[ChunkId | None, int], list[Allocation]]:
        """The gradients of each chunk on the device, by micro-batch."""
        found: dict[tuple[ChunkId | None, int], list[Allocation]] = {}
        for buffer in self.schedule.buffers:
            if buffer.content is Content.GRADIENTS and buffer.memory is Memory.DEVICE:
                found.setdefault((buffer.chunk, buffer.micro_batch), []).append(buffer)
        return found

    @cached_property
    def swapping(self) -> dict[BlockId, int]:
        """Blocks in mode SWAP that have anything to swap, with its bytes."""
        sizes = {BlockId(b): self.workload.profile_of(b).swappable_bytes for b in range(self.workload.num_blocks)}
        return {b: size for b, size in sizes.items() if size and self.modes[b] is ActivationMode.SWAP}

    @cached_property
    def offloaded_inputs(self) -> dict[BlockId, int]:
        """Blocks in mode OFFLOAD_INPUT that have an input to move, with its bytes."""
        sizes = {BlockId(block): size_bytes for block, size_bytes in enumerate(input_bytes(self.workload))}
        return {b: size for b, size in sizes.items() if size and self.modes[b] is ActivationMode.OFFLOAD_INPUT}

    @cached_property
    def travelling(self) -> dict[BlockId, int]:
        """Blocks of which something goes to the host and comes back, with its bytes."""
        return self.swapping | self.offloaded_inputs

    def freed_by(self, kind: TaskKind) -> list[AllocationId]:
        """What the tasks of one kind free."""
        return [buffer for task in self.tasks_of(kind) for buffer in task.frees]

    def tasks_of(self, *kinds: TaskKind) -> list[Task]:
        """The tasks of some kinds, in the order of the program."""
        found = [task for kind in kinds for task in self._by_kind.get(kind, ())]
        return found if len(kinds) == 1 else sorted(found, key=lambda task: task.id)

    @cached_property
    def _by_kind(self) -> dict[TaskKind, list[Task]]:
        found: dict[TaskKind, list[Task]] = {}
        for task in self.schedule.tasks:
            found.setdefault(task.kind, []).append(task)
        return found

    def on_compute(self, tasks: Iterable[TaskId]) -> list[TaskId]:
        """Those of ``tasks`` that the compute lane runs."""
        return [task for task in tasks if self.schedule.tasks[task].lane is Lane.COMPUTE]

    @cached_property
    def updated(self) -> list[ChunkId]:
        """The chunks that CPU Adam steps."""
        others = self.persistent | self.sharded
        return [chunk.id for chunk in self.layout.chunks if chunk.is_trainable and chunk.id not in others]

    @cached_property
    def leave_once(self) -> frozenset[ChunkId]:
        """The chunks whose gradients leave the device when all micro-batches are added up there: to be projected."""
        if self.plan.micro_batches == 1 or self.plan.projects_gradients_on is ProjectionPlace.HOST:
            return frozenset()
        return frozenset(chunk for chunk in self.updated if self.layout.chunks[chunk].subspaces)

    @cached_property
    def added_on_device(self) -> frozenset[ChunkId]:
        """The chunks whose gradients stay on the device from one micro-batch to the next, whole."""
        return self.persistent | self.leave_once

    def is_added_to(self, chunk: ChunkId, micro_batch: int) -> bool:
        """Whether a chunk's gradients lie on the device already when a micro-batch's backward adds its own."""
        is_kept = self.keeping.keeps_gradients and chunk in self.persistent
        return chunk in self.added_on_device and (micro_batch > 0 or is_kept)

    @cached_property
    def left_to_step(self) -> list[Allocation]:
        """Gradients of whole chunks that are on the device when device Adam begins: it frees them, or they stay."""
        found = [self.buffer(b) for b in self.freed_by(TaskKind.DEVICE_ADAM)]
        found += [b for b in self.schedule.buffers if b.is_static and b.memory is Memory.DEVICE]
        return [b for b in found if b.content is Content.GRADIENTS]

    def leaving_in(self, chunk: ChunkId) -> Sequence[int]:
        """The micro-batches in which gradients of a chunk that the host steps leave the device."""
        return range(self.plan.micro_batches - 1 if chunk in self.leave_once else 0, self.plan.micro_batches)

    @cached_property
    def scattered(self) -> list[ChunkId]:
        """The chunks of which device Adam steps the rank's part."""
        return [chunk.id for chunk in self.layout.chunks if chunk.is_trainable and chunk.id in self.sharded]

    @cached_property
    def held(self) -> dict[ChunkId, Held]:
        """What one rank has, on its host or its device, of every chunk that is not persistent."""
        return {
            chunk.id: held(chunk, self.workload.parameters, self.plan)
            for chunk in self.layout.chunks
            if chunk.id not in self.persistent
        }

    def buffer(self, buffer_id: AllocationId) -> Allocation:
        """A buffer by its id."""
        return self.schedule.buffers[buffer_id]

    def is_gathered(self, buffer_id: AllocationId) -> bool:
        """Whether a buffer holds a whole chunk's parameters on the device for the length of a stay."""
        buffer = self.buffer(buffer_id)
        return buffer.content is Content.PARAMETERS and buffer.memory is Memory.DEVICE and not buffer.is_static

    def name(self, task_id: TaskId) -> str:
        """How messages call a task."""
        return self.schedule.tasks[task_id].name


def reject(fact: str) -> NoReturn:
    """Raise ScheduleError: the schedule has a fault."""
    raise ScheduleError(f"the schedule is unsafe: {fact}. Compile it again from its plan.")


def chunk_of(claim: Claim, task: Task, *, section: Section | None = None) -> Chunk:
    """The chunk that a task names.  Raises ScheduleError if there is none, or the task names more."""
    if task.chunk is None or not 0 <= task.chunk < len(claim.layout.chunks):
        reject(f"task {task.id} ({task.kind}) names chunk {task.chunk} of {len(claim.layout.chunks)}")
    if task.section != section or task.phase is not None:
        reject(f"{task.name} has section {task.section}, not {section}, or a phase")
    return claim.layout.chunks[task.chunk]


def compare_buffers(task: Task, found: Iterable[AllocationId], expected: Iterable[Allocation], verb: str) -> None:
    """Raise ScheduleError unless a task names the expected buffers and no others."""
    if sorted(found) != sorted(buffer.id for buffer in expected):
        reject(f"{task.name} {verb} buffers {sorted(found)}, not {sorted(buffer.id for buffer in expected)}")


def check_in_place(task: Task, buffers: Iterable[Allocation]) -> None:
    """Raise ScheduleError unless a task reads and writes ``buffers``, and neither allocates nor frees any."""
    buffers = list(buffers)
    compare_buffers(task, task.reads, buffers, "reads")
    compare_buffers(task, task.writes, buffers, "writes")
    compare_buffers(task, task.allocates, [], "allocates")
    compare_buffers(task, task.frees, [], "frees")


def check_amounts(
    task: Task,
    *,
    moved_bytes: int = 0,
    num_stepped: int = 0,
    stepped_bytes: int = 0,
    num_tensors: int = 0,
    flops: int = 0,
) -> None:
    """Raise ScheduleError unless a task moves, steps and computes these amounts."""
    if task.flops != flops:
        reject(f"{task.name} takes {task.flops} FLOPs, not {flops}")
    found = (task.moved_bytes, task.num_stepped, task.stepped_bytes, task.num_tensors)
    if found != (moved_bytes, num_stepped, stepped_bytes, num_tensors):
        reject(
            f"{task.name} moves {found[0]} B and steps {found[1]} scalars over {found[2]} B in {found[3]} tensors, "
            f"not {moved_bytes} B, {num_stepped} scalars, {stepped_bytes} B and {num_tensors} tensors"
        )


def check_earlier(claim: Claim, first: TaskId, second: TaskId) -> None:
    """Raise ScheduleError unless the first task is guaranteed to end before the second starts; or they are one."""
    if first != second and not claim.before(first, second):
        reject(f"{claim.name(second)} may start before {claim.name(first)} has ended")
