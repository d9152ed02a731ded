"""Where chunks and saved activations lie, when they come to the device and when they go.

See [Note: Steps] and [Note: Ranks] in ``compile.py``.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ..drafts.program import (
    NOT_THERE,
    BoolArray,
    BufferGroup,
    Draft,
    IntArray,
    Integers,
    Operand,
    Part,
    TaskGroup,
    Work,
    spread,
)
from ..schema.schedule import Content, Memory, TaskKind
from .chunk_facts import Stays
from .family import Family
from .homes import Homes
from .sections import Sections

READS, COPIES, EXCHANGES, _PER_STAY = range(4)
"""The order of what brings one stay."""


class Residency:
    """Persistent, host-stepped, sharded and offloaded chunks; activations that stay, and those that travel.

    Shapes: C chunks, D depths, G stays of gathered chunks, H host-stepped chunks, M micro-batches, S steps, B blocks
    of which something travels: what they saved (SWAP), or their input (OFFLOAD_INPUT).
    """

    def __init__(self, family: Family, draft: Draft, sections: Sections) -> None:
        self.family = family
        self.draft = draft
        self.sections = sections
        self.stays: Stays = family.facts.stays(family.is_gathered, family.n_buffer, sections.step_number)
        self.renewed: IntArray = np.flatnonzero(family.is_host_stepped)
        """(H,) chunks."""
        self._first_use, self._last_use = self._uses_of(self.renewed)
        self.travelling = family.travelling
        """(B,) blocks"""
        self._travelling = 1 + family.travelling
        """(B,) the same among the sections."""
        self.stay_ends: IntArray = sections.stay_ends(self.stays.chunk, self.stays.last_step)
        """(G,) the task that ends each stay."""
        draft.repeats = self.stays.repeats(sections.positions.micro_steps)
        self._send_out()
        self._send_position = self._sent_behind()  # (S,) or (D, S)
        self._gather_rank, self._renewal_rank, self._fetch_rank = self._ranks()
        self._gather()
        self._renew()
        self._fetch()

    fewer_buffers_add: ClassVar[bool] = True
    """Whether plans with fewer buffers and less look-ahead have the tasks and waits of others, and more, in every
    sequence of a lane (``sequences_of_tasks``)."""

    # -- when things come --------------------------------------------------------------------------------------------

    def _window(self, steps: IntArray) -> IntArray:
        """(D, n) the step that ends before anything may come for each of ``steps``; below 0 in the iteration before."""
        return steps - self.family.depths[:, None] - 1

    def _sent_behind(self) -> IntArray:
        """The position of the compute lane behind which stands what comes for each step; see [Note: Ranks].

        Alone, or where hosts have whole chunks, right before the step.  Where a collective brings a part of it, as soon
        as its slot and window are open, in the order of the steps.
        """
        sections, stays = self.sections, self.stays
        before = sections.begin_position - 1
        if not self.family.step.is_sharded:
            return before
        steps = np.arange(len(before))
        freed = np.full(len(before), NOT_THERE)
        for of_stay in (stays.previous, stays.earlier):
            has_one = of_stay >= 0
            np.maximum.at(freed, stays.first_step[has_one], stays.last_step[of_stay[has_one]])
        # What comes back is sent in the same order, and not before its way out.
        blocks = 1 + np.flatnonzero(self.family.is_swap | self.family.offloads_input)
        back = sections.backward_step(blocks)
        freed[back] = np.maximum(freed[back], sections.forward_step(blocks))
        opened = np.maximum(freed, self._window(steps))
        # Before the end of the first step nothing but what that step needs is sent.
        behind = np.maximum(np.maximum.accumulate(opened, axis=1), 0)
        position: IntArray = sections.end_position[behind]
        position[:, 0] = before[0]
        return position

    def _ranks(self) -> tuple[IntArray, IntArray, IntArray]:
        """The order of all that comes: (G,) of gathers, (H,) of new values, (M * B,) of what comes back.

        It is the order of the steps; to one step, what comes back is first, then new values.
        """
        back = self.sections.backward_step(self._travelling).ravel()
        steps = np.concatenate([back, self._first_use, self.stays.first_step])
        ranks = np.empty_like(steps)
        ranks[np.argsort(steps, kind="stable")] = np.arange(len(steps))
        of_back, of_renewals, of_gathers = np.split(ranks, [len(back), len(back) + len(self._first_use)])
        return of_gathers, of_renewals, of_back

    # -- chunks ------------------------------------------------------------------------------------------------------

    def _gather(self) -> None:
        """Add the gathers of all stays, their waits, and the buffers that they fill."""
        stays, facts, sections = self.stays, self.family.facts, self.sections
        self.gathers: IntArray = np.full(len(stays.chunk), NOT_THERE)
        """(G,) the task that each gather begins with: a copy, or an all-gather alone."""
        is_copied = self.family.is_offloaded[stays.chunk]
        copied, alone = np.flatnonzero(is_copied), np.flatnonzero(~is_copied)
        self.gathers[copied] = self.coming(TaskKind.GATHER, facts.gather_work, copied)
        self.gathers[alone] = self.coming(TaskKind.ALL_GATHER, facts.all_gather_work, alone)
        self.exchanged = copied if self.family.step.is_sharded else copied[:0]
        """The stays of offloaded chunks that ranks have in parts."""
        self.exchanges = self.coming(TaskKind.ALL_GATHER, facts.all_gather_work, self.exchanged, number=EXCHANGES)
        """Of these, the all-gathers that follow the copies."""
        self.draft.wait(self.exchanges, self.gathers[self.exchanged])
        arrivals = self.gathers.copy()
        arrivals[self.exchanged] = self.exchanges
        self.draft.wait(sections.step_begin[stays.first_step], arrivals)
        self._read_first(stays.first_step, facts.part("gathered_bytes")[stays.chunk])
        self._wait_for_room()
        self.buffers = self.draft.buffers(
            BufferGroup(
                Content.PARAMETERS,
                Memory.DEVICE,
                facts.part("gathered_bytes")[stays.chunk],
                chunk=stays.chunk,
                micro_batch=self.micro_batch_of(stays.first_step),
                slot=stays.slot,
                made_by=self.gathers,
                freed_by=self.stay_ends,
                freed_at=Operand.RELEASED.at(np.arange(len(stays.chunk))),
            )
        )
        """(G,)"""

    def _read_first(self, steps: IntArray, size_bytes: IntArray) -> None:
        """Let the first task of each of ``steps`` be the first that reads so many bytes since they came."""
        self.draft.arrive(self.sections.step_begin[steps], self.sections.step_end[steps], size_bytes)

    def coming(
        self, kind: TaskKind, work: Work, stays: IntArray, *, number: int = COPIES, part: Part = Part.COMES
    ) -> IntArray:
        """Add the ``number``th task of these stays' gathers."""
        steps, chunks = self.stays.first_step[stays], self.stays.chunk[stays]
        return self.draft.tasks(
            TaskGroup(
                kind,
                self._send_position[..., steps],
                part,
                work,
                chunks,
                within=_PER_STAY * self._gather_rank[stays] + number,
                chunk=chunks,
                micro_batch=self.micro_batch_of(steps),
            )
        )

    def _uses_of(self, chunks: IntArray) -> tuple[IntArray, IntArray]:
        """(H,) each: the first step of the iteration that uses each chunk, and the last."""
        steps, used, _ = self.family.facts.uses
        num_chunks, num_steps = len(self.family.is_gathered), len(self.sections.step_begin)
        first, last = np.full(num_chunks, num_steps), np.full(num_chunks, NOT_THERE)
        np.minimum.at(first, used, steps)
        np.maximum.at(last, used, steps)
        return first[chunks], last[chunks] + num_steps - self.sections.positions.micro_steps

    def _renew(self) -> None:
        """Add the copies of what the host has stepped, to the chunks' own places.

        They take no room, so that no window bounds them: they may come as soon as nobody uses the values before.
        """
        chunks, sections = self.renewed, self.sections
        if not len(chunks):
            self.renewals = np.zeros(0, dtype=np.int64)
            return
        self.renewals = self.draft.tasks(
            TaskGroup(
                TaskKind.GATHER,
                self._send_position[..., self._first_use],
                Part.COMES,
                self.family.facts.gather_work,
                chunks,
                within=_PER_STAY * self._renewal_rank,
                chunk=chunks,
            )
        )
        """(H,)"""
        self.draft.wait(self.renewals, sections.step_end[self._last_use], is_previous=True)
        self.draft.wait(sections.step_begin[self._first_use], self.renewals)
        self._read_first(self._first_use, self.family.facts.size_bytes[chunks])

    def micro_batch_of(self, steps: IntArray) -> IntArray:
        """The micro-batch of each step."""
        found: IntArray = steps // self.sections.positions.micro_steps
        return found

    def _wait_for_room(self) -> None:
        """A gather waits for its slot, for its chunk's stay before, and for its window."""
        stays, step_end, wait = self.stays, self.sections.step_end, self.draft.wait
        for before in (stays.previous, stays.earlier):
            of_stay = np.flatnonzero(before >= 0)
            wait(self.gathers[of_stay], self.stay_ends[before[of_stay]])
        first = np.flatnonzero(stays.previous < 0)
        wait(self.gathers[first], self.stay_ends[stays.last_in_slot[first]], is_previous=True)
        self._wait_for_window(self.gathers, stays.first_step)
        window = self._window(stays.first_step)
        early = np.flatnonzero(window.min(axis=0, initial=0) < 0)
        # Not more than an iteration ahead, however deep the prefetch.
        ahead = step_end[np.clip(window[:, early] + len(step_end), 0, len(step_end) - 1)]
        wait(self.gathers[early], np.where(window[:, early] < 0, ahead, NOT_THERE), is_previous=True)

    def _wait_for_window(self, tasks: IntArray, steps: IntArray) -> None:
        window = self._window(steps)
        self.draft.wait(tasks, np.where(window >= 0, self.sections.step_end[np.maximum(window, 0)], NOT_THERE))

    def follow(self, stepped_by: IntArray) -> None:
        """Let the first gather of every chunk, and new values, wait for what stepped it in the previous iteration.

        ``stepped_by``: (C,) tasks; ``NOT_THERE`` where nothing does: then it waits for the end of the last stay.
        """
        stays = self.stays
        first = np.flatnonzero(stays.earlier < 0)
        stepped = stepped_by[stays.chunk[first]]
        gone = self.stay_ends[stays.latest[first]]
        self.draft.wait(self.gathers[first], np.where(stepped >= 0, stepped, gone), is_previous=True)
        self.draft.wait(self.renewals, stepped_by[self.renewed], is_previous=True)

    # -- activations -------------------------------------------------------------------------------------------------

    def _send_out(self) -> None:
        """Add the ways out of what blocks save, or of their inputs, behind their forward."""
        sections = self.sections
        if not len(self.travelling):
            none = np.zeros(0, dtype=np.int64)
            self._trip_facts = {"section": none, "micro_batch": none}
            self._trip_rows = self._are_inputs = self.offloads = self.saved = none
            return
        steps = sections.forward_step(self._travelling)  # (M, B)
        self._trip_facts = {
            "section": spread(self._travelling, steps.shape),
            "micro_batch": spread(sections.micro_batch, steps.shape),
        }
        self._trip_rows = self.family.trip_rows[self._trip_facts["section"] - 1]
        """(M * B,) of the work of copies."""
        self._are_inputs = spread(self.family.offloads_input[self.travelling].astype(np.int64), steps.shape)
        """(M * B,) 1 where it is a block's input that travels."""
        forwards = sections.step_end[steps].ravel()
        self.offloads = self.draft.tasks(
            TaskGroup(
                TaskKind.ACTIVATION_OFFLOAD,
                sections.end_position[steps].ravel(),
                Part.LEAVES,
                self.family.trip_work,
                self._trip_rows,
                **self._trip_facts,
            )
        )
        """(M * B,)"""
        self.draft.wait(self.offloads, forwards)
        over = steps.ravel() + self.family.depths[:, None] + 1
        later = np.where(over < len(sections.step_begin), over, 0)
        waiting = np.where(over < len(sections.step_begin), sections.step_begin[later], NOT_THERE)
        self.draft.wait(waiting, self.offloads)
        # The block before has made an input.
        made_by = sections.step_end[steps.ravel() - self._are_inputs]
        self.saved = self._trip_buffers(made_by, self.offloads)

    def _fetch(self) -> None:
        """Add their ways back, ahead of their backward and its recomputation."""
        sections = self.sections
        if not len(self.travelling):
            self.fetches = self.fetched = np.zeros(0, dtype=np.int64)
            return
        steps = sections.backward_step(self._travelling).ravel()
        self.fetches = self.draft.tasks(
            TaskGroup(
                TaskKind.ACTIVATION_FETCH,
                self._send_position[..., steps],
                Part.COMES,
                self.family.trip_work,
                self._trip_rows,
                within=_PER_STAY * self._fetch_rank,
                **self._trip_facts,
            )
        )
        """(M * B,)"""
        self.draft.wait(self.fetches, self.offloads)
        self._wait_for_window(self.fetches, steps)
        self.draft.wait(sections.step_begin[steps], self.fetches)
        self._read_first(steps, self.family.trip_bytes[self._trip_facts["section"] - 1])
        self.fetched = self._trip_buffers(self.fetches, sections.step_end[steps], replaces=self.saved)

    def _trip_buffers(self, made_by: IntArray, freed_by: IntArray, replaces: Integers = NOT_THERE) -> IntArray:
        sizes = self.family.trip_bytes[self._trip_facts["section"] - 1]
        return self.draft.buffers(
            BufferGroup(
                Content.SWAPPED,
                Memory.DEVICE,
                sizes,
                **self._trip_facts,
                made_by=made_by,
                made_at=Operand.SWAPPED.at(),
                freed_by=freed_by,
                freed_at=Operand.SWAPPED.at(),
                replaces=replaces,
            )
        )

    # -- one plan ----------------------------------------------------------------------------------------------------

    def wire(self, homes: Homes, passing: IntArray) -> None:
        """Add the hosts' buffers of what travels, and what tasks read and write, in the family's one plan.

        ``passing``: (G,) what each gather copies of a chunk that comes from the disk; ``NOT_THERE`` of others.
        """
        draft, stays = self.draft, self.stays
        draft.read(self.gathers, np.where(passing == NOT_THERE, homes.parameters[stays.chunk], passing), 0)
        draft.read(self.renewals, homes.parameters[self.renewed], 0)
        draft.update(self.renewals, homes.kept[self.renewed], 0)
        draft.read(self.exchanges, self.buffers[self.exchanged], 0)
        draft.update(self.exchanges, self.buffers[self.exchanged], 0)
        at_home = draft.buffers(
            BufferGroup(
                Content.SWAPPED,
                Memory.PINNED_HOST,
                self.family.trip_bytes[self.travelling],
                section=self._travelling,
                made_at=Operand.SWAPPED.at(self.travelling),
            )
        )
        at_home = spread(at_home, (self.family.step.micro_batches, len(at_home)))
        draft.read(self.offloads, self.saved, 0)
        draft.update(self.offloads, at_home, 0)
        draft.read(self.fetches, at_home, 0)
        draft.read(self.sections.backward_of(self._travelling).ravel(), self.fetched, Operand.SWAPPED.at())
        self._read_inputs()
        self._read_parameters(homes)

    def _read_inputs(self) -> None:
        """Forwards read the inputs that leave behind them, and recomputations those that have come back."""
        inputs, sections = np.flatnonzero(self._are_inputs), self.sections
        section = self._trip_facts["section"][inputs]
        micro_batch = self._trip_facts["micro_batch"][inputs]
        forward = sections.positions.forward_step(section, micro_batch)
        again = sections.positions.backward_step(section, micro_batch)
        self.draft.read(sections.step_end[forward], self.saved[inputs], Operand.SWAPPED.at())
        self.draft.read(sections.step_begin[again], self.fetched[inputs], Operand.SWAPPED.at())

    def _read_parameters(self, homes: Homes) -> None:
        """Every compute task reads the chunks that its step needs."""
        draft, sections, stays = self.draft, self.sections, self.stays
        numbers, chunks, places = self.family.facts.uses
        num_steps = len(sections.step_begin)
        # The stay of each chunk at each step: the latest that has begun.
        begins = stays.chunk * num_steps + stays.first_step
        by_chunk = np.argsort(begins)
        steps = sections.positions.micro_steps * sections.micro_batch + numbers  # (M, U)
        number = np.searchsorted(begins[by_chunk], chunks * num_steps + steps, side="right") - 1
        where = spread(homes.kept[chunks], steps.shape).reshape(steps.shape)
        gathered = self.family.is_gathered[chunks]
        where[:, gathered] = self.buffers[by_chunk[number[:, gathered]]]
        begin, end = sections.step_begin[steps], sections.step_end[steps]
        draft.read(end, where, Operand.PARAMETERS.at(places))
        # Steps of two tasks: the epilogue's, and backwards with their recomputation.
        draft.read(np.where(begin == end, NOT_THERE, begin), where, Operand.PARAMETERS.at(places))


class GatheredBehind(Residency):
    """What a backward needs is gathered when the computation before it has ended, however deep the look-ahead.

    And ahead of that one's gradients.  So FSDP gathers with ``BackwardPrefetch.BACKWARD_POST``
    (``_post_backward_reshard`` in ``torch/distributed/fsdp/_runtime_utils.py``).
    """

    def coming(
        self, kind: TaskKind, work: Work, stays: IntArray, *, number: int = COPIES, part: Part = Part.COMES
    ) -> IntArray:
        """Add the ``number``th task of these stays' gathers."""
        is_backward, tasks = self._is_backward(self.stays.first_step[stays]), np.full(len(stays), NOT_THERE)
        for chosen, of_chosen in ((is_backward, Part.LEADS), (~is_backward, part)):
            tasks[chosen] = super().coming(kind, work, stays[chosen], number=number, part=of_chosen)
        return tasks

    def _window(self, steps: IntArray) -> IntArray:
        return np.where(self._is_backward(steps), steps - 1, super()._window(steps))

    def _is_backward(self, steps: IntArray) -> BoolArray:
        blocks = np.arange(1 + self.family.workload.num_blocks)
        return np.isin(steps, self.sections.backward_step(blocks))
