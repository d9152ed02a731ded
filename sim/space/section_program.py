"""What the search reads of a section program alone, without any chunk: seconds of compute, and levels of activations.

Both come from what the program itself adds to a draft, as a schedule would have it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from ...shared.compile.activation_levels import NO_TASK_BYTES, ActivationLevels
from ...shared.compile.chunk_facts import ChunkFacts, StepKnobs
from ...shared.compile.compile import Policies
from ...shared.compile.family import Family
from ...shared.compile.sections import Sections
from ...shared.drafts.program import NOT_THERE, Draft, Part, TaskGroup, Work
from ...shared.layout.layout import Layout
from ...shared.schema.schedule import TaskKind
from ...shared.schema.workload import Workload
from .prices import FloatArray, PriceList
from .space import BoolArray, IntArray


@dataclass(frozen=True, eq=False)
class SectionProgram:
    """The compute lane of a workload where nothing else runs.

    Shapes: K choices of modes, W positions of a micro-batch, M micro-batches, n blocks.
    """

    sections: Sections
    draft: Draft

    @classmethod
    def of(
        cls,
        policies: Policies,
        workload: Workload,
        is_checkpoint: BoolArray,
        *,
        is_swap: BoolArray | None = None,
        micro_batches: int = 1,
    ) -> Self:
        """The program of ``policies`` with (K, n) blocks in mode CHECKPOINT, and (n,) in mode SWAP, none if None."""
        nothing = Layout(chunk_bytes=1, chunks=(), num_blocks=workload.num_blocks, method=workload.method)
        family = Family(
            workload=workload,
            facts=ChunkFacts.of(nothing, workload.parameters, StepKnobs(micro_batches)),
            residency=np.zeros(0, dtype=np.int64),
            n_buffer=0,
            is_swap=np.zeros(workload.num_blocks, dtype=np.bool_) if is_swap is None else is_swap,
            offloads_input=np.zeros(workload.num_blocks, dtype=np.bool_),
            is_checkpoint=is_checkpoint,
            depths=np.ones(1, dtype=np.int64),
        )
        draft = Draft()
        return cls(policies.sections(family, draft), draft)

    def seconds(self, prices: PriceList) -> FloatArray:
        """(K, W) of each task of the first micro-batch alone on the machine; 0 where there is none."""
        is_checkpoint, length = self.sections.family.is_checkpoint, self.sections.positions.micro_length
        found = np.zeros((len(is_checkpoint), length))
        for _, group in self.draft.groups:
            if group.part is not Part.RUNS:
                continue
            here = np.flatnonzero(group.position < length)
            rows = group.rows_in(is_checkpoint)[:, here]
            found[:, group.position[here]] = prices.seconds(group.kind, group.work)[rows]
        return found

    def levels(self) -> ActivationLevels:
        """Of a program with one choice of modes: the sums of the buffers that its tasks make and free."""
        positions = self.sections.positions
        at_end, row = positions.device_adam, np.zeros(1, dtype=np.int64)
        device_adam = self.draft.tasks(TaskGroup(TaskKind.DEVICE_ADAM, np.array([at_end]), Part.RUNS, Work(), row))
        self.sections.wire(device_adam)
        level = self._level()
        shape = (positions.micro_batches, positions.micro_length)
        peaks = self._peaks()[:at_end].reshape(shape)
        alive = level[:at_end].reshape(shape)
        # The first micro-batch is a kind of its own: later ones add their gradients to those that it makes.
        later, kinds = np.unique(alive[1:], axis=0, return_inverse=True)
        return ActivationLevels(
            alive_bytes=np.concatenate([alive[:1], later])[None],
            peak_bytes=peaks[:1],
            adding_bytes=peaks[-1:],
            kind=np.append(0, 1 + kinds.reshape(-1)),
            end_bytes=level[at_end:],
        )

    def _level(self) -> IntArray:
        """(P,) bytes that are there before the task at each position of the iteration."""
        position, length = np.zeros(self.draft.num_tasks, dtype=np.int64), self.sections.positions.length
        for ids, group in self.draft.groups:
            position[ids] = group.position
        changes = np.zeros(length + 1, dtype=np.int64)
        for _, buffers in self.draft.buffer_groups:
            assert buffers.made_by is not None
            assert buffers.freed_by is not None
            # What a task makes counts from its end on, and what it frees until then.
            np.add.at(changes, position[buffers.made_by] + 1, buffers.size_bytes)
            np.subtract.at(changes, position[buffers.freed_by] + 1, buffers.size_bytes)
        level: IntArray = changes[:length].cumsum()
        return level

    def _peaks(self) -> IntArray:
        """(P,) what the task at each position adds while it runs; ``NO_TASK_BYTES`` where there is none."""
        peaks = np.full(self.sections.positions.length, NO_TASK_BYTES)
        for ids, group in self.draft.groups:
            (rows,) = group.rows_in(self.sections.family.is_checkpoint)
            for task, position, row in zip(ids.tolist(), group.position.tolist(), rows.tolist(), strict=True):
                phase = self.draft.phases.get(task)
                if phase is not None and row != NOT_THERE:
                    peaks[position] = phase.peak_bytes
        return peaks
