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

    def make_gradients(self, block: BlockId) -> tuple[list[BufferId], int]:
        """New buffers for the gradients of the block in each of its chunks, and their bytes together."""
        made, total = [], 0
        for chunk_id in self.layout.chunks_of_block[block]:
            chunk = self.layout.chunks[chunk_id]
            size_bytes = chunk.gradient_bytes[chunk.blocks.index(block)]
            if size_bytes:
                buffer = self.program.buffer(
                    Content.GRADIENTS, Memory.DEVICE, size_bytes, chunk=chunk_id, section=block
                )
                self._gradients[chunk_id].append(buffer)
                made.append(buffer)
                total += size_bytes
        return made, total

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
        """The copy of a chunk's gradients to the host, followed by its CPU Adam; returns the copy."""
        gradients = tuple(self._gradients[chunk.id])
        staging, stepped = self.homes.staging[chunk.id], (self.homes.state[chunk.id], self.homes.parameters[chunk.id])
        offload = self.program.task(
            TaskKind.GRADIENT_OFFLOAD,
            chunk=chunk.id,
            after=(after,),
            frees=gradients,
            reads=gradients,
            updates=(staging,),
            moved_bytes=sum(chunk.gradient_bytes),
        )
        self.adam_of[chunk.id] = self.program.task(
            TaskKind.CPU_ADAM,
            chunk=chunk.id,
            after=(offload,),
            reads=(staging, *stepped),
            updates=stepped,
            num_stepped=chunk.num_trainable,
            stepped_bytes=stepped_bytes(chunk, self.parameters),
        )
        return offload

    def device_adam(self, left_over: BufferId) -> None:
        """Step the persistent chunks; ``left_over`` are the gradients outside every block."""
        chunks = [c for c in self.layout.chunks if c.id in self.persistent and c.is_trainable]
        gradients = tuple(buffer for chunk in chunks for buffer in self._gradients[chunk.id])
        stepped = (
            *(self.homes.parameters[chunk.id] for chunk in chunks),
            *(self.homes.state[chunk.id] for chunk in chunks),
        )
        self.program.task(
            TaskKind.DEVICE_ADAM,
            frees=(left_over, *gradients),
            reads=(left_over, *gradients, *stepped),
            updates=stepped,
            num_stepped=sum(chunk.num_trainable for chunk in chunks),
            stepped_bytes=sum(stepped_bytes(chunk, self.parameters) for chunk in chunks),
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
