"""What happens to gradients until their parameters are new ([Note: Steps] and [Note: Ranks] in ``compile.py``)."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from ..drafts.program import NOT_THERE, Draft, IntArray, Part, TaskGroup, Work
from ..schema.schedule import NORM_BYTES, TaskKind
from ..schema.workload import Phase
from .family import Family
from .gradients import STEPS, TASKS_PER_CHUNK, Gradients
from .homes import Homes, bytes_of_lists
from .sections import Sections

TO_OWNERS, PROJECTION, FROM_OWNERS, _NORM, _NORM_PARTS = range(-5, 0)
"""The order of what follows the last backward of all, ahead of what steps chunks."""


class Updates(Gradients):
    """Gradients on their way, the norm, and Adam on the host and on the device.

    Shapes: those of ``Gradients``; N norms.
    """

    def __init__(self, family: Family, draft: Draft, sections: Sections) -> None:
        super().__init__(family, draft, sections)
        self._project()
        self._step()
        self._add_gradients(self.device_adam)

    def _behind_norms(self, kind: TaskKind, work: Work, number: int) -> IntArray:
        """(N,) a task behind the last backward of all, or behind that of each block whose norm is limited by itself."""
        sections = self.family.facts.norm_sections
        rows = np.arange(len(sections))
        group = TaskGroup(
            kind,
            self._norm_positions,
            Part.LEAVES,
            work,
            rows,
            within=self.behind_chunks + number,
            section=sections,
        )
        return self.draft.tasks(group)

    @cached_property
    def _norm_positions(self) -> IntArray:
        """(N,) the last backwards behind which norms are taken."""
        positions, sections = self.sections.positions, self.family.facts.norm_sections
        if not self.family.layout.limits_each_block:
            return np.full(len(sections), positions.prologue_backward)
        found: IntArray = positions.last_backward(sections)
        return found

    def step_positions(self, chunks: IntArray) -> IntArray:
        """(n,) the last backwards behind which the host steps ``chunks``."""
        if self.family.step.limits_norm:
            found: IntArray = self._norm_positions[self.family.facts.norm_of[chunks]]
            return found
        of_steps: IntArray = self.sections.end_position[self.last_steps(chunks)[-1]]
        return of_steps

    @property
    def behind_chunks(self) -> int:
        """The order of what steps chunks behind all that becomes of their gradients, and behind the norm of these."""
        return TASKS_PER_CHUNK * len(self.family.facts.update_order) - TO_OWNERS

    def _project(self) -> None:
        """Project gradients, of a method that does."""

    # -- at the end of the step --------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Add the norm if it is limited, Adam of every chunk that the host steps, and device Adam."""
        draft, facts = self.draft, self.family.facts
        self.norm: IntArray = np.zeros(0, dtype=np.int64)
        """(N,), or (0,) if it is not limited: one of all gradients, or one of each student block's."""
        if not self.family.step.limits_norm:
            last = slice(-1, None)
            (self.cpu_adams,) = self.behind_backward(TaskKind.CPU_ADAM, facts.cpu_adam_work, self.leaving, STEPS, last)
            """(U,)"""
            draft.wait(self.cpu_adams, self.arrived)
            known = self.norm
        else:
            known = self._limit_norm()
            self.cpu_adams = draft.tasks(
                TaskGroup(
                    TaskKind.CPU_ADAM,
                    self.step_positions(self.leaving),
                    Part.LEAVES,
                    facts.cpu_adam_work,
                    self.leaving,
                    # In the order in which the next iteration needs them.
                    within=self.behind_chunks + TASKS_PER_CHUNK * self.leaving + STEPS,
                    chunk=self.leaving,
                )
            )
            draft.wait(self.cpu_adams, known[facts.norm_of[self.leaving]])
        self.device_adam = draft.tasks(
            TaskGroup(
                TaskKind.DEVICE_ADAM,
                np.array([self.sections.positions.device_adam]),
                Part.RUNS,
                self._device_adam_work,
                np.zeros(1, dtype=np.int64),
            )
        )
        """(1,)"""
        draft.wait(self.device_adam, np.concatenate([known, *(tasks for tasks, _ in self.summed)]))
        self.stepped_by: IntArray = np.full(len(facts.size_bytes), NOT_THERE)
        """(C,) what steps each chunk that is gathered, or stepped on the host."""
        self.stepped_by[self.leaving] = self.cpu_adams
        self.stepped_by[self.parted] = self.device_adam
        self.rows.follow(self.stepped_by)

    def _limit_norm(self) -> IntArray:
        """Add the norm of all gradients, or of each student block's; gives the (N,) tasks after which they are known.

        See [Note: Norms of blocks].
        """
        draft, facts, step = self.draft, self.family.facts, self.family.step
        read_bytes = np.zeros(len(facts.norm_sections), dtype=np.int64)
        np.add.at(read_bytes, facts.norm_of[self.leaving], facts.part("summed_bytes")[self.leaving])
        kept_bytes = np.zeros_like(read_bytes)
        chunks, _, sizes = facts.gradients
        stays = self.family.is_persistent[chunks]
        np.add.at(kept_bytes, facts.norm_of[chunks[stays]], sizes[stays])
        np.add.at(kept_bytes, facts.norm_of[self.parted], facts.part("gradient_bytes")[self.parted])
        work = Work(moved_bytes=kept_bytes, stepped_bytes=read_bytes)
        self.norm = self._behind_norms(TaskKind.GRADIENT_NORM, work, _NORM)
        if self.family.layout.limits_each_block:
            draft.wait(self.norm[facts.norm_of[self.staying]], self._ends(self.staying)[-1])
        else:
            draft.wait(self.norm, self._last_added())
        for tasks, chunks in ((self.arrived, self.leaving), *self.summed):
            draft.wait(self.norm[facts.norm_of[chunks]], tasks)
        if not step.is_sharded or not len(self.leaving) + len(self.parted):
            return self.norm
        # Of sharded gradients every rank knows the norm of its own shards only.
        work = Work(moved_bytes=NORM_BYTES, num_ranks=step.num_shards, axis=step.shard_axis)
        known = self._behind_norms(TaskKind.ALL_REDUCE, work, _NORM_PARTS)
        draft.wait(known, self.norm)
        return known

    def _last_added(self) -> IntArray:
        """(1,) the backward that completes the last gradient which stays where backwards add to it; (0,) for none.

        Where nothing is trained, the last backward of all: a norm that waits for nothing would run on without end.
        """
        chunks, completing, _ = self.family.facts.gradients
        stays = self.family.is_persistent[chunks]
        if not len(chunks):
            return self.sections.backwards[-1, -1:]
        if not stays.any():
            return np.zeros(0, dtype=np.int64)
        ends = self.sections.backward_step(completing[stays])[-1]
        last: IntArray = self.sections.step_end[ends.max(keepdims=True)]
        return last

    @cached_property
    def _device_adam_work(self) -> Work:
        facts, parted = self.family.facts, self.parted
        whole = self.family.is_persistent & facts.is_trainable
        return Work(
            num_stepped=int(facts.num_stepped[whole].sum() + facts.part("num_stepped")[parted].sum()),
            stepped_bytes=int(facts.whole_stepped_bytes[whole].sum() + facts.part_stepped_bytes[parted].sum()),
            num_tensors=int(facts.num_tensors[whole].sum() + facts.part("num_tensors")[parted].sum()),
        )

    # -- one plan ----------------------------------------------------------------------------------------------------

    def wire(self, homes: Homes) -> None:
        """Add what tasks read and write in the family's one plan, and the phase of device Adam."""
        draft = self.draft
        self._wire_gradients(homes)
        self._wire_cpu_adams(homes)
        self.rows.wire(homes)
        _, staying, places = self.gradients_of(np.flatnonzero(self.family.is_persistent))
        whole = staying[0][np.argsort(places)]
        parts = homes.gradients[np.sort(self.parted)]
        self._wire_norms(homes)
        chunks = np.concatenate(
            [np.flatnonzero(self.family.is_persistent & self.family.facts.is_trainable), np.sort(self.parted)]
        )
        paged = homes.paged[chunks]
        stepped = (homes.parameters[chunks], homes.state[chunks], paged[paged != NOT_THERE])
        self.read_in_order(self.device_adam, whole, parts, *stepped)
        written = np.concatenate(stepped)
        draft.update(self.device_adam, written, np.arange(len(written)))
        if (phase := self.phase_of_step) is not None:
            draft.phases[int(self.device_adam[0])] = phase

    def _wire_cpu_adams(self, homes: Homes) -> None:
        """CPU Adam reads gradients, and changes what it steps."""
        draft, leaving = self.draft, self.leaving
        draft.read(self.cpu_adams, homes.gradients[leaving], 0)
        for place, stepped in enumerate((homes.state[leaving], homes.parameters[leaving])):
            draft.read(self.cpu_adams, stepped, 1 + place)
            draft.update(self.cpu_adams, stepped, place)

    def _wire_norms(self, homes: Homes) -> None:
        """Each norm reads what it is of: what is staged, parts, and what stays whole on the device."""
        norm_of = self.family.facts.norm_of
        for place, norm in enumerate(self.norm[:, None]):
            leaving, parted, persistent = (
                np.sort(chunks[norm_of[chunks] == place]) for chunks in (self.leaving, self.parted, self.staying)
            )
            _, staying, places = self.gradients_of(persistent)
            whole = staying[0][np.argsort(places)]
            self.read_in_order(norm, homes.gradients[leaving], homes.gradients[parted], whole)

    @property
    def phase_of_step(self) -> Phase | None:
        """Device Adam's levels; None if it makes nothing."""
        return Phase(curve=((1.0, self.widened_bytes),)) if self.widened_bytes else None

    @cached_property
    def widened_bytes(self) -> int:
        """The most that device Adam adds to the level at its start."""
        facts, lists_bytes = self.family.facts, bytes_of_lists(self.family, self.draft.keeping)
        whole = np.flatnonzero(self.family.is_persistent & facts.is_trainable)
        return lists_bytes + facts.widened_bytes(whole, self.parted, drops=self.draft.keeping.drops_gradients)
