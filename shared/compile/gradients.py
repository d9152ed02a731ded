"""Gradients on their way to where they are stepped ([Note: Steps] and [Note: Ranks] in ``compile.py``)."""

from __future__ import annotations

import numpy as np

from ..drafts.program import NOT_THERE, BufferGroup, Draft, IntArray, Operand, Part, TaskGroup, Work, spread
from ..schema.schedule import Content, Memory, TaskKind
from .family import Family
from .homes import Homes, kept_gradients
from .rows import Rows
from .sections import Sections

DISK_WRITES, DISK_READS, _REDUCES, _REPLICATES, DEVICE_PROJECTIONS, _OFFLOADS, _ACCUMULATES = range(7)
HOST_PROJECTIONS, STEPS, PARAMETER_PROJECTIONS, TASKS_PER_CHUNK = range(7, 11)
"""The order of what becomes of one chunk's gradients behind a backward; behind the norm of all, of what steps it."""
_FINAL = frozenset({TaskKind.CPU_ADAM, TaskKind.HOST_GRADIENT_PROJECTION, TaskKind.HOST_PARAMETER_PROJECTION})
"""What comes when gradients are complete, those of rows included."""


class Gradients:
    """Reductions over ranks, copies to the host, sums there, and the buffers of all these.

    Shapes: C chunks, D depths, M micro-batches; U chunks whose gradients leave, V chunks that are sharded over the
    devices, P chunks whose gradients stay, each in the order in which they are complete.
    """

    def __init__(self, family: Family, draft: Draft, sections: Sections) -> None:
        self.family = family
        self.draft = draft
        self.sections = sections
        order = family.facts.update_order
        self.leaving: IntArray = order[family.leaves[order]]
        """(U,) chunks."""
        self.sent: IntArray = self.leaving[family.facts.left_by[self.leaving] != NOT_THERE]
        """(U',) of these, chunks that have gradients on the device beside those of rows."""
        self.parted: IntArray = order[family.is_sharded[order]]
        """(V,) chunks."""
        self.staying: IntArray = order[family.is_persistent[order]]
        """(P,) chunks."""
        self.place_of: IntArray = np.zeros(len(family.layout.chunks), dtype=np.int64)
        self.place_of[order] = np.arange(len(order))
        self.summed: list[tuple[IntArray, IntArray]] = []
        """What adds up the gradients that stay on the device, whole or in parts, and of which chunks."""
        self.rows = Rows(family, draft, sections, order)
        self._leave_in_time(self.rows.offloads, self.rows.steps)
        self._reduce()
        self._offload()

    def behind_backward(
        self, kind: TaskKind, work: Work, chunks: IntArray, number: int, micro_batches: slice = slice(None)
    ) -> IntArray:
        """(M', n) a task for each of ``chunks``, behind its last backward in each of these micro-batches.

        Of chunks whose gradients leave once, behind that of the last micro-batch alone; ``NOT_THERE`` in others.
        """
        steps = self._final_steps(chunks) if kind in _FINAL else self.last_steps(chunks)
        position = self.sections.end_position[steps[micro_batches]]
        micro_batch = self.sections.micro_batch[micro_batches]
        here = np.flatnonzero((micro_batch == self.sections.micro_batch[-1]) | ~self.family.leaves_once[chunks])
        shape = position.shape
        group = TaskGroup(
            kind,
            position.ravel()[here],
            Part.LEAVES,
            work,
            spread(chunks, shape)[here],
            within=spread(TASKS_PER_CHUNK * self.place_of[chunks] + number, shape)[here],
            chunk=spread(chunks, shape)[here],
            micro_batch=spread(micro_batch, shape)[here],
        )
        found = np.full(shape, NOT_THERE)
        found.ravel()[here] = self.draft.tasks(group)
        return found

    def last_steps(self, chunks: IntArray) -> IntArray:
        """(M, n) the steps of the last backwards that leave gradients of ``chunks``, those of rows aside."""
        return self.sections.backward_step(self.family.facts.left_by[chunks])

    def _final_steps(self, chunks: IntArray) -> IntArray:
        """(M, n) the steps behind which gradients of ``chunks``, those of rows included, are complete."""
        return self.sections.backward_step(self.family.facts.completed_by[chunks])

    def _ends(self, chunks: IntArray) -> IntArray:
        """(M, n) the last backwards of ``chunks``."""
        ends: IntArray = self.sections.step_end[self.last_steps(chunks)]
        return ends

    # -- reductions, and copies to the host ----------------------------------------------------------------------------

    def _reduce(self) -> None:
        """Add up gradients over ranks: those that leave, in every micro-batch, and those that stay, in the last."""
        facts, step, draft = self.family.facts, self.family.step, self.draft
        self.parting = self.behind_backward(TaskKind.REDUCE_SCATTER, facts.scatter_work, self.parted, _REDUCES)
        """(M, V) reductions to each rank's part on its device."""
        draft.wait(self.parting.ravel(), self._ends(self.parted).ravel())
        self._leave_in_time(self.parting, self.last_steps(self.parted))
        self.reducing: IntArray = np.zeros((len(self.parting), 0), dtype=np.int64)
        """(M, U) reductions of gradients that leave; none of one rank alone."""
        self.summing: IntArray = np.zeros(0, dtype=np.int64)
        """(P,) reductions of gradients that stay."""
        if step.num_ranks > 1:
            kind = TaskKind.REDUCE_SCATTER if step.is_sharded else TaskKind.ALL_REDUCE
            work = facts.scatter_work if step.is_sharded else facts.all_reduce_work
            self.reducing = self.behind_backward(kind, work, self.leaving, _REDUCES)
            draft.wait(self.reducing.ravel(), self._ends(self.leaving).ravel())
            (self.summing,) = self.behind_backward(
                TaskKind.ALL_REDUCE, facts.all_reduce_work, self.staying, _REDUCES, slice(-1, None)
            )
            draft.wait(self.summing, self._ends(self.staying)[-1])
        self._replicate()
        parted = spread(self.parted, self.parting.shape)
        agreed = self.parted[: len(self.agreeing)]
        self.summed += [
            (self.parting.ravel(), parted),
            (self.agreeing, agreed),
            (self.summing, self.staying[: len(self.summing)]),
        ]

    def _replicate(self) -> None:
        """Add up parts over shard groups: those that leave, in every micro-batch, and those that stay, in the last."""
        facts, draft, kind = self.family.facts, self.draft, TaskKind.ALL_REDUCE
        self.reduced_by: IntArray = self.reducing
        """(M, U) what ends the reductions of gradients that leave."""
        self.agreeing: IntArray = np.zeros(0, dtype=np.int64)
        """(V,) reductions of parts that stay; none without shard groups."""
        if self.family.step.num_replicas == 1:
            return
        self.reduced_by = self.behind_backward(kind, facts.replica_work, self.leaving, _REPLICATES)
        draft.wait(self.reduced_by.ravel(), self.reducing.ravel())
        last = slice(-1, None)
        (self.agreeing,) = self.behind_backward(kind, facts.replica_work, self.parted, _REPLICATES, last)
        draft.wait(self.agreeing, self.parting[-1])

    def _offload(self) -> None:
        """Copy gradients to the host, where those of later micro-batches are added to the first ones'.

        Where the host adds them up in float32, the first ones are widened into the sums that later ones are added to.
        """
        facts, draft, sent = self.family.facts, self.draft, self.sent
        self.offloads = self.behind_backward(TaskKind.GRADIENT_OFFLOAD, facts.offload_work, sent, _OFFLOADS)
        """(M, U')"""
        complete = self.reduced_by if self.family.step.num_ranks > 1 else self._ends(sent)
        draft.wait(self.offloads.ravel(), complete.ravel())
        self._leave_in_time(self.offloads, self.last_steps(sent))
        # Those to which gradients of rows are added wait for them.
        is_alone = ~facts.is_looked_up[sent] & ~self.family.leaves_once[sent]
        self.added: IntArray = sent[is_alone]
        """(A,) chunks without gradients of rows whose gradients leave in every micro-batch."""
        kind = TaskKind.GRADIENT_ACCUMULATE
        self.sums = self.behind_backward(kind, facts.accumulate_work, self.added, _ACCUMULATES, slice(1, None))
        """(M - 1, A), or (M, A) where the first gradients are widened."""
        if self.family.step.widens:
            first = self.behind_backward(kind, facts.widen_work, self.added, _ACCUMULATES, slice(1))
            self.sums = np.concatenate([first, self.sums])
        arriving = self.offloads[self._num_staged :, is_alone]
        draft.wait(self.sums.ravel(), arriving.ravel())
        # The arrivals of the micro-batch before must have been added.
        draft.wait(arriving[1:].ravel(), self.sums[:-1].ravel())
        self.rows.wait_for_sums(self.offloads, sent)
        arrived = np.full(len(self.place_of), NOT_THERE)
        arrived[sent] = self.offloads[-1]
        if len(self.sums):
            arrived[self.added] = self.sums[-1]
        arrived[self.rows.chunks] = self.rows.sums[-1]
        self.arrived = arrived[self.leaving]
        """(U,) the last task that brought gradients of a chunk to where they are added up."""

    @property
    def _num_staged(self) -> int:
        """Micro-batches whose gradients arrive where they are added up: the first one's, unless they are widened."""
        return 0 if self.family.step.widens else 1

    def _leave_in_time(self, tasks: IntArray, last_steps: IntArray) -> None:
        """Gradients have left before the step ``depth + 1`` after their last backward, perhaps of the next iteration.

        Of the next iteration, its first steps wait for those alone that leave less than an iteration before them.
        """
        begin = self.sections.step_begin
        over = last_steps.ravel() + self.family.depths[:, None] + 1
        for first in (0, len(begin)):
            is_here = (over >= first) & (over < first + len(begin))
            if is_here.any():
                waiting = np.where(is_here, begin[np.where(is_here, over - first, 0)], NOT_THERE)
                self.draft.wait(waiting, tasks.ravel(), is_previous=first > 0)

    # -- buffers -------------------------------------------------------------------------------------------------------

    def _add_gradients(self, device_adam: IntArray) -> None:
        """Add the gradients that backwards leave, and what reductions make of them.

        ``device_adam``: (1,) what frees those that stay.
        """
        facts, sections, family = self.family.facts, self.sections, self.family
        chunks, completing, sizes = facts.gradients
        # What takes the gradients of each chunk away, by micro-batch.
        taken_by = np.full((len(sections.micro_batch), len(facts.size_bytes)), device_adam[0])
        taken_by[:, self.parted] = self.parting
        taken_by[:, self.sent] = self.reducing if family.step.is_sharded else self.offloads
        taken_by[:, family.leaves_once] = taken_by[-1, family.leaves_once]
        # Of gradients among others of their chunk: those of the last section first.
        places = np.lexsort((-completing, chunks)).argsort()
        # What later backwards add to stays from the first micro-batch on.
        kept = kept_gradients(family, self.draft)
        is_made = (~family.adds_on_device[chunks] | (sections.micro_batch == 0)) & (kept == NOT_THERE)
        micro_batch, pairs = np.nonzero(is_made)
        group = BufferGroup(
            Content.GRADIENTS,
            Memory.DEVICE,
            sizes[pairs],
            chunk=chunks[pairs],
            section=completing[pairs],
            micro_batch=micro_batch,
            made_by=sections.backward_of(completing)[is_made],
            made_at=Operand.GRADIENTS.at(chunks[pairs]),
            freed_by=taken_by[micro_batch, chunks[pairs]],
            freed_at=Operand.GRADIENTS.at(places[pairs]),
        )
        self.gradients: IntArray = np.full(is_made.shape, NOT_THERE)
        """(M, E) the buffers of (chunk, section) pairs; of persistent chunks in the first micro-batch alone."""
        self.gradients[is_made] = self.draft.buffers(group)
        self.gradients[0] = np.maximum(self.gradients[0], kept)
        self.gradients[:, family.leaves_once[chunks]] = self.gradients[0, family.leaves_once[chunks]]
        self.gradient_places = places
        self.reduced = self._add_reduced(device_adam)
        """(M, U) each rank's part of gradients that leave; none unless ranks share chunks."""

    def _add_reduced(self, device_adam: IntArray) -> IntArray:
        """Add what scatterings make: gradients laid flat, and parts that leave, stay or are added to others."""
        self.parts: IntArray = np.full(len(self.family.facts.size_bytes), NOT_THERE)
        """(C,) buffers of parts that stay until ``device_adam`` has stepped them."""
        facts, none = self.family.facts, np.zeros((len(self.sections.micro_batch), 0), dtype=np.int64)
        if not self.family.step.is_sharded:
            return none

        def add(
            content: Content,
            sizes: IntArray,
            chunks: IntArray,
            made_by: IntArray,
            freed_by: IntArray,
            *,
            stays: bool = False,
        ) -> IntArray:
            first = 0 if stays else len(self.sections.micro_batch) - len(made_by)
            micro_batch = self.sections.micro_batch[first : first + len(made_by)]
            number = 0 if content is Content.FLAT_GRADIENTS else 1
            group = BufferGroup(
                content,
                Memory.DEVICE,
                spread(sizes[chunks], made_by.shape),
                chunk=spread(chunks, made_by.shape),
                micro_batch=spread(micro_batch, made_by.shape),
                made_by=made_by.ravel(),
                made_at=number,
                freed_by=freed_by.ravel(),
                freed_at=Operand.RELEASED.at(spread(2 + chunks, made_by.shape) if stays else number),
            )
            return self.draft.buffers(group).reshape(made_by.shape)

        for chunks, tasks in ((self.parted, self.parting), (self.leaving, self.reducing)):
            add(Content.FLAT_GRADIENTS, facts.part("reduced_bytes"), chunks, tasks, tasks)
        parts = facts.part("gradient_bytes")
        # Parts that stay take the first micro-batch's gradients as they come; later ones are added to them.
        first, later = self.parting[:1], self.parting[1:]
        if self.draft.keeping.parts_go:
            stepped = spread(device_adam[0], first.shape).reshape(first.shape)
            (self.parts[self.parted],) = add(Content.REDUCED_GRADIENTS, parts, self.parted, first, stepped, stays=True)
        add(Content.REDUCED_GRADIENTS, parts, self.parted, later, later)
        return add(Content.REDUCED_GRADIENTS, parts, self.leaving, self.reducing, self.offloads)

    # -- one plan ------------------------------------------------------------------------------------------------------

    def _wire_gradients(self, homes: Homes) -> None:
        """Add what reductions, copies and sums read and write in the family's one plan."""
        self._wire_device(homes)
        self._wire_hosts(homes)

    def _wire_device(self, homes: Homes) -> None:
        """Gradients that backwards add to, and what adds them up over ranks."""
        draft, added = self.draft, self.family.adds_on_device[self.family.facts.gradients[0]]
        chunks, completing, _ = (of[added] for of in self.family.facts.gradients)
        adding = self.sections.backward_of(completing)[0 if draft.keeping.keeps_gradients else 1 :]
        for use in (draft.read, draft.update):
            use(adding, self.gradients[:1, added], Operand.GRADIENTS.at(chunks))
        number, gradients, places = self.gradients_of(self.parted)
        draft.read(self.parting[:, number], gradients, places)
        draft.read(self.parting[1:], homes.gradients[self.parted], Operand.RELEASED.at())
        draft.update(self.parting[1 if draft.keeping.parts_go else 0 :], homes.gradients[self.parted], 0)
        number, gradients, places = self.gradients_of(self.staying)
        if len(self.summing):
            for use in (draft.read, draft.update):
                use(self.summing[number], gradients[0], places)
        number, gradients, places = self.gradients_of(self.sent)
        if self.family.step.num_ranks > 1:
            draft.read(self.reducing[:, number], gradients, places)
            if not self.family.step.is_sharded:
                draft.update(self.reducing[:, number], gradients, places)
        if self.family.step.num_replicas > 1:
            for use in (draft.read, draft.update):
                use(self.reduced_by, self.reduced, 0)
                use(self.agreeing, homes.gradients[self.parted], 0)
        if self.family.step.is_sharded:
            draft.read(self.offloads, self.reduced, 0)
        else:
            draft.read(self.offloads[:, number], gradients, places)

    def _wire_hosts(self, homes: Homes) -> None:
        """Copies to the host, and sums there."""
        draft, num_staged, is_home = self.draft, self._num_staged, ~self.family.stages_gradients[self.sent]
        draft.update(self.offloads[:num_staged, is_home], homes.gradients[self.sent][is_home], 0)
        once = self.family.leaves_once[self.sent]
        draft.update(self.offloads[num_staged:, ~once], homes.arrivals[self.sent[~once]], 0)
        draft.update(self.offloads[-1:, once], homes.gradients[self.sent[once]], 0)
        draft.read(self.sums, homes.arrivals[self.added], 0)
        draft.read(self.sums[1 - num_staged :], homes.gradients[self.added], 1)
        draft.update(self.sums, homes.gradients[self.added], 0)

    def gradients_of(self, chunks: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """The gradients of ``chunks``: (E',) the chunk's number among these, (M, E') buffers, (E',) their places."""
        number = np.full(len(self.place_of), NOT_THERE)
        number[chunks] = np.arange(len(chunks))
        of_pairs = number[self.family.facts.gradients[0]]
        pairs = np.flatnonzero(of_pairs >= 0)
        return of_pairs[pairs], self.gradients[:, pairs], self.gradient_places[pairs]

    def read_in_order(self, task: IntArray, *buffers: IntArray) -> None:
        """Let a task, if it is there, read ``buffers`` in this order."""
        joined = np.concatenate(buffers)
        self.draft.read(task[:, None], joined, np.arange(len(joined)))
