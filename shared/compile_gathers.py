"""Where chunks lie, when they are gathered and when they go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .layout import ChunkId, Layout
from .plan import Plan
from .program import Program
from .schedule import BufferId, Content, Memory, TaskId, TaskKind
from .slots import assign_slots
from .workload import BlockId


@dataclass(frozen=True)
class Homes:
    """The static buffers of every chunk: on the device if it is persistent, on the host if it is offloaded."""

    parameters: Mapping[ChunkId, BufferId]
    state: Mapping[ChunkId, BufferId]
    """Of trainable chunks."""
    staging: Mapping[ChunkId, BufferId]
    """Of offloaded trainable chunks: where their gradients arrive, and where those of later micro-batches are added."""
    arrivals: Mapping[ChunkId, BufferId]
    """Where the gradients of later micro-batches arrive, if there are any."""


def allocate_homes(program: Program, layout: Layout, persistent: frozenset[ChunkId], *, micro_batches: int) -> Homes:
    """Add the static buffers of all chunks."""
    parameters: dict[ChunkId, BufferId] = {}
    state: dict[ChunkId, BufferId] = {}
    staging: dict[ChunkId, BufferId] = {}
    arrivals: dict[ChunkId, BufferId] = {}
    for chunk in layout.chunks:
        is_persistent = chunk.id in persistent
        place = Memory.DEVICE if is_persistent else Memory.PINNED_HOST
        parameters[chunk.id] = program.buffer(
            Content.PARAMETERS, place, chunk.size_bytes, chunk=chunk.id, is_static=True
        )
        if not chunk.is_trainable:
            continue
        place = Memory.DEVICE if is_persistent else Memory.HOST
        state[chunk.id] = program.buffer(
            Content.OPTIMIZER_STATE, place, chunk.state_bytes, chunk=chunk.id, is_static=True
        )
        if is_persistent:
            continue
        staging[chunk.id] = program.buffer(
            Content.GRADIENTS, Memory.PINNED_HOST, chunk.staging_bytes, chunk=chunk.id, is_static=True
        )
        if micro_batches > 1:
            arrivals[chunk.id] = program.buffer(
                Content.ARRIVING_GRADIENTS, Memory.PINNED_HOST, chunk.staging_bytes, chunk=chunk.id, is_static=True
            )
    return Homes(parameters, state, staging, arrivals)


class Gathers:
    """The stays of offloaded chunks, added to the program step by step ([Note: Steps] in ``compile.py``)."""

    def __init__(
        self, program: Program, plan: Plan, layout: Layout, homes: Homes, persistent: frozenset[ChunkId]
    ) -> None:
        self.program = program
        self.prefetch_depth = plan.prefetch_depth
        self.layout = layout
        self.homes = homes
        needed = [[c for c in chunks if c not in persistent] for chunks in layout.chunks_of_block]
        self.stays = assign_slots((needed + needed[::-1]) * plan.micro_batches, plan.n_buffer)
        self._begins: dict[int, list[int]] = {}
        self._ends: dict[int, list[int]] = {}
        for index, stay in enumerate(self.stays):
            self._begins.setdefault(stay.first_step, []).append(index)
            self._ends.setdefault(stay.last_step, []).append(index)
        self._latest_stay: dict[ChunkId, int] = {}
        """Of every chunk that has been gathered."""
        self._buffers: list[BufferId] = []
        self._tasks: list[TaskId] = []
        self._resident = {chunk: homes.parameters[chunk] for chunk in persistent}

    def parameters(self, block: BlockId) -> tuple[BufferId, ...]:
        """Where the chunks of a block lie on the device, as of the latest gathers."""
        return tuple(self._resident[chunk] for chunk in self.layout.chunks_of_block[block])

    def unowned_parameters(self) -> tuple[BufferId, ...]:
        """Where the chunks outside every block lie."""
        return tuple(self._resident[chunk] for chunk in sorted(self.layout.unowned))

    def begin(self, step: int) -> tuple[TaskId, ...]:
        """Add the gathers of the chunks whose stay begins with ``step``; steps come in order."""
        return tuple(self._gather(index) for index in self._begins.get(step, ()))

    def released_by(self, step: int) -> tuple[BufferId, ...]:
        """The buffers of the chunks whose stay ends with ``step``."""
        return tuple(self._buffers[index] for index in self._ends.get(step, ()))

    def _gather(self, index: int) -> TaskId:
        stay = self.stays[index]
        chunk = self.layout.chunks[stay.chunk]
        step_end = self.program.step_end
        after = []
        before = [stay.previous, self._latest_stay.get(stay.chunk)]
        after += [step_end[self.stays[index].last_step] for index in before if index is not None]
        window = stay.first_step - self.prefetch_depth - 1
        if window >= 0:
            after.append(step_end[window])
        buffer = self.program.buffer(
            Content.PARAMETERS, Memory.DEVICE, chunk.size_bytes, chunk=chunk.id, slot=stay.slot
        )
        task = self.program.task(
            TaskKind.GATHER,
            chunk=chunk.id,
            after=after,
            makes=(buffer,),
            reads=(self.homes.parameters[chunk.id],),
            moved_bytes=chunk.size_bytes,
        )
        self._latest_stay[chunk.id] = index
        self._resident[chunk.id] = buffer
        self._buffers.append(buffer)
        self._tasks.append(task)
        return task

    def link_previous_iteration(self, adam_of: Mapping[ChunkId, TaskId]) -> None:
        """Add what gathers wait for in the previous iteration: their slot, their window, their chunk."""
        step_end = self.program.step_end
        last_in_slot = {stay.slot: step_end[stay.last_step] for stay in self.stays}
        waits: dict[TaskId, list[TaskId]] = {}
        gathered: set[ChunkId] = set()
        for stay, task in zip(self.stays, self._tasks, strict=True):
            wait = waits.setdefault(task, [])
            if stay.previous is None:
                wait.append(last_in_slot[stay.slot])
            window = stay.first_step - self.prefetch_depth - 1
            if window < 0:
                # Not more than an iteration ahead, however deep the prefetch.
                wait.append(step_end[max(0, window + len(step_end))])
            if stay.chunk not in gathered:
                # CPU Adam comes after the chunk's last stay; a frozen chunk has none.
                last_stay = self.stays[self._latest_stay[stay.chunk]]
                wait.append(adam_of.get(stay.chunk, step_end[last_stay.last_step]))
            gathered.add(stay.chunk)
        self.program.wait_for_previous(waits)
