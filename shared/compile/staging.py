"""What passes between the host's disk and the rest, through places of the host that chunks share.

See [Note: Disk] in ``compile.py``.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..drafts.program import NOT_THERE, BufferGroup, Draft, IntArray, Operand, Part, TaskGroup, Work
from ..schema.schedule import TaskKind
from .family import Family
from .gradients import DISK_READS, DISK_WRITES, TASKS_PER_CHUNK
from .homes import Homes, staged_sizes
from .residency import READS, Residency
from .sections import Sections
from .updates import Updates


class Staging:
    """Reads ahead of gathers and of CPU Adam, and writes behind that.

    Shapes: C chunks, G stays of gathered chunks, R stays of those on the disk, J chunks that are stepped from the disk,
    in the order of their steps.
    """

    def __init__(
        self, family: Family, draft: Draft, sections: Sections, residency: Residency, updates: Updates
    ) -> None:
        self.family = family
        self.draft = draft
        self.sections = sections
        self.residency = residency
        self.updates = updates
        self.passing: IntArray = np.full(len(residency.stays.chunk), NOT_THERE)
        """(G,) the buffers that gathers of chunks on the disk copy."""
        num_chunks = len(family.is_gathered)
        self._state, self._parameters, self._gradients = np.full((3, num_chunks), NOT_THERE)
        self.read_stays: IntArray = np.flatnonzero(family.is_on_disk[residency.stays.chunk])
        """(R,)"""
        stepped = updates.leaving[family.is_stepped_from_disk[updates.leaving]]
        self.stepped: IntArray = np.sort(stepped) if family.step.limits_norm else stepped
        """(J,) chunks."""
        if family.num_staging:
            (_, _, self._passing_bytes, _), _, (_, _, self._state_bytes, _), _ = staged_sizes(family)
            self._read_for_gathers()
            self._stage_steps()

    # -- on the way to the device ------------------------------------------------------------------------------------

    def _read_for_gathers(self) -> None:
        """A read ahead of every gather of a chunk on the disk, as soon as a place is free: it takes no device memory.

        Places are taken in turns, anew in every micro-batch, so that all in the middle are alike.
        """
        residency, chunks = self.residency, self.residency.stays.chunk[self.read_stays]
        gathers = residency.gathers[self.read_stays]
        self.reads = residency.coming(
            TaskKind.DISK_READ, Work(moved_bytes=self._passing_bytes), self.read_stays, number=READS
        )
        """(R,)"""
        self.draft.wait(gathers, self.reads)
        micro_batch = residency.micro_batch_of(residency.stays.first_step[self.read_stays])
        number = np.arange(len(chunks)) - np.searchsorted(micro_batch, micro_batch)
        slot = number % self.family.num_staging
        self._take_turns(slot, self.reads, gathers)
        (content, memory, sizes, _), *_ = staged_sizes(self.family)
        self.passing[self.read_stays] = self.draft.buffers(
            BufferGroup(
                content,
                memory,
                sizes[chunks],
                chunk=chunks,
                micro_batch=micro_batch,
                slot=slot,
                made_by=self.reads,
                freed_by=gathers,
                freed_at=Operand.RELEASED.at(),
            )
        )

    def _take_turns(self, slot: IntArray, takers: IntArray, leavers: IntArray) -> None:
        """Each of ``takers`` waits until who had its place before has left, perhaps in the iteration before."""
        latest: dict[int, int] = {}
        for number, place in enumerate(slot.tolist()):
            if place in latest:
                self.draft.wait(takers[[number]], leavers[[latest[place]]])
            latest[place] = number
        for number, place in enumerate(slot[: self.family.num_staging].tolist()):
            if place not in slot[:number].tolist():
                self.draft.wait(takers[[number]], leavers[[latest[place]]], is_previous=True)

    # -- steps -------------------------------------------------------------------------------------------------------

    def _stage_steps(self) -> None:
        """What CPU Adam steps is read before it, and written behind it; chunks take places in turns.

        In the lane's order a chunk's write stands right before the read of the chunk that has its place next, so that
        the disk need not wait for CPU Adam while there are places.
        """
        family, chunks, num_staging = self.family, self.stepped, self.family.num_staging
        num_chunks = len(family.is_gathered)
        moved_bytes = self._state_bytes + np.where(family.is_on_disk, self._passing_bytes, 0)
        work = Work(moved_bytes=moved_bytes)
        of_chunks = np.full(num_chunks, NOT_THERE)
        of_chunks[self.updates.leaving] = self.updates.cpu_adams
        adams, ends = of_chunks[chunks], self.updates.stepped_by[chunks]
        self.step_reads = self._beside(TaskKind.DISK_READ, work, chunks, chunks, DISK_READS)
        """(J,)"""
        beside = np.concatenate([chunks[num_staging:], num_chunks + np.arange(min(num_staging, len(chunks)))])
        self.step_writes = self._beside(TaskKind.DISK_WRITE, work, chunks, beside, DISK_WRITES)
        """(J,)"""
        self.draft.wait(adams, self.step_reads)
        self.draft.wait(self.step_writes, ends)
        self.step_slots: IntArray = np.arange(len(chunks)) % num_staging
        """(J,) the places that they are stepped in."""
        slot = self.step_slots
        micro_batch = 0 if family.step.limits_norm else family.step.micro_batches - 1
        offloads = np.full(num_chunks, NOT_THERE)
        offloads[self.updates.leaving] = self.updates.offloads[0]
        if family.stages_gradients.any():
            self._take_turns(slot, offloads[chunks], adams)
        lives = ((self.step_reads, self.step_writes), (self.step_reads, self.step_writes), (offloads[chunks], adams))
        _, *sorts = staged_sizes(family)
        found = (self._parameters, self._state, self._gradients)
        for place, ((content, memory, sizes, passes), (makers, freers), of_chunk) in enumerate(
            zip(sorts, lives, found, strict=True)
        ):
            here = np.flatnonzero(passes[chunks])
            of_chunk[chunks[here]] = self.draft.buffers(
                BufferGroup(
                    content,
                    memory,
                    sizes[chunks[here]],
                    chunk=chunks[here],
                    micro_batch=micro_batch,
                    slot=slot[here],
                    made_by=makers[here],
                    made_at=place,
                    freed_by=freers[here],
                    freed_at=Operand.RELEASED.at(place),
                )
            )

    def _beside(self, kind: TaskKind, work: Work, chunks: IntArray, beside: IntArray, number: int) -> IntArray:
        """(J,) a task for each of ``chunks``, where the steps of ``beside`` stand; behind all of them for others."""
        positions, updates = self.sections.positions, self.updates
        num_chunks = len(self.family.is_gathered)
        position = np.full(len(chunks), positions.prologue_backward)
        within = updates.behind_chunks + TASKS_PER_CHUNK * beside + number
        here = np.flatnonzero(beside < num_chunks)
        position[here] = updates.step_positions(beside[here])
        if not self.family.step.limits_norm:
            within[here] = TASKS_PER_CHUNK * updates.place_of[beside[here]] + number
        micro_batch = 0 if self.family.step.limits_norm else self.family.step.micro_batches - 1
        group = TaskGroup(
            kind, position, Part.LEAVES, work, chunks, within=within, chunk=chunks, micro_batch=micro_batch
        )
        return self.draft.tasks(group)

    # -- one plan ----------------------------------------------------------------------------------------------------

    def wire(self, homes: Homes) -> Homes:
        """Add what reads and writes use in the family's one plan; gives where CPU Adam finds what it steps."""
        if not self.family.num_staging:
            return homes
        draft, chunks = self.draft, self.stepped
        draft.read(self.reads, homes.parameters[self.residency.stays.chunk[self.read_stays]], 0)
        on_disk = self.family.is_on_disk[chunks]
        for place, staged, home, here in (
            (0, self._parameters, homes.parameters, on_disk),
            (1, self._state, homes.state, np.ones_like(on_disk)),
        ):
            draft.read(self.step_reads[here], home[chunks[here]], place)
            draft.read(self.step_writes[here], staged[chunks[here]], place)
            draft.update(self.step_writes[here], home[chunks[here]], place)
        found = {
            name: np.where(staged == NOT_THERE, home, staged)
            for name, staged, home in (
                ("parameters", self._parameters, homes.parameters),
                ("state", self._state, homes.state),
                ("gradients", self._gradients, homes.gradients),
            )
        }
        return replace(homes, **found)
