"""Where chunks lie, when they are gathered and when they go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..layout.layout import Layout
from ..layout.shards import RankPart, rank_part
from ..layout.slots import assign_slots
from ..schema.plan import ParallelMode, Plan
from ..schema.schedule import AllocationId, ChunkId, Content, Memory, TaskId, TaskKind
from ..schema.workload import BlockId, Parameter
from .builder import ScheduleBuilder


@dataclass(frozen=True)
class Homes:
    """The static buffers of every chunk: on the device if it is persistent or sharded, else on the host."""

    parameters: Mapping[ChunkId, AllocationId]
    state: Mapping[ChunkId, AllocationId]
    """Of trainable chunks."""
    staging: Mapping[ChunkId, AllocationId]
    """Of offloaded trainable chunks: where their gradients arrive, and where those of later micro-batches are added."""
    arrivals: Mapping[ChunkId, AllocationId]
    """Where the gradients of later micro-batches arrive, if there are any."""
    reduced: Mapping[ChunkId, AllocationId]
    """Of sharded trainable chunks: the rank's part of their gradients on its device."""
    parts: Mapping[ChunkId, RankPart]
    """Of all chunks that are gathered: what one rank holds of them."""
    sharded: frozenset[ChunkId]
    """The chunks that are sharded over the devices."""


def allocate_homes(
    builder: ScheduleBuilder,
    plan: Plan,
    parameters_of: Sequence[Parameter],
    layout: Layout,
    persistent: frozenset[ChunkId],
) -> Homes:
    """Add the static buffers of all chunks."""
    sharded = layout.sharded(plan.n_persist, plan.n_shard)
    parts = {
        c.id: rank_part(c, parameters_of, plan.parallel, plan.num_ranks)
        for c in layout.chunks
        if c.id not in persistent
    }
    parameters: dict[ChunkId, AllocationId] = {}
    state: dict[ChunkId, AllocationId] = {}
    staging: dict[ChunkId, AllocationId] = {}
    arrivals: dict[ChunkId, AllocationId] = {}
    reduced: dict[ChunkId, AllocationId] = {}
    for chunk in layout.chunks:
        is_persistent = chunk.id in persistent
        is_on_device = is_persistent or chunk.id in sharded
        place = Memory.DEVICE if is_on_device else Memory.PINNED_HOST
        size_bytes = chunk.size_bytes if is_persistent else parts[chunk.id].parameter_bytes
        parameters[chunk.id] = builder.buffer(Content.PARAMETERS, place, size_bytes, chunk=chunk.id, is_static=True)
        if not chunk.is_trainable:
            continue
        place = Memory.DEVICE if is_on_device else Memory.HOST
        size_bytes = chunk.state_bytes if is_persistent else parts[chunk.id].state_bytes
        state[chunk.id] = builder.buffer(Content.OPTIMIZER_STATE, place, size_bytes, chunk=chunk.id, is_static=True)
        if is_persistent:
            continue
        if chunk.id in sharded:
            reduced[chunk.id] = builder.buffer(
                Content.REDUCED_GRADIENTS,
                Memory.DEVICE,
                parts[chunk.id].gradient_bytes,
                chunk=chunk.id,
                is_static=True,
            )
            continue
        staging_bytes = parts[chunk.id].staging_bytes
        staging[chunk.id] = builder.buffer(
            Content.GRADIENTS, Memory.PINNED_HOST, staging_bytes, chunk=chunk.id, is_static=True
        )
        if plan.micro_batches > 1:
            arrivals[chunk.id] = builder.buffer(
                Content.ARRIVING_GRADIENTS, Memory.PINNED_HOST, staging_bytes, chunk=chunk.id, is_static=True
            )
    return Homes(parameters, state, staging, arrivals, reduced, parts, sharded)


class Gathers:
    """The stays of chunks that are gathered, added to the schedule step by step ([Note: Steps] in ``compile.py``)."""

    def __init__(
        self, builder: ScheduleBuilder, plan: Plan, layout: Layout, homes: Homes, persistent: frozenset[ChunkId]
    ) -> None:
        self.builder = builder
        self.prefetch_depth = plan.prefetch_depth
        self.layout = layout
        self.homes = homes
        self.num_ranks = plan.num_ranks
        self.has_shards = plan.parallel is ParallelMode.SHARDED
        needed = [[c for c in chunks if c not in persistent] for chunks in layout.chunks_of_block]
        self._needed = (needed + needed[::-1]) * plan.micro_batches
        self.stays = assign_slots(self._needed, plan.n_buffer)
        self._begins: dict[int, list[int]] = {}
        self._ends: dict[int, list[int]] = {}
        for index, stay in enumerate(self.stays):
            self._begins.setdefault(stay.first_step, []).append(index)
            self._ends.setdefault(stay.last_step, []).append(index)
        self._latest_stay: dict[ChunkId, int] = {}
        """Of every chunk that has been gathered."""
        self._buffers: list[AllocationId] = []
        self._tasks: list[TaskId] = []
        self._resident = {chunk: homes.parameters[chunk] for chunk in persistent}
        self._stay_at = self._stays_by_step()

    def _stays_by_step(self) -> list[dict[ChunkId, int]]:
        """For every step the stay in which it finds each of its gathered chunks."""
        latest: dict[ChunkId, int] = {}
        found = []
        for step, chunks in enumerate(self._needed):
            latest.update((self.stays[index].chunk, index) for index in self._begins.get(step, ()))
            found.append({chunk: latest[chunk] for chunk in chunks})
        return found

    def parameters(self, block: BlockId, *, step: int) -> tuple[AllocationId, ...]:
        """Where the chunks of a block lie on the device during ``step``, for which all gathers have been added."""
        stay_of = self._stay_at[step]
        return tuple(
            self._buffers[stay_of[chunk]] if chunk in stay_of else self._resident[chunk]
            for chunk in self.layout.chunks_of_block[block]
        )

    def unowned_parameters(self) -> tuple[AllocationId, ...]:
        """Where the chunks outside every block lie."""
        return tuple(self._resident[chunk] for chunk in sorted(self.layout.unowned))

    def opened_by(self, step: int) -> int:
        """The step whose end opens the way for the gathers of ``step``, all earlier ones added; -1 if nothing does.

        That is the end of their window, and of the stays in their slots and of their chunks.
        """
        stays = [self.stays[index] for index in self._begins.get(step, ())]
        before = [index for stay in stays for index in (stay.previous, self._latest_stay.get(stay.chunk))]
        gone = [self.stays[index].last_step for index in before if index is not None]
        return max(-1, step - self.prefetch_depth - 1, *gone)

    def begin(self, step: int) -> tuple[TaskId, ...]:
        """Add the gathers of the chunks whose stay begins with ``step``, and give what compute waits for.

        Steps come in order.
        """
        return tuple(self._gather(index) for index in self._begins.get(step, ()))

    def released_by(self, step: int) -> tuple[AllocationId, ...]:
        """The buffers of the chunks whose stay ends with ``step``."""
        return tuple(self._buffers[index] for index in self._ends.get(step, ()))

    def _gather(self, index: int) -> TaskId:
        stay = self.stays[index]
        chunk = self.layout.chunks[stay.chunk]
        step_end = self.builder.step_end
        after = []
        before = [stay.previous, self._latest_stay.get(stay.chunk)]
        after += [step_end[self.stays[index].last_step] for index in before if index is not None]
        window = stay.first_step - self.prefetch_depth - 1
        if window >= 0:
            after.append(step_end[window])
        part = self.homes.parts[chunk.id]
        buffer = self.builder.buffer(
            Content.PARAMETERS, Memory.DEVICE, part.gathered_bytes, chunk=chunk.id, slot=stay.slot
        )
        is_on_device = chunk.id in self.homes.sharded
        task = self.builder.task(
            TaskKind.ALL_GATHER if is_on_device else TaskKind.GATHER,
            chunk=chunk.id,
            after=after,
            makes=(buffer,),
            reads=(self.homes.parameters[chunk.id],),
            moved_bytes=part.gathered_bytes if is_on_device else part.parameter_bytes,
            num_ranks=self.num_ranks if is_on_device else 1,
        )
        self._latest_stay[chunk.id] = index
        self._buffers.append(buffer)
        self._tasks.append(task)
        if is_on_device or not self.has_shards:
            return task
        return self.builder.task(
            TaskKind.ALL_GATHER,
            chunk=chunk.id,
            after=(task,),
            reads=(buffer,),
            updates=(buffer,),
            moved_bytes=part.gathered_bytes,
            num_ranks=self.num_ranks,
        )

    def link_previous_iteration(self, adam_of: Mapping[ChunkId, TaskId]) -> None:
        """Add what gathers wait for in the previous iteration: their slot, their window, their chunk."""
        step_end = self.builder.step_end
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
                # Adam comes after the chunk's last stay; a frozen chunk has none.
                last_stay = self.stays[self._latest_stay[stay.chunk]]
                wait.append(adam_of.get(stay.chunk, step_end[last_stay.last_step]))
            gathered.add(stay.chunk)
        self.builder.wait_for_previous(waits)
