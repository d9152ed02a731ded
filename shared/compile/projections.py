"""Orthogonal subspace fine-tuning: projections before and after the step ([Note: Subspaces]).

[Note: Order of projections]
Gradients are projected when they are complete: behind the last micro-batch's sum and the reductions over ranks, before
their norm, and so before they are scaled down to its limit, and before Adam.  Parameters are projected behind Adam, and
nothing gathers or reads them for the next step before that.

- Chunks that stay on the device: one task for all gradients behind the last backward, one for all parameters behind
  device Adam, which ends the iteration in place of it.
- Chunks that the host steps: gradients on the host, in the lane of CPU Adam, or, where the plan says so
  (``Plan.projects_gradients_on``), on the device behind the chunk's last backward, before they leave.  The stay of the
  chunk then ends with the projection: the frozen factors are there, and nobody gathers them again.  Of several
  micro-batches, these gradients are added up where backwards leave them, are reduced over ranks and projected behind
  the last one, and leave once; nothing arrives on the host that would have to be added.  Parameters are projected on
  the host behind CPU Adam.
- Chunks on the disk: the same, in the places of the host that what is stepped passes through.

Every rank has whole chunks and projects all of them by itself; of chunks that lie in parts on the devices of several
ranks, an owner projects each subspace ([Note: Owners] in ``shared/layout/owners.py``).  An exchange before either of
the two projections of what stays brings the owner whole matrices, and one behind it brings all ranks their parts back:
those of the gradients before the norm, those of the parameters before the next gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from ..drafts.program import NOT_THERE, BufferGroup, Draft, IntArray, Integers, Operand, Part, TaskGroup, Work
from ..layout.owners import Ownership, SentMatrix
from ..layout.projections import ProjectionWork
from ..schema.schedule import OF_OWNERS, Content, Memory, TaskKind
from ..schema.workload import Phase
from .family import Family
from .gradients import DEVICE_PROJECTIONS, DISK_READS, HOST_PROJECTIONS, PARAMETER_PROJECTIONS, TASKS_PER_CHUNK
from .homes import Homes, staged_sizes
from .residency import Residency
from .sections import FullTraining, Sections
from .staging import Staging
from .updates import FROM_OWNERS, PROJECTION, TO_OWNERS, Updates

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
    P chunks that have some and stay on the device with all that they are stepped with, O chunks that have some and lie
    on the devices in parts.
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

    @cached_property
    def _owned(self) -> IntArray:
        """(O,) chunks that lie on the devices in parts, ascending."""
        found: IntArray = np.sort(self.parted[self.family.facts.has_subspaces[self.parted]])
        return found

    @cached_property
    def _ownership(self) -> Ownership:
        """Who projects their subspaces."""
        return self.family.facts.ownership(self._owned)

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
        # Norm and Adam follow in the same lane.
        draft.wait(self.host_projections, self.arrived[place[self.on_host]])

        position = np.array([self.sections.positions.prologue_backward])
        self.gradients_out = self._exchange(TaskKind.GRADIENTS_TO_OWNERS, position, self.behind_chunks + TO_OWNERS)
        """(1,), or (0,) where nothing lies in parts that is projected; so of all that owners exchange."""
        if len(self._owned):
            reduced = self.agreeing if len(self.agreeing) else self.parting[-1]
            draft.wait(self.gradients_out, reduced[facts.has_subspaces[self.parted]])
        self.gradient_projection = self._of_all(
            TaskKind.GRADIENT_PROJECTION, facts.gradient_projections, position, self.behind_chunks + PROJECTION
        )
        """(1,), or (0,) where nothing stays that is projected."""
        is_kept = facts.has_subspaces[self.staying]
        draft.wait(self.gradient_projection, self._ends(self.staying[is_kept])[-1])
        if self.family.step.num_ranks > 1:
            draft.wait(self.gradient_projection, self.summing[is_kept])
        self.gradients_back = self._exchange(TaskKind.GRADIENTS_FROM_OWNERS, position, self.behind_chunks + FROM_OWNERS)
        self._around(self.gradient_projection, self.gradients_out, self.gradients_back)
        self.summed.append((self.gradients_back, self._owned[:1]))

    def _around(self, projection: IntArray, out: IntArray, back: IntArray) -> None:
        """Owners project between two exchanges, if there are any."""
        if len(out):
            self.draft.wait(projection, out)
            self.draft.wait(back, projection)

    def _exchange(self, kind: TaskKind, position: IntArray, within: int) -> IntArray:
        """What ranks and owners send each other; (0,) where nothing lies in parts that is projected."""
        if not len(self._owned):
            return np.zeros(0, dtype=np.int64)
        step, moved_bytes = self.family.step, self._ownership.moved_bytes(self._sent(kind))
        work = Work(moved_bytes=moved_bytes, num_ranks=step.num_shards, axis=step.shard_axis)
        return self.draft.tasks(
            TaskGroup(kind, position, Part.LEAVES, work, np.zeros(1, dtype=np.int64), within=within)
        )

    def _sent(self, kind: TaskKind) -> Sequence[SentMatrix]:
        """The matrices that an exchange is of."""
        of = self._ownership
        if kind is TaskKind.GRADIENTS_TO_OWNERS:
            return *of.frozen, *of.gradients
        return of.gradients if kind is TaskKind.GRADIENTS_FROM_OWNERS else of.stepped

    def _of_all(self, kind: TaskKind, done: tuple[Work, IntArray], position: IntArray, within: int) -> IntArray:
        """A task for all chunks that stay, whole or in parts."""
        work, peak_bytes = done
        kept, owned = self._kept, ProjectionWork()
        if not len(kept) and not len(self._owned):
            return np.zeros(0, dtype=np.int64)
        if len(self._owned):
            of = self._ownership
            owned = of.gradient_work if kind is TaskKind.GRADIENT_PROJECTION else of.parameter_work
        together = Work(
            num_stepped=_sum(work.num_stepped, kept) + owned.num_projected,
            stepped_bytes=_sum(work.stepped_bytes, kept) + owned.touched_bytes,
            num_tensors=_sum(work.num_tensors, kept) + owned.num_tensors,
            flops=_sum(work.flops, kept) + owned.flops,
        )
        group = TaskGroup(kind, position, Part.LEAVES, together, np.zeros(1, dtype=np.int64), within=within)
        tasks = self.draft.tasks(group)
        most_bytes = max(int(peak_bytes[kept].max(initial=0)), owned.peak_bytes)
        self.draft.between_bytes.append((tasks, np.array([most_bytes])))
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
        # They follow CPU Adam in the same lane.
        self.stepped_by[chunks] = self.host_renewals
        self.rows.follow(self.stepped_by)
        position = np.array([self.sections.positions.device_adam])
        self.parameters_out = self._exchange(TaskKind.PARAMETERS_TO_OWNERS, position, 0)
        if len(self._owned):
            draft.wait(self.parameters_out, self.device_adam)
        self.parameter_projection = self._of_all(
            TaskKind.PARAMETER_PROJECTION, facts.parameter_projections, position, 1
        )
        """(1,), or (0,) where nothing stays that is projected."""
        # It follows device Adam in the same lane.
        self.parameters_back = self._exchange(TaskKind.PARAMETERS_FROM_OWNERS, position, 2)
        self._around(self.parameter_projection, self.parameters_out, self.parameters_back)
        if len(self._owned):
            self.stepped_by[self._owned] = self.parameters_back

    def _add_gradients(self, device_adam: IntArray) -> None:
        """Add what owners have while they project, and what passes between them and all ranks."""
        super()._add_gradients(device_adam)
        if not len(self._owned):
            return
        of = self._ownership

        def add(content: Content, size_bytes: int, made_by: IntArray, freed_by: IntArray, number: int) -> IntArray:
            group = BufferGroup(
                content,
                Memory.DEVICE,
                np.array([size_bytes]),
                made_by=made_by,
                made_at=number,
                freed_by=freed_by,
                freed_at=Operand.RELEASED.at(number),
            )
            return self.draft.buffers(group)

        exchanges = (self.gradients_out, self.gradients_back, self.parameters_out, self.parameters_back)
        for kind, tasks in zip(OF_OWNERS, exchanges, strict=True):
            add(Content.PASSING_PARTS, of.passing_bytes(self._sent(kind)), tasks, tasks, 0)
        self.owned_gradients = add(
            Content.OWNED_TRAINED, of.whole_bytes(of.gradients), self.gradients_out, self.gradients_back, 1
        )
        self.owned_frozen = add(
            Content.OWNED_FROZEN, of.whole_bytes(of.frozen), self.gradients_out, self.parameters_back, 2
        )
        self.owned_parameters = add(
            Content.OWNED_TRAINED, of.whole_bytes(of.stepped), self.parameters_out, self.parameters_back, 1
        )

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
        none = np.zeros(0, dtype=np.int64)
        owned = (self.owned_gradients, self.owned_frozen, self.owned_parameters) if len(self._owned) else (none,) * 3
        changed = np.concatenate([whole, owned[0]])
        self.read_in_order(self.gradient_projection, changed, homes.parameters[kept], owned[1])
        draft.update(self.gradient_projection[:, None], changed, np.arange(len(changed)))
        stepped = np.concatenate([homes.parameters[kept], homes.state[kept], owned[2]])
        self.read_in_order(self.parameter_projection, stepped, owned[1])
        draft.update(self.parameter_projection[:, None], stepped, np.arange(len(stepped)))
        if len(self._owned):
            self._wire_exchanges(homes)
        for tasks, made_bytes in draft.between_bytes:
            draft.phases.update(
                (task, Phase(curve=((1.0, size_bytes),)))
                for task, size_bytes in zip(tasks.tolist(), made_bytes.tolist(), strict=True)
                if size_bytes
            )

    def _wire_exchanges(self, homes: Homes) -> None:
        """Parts are read where they lie, and changed there when they come back."""
        parts, gradients = homes.parameters[self._owned], homes.gradients[self._owned]
        stepped = np.concatenate([parts, homes.state[self._owned]])
        self.read_in_order(self.gradients_out, parts, gradients)
        self.read_in_order(self.gradients_back, gradients, self.owned_gradients)
        self.read_in_order(self.parameters_out, stepped)
        self.read_in_order(self.parameters_back, stepped, self.owned_parameters)
        for task, changed in ((self.gradients_back, gradients), (self.parameters_back, stepped)):
            self.draft.update(task[:, None], changed, 3 + np.arange(len(changed)))


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
