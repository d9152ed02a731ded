"""How gradients leave and parameters are stepped."""

from __future__ import annotations

from collections.abc import Sequence

from ..layout.adam_memory import device_adam_peak_bytes, part_peak_bytes
from ..layout.layout import Chunk, Layout
from ..layout.shards import stepped_bytes
from ..schema.plan import ParallelMode, Plan
from ..schema.schedule import NORM_BYTES, AllocationId, ChunkId, Content, Memory, OuterSection, TaskId, TaskKind
from ..schema.workload import BlockId, Parameter, Phase
from .builder import ScheduleBuilder
from .gathers import Homes


class Updates:
    """Gradients of blocks, how ranks add them up, their copies to the host, CPU Adam and device Adam.

    See [Note: Steps] and [Note: Ranks] in ``compile.py``.
    """

    def __init__(
        self,
        builder: ScheduleBuilder,
        plan: Plan,
        parameters: Sequence[Parameter],
        layout: Layout,
        homes: Homes,
        persistent: frozenset[ChunkId],
    ) -> None:
        self.builder = builder
        self.prefetch_depth = plan.prefetch_depth
        self.parameters = parameters
        self.layout = layout
        self.homes = homes
        self.persistent = persistent
        self.adam_of: dict[ChunkId, TaskId] = {}
        """What steps every trainable chunk that is gathered: its CPU Adam, or device Adam if it is sharded."""
        self._gradients: dict[ChunkId, list[AllocationId]] = {chunk.id: [] for chunk in layout.chunks}
        self._leaving_at_step: dict[int, list[TaskId]] = {}
        """What takes gradients off the device: copies to the host, reductions to the rank's part of them."""
        self._arrived: dict[ChunkId, TaskId] = {}
        """The latest task that brought gradients of a chunk into its staging buffer."""
        self.max_gradient_norm = plan.max_gradient_norm
        self.last_micro_batch = plan.micro_batches - 1
        self._norm: tuple[TaskId, ...] = ()
        self.num_ranks = plan.num_ranks
        self.has_shards = plan.parallel is ParallelMode.SHARDED
        self._summed: list[TaskId] = []
        """What has added up the gradients that stay on the device, whole or in parts."""

    def make_gradients(self, block: BlockId) -> tuple[list[AllocationId], list[AllocationId], int]:
        """New buffers for the gradients of the block in each of its chunks, those that it adds to, and all its bytes.

        Gradients of persistent chunks stay from one micro-batch to the next, which adds to them.
        """
        made: list[AllocationId] = []
        added: list[AllocationId] = []
        total = 0
        for chunk_id in self.layout.chunks_of_block[block]:
            chunk = self.layout.chunks[chunk_id]
            size_bytes = chunk.gradient_bytes[chunk.blocks.index(block)]
            total += size_bytes
            if size_bytes and self.builder.micro_batch and chunk_id in self.persistent:
                added += [b for b in self._gradients[chunk_id] if self.builder.buffers[b].section == block]
            elif size_bytes:
                buffer = self.builder.buffer(
                    Content.GRADIENTS, Memory.DEVICE, size_bytes, chunk=chunk_id, section=block
                )
                self._gradients[chunk_id].append(buffer)
                made.append(buffer)
        return made, added, total

    def gone_before(self, step: int) -> tuple[TaskId, ...]:
        """What must have taken gradients off the device before ``step`` begins, of what this iteration began."""
        return tuple(self._leaving_at_step.get(step - self.prefetch_depth - 1, ()))

    def end_backward(self, block: BlockId, *, step: int) -> None:
        """Send the gradients on their way whose chunk has had its last backward, in the order they were filled."""
        for chunk_id in reversed(self.layout.chunks_of_block[block]):
            chunk = self.layout.chunks[chunk_id]
            if not chunk.is_trainable or chunk.blocks[0] != block:
                continue
            end = self.builder.step_end[step]
            if chunk.id in self.homes.sharded:
                scattered = self._scatter(chunk, after=end)
                self._summed.append(scattered)
                self._leaving_at_step.setdefault(step, []).append(scattered)
            elif chunk.id not in self.persistent:
                self._leaving_at_step.setdefault(step, []).append(self._offload(chunk, after=end))
            elif self.num_ranks > 1 and self.builder.micro_batch == self.last_micro_batch:
                self._summed.append(self._all_reduce(chunk, tuple(self._gradients[chunk.id]), after=end))

    def _all_reduce(self, chunk: Chunk, gradients: tuple[AllocationId, ...], *, after: TaskId) -> TaskId:
        """Add up the gradients of a chunk where they lie."""
        return self.builder.task(
            TaskKind.ALL_REDUCE,
            chunk=chunk.id,
            after=(after,),
            reads=gradients,
            updates=gradients,
            moved_bytes=sum(chunk.gradient_bytes),
            num_ranks=self.num_ranks,
        )

    def reduce_outer(self, left_over: Sequence[AllocationId], *, after: TaskId) -> None:
        """Add up what ranks have of the gradients outside every block; ``left_over`` hold them."""
        outer = [self.layout.chunks[chunk] for chunk in self.layout.unowned]
        moved_bytes = sum(sum(chunk.gradient_bytes) for chunk in outer)
        if self.num_ranks > 1 and moved_bytes:
            self._summed.append(
                self.builder.task(
                    TaskKind.ALL_REDUCE,
                    section=OuterSection.PROLOGUE,
                    after=(after,),
                    reads=left_over,
                    updates=left_over,
                    moved_bytes=moved_bytes,
                    num_ranks=self.num_ranks,
                )
            )

    def _reduce(self, chunk: Chunk, *, after: TaskId) -> tuple[TaskId, tuple[AllocationId, ...]]:
        """What the copy of a chunk's gradients waits for, and the buffers that it reads; ranks have added them up."""
        if self.has_shards:
            task = self._scatter(chunk, after=after)
            return task, tuple(b for b in self.builder.tasks[task].allocates if self._is_reduced(b))
        gradients = tuple(self._gradients[chunk.id])
        self._gradients[chunk.id].clear()
        if self.num_ranks == 1:
            return after, gradients
        return self._all_reduce(chunk, gradients, after=after), gradients

    def _is_reduced(self, buffer: AllocationId) -> bool:
        return self.builder.buffers[buffer].content is Content.REDUCED_GRADIENTS

    def _scatter(self, chunk: Chunk, *, after: TaskId) -> TaskId:
        """Add up the gradients of a chunk, of which every rank keeps its part: made anew, or where it lies for good.

        A part that lies for good takes the first micro-batch's gradients as they come; later ones are added to it.
        """
        gradients = tuple(self._gradients[chunk.id])
        self._gradients[chunk.id].clear()
        part = self.homes.parts[chunk.id]
        home = self.homes.reduced.get(chunk.id)
        is_added = home is not None and self.builder.micro_batch > 0
        made = [self.builder.buffer(Content.FLAT_GRADIENTS, Memory.DEVICE, part.reduced_bytes, chunk=chunk.id)]
        if home is None or is_added:
            made.append(
                self.builder.buffer(Content.REDUCED_GRADIENTS, Memory.DEVICE, part.gradient_bytes, chunk=chunk.id)
            )
        kept = () if home is None else (home,)
        return self.builder.task(
            TaskKind.REDUCE_SCATTER,
            chunk=chunk.id,
            after=(after,),
            reads=(*gradients, *kept) if is_added else gradients,
            makes=made,
            updates=kept,
            frees=(*gradients, *(made if is_added else made[:1])),
            moved_bytes=part.reduced_bytes,
            num_ranks=self.num_ranks,
        )

    def _offload(self, chunk: Chunk, *, after: TaskId) -> TaskId:
        """The copy of a chunk's gradients to the host, and what follows it there; returns the copy."""
        after, gradients = self._reduce(chunk, after=after)
        part = self.homes.parts[chunk.id]
        staging = self.homes.staging[chunk.id]
        is_first = self.builder.micro_batch == 0
        waits = [after]
        if self.builder.micro_batch > 1:
            # The arrivals of the micro-batch before must have been added.
            waits.append(self._arrived[chunk.id])
        offload = self._arrived[chunk.id] = self.builder.task(
            TaskKind.GRADIENT_OFFLOAD,
            chunk=chunk.id,
            after=waits,
            frees=gradients,
            reads=gradients,
            updates=(staging if is_first else self.homes.arrivals[chunk.id],),
            moved_bytes=part.gradient_bytes,
        )
        if not is_first:
            arrivals = self.homes.arrivals[chunk.id]
            self._arrived[chunk.id] = self.builder.task(
                TaskKind.GRADIENT_ACCUMULATE,
                chunk=chunk.id,
                after=(offload,),
                reads=(arrivals, staging),
                updates=(staging,),
                stepped_bytes=3 * part.gradient_bytes,
            )
        if self.builder.micro_batch == self.last_micro_batch and self.max_gradient_norm is None:
            self._cpu_adam(chunk, after=self._arrived[chunk.id])
        return offload

    def _cpu_adam(self, chunk: Chunk, *, after: TaskId) -> None:
        stepped = (self.homes.state[chunk.id], self.homes.parameters[chunk.id])
        part = self.homes.parts[chunk.id]
        self.adam_of[chunk.id] = self.builder.task(
            TaskKind.CPU_ADAM,
            chunk=chunk.id,
            after=(after,),
            reads=(self.homes.staging[chunk.id], *stepped),
            updates=stepped,
            num_stepped=part.num_stepped,
            stepped_bytes=part.stepped_bytes + self._scaling_bytes(part.gradient_bytes),
        )

    def _scaling_bytes(self, gradient_bytes: int) -> int:
        """Traffic of scaling gradients down to the limit of their norm: in and out."""
        return 0 if self.max_gradient_norm is None else 2 * gradient_bytes

    def limit_norm(self, left_over: Sequence[AllocationId], *, after: TaskId) -> None:
        """If there is a limit: the norm of all gradients, and CPU Adam of every offloaded chunk after it.

        Adam takes the chunks in the order in which the next iteration needs them.
        """
        if self.max_gradient_norm is None:
            return
        staged = sorted(self._arrived)
        parts = self.homes.reduced.values()
        waiting = [b for chunk in self.layout.chunks if chunk.id in self.persistent for b in self._gradients[chunk.id]]
        norm = self.builder.task(
            TaskKind.GRADIENT_NORM,
            after=(after, *self._arrived.values(), *self._summed),
            reads=(*(self.homes.staging[chunk] for chunk in staged), *parts, *left_over, *waiting),
            stepped_bytes=sum(self.homes.parts[chunk].gradient_bytes for chunk in staged),
        )
        if self.has_shards and (staged or parts):
            # Of sharded gradients every rank knows the norm of its own shards only.
            norm = self.builder.task(
                TaskKind.ALL_REDUCE, after=(norm,), moved_bytes=NORM_BYTES, num_ranks=self.num_ranks
            )
        self._norm = (norm,)
        for chunk_id in staged:
            self._cpu_adam(self.layout.chunks[chunk_id], after=norm)

    def device_adam(self, left_over: Sequence[AllocationId]) -> None:
        """Step persistent and sharded chunks; ``left_over`` are the gradients outside every block."""
        chunks = [c for c in self.layout.chunks if c.id in self.persistent and c.is_trainable]
        shards = [c for c in self.layout.chunks if c.id in self.homes.reduced]
        parts = [self.homes.parts[chunk.id] for chunk in shards]
        gradients = tuple(buffer for chunk in chunks for buffer in self._gradients[chunk.id])
        stepped = (
            *(self.homes.parameters[chunk.id] for chunk in (*chunks, *shards)),
            *(self.homes.state[chunk.id] for chunk in (*chunks, *shards)),
        )
        widened_bytes = max(
            device_adam_peak_bytes(chunks, self.parameters),
            part_peak_bytes(shards, chunks, self.parameters, self.num_ranks),
        )
        adam = self.builder.task(
            TaskKind.DEVICE_ADAM,
            phase=Phase(curve=((1.0, widened_bytes),)) if widened_bytes else None,
            after=(*self._norm, *self._summed),
            frees=(*left_over, *gradients),
            reads=(*left_over, *gradients, *self.homes.reduced.values(), *stepped),
            updates=stepped,
            num_stepped=sum(chunk.num_trainable for chunk in chunks) + sum(part.num_stepped for part in parts),
            stepped_bytes=sum(
                stepped_bytes(chunk, self.parameters) + self._scaling_bytes(sum(chunk.gradient_bytes))
                for chunk in chunks
            )
            + sum(part.stepped_bytes + self._scaling_bytes(part.gradient_bytes) for part in parts),
        )
        self.adam_of.update(dict.fromkeys(self.homes.reduced, adam))

    def link_previous_iteration(self) -> None:
        """Add which gradients of the previous iteration must have gone before the first steps begin."""
        num_steps = len(self.builder.step_end)
        self.builder.wait_for_previous(
            {
                self.builder.step_begin[step]: offloads
                for step in range(min(num_steps, self.prefetch_depth + 1))
                if (offloads := self._leaving_at_step.get(step - self.prefetch_depth - 1 + num_steps))
            }
        )
