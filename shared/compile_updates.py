"""How gradients leave and parameters are stepped."""

from __future__ import annotations

from collections.abc import Sequence

from .compile_gathers import Homes
from .layout import Chunk, ChunkId, Layout, master_bytes, moment_bytes
from .plan import Plan
from .program import Program
from .schedule import BufferId, Content, Memory, TaskId, TaskKind
from .workload import BlockId, Parameter


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


class Updates:
    """Gradients of blocks, their copies to the host, CPU Adam and device Adam ([Note: Steps] in ``compile.py``)."""

    def __init__(
        self,
        program: Program,
        plan: Plan,
        parameters: Sequence[Parameter],
        layout: Layout,
        homes: Homes,
        persistent: frozenset[ChunkId],
    ) -> None:
        self.program = program
        self.prefetch_depth = plan.prefetch_depth
        self.parameters = parameters
        self.layout = layout
        self.homes = homes
        self.persistent = persistent
        self.adam_of: dict[ChunkId, TaskId] = {}
        """CPU Adam of every offloaded trainable chunk."""
        self._gradients: dict[ChunkId, list[BufferId]] = {chunk.id: [] for chunk in layout.chunks}
        self._offloads_of_step: dict[int, list[TaskId]] = {}
        self._arrived: dict[ChunkId, TaskId] = {}
        """The latest task that brought gradients of a chunk into its staging buffer."""
        self.max_gradient_norm = plan.max_gradient_norm
        self.last_micro_batch = plan.micro_batches - 1
        self._norm: tuple[TaskId, ...] = ()

    def make_gradients(self, block: BlockId) -> tuple[list[BufferId], list[BufferId], int]:
        """New buffers for the gradients of the block in each of its chunks, those that it adds to, and all its bytes.

        Gradients of persistent chunks stay from one micro-batch to the next, which adds to them.
        """
        made: list[BufferId] = []
        added: list[BufferId] = []
        total = 0
        for chunk_id in self.layout.chunks_of_block[block]:
            chunk = self.layout.chunks[chunk_id]
            size_bytes = chunk.gradient_bytes[chunk.blocks.index(block)]
            total += size_bytes
            if size_bytes and self.program.micro_batch and chunk_id in self.persistent:
                added += [b for b in self._gradients[chunk_id] if self.program.buffers[b].section == block]
            elif size_bytes:
                buffer = self.program.buffer(
                    Content.GRADIENTS, Memory.DEVICE, size_bytes, chunk=chunk_id, section=block
                )
                self._gradients[chunk_id].append(buffer)
                made.append(buffer)
        return made, added, total

    def gone_before(self, step: int) -> tuple[TaskId, ...]:
        """The offloads that must have ended before ``step`` begins, of those that this iteration began."""
        return tuple(self._offloads_of_step.get(step - self.prefetch_depth - 1, ()))

    def end_backward(self, block: BlockId, *, step: int) -> None:
        """Send the gradients on their way whose chunk has had its last backward, in the order they were filled."""
        for chunk_id in reversed(self.layout.chunks_of_block[block]):
            chunk = self.layout.chunks[chunk_id]
            if chunk.id not in self.persistent and chunk.is_trainable and chunk.blocks[0] == block:
                self._offloads_of_step.setdefault(step, []).append(
                    self._offload(chunk, after=self.program.step_end[step])
                )

    def _offload(self, chunk: Chunk, *, after: TaskId) -> TaskId:
        """The copy of a chunk's gradients to the host, and what follows it there; returns the copy."""
        gradients = tuple(self._gradients[chunk.id])
        self._gradients[chunk.id].clear()
        staging = self.homes.staging[chunk.id]
        is_first = self.program.micro_batch == 0
        waits = [after]
        if self.program.micro_batch > 1:
            # The arrivals of the micro-batch before must have been added.
            waits.append(self._arrived[chunk.id])
        offload = self._arrived[chunk.id] = self.program.task(
            TaskKind.GRADIENT_OFFLOAD,
            chunk=chunk.id,
            after=waits,
            frees=gradients,
            reads=gradients,
            updates=(staging if is_first else self.homes.arrivals[chunk.id],),
            moved_bytes=sum(chunk.gradient_bytes),
        )
        if not is_first:
            arrivals = self.homes.arrivals[chunk.id]
            self._arrived[chunk.id] = self.program.task(
                TaskKind.GRADIENT_ACCUMULATE,
                chunk=chunk.id,
                after=(offload,),
                reads=(arrivals, staging),
                updates=(staging,),
                stepped_bytes=3 * sum(chunk.gradient_bytes),
            )
        if self.program.micro_batch == self.last_micro_batch and self.max_gradient_norm is None:
            self._cpu_adam(chunk, after=self._arrived[chunk.id])
        return offload

    def _cpu_adam(self, chunk: Chunk, *, after: TaskId) -> None:
        stepped = (self.homes.state[chunk.id], self.homes.parameters[chunk.id])
        self.adam_of[chunk.id] = self.program.task(
            TaskKind.CPU_ADAM,
            chunk=chunk.id,
            after=(after,),
            reads=(self.homes.staging[chunk.id], *stepped),
            updates=stepped,
            num_stepped=chunk.num_trainable,
            stepped_bytes=stepped_bytes(chunk, self.parameters) + self._scaling_bytes(chunk),
        )

    def _scaling_bytes(self, chunk: Chunk) -> int:
        """Traffic of scaling a chunk's gradients down to the limit of their norm: in and out."""
        return 0 if self.max_gradient_norm is None else 2 * sum(chunk.gradient_bytes)

    def limit_norm(self, left_over: Sequence[BufferId], *, after: TaskId) -> None:
        """If there is a limit: the norm of all gradients, and CPU Adam of every offloaded chunk after it.

        Adam takes the chunks in the order in which the next iteration needs them.
        """
        if self.max_gradient_norm is None:
            return
        staged = sorted(self._arrived)
        waiting = [b for chunk in self.layout.chunks if chunk.id in self.persistent for b in self._gradients[chunk.id]]
        norm = self.program.task(
            TaskKind.GRADIENT_NORM,
            after=(after, *self._arrived.values()),
            reads=(*(self.homes.staging[chunk] for chunk in staged), *left_over, *waiting),
            stepped_bytes=sum(sum(self.layout.chunks[chunk].gradient_bytes) for chunk in staged),
        )
        self._norm = (norm,)
        for chunk_id in staged:
            self._cpu_adam(self.layout.chunks[chunk_id], after=norm)

    def device_adam(self, left_over: Sequence[BufferId]) -> None:
        """Step the persistent chunks; ``left_over`` are the gradients outside every block."""
        chunks = [c for c in self.layout.chunks if c.id in self.persistent and c.is_trainable]
        gradients = tuple(buffer for chunk in chunks for buffer in self._gradients[chunk.id])
        stepped = (
            *(self.homes.parameters[chunk.id] for chunk in chunks),
            *(self.homes.state[chunk.id] for chunk in chunks),
        )
        self.program.task(
            TaskKind.DEVICE_ADAM,
            after=self._norm,
            frees=(*left_over, *gradients),
            reads=(*left_over, *gradients, *stepped),
            updates=stepped,
            num_stepped=sum(chunk.num_trainable for chunk in chunks),
            stepped_bytes=sum(stepped_bytes(chunk, self.parameters) + self._scaling_bytes(chunk) for chunk in chunks),
        )

    def link_previous_iteration(self) -> None:
        """Add which gradients of the previous iteration must have gone before the first steps begin."""
        num_steps = len(self.program.step_end)
        self.program.wait_for_previous(
            {
                self.program.step_begin[step]: offloads
                for step in range(min(num_steps, self.prefetch_depth + 1))
                if (offloads := self._offloads_of_step.get(step - self.prefetch_depth - 1 + num_steps))
            }
        )
