"""Embeddings whose rows the prologue looks up on the host ([Note: Rows of embeddings]).

[Note: Rows of embeddings]
A plan with ``looks_up_rows`` gathers no table for the prologue.

- The prologue's forward looks the rows up itself, since nobody knows before it begins which rows it needs: it reads
  them on the host, and copies them to the device.  It waits for the steps of the tables in the iteration before.
- The prologue's backward leaves gradients of rows, which leave for the host behind it, in the windows of all gradients.
- There they are added up, row by row in the order of the lookups, as the gradient of a whole table is: in the first
  micro-batch to zeros, or to what other sections have left of the table's gradient; in later ones the sum of the
  micro-batch is added to those of earlier ones.  Adam then steps the whole table.
"""

from __future__ import annotations

import numpy as np

from ..drafts.program import NOT_THERE, BufferGroup, Draft, IntArray, Operand, Part, TaskGroup, Work, spread
from ..schema.schedule import Content, Memory, TaskKind
from .chunk_facts import ChunkFacts
from .family import Family
from .homes import Homes
from .sections import Sections

_PROLOGUE = 0
"""Its number among the sections."""
_PASSES = 5
"""Over gradients of rows, where they are added up: they are read, written to the sums of equal rows and read again, and
rows of the table's gradient are read and written."""
_OFFLOADS, _SUMS = range(2)


class Rows:
    """Lookups, and what becomes of gradients of rows.  Shapes: M micro-batches, R trainable chunks that are looked up.

    Nothing is there unless the plan looks rows up.
    """

    def __init__(self, family: Family, draft: Draft, sections: Sections, order: IntArray) -> None:
        """``order``: trainable chunks as their gradients are complete."""
        facts = family.facts
        self.family, self.draft, self.sections = family, draft, sections
        self.chunks: IntArray = order[facts.is_looked_up[order]]
        """(R,)"""
        self.is_shared = facts.left_by[self.chunks] != NOT_THERE
        """(R,) whether other sections leave gradients of a chunk too."""
        self.steps = sections.backward_step(np.full(len(self.chunks), _PROLOGUE))
        """(M, R) the steps of the prologue's backwards."""
        self.sums: IntArray = np.zeros_like(self.steps)
        """(M, R)"""
        if not len(self.chunks):
            # As in most plans: searches draft thousands.
            self.offloads = self.gradients = self.sums
            return
        self._backwards = sections.step_end[self.steps]
        offload_work = Work(moved_bytes=facts.of_rows("gradient_bytes"))
        self.offloads = self._behind_prologue(TaskKind.GRADIENT_OFFLOAD, offload_work, _OFFLOADS)
        """(M, R)"""
        first, later = self._behind_prologues_sums(facts)
        self.sums = np.concatenate([first, later])
        draft.wait(self.offloads.ravel(), self._backwards.ravel())
        draft.wait(self.sums.ravel(), self.offloads.ravel())
        # What has arrived of the micro-batch before must have been added.
        draft.wait(self.offloads[1:].ravel(), self.sums[:-1].ravel())
        self._add_gradients(facts)

    def _behind_prologue(self, kind: TaskKind, work: Work, number: int, micro_batches: slice = slice(None)) -> IntArray:
        """(M', R) a task for every chunk behind the prologue's backward in each of these micro-batches."""
        position = self.sections.end_position[self.steps[micro_batches]]
        shape = position.shape
        place = np.arange(len(self.chunks))
        group = TaskGroup(
            kind,
            position.ravel(),
            Part.LEAVES,
            work,
            spread(self.chunks, shape),
            # Ahead of what becomes of other gradients there: the next forward waits for these.
            within=spread(2 * (place - len(place)) + number, shape),
            chunk=spread(self.chunks, shape),
            section=_PROLOGUE,
            micro_batch=spread(self.sections.micro_batch[micro_batches], shape),
        )
        return self.draft.tasks(group).reshape(shape)

    def _behind_prologues_sums(self, facts: ChunkFacts) -> tuple[IntArray, IntArray]:
        """(1, R) and (M - 1, R) the sums of the first micro-batch and of the others."""
        rows_bytes, whole_bytes = _PASSES * facts.of_rows("gradient_bytes"), facts.of_rows("table_gradient_bytes")
        is_shared = facts.left_by != NOT_THERE
        # Where nobody else leaves any, sums begin with zeros.
        first = Work(stepped_bytes=rows_bytes + np.where(is_shared, 0, whole_bytes))
        later = Work(stepped_bytes=rows_bytes + np.where(is_shared, 3 * whole_bytes, 0))
        return (
            self._behind_prologue(TaskKind.GRADIENT_ACCUMULATE, first, _SUMS, slice(1)),
            self._behind_prologue(TaskKind.GRADIENT_ACCUMULATE, later, _SUMS, slice(1, None)),
        )

    def _add_gradients(self, facts: ChunkFacts) -> None:
        """Add the gradients of rows that backwards leave."""
        shape = self.offloads.shape
        group = BufferGroup(
            Content.GRADIENTS,
            Memory.DEVICE,
            spread(facts.of_rows("gradient_bytes")[self.chunks], shape),
            chunk=spread(self.chunks, shape),
            section=_PROLOGUE,
            micro_batch=spread(self.sections.micro_batch, shape),
            made_by=self._backwards.ravel(),
            made_at=Operand.GRADIENTS.at(spread(self.chunks, shape)),
            freed_by=self.offloads.ravel(),
            freed_at=Operand.GRADIENTS.at(),
        )
        self.gradients = self.draft.buffers(group).reshape(shape)
        """(M, R)"""

    def follow(self, stepped_by: IntArray) -> None:
        """Let lookups wait for what stepped their tables in the previous iteration; ``stepped_by``: (C,) tasks."""
        if len(self.chunks):
            self.draft.wait(self.sections.forwards[:1, _PROLOGUE], stepped_by[self.chunks], is_previous=True)

    def wait_for_sums(self, offloads: IntArray, chunks: IntArray) -> None:
        """Let what others leave of a table arrive when what arrived before has been added.

        ``offloads``: (M, n) of ``chunks``.
        """
        for number, chunk in enumerate(self.chunks.tolist()):
            self.draft.wait(offloads[2:, chunks == chunk].ravel(), self.sums[1:-1, number])

    # -- one plan ----------------------------------------------------------------------------------------------------

    def wire(self, homes: Homes) -> None:
        """Add what tasks read and write in the family's one plan."""
        draft, forwards = self.draft, self.sections.forwards[:, _PROLOGUE, None]
        chunks = np.flatnonzero(self.family.facts.is_looked_up)
        places = np.arange(len(chunks))
        draft.read(forwards, homes.parameters[chunks], Operand.RELEASED.at(places))
        draft.update(forwards, homes.rows[chunks], Operand.RELEASED.at(places))
        chunks = self.chunks
        draft.read(self.offloads, self.gradients, 0)
        draft.update(self.offloads, homes.row_gradients[chunks], 0)
        staging = homes.gradients[chunks]
        draft.read(self.sums, homes.row_gradients[chunks], 0)
        draft.update(self.sums, staging, 0)
        # What is there already: of earlier micro-batches, or of other sections.
        draft.read(self.sums[1:], staging, 1)
        shared = np.flatnonzero(self.is_shared)
        draft.read(self.sums[:1, shared], staging[shared], 1)
        arrivals = homes.arrivals[chunks[shared]]
        draft.read(self.sums[1:, shared], arrivals, 2)
        draft.update(self.sums[1:, shared], arrivals, 1)
