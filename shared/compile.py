"""From a plan to the schedule that carries it out.  All policy lives here.

[Note: Steps]
A *step* is one block's forward, or one block's backward with its recomputation: the stretches of the compute lane that
need chunks.  An iteration of n blocks has 2n steps, forward ones first.  The policies are written in steps:

- A chunk is gathered for the step that first needs it, not before the step ``prefetch_depth`` earlier has begun.
- A chunk is freed when the last step that uses its stay ends (``slots.assign_slots``).
- The gradients of a chunk leave when its last backward step has ended, and have left before the step
  ``prefetch_depth + 1`` later begins: that bounds the gradients that wait on the device.
- CPU Adam steps a chunk as soon as its gradients have arrived; the chunk's next gather waits for that.
- Gradients of persistent chunks stay until device Adam, which ends the iteration.

[Note: Memory of compute tasks]
A phase's curve already contains what the task allocates and frees while it runs, so the buffers of a compute task
count from its end on, and those that it frees count until its end.  What a backward leaves behind beyond saved
activations, outputs and gradients (above all the gradient that it hands to the section before) is measured, and is
the INCOMING_GRADIENT buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from .layout import Chunk, ChunkId, Layout, build_layout, check_layout, master_bytes, moment_bytes
from .plan import ActivationMode, Plan
from .schedule import Buffer, BufferId, Content, Memory, Part, Schedule, Section, Task, TaskId, TaskKind
from .slots import Residency, assign_slots
from .workload import BlockId, Parameter, Phase, Workload, check_plan


def compile_schedule(plan: Plan, workload: Workload, layout: Layout | None = None) -> Schedule:
    """The schedule of one steady-state iteration of ``workload`` under ``plan``.

    ``layout`` spares building it again; it must be the one of ``plan.chunk_bytes``.
    Raises PlanError if the plan belongs to another workload or its knobs contradict the layout.
    """
    check_plan(plan, workload)
    if layout is None:
        layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=plan.chunk_bytes)
    check_layout(layout, plan, workload)
    return _Compiler(plan, workload, layout).run()


def stepped_bytes(chunk: Chunk, parameters: Sequence[Parameter]) -> int:
    """Memory traffic of Adam on a chunk: moments and master weights in and out, gradients in, narrow weights out."""
    total = 0
    for placed in chunk.parameters:
        parameter = parameters[placed.index]
        if parameter.trainable:
            dtype = parameter.dtype
            master = master_bytes(dtype)
            state = moment_bytes(dtype) + (master or dtype.item_bytes)
            total += parameter.num_elements * (2 * state + dtype.item_bytes + (dtype.item_bytes if master else 0))
    return total


class _Compiler:
    """Builds one schedule; the order of the methods is the order of the program."""

    def __init__(self, plan: Plan, workload: Workload, layout: Layout) -> None:
        self.plan = plan
        self.workload = workload
        self.layout = layout
        self.num_blocks = workload.num_blocks
        self.modes = plan.modes(self.num_blocks)
        self.persistent = layout.persistent(plan.n_persist)
        self.tasks: list[Task] = []
        self.buffers: list[Buffer] = []
        self.parameters_of: dict[ChunkId, BufferId] = {}
        self.host_parameters: dict[ChunkId, BufferId] = {}
        self.staging: dict[ChunkId, BufferId] = {}
        self.state: dict[ChunkId, BufferId] = {}
        self.gradients: dict[ChunkId, list[BufferId]] = {chunk.id: [] for chunk in layout.chunks}
        self.outputs: dict[Section, BufferId] = {}
        self.saved: dict[Section, BufferId] = {}
        self.incoming: BufferId | None = None
        self.step_end: dict[int, TaskId] = {}
        self.offloads_of_step: dict[int, list[TaskId]] = {}
        self.level = 0
        """Device bytes of activations, as measured phase by phase, without gradients of blocks."""

    def run(self) -> Schedule:
        needed = [[c for c in chunks if c not in self.persistent] for chunks in self.layout.chunks_of_block]
        stays = assign_slots(needed + needed[::-1], self.plan.n_buffer)
        self._first_stay = self._gathers_by_step(stays)
        self._frees_at: dict[int, list[int]] = {}
        self._stays = stays
        for index, stay in enumerate(stays):
            self._frees_at.setdefault(stay.last_step, []).append(index)
        self._stay_buffer: dict[int, BufferId] = {}
        self._allocate_static()

        self._prologue_forward()
        for block in range(self.num_blocks):
            self._forward(BlockId(block), step=block)
        self._epilogue()
        for block in reversed(range(self.num_blocks)):
            self._backward(BlockId(block), step=2 * self.num_blocks - 1 - block)
        self._prologue_backward()
        self._device_adam()
        self._link_previous_iteration()
        return Schedule(
            plan_id=self.plan.identity,
            tasks=tuple(self.tasks),
            buffers=tuple(self.buffers),
            num_slots=self.plan.n_buffer,
            num_blocks=self.num_blocks,
            prefetch_depth=self.plan.prefetch_depth,
        )

    # -- building blocks ---------------------------------------------------------------------------------------------

    def _buffer(
        self,
        content: Content,
        memory: Memory,
        size_bytes: int,
        *,
        chunk: ChunkId | None = None,
        section: Section | None = None,
        slot: int | None = None,
        is_static: bool = False,
    ) -> BufferId:
        buffer_id = BufferId(len(self.buffers))
        self.buffers.append(Buffer(buffer_id, content, memory, size_bytes, chunk, section, slot, is_static))
        return buffer_id

    def _add(self, task: Task) -> TaskId:
        self.tasks.append(task)
        return task.id

    @property
    def _next_id(self) -> TaskId:
        return TaskId(len(self.tasks))

    def _gathers_by_step(self, stays: Iterable[Residency]) -> dict[int, list[int]]:
        by_step: dict[int, list[int]] = {}
        for index, stay in enumerate(stays):
            by_step.setdefault(stay.first_step, []).append(index)
        return by_step

    def _allocate_static(self) -> None:
        self._buffer(Content.RESIDENT, Memory.DEVICE, self.workload.resident_bytes, is_static=True)
        for chunk in self.layout.chunks:
            is_persistent = chunk.id in self.persistent
            place = Memory.DEVICE if is_persistent else Memory.PINNED_HOST
            home = self._buffer(Content.PARAMETERS, place, chunk.size_bytes, chunk=chunk.id, is_static=True)
            (self.parameters_of if is_persistent else self.host_parameters)[chunk.id] = home
            if not chunk.is_trainable:
                continue
            state_place = Memory.DEVICE if is_persistent else Memory.HOST
            self.state[chunk.id] = self._buffer(
                Content.OPTIMIZER_STATE, state_place, chunk.state_bytes, chunk=chunk.id, is_static=True
            )
            if not is_persistent:
                self.staging[chunk.id] = self._buffer(
                    Content.GRADIENTS, Memory.PINNED_HOST, chunk.staging_bytes, chunk=chunk.id, is_static=True
                )

    def _unowned_parameters(self) -> tuple[BufferId, ...]:
        return tuple(self.parameters_of[c] for c in sorted(self.layout.unowned))

    def _gather_for(self, step: int) -> list[TaskId]:
        """The gathers of the chunks whose stay begins with ``step``."""
        gathers = []
        for index in self._first_stay.get(step, ()):
            stay = self._stays[index]
            chunk = self.layout.chunks[stay.chunk]
            buffer = self._buffer(Content.PARAMETERS, Memory.DEVICE, chunk.size_bytes, chunk=chunk.id, slot=stay.slot)
            after = []
            if stay.previous is not None:
                after.append(self.step_end[self._stays[stay.previous].last_step])
            window = step - self.plan.prefetch_depth - 1
            if window >= 0:
                after.append(self.step_end[window])
            self._stay_buffer[index] = self.parameters_of[chunk.id] = buffer
            gathers.append(
                self._add(
                    Task(
                        self._next_id,
                        TaskKind.GATHER,
                        chunk=chunk.id,
                        after=_unique(after),
                        allocates=(buffer,),
                        reads=(self.host_parameters[chunk.id],),
                        writes=(buffer,),
                        moved_bytes=chunk.size_bytes,
                    )
                )
            )
        return gathers

    def _parameters(self, block: BlockId) -> tuple[BufferId, ...]:
        return tuple(self.parameters_of[c] for c in self.layout.chunks_of_block[block])

    def _released_after(self, step: int) -> tuple[BufferId, ...]:
        return tuple(self._stay_buffer[index] for index in self._frees_at.get(step, ()))

    # -- forward -----------------------------------------------------------------------------------------------------

    def _prologue_forward(self) -> None:
        phase = self.workload.prologue_forward
        self.level += phase.net_bytes
        output = self._buffer(Content.OUTPUT, Memory.DEVICE, max(0, phase.net_bytes), section=Part.PROLOGUE)
        self.outputs[Part.PROLOGUE] = output
        self._add(
            Task(
                self._next_id,
                TaskKind.FORWARD,
                section=Part.PROLOGUE,
                allocates=(output,),
                reads=self._unowned_parameters(),
                writes=(output,),
                phase=phase,
            )
        )

    def _before(self, block: int) -> Section:
        return BlockId(block - 1) if block > 0 else Part.PROLOGUE

    def _forward(self, block: BlockId, *, step: int) -> None:
        gathers = self._gather_for(step)
        profile = self.workload.profile_of(block)
        mode = self.modes[block]
        phase = profile.forward_in(mode)
        self.level += phase.net_bytes
        keeps = mode is ActivationMode.KEEP
        output_bytes = profile.output_bytes if keeps else max(profile.output_bytes, phase.net_bytes)
        output = self._buffer(Content.OUTPUT, Memory.DEVICE, output_bytes, section=block)
        self.outputs[block] = output
        made = [output]
        if keeps:
            saved_bytes = max(0, phase.net_bytes - profile.output_bytes)
            self.saved[block] = self._buffer(Content.ACTIVATIONS, Memory.DEVICE, saved_bytes, section=block)
            made.append(self.saved[block])
        self.step_end[step] = self._add(
            Task(
                self._next_id,
                TaskKind.FORWARD,
                section=block,
                after=tuple(gathers),
                allocates=tuple(made),
                frees=self._released_after(step),
                reads=(*self._parameters(block), self.outputs[self._before(block)]),
                writes=tuple(made),
                phase=phase,
            )
        )

    def _epilogue(self) -> None:
        last = self.outputs[BlockId(self.num_blocks - 1)]
        parameters = self._unowned_parameters()
        forward, backward = self.workload.epilogue_forward, self.workload.epilogue_backward
        self.level += forward.net_bytes
        saved = self._buffer(Content.ACTIVATIONS, Memory.DEVICE, max(0, forward.net_bytes), section=Part.EPILOGUE)
        self._add(
            Task(
                self._next_id,
                TaskKind.FORWARD,
                section=Part.EPILOGUE,
                allocates=(saved,),
                reads=(*parameters, last),
                writes=(saved,),
                phase=forward,
            )
        )
        self.saved[Part.EPILOGUE] = saved
        frees = (saved, last)
        incoming = self._hand_over(Part.EPILOGUE, backward, frees=frees, gradient_bytes=0)
        self._add(
            Task(
                self._next_id,
                TaskKind.BACKWARD,
                section=Part.EPILOGUE,
                allocates=(incoming,),
                frees=frees,
                reads=(*parameters, saved, last),
                writes=(incoming,),
                phase=backward,
            )
        )

    # -- backward ----------------------------------------------------------------------------------------------------

    def _hand_over(self, section: Section, phase: Phase, *, frees: Iterable[BufferId], gradient_bytes: int) -> BufferId:
        """The INCOMING_GRADIENT buffer that the backward of ``section`` leaves for the one before it."""
        self.level += phase.net_bytes - gradient_bytes
        freed = set(frees)
        alive = sum(
            self.buffers[b].size_bytes for b in (*self.outputs.values(), *self.saved.values()) if b not in freed
        )
        for table in (self.outputs, self.saved):
            for key in [key for key, buffer in table.items() if buffer in freed]:
                del table[key]
        self.incoming = self._buffer(
            Content.INCOMING_GRADIENT, Memory.DEVICE, max(0, self.level - alive), section=section
        )
        return self.incoming

    def _backward(self, block: BlockId, *, step: int) -> None:
        gathers = tuple(self._gather_for(step))
        profile = self.workload.profile_of(block)
        before = self.outputs[self._before(block)]
        wait = (*gathers, *self._gradients_gone_by(step))
        if self.modes[block] is ActivationMode.CHECKPOINT:
            self.level += profile.recompute.net_bytes
            saved_bytes = max(0, profile.recompute.net_bytes)
            self.saved[block] = self._buffer(Content.ACTIVATIONS, Memory.DEVICE, saved_bytes, section=block)
            self._add(
                Task(
                    self._next_id,
                    TaskKind.RECOMPUTE,
                    section=block,
                    after=wait,
                    allocates=(self.saved[block],),
                    reads=(*self._parameters(block), before),
                    writes=(self.saved[block],),
                    phase=profile.recompute,
                )
            )
            wait = ()
        phase = profile.backward_in(self.modes[block])
        saved, handed = self.saved[block], self.incoming
        assert handed is not None
        frees = (saved, before) if block > 0 else (saved,)
        gradients, gradient_bytes = self._gradients_of(block)
        incoming = self._hand_over(block, phase, frees=frees, gradient_bytes=gradient_bytes)
        end = self._add(
            Task(
                self._next_id,
                TaskKind.BACKWARD,
                section=block,
                after=wait,
                allocates=(incoming, *gradients),
                frees=(*frees, handed, *self._released_after(step)),
                reads=(*self._parameters(block), before, saved, handed),
                writes=(incoming, *gradients),
                phase=phase,
            )
        )
        self.step_end[step] = end
        for chunk in self._finished_chunks(block):
            self.offloads_of_step.setdefault(step, []).append(self._offload_gradients(chunk, after=end))

    def _gradients_gone_by(self, step: int) -> tuple[TaskId, ...]:
        finished = step - self.plan.prefetch_depth - 1
        if finished < self.num_blocks:
            return ()
        return tuple(self.offloads_of_step.get(finished, ()))

    def _gradients_of(self, block: BlockId) -> tuple[list[BufferId], int]:
        """New gradient buffers for the block's part of each of its chunks, and their bytes together."""
        made, total = [], 0
        for chunk_id in self.layout.chunks_of_block[block]:
            chunk = self.layout.chunks[chunk_id]
            size_bytes = chunk.gradient_bytes[chunk.blocks.index(block)]
            if size_bytes:
                buffer = self._buffer(Content.GRADIENTS, Memory.DEVICE, size_bytes, chunk=chunk_id, section=block)
                self.gradients[chunk_id].append(buffer)
                made.append(buffer)
                total += size_bytes
        return made, total

    def _finished_chunks(self, block: BlockId) -> list[Chunk]:
        """Offloaded trainable chunks whose last backward step is this block's, in the order they were filled."""
        chunks = (self.layout.chunks[c] for c in reversed(self.layout.chunks_of_block[block]))
        return [c for c in chunks if c.id not in self.persistent and c.is_trainable and c.blocks[0] == block]

    def _offload_gradients(self, chunk: Chunk, *, after: TaskId) -> TaskId:
        """The copy of a chunk's gradients to the host, followed by its CPU Adam; returns the copy."""
        gradients = tuple(self.gradients[chunk.id])
        offload = self._add(
            Task(
                self._next_id,
                TaskKind.GRADIENT_OFFLOAD,
                chunk=chunk.id,
                after=(after,),
                frees=gradients,
                reads=gradients,
                writes=(self.staging[chunk.id],),
                moved_bytes=sum(chunk.gradient_bytes),
            )
        )
        self._add(
            Task(
                self._next_id,
                TaskKind.CPU_ADAM,
                chunk=chunk.id,
                after=(offload,),
                reads=(self.staging[chunk.id], self.state[chunk.id], self.host_parameters[chunk.id]),
                writes=(self.state[chunk.id], self.host_parameters[chunk.id]),
                num_stepped=chunk.num_trainable,
                stepped_bytes=stepped_bytes(chunk, self.workload.parameters),
            )
        )
        return offload

    def _prologue_backward(self) -> None:
        handed, output = self.incoming, self.outputs[Part.PROLOGUE]
        assert handed is not None
        phase = self.workload.prologue_backward
        incoming = self._hand_over(Part.PROLOGUE, phase, frees=(output,), gradient_bytes=0)
        self._add(
            Task(
                self._next_id,
                TaskKind.BACKWARD,
                section=Part.PROLOGUE,
                allocates=(incoming,),
                frees=(output, handed),
                reads=(*self._unowned_parameters(), output, handed),
                writes=(incoming,),
                phase=phase,
            )
        )

    def _device_adam(self) -> None:
        assert self.incoming is not None
        chunks = [self.layout.chunks[c] for c in sorted(self.persistent) if self.layout.chunks[c].is_trainable]
        gradients = tuple(buffer for chunk in chunks for buffer in self.gradients[chunk.id])
        parameters = tuple(self.parameters_of[chunk.id] for chunk in chunks)
        state = tuple(self.state[chunk.id] for chunk in chunks)
        self._add(
            Task(
                self._next_id,
                TaskKind.DEVICE_ADAM,
                frees=(self.incoming, *gradients),
                reads=(self.incoming, *gradients, *parameters, *state),
                writes=(*parameters, *state),
                num_stepped=sum(chunk.num_trainable for chunk in chunks),
                stepped_bytes=sum(stepped_bytes(chunk, self.workload.parameters) for chunk in chunks),
            )
        )

    # -- across iterations -------------------------------------------------------------------------------------------

    def _link_previous_iteration(self) -> None:
        """Add what tasks wait for in the previous iteration, now that the whole program is known."""
        num_steps = 2 * self.num_blocks
        adam_of = {task.chunk: task.id for task in self.tasks if task.kind is TaskKind.CPU_ADAM}
        last_in_slot: dict[int, TaskId] = {}
        for stay in self._stays:
            last_in_slot[stay.slot] = self.step_end[stay.last_step]
        waits: dict[TaskId, list[TaskId]] = {}
        gathered: set[ChunkId] = set()
        gathers = (task for task in self.tasks if task.kind is TaskKind.GATHER)
        for stay, task in zip(self._stays, gathers, strict=True):
            wait = waits.setdefault(task.id, [])
            if stay.previous is None:
                wait.append(last_in_slot[stay.slot])
            window = stay.first_step - self.plan.prefetch_depth - 1
            if window < 0:
                wait.append(self.step_end[max(0, window + num_steps)])
            if stay.chunk in adam_of and stay.chunk not in gathered:
                wait.append(adam_of[stay.chunk])
            gathered.add(stay.chunk)
        offloads = self.offloads_of_step
        for step in range(num_steps):
            finished = step - self.plan.prefetch_depth - 1
            if finished < 0 and finished + num_steps in offloads:
                first = self._first_task_of_step(step)
                waits.setdefault(first, []).extend(offloads[finished + num_steps])
        for task_id, wait in waits.items():
            self.tasks[task_id] = replace(self.tasks[task_id], after_previous=_unique(wait))

    def _first_task_of_step(self, step: int) -> TaskId:
        end = self.step_end[step]
        section = self.tasks[end].section
        if step >= self.num_blocks and self.modes[_as_block(section)] is ActivationMode.CHECKPOINT:
            return TaskId(end - 1)
        return end


def _as_block(section: Section | None) -> int:
    assert isinstance(section, int)
    return section


def _unique(ids: Iterable[TaskId]) -> tuple[TaskId, ...]:
    return tuple(sorted(set(ids)))
