"""How saved activations travel: to the host behind forward, and back ahead of backward."""

from __future__ import annotations

from collections.abc import Sequence

from ..schema.plan import ActivationMode, Plan
from ..schema.schedule import AllocationId, Content, Memory, TaskId, TaskKind
from ..schema.workload import BlockId, Workload
from .builder import ScheduleBuilder


class Swaps:
    """What blocks in mode SWAP save, and the copies of it ([Note: Steps] in ``compile.py``)."""

    def __init__(
        self, builder: ScheduleBuilder, plan: Plan, workload: Workload, modes: Sequence[ActivationMode]
    ) -> None:
        self.builder = builder
        self.prefetch_depth = plan.prefetch_depth
        self._homes: dict[BlockId, AllocationId] = {}
        for index, mode in enumerate(modes):
            size_bytes = workload.profile_of(index).swappable_bytes
            if mode is ActivationMode.SWAP and size_bytes:
                block = BlockId(index)
                self._homes[block] = builder.buffer(
                    Content.SWAPPED, Memory.PINNED_HOST, size_bytes, section=block, is_static=True
                )
        self._offload_of: dict[BlockId, TaskId] = {}
        self._offloads_of_step: dict[int, list[TaskId]] = {}

    def save(self, block: BlockId) -> list[AllocationId]:
        """A new device buffer for what the block saves and swaps; none if it swaps nothing."""
        if block not in self._homes:
            return []
        return [self._on_device(block)]

    def offload(self, block: BlockId, saved: Sequence[AllocationId], *, step: int) -> None:
        """Add the copy to the host, behind the block's forward."""
        if not saved:
            return
        home = self._homes[block]
        task = self.builder.task(
            TaskKind.ACTIVATION_OFFLOAD,
            section=block,
            after=(self.builder.step_end[step],),
            reads=saved,
            updates=(home,),
            frees=saved,
            moved_bytes=self.builder.buffers[home].size_bytes,
        )
        self._offload_of[block] = task
        self._offloads_of_step.setdefault(step, []).append(task)

    def fetch(self, block: BlockId, *, step: int) -> tuple[list[TaskId], list[AllocationId]]:
        """Add the copy back for the backward ``step``; gives it and the buffer that it fills."""
        if block not in self._homes:
            return [], []
        home, made = self._homes[block], self._on_device(block)
        after = [self._offload_of[block]]
        window = step - self.prefetch_depth - 1
        if window >= 0:
            after.append(self.builder.step_end[window])
        task = self.builder.task(
            TaskKind.ACTIVATION_FETCH,
            section=block,
            after=after,
            reads=(home,),
            makes=(made,),
            moved_bytes=self.builder.buffers[home].size_bytes,
        )
        return [task], [made]

    def gone_before(self, step: int) -> tuple[TaskId, ...]:
        """The copies to the host that must have ended before ``step`` begins."""
        return tuple(self._offloads_of_step.get(step - self.prefetch_depth - 1, ()))

    def _on_device(self, block: BlockId) -> AllocationId:
        size_bytes = self.builder.buffers[self._homes[block]].size_bytes
        return self.builder.buffer(Content.SWAPPED, Memory.DEVICE, size_bytes, section=block)
