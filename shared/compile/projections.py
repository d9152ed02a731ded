"""Orthogonal subspace fine-tuning: projections before and after the step ([Note: Subspaces]).

[Note: Order of projections]
Gradients are projected when they are complete: behind the last micro-batch's sum and the reductions over ranks, before
their norm, and so before they are scaled down to its limit, and before Adam.  Parameters are projected behind Adam, and
nothing gathers or reads them for the next step before that.

- Chunks that stay on the device: one task for all gradients behind the last backward, one for all parameters behind
  device Adam, which ends the iteration in place of it.
- Chunks that the host steps: gradients on the host, in the lane of CPU Adam, or, where the plan says so
  (``Plan.projects_gradients_on``), on the device behind the chunk's last backward, before they leave.  The stay of the
  chunk then ends with the projection: the frozen factors are there, and nobody gathers them again.  Parameters are
  projected on the host behind CPU Adam.
- Chunks on the disk: the same, in the places of the host that what is stepped passes through.

Every rank has whole chunks and projects all of them by itself.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from ..schema.schedule import TaskKind
from ..schema.workload import Phase
from .family import Family
from .homes import Homes, staged_sizes
from .program import NOT_THERE, BufferGroup, Draft, IntArray, Integers, Operand, Part, TaskGroup, Work
from .residency import Residency
from .sections import FullTraining, Sections
from .staging import Staging
from .updates import (
    DEVICE_PROJECTIONS,
    DISK_READS,
    HOST_PROJECTIONS,
    PARAMETER_PROJECTIONS,
    PROJECTION,
    TASKS_PER_CHUNK,
    Updates,
)

_LAST = slice(-1, None)
"""The last micro-batch."""


class ProjectedSections(FullTraining):
    """Full training, and on the compute lane projections of gradients that leave."""

    def __init__(self, family: Family, draft: Draft) -> None:
        super().__init__(family, draft)
        facts, order = family.facts, family.facts.update_order
        is_projected = family.leaves & facts.has_subspaces & family.step.projects_on_device
        places = np.flatnonzero(is_projected[order])
        self.projected: IntArray = order[places]
        """(J,) chunks whose gradients are projected on the device before they leave."""
        self.projected_steps = self.backward_step(facts.left_by[self.projected])[-1]
        """(J,) the steps of their last backwards."""
        work, peak_bytes = facts.gradient_projections
        self.projections = draft.tasks(
            TaskGroup(
                TaskKind.GRADIENT_PROJECTION,
                self.end_position[self.projected_steps],
                Part.LEAVES,
                work,
                self.projected,
                within=TASKS_PER_CHUNK * places + DEVICE_PROJECTIONS,
                chunk=self.projected,
                micro_batch=family.step.micro_batches - 1,
            )
        )
        """(J,)"""
        draft.wait(self.projections, self.step_end[self.projected_steps])
        draft.between_bytes.append((self.projections, peak_bytes[self.projected]))

    def stay_ends(self, chunks: IntArray, last_steps: IntArray) -> IntArray:
        """A stay that lasts until its chunk's gradients are complete ends when they are projected."""
        number = np.full(len(self.family.layout.chunks), NOT_THERE)
        number[self.projected] = np.arange(len(self.projected))
        found = super().stay_ends(chunks, last_steps)
        if len(self.projected):
            of_stay = number[chunks]
            is_last = (of_stay != NOT_THERE) & (self.projected_steps[of_stay] == last_steps)
            found = np.where(is_last, self.projections[of_stay], found)
        return found


class ProjectedResidency(Residency):
    """Chunks come and go as ever; those that are projected against on the device are read there."""

    def wire(self, homes: Homes, passing: IntArray) -> None:
        """Add what tasks read and write in the family's one plan."""
        super().wire(homes, passing)
        sections, stays = self.sections, self.stays
        assert isinstance(sections, ProjectedSections)
        for chunk, step, task in zip(sections.projected, sections.projected_steps, sections.projections, strict=True):
            is_here = (stays.chunk == chunk) & (stays.first_step <= step) & (step <= stays.last_step)
            there = self.buffers[is_here] if self.family.is_gathered[chunk] else homes.kept[[chunk]]
            self.draft.read(task[None], there, 0)


class ProjectedUpdates(Updates):
    """Updates with gradients projected before norm and Adam, and parameters behind Adam.

    Shapes: H chunks whose gradients are projected on the host, Q chunks that the host steps and that have subspaces,
    P chunks that have some and stay on the device with all that they are stepped with.
    """

    def __init__(self, family: Family, draft: Draft, sections: Sections) -> None:
        assert isinstance(sections, ProjectedSections)
        self.projecting = sections
        super().__init__(family, draft, sections)
        self.read_against: IntArray = np.full(len(family.facts.size_bytes), NOT_THERE)
        """(C,) what gradients are projected against on the host, where that was read from the disk for it alone."""

    @cached_property
    def _stepped_by_host(self) -> IntArray:
        """(Q,) chunks."""
        found: IntArray = self.leaving[self.family.facts.has_subspaces[self.leaving]]
        return found

    @cached_property
    def _kept(self) -> IntArray:
        """(P,) chunks, ascending."""
        found: IntArray = np.sort(self.staying[self.family.facts.has_subspaces[self.staying]])
        return found

    def _project(self) -> None:
        draft, sections, facts = self.draft, self.projecting, self.family.facts
        place = np.full(len(facts.size_bytes), NOT_THERE)
        place[self.leaving] = np.arange(len(self.leaving))
        if self.family.step.num_ranks > 1:
            draft.wait(sections.projections, self.reduced_by[-1, place[sections.projected]])
        sent = np.full(len(facts.size_bytes), NOT_THERE)
        sent[self.sent] = np.arange(len(self.sent))
        draft.wait(self.offloads[-1, sent[sections.projected]], sections.projections)

        self.on_host: IntArray = self._stepped_by_host
        """(H,) chunks."""
        if self.family.step.projects_on_device:
            self.on_host = self.on_host[:0]
        kind, (work, _) = TaskKind.HOST_GRADIENT_PROJECTION, facts.host_gradient_projections
        (self.host_projections,) = self.behind_backward(kind, work, self.on_host, HOST_PROJECTIONS, _LAST)
        """(H,)"""
        at = place[self.on_host]
        draft.wait(self.host_projections, self.arrived[at])
        self.arrived[at] = self.host_projections

        position = np.array([self.sections.positions.prologue_backward])
        self.gradient_projection = self._of_all(
            TaskKind.GRADIENT_PROJECTION, facts.gradient_projections, position, self.behind_chunks + PROJECTION
        )
        """(1,), or (0,) where nothing stays that is projected."""
        is_kept = facts.has_subspaces[self.staying]
        draft.wait(self.gradient_projection, self._ends(self.staying[is_kept])[-1])
        if self.family.step.num_ranks > 1:
            draft.wait(self.gradient_projection, self.summing[is_kept])

    def _of_all(self, kind: TaskKind, done: tuple[Work, IntArray], position: IntArray, within: int) -> IntArray:
        """A task for all chunks that stay."""
        work, peak_bytes = done
        kept = self._kept
        if not len(kept):
            return np.zeros(0, dtype=np.int64)
        together = Work(
            num_stepped=_sum(work.num_stepped, kept),
            stepped_bytes=_sum(work.stepped_bytes, kept),
            num_tensors=_sum(work.num_tensors, kept),
            flops=_sum(work.flops, kept),
        )
        group = TaskGroup(kind, position, Part.LEAVES, together, np.zeros(1, dtype=np.int64), within=within)
        tasks = self.draft.tasks(group)
        self.draft.between_bytes.append((tasks, peak_bytes[kept].max(keepdims=True)))
        return tasks

    def _limit_norm(self) -> IntArray:
        known = super()._limit_norm()
        if len(self.gradient_projection):
            self.draft.wait(self.norm, self.gradient_projection)
        return known

    def _step(self) -> None:
        super()._step()
        draft, facts, chunks = self.draft, self.family.facts, self._stepped_by_host
        kind, done = TaskKind.HOST_PARAMETER_PROJECTION, facts.parameter_projections
        if not self.family.step.limits_norm:
            (self.host_renewals,) = self.behind_backward(kind, done[0], chunks, PARAMETER_PROJECTIONS, _LAST)
        else:
            within = self.behind_chunks + TASKS_PER_CHUNK * chunks + PARAMETER_PROJECTIONS
            group = TaskGroup(
                kind, self.step_positions(chunks), Part.LEAVES, done[0], chunks, within=within, chunk=chunks
            )
            self.host_renewals = draft.tasks(group)
        """(Q,)"""
        draft.wait(self.host_renewals, self.stepped_by[chunks])
        self.stepped_by[chunks] = self.host_renewals
        self.rows.follow(self.stepped_by)
        position = np.array([self.sections.positions.device_adam])
        self.parameter_projection = self._of_all(
            TaskKind.PARAMETER_PROJECTION, facts.parameter_projections, position, 0
        )
        """(1,), or (0,) where nothing stays that is projected."""
        draft.wait(self.parameter_projection, self.device_adam)

    def wire(self, homes: Homes) -> None:
        """Add what projections read and write, and what they make on the way."""
        super().wire(homes)
        draft, sections, kept = self.draft, self.projecting, self._kept
        number, gradients, places = self.gradients_of(sections.projected)
        for use in (draft.read, draft.update):
            use(sections.projections[number], gradients[-1], 1 + places)
        for use in (draft.read, draft.update):
            use(self.host_projections, homes.gradients[self.on_host], 0)
        against = np.where(self.read_against == NOT_THERE, homes.parameters, self.read_against)
        draft.read(self.host_projections, against[self.on_host], 1)
        chunks = self._stepped_by_host
        for place, home in enumerate((homes.state, homes.parameters)):
            for use in (draft.read, draft.update):
                use(self.host_renewals, home[chunks], place)
        _, staying, places = self.gradients_of(kept)
        whole = staying[0][np.argsort(places)]
        self.read_in_order(self.gradient_projection, whole, homes.parameters[kept])
        draft.update(self.gradient_projection[:, None], whole, np.arange(len(whole)))
        stepped = np.concatenate([homes.parameters[kept], homes.state[kept]])
        self.read_in_order(self.parameter_projection, stepped)
        draft.update(self.parameter_projection[:, None], stepped, np.arange(len(stepped)))
        for tasks, made_bytes in draft.between_bytes:
            draft.phases.update(
                (task, Phase(curve=((1.0, size_bytes),)))
                for task, size_bytes in zip(tasks.tolist(), made_bytes.tolist(), strict=True)
                if size_bytes
            )


class ProjectedStaging(Staging):
    """What is stepped from the disk is projected in the places that it passes through.

    Parameters are read from the disk to be stepped before their gradients are projected against them.  Where the norm
    is limited, steps begin when all gradients have been projected: then they are read for the projection alone too.
    """

    def _stage_steps(self) -> None:
        super()._stage_steps()
        updates = self.updates
        assert isinstance(updates, ProjectedUpdates)
        is_read = self.family.is_on_disk[updates.on_host]
        chunks = updates.on_host[is_read]
        projections = updates.host_projections[is_read]
        place = np.full(len(self.family.is_gathered), NOT_THERE)
        place[self.stepped] = np.arange(len(self.stepped))
        places = place[chunks]
        if not self.family.step.limits_norm:
            self.draft.wait(projections, self.step_reads[places])
            chunks = chunks[:0]
        self.read_for: IntArray = chunks
        """(F,) chunks that are read for projections of their gradients alone, in the order of these."""
        if not len(chunks):
            self.extra_reads: IntArray = chunks
            return
        work = Work(moved_bytes=self._passing_bytes)
        (self.extra_reads,) = updates.behind_backward(TaskKind.DISK_READ, work, self.read_for, DISK_READS, _LAST)
        """(F,)"""
        self.draft.wait(projections, self.extra_reads)
        self._take_turns_before_steps(self.step_slots[places], projections)
        _, (content, memory, sizes, _), *_ = staged_sizes(self.family)
        updates.read_against[self.read_for] = self.draft.buffers(
            BufferGroup(
                content,
                memory,
                sizes[self.read_for],
                chunk=self.read_for,
                micro_batch=self.family.step.micro_batches - 1,
                slot=self.step_slots[places],
                made_by=self.extra_reads,
                freed_by=projections,
                freed_at=Operand.RELEASED.at(),
            )
        )

    def _take_turns_before_steps(self, slots: IntArray, projections: IntArray) -> None:
        """Extra reads take the places of steps one after the other, and leave them before the first step reads.

        What writes the last step of an iteration is ahead of the next iteration's reads in the disk's own lane.
        """
        latest: dict[int, int] = {}
        for number, slot in enumerate(slots.tolist()):
            if slot in latest:
                self.draft.wait(self.extra_reads[[number]], projections[[latest[slot]]])
            latest[slot] = number
        on_disk = np.flatnonzero(self.family.is_on_disk[self.stepped])
        for number in on_disk.tolist():
            if (last := latest.pop(int(self.step_slots[number]), None)) is not None:
                self.draft.wait(self.step_reads[[number]], projections[[last]])

    def wire(self, homes: Homes) -> Homes:
        """Add what extra reads use too."""
        if self.family.num_staging:
            self.draft.read(self.extra_reads, homes.parameters[self.read_for], 0)
        return super().wire(homes)


def _sum(of_chunks: Integers, chosen: IntArray) -> int:
    """Of the chosen chunks together."""
    return int(np.asarray(of_chunks)[chosen].sum())
