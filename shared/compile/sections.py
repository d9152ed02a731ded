"""Section programs: what computes, in which order; that of full training ([Note: Steps] in ``compile.py``).

[Note: Exchanges]
Ranks that share a sequence exchange parts of it within the compute tasks of blocks, ahead of attention and behind it.
Nothing of the rank's own computes meanwhile, whatever else its lanes do.  So a schedule has all exchanges of a step
(those of a recomputation and of the backward behind it together) as one task of the collective lane ahead of the step:
it waits for the compute task before, and the step waits for it.  Seconds add up as they do in truth; where in the step
an exchange lies, no schedule says.

In the collective lane it stands ahead of the reductions of the compute task before, since these have time, and behind
all-gathers whose room and window are open by then.  What an exchange takes on the device the phases' curves contain.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from ..drafts.program import (
    NOT_THERE,
    BoolArray,
    BufferGroup,
    Draft,
    IntArray,
    Operand,
    Part,
    PhaseWork,
    TaskGroup,
    Work,
    spread,
)
from ..layout.positions import Positions
from ..schema.schedule import Content, Memory, RankAxis, TaskKind
from ..schema.workload import BlockProfile, Phase, Workload
from .activation_levels import ActivationAccount, ActivationLevels, activation_levels
from .family import Family

_PROLOGUE_FORWARD, _EPILOGUE_FORWARD, _EPILOGUE_BACKWARD, _PROLOGUE_BACKWARD, _PROFILES = range(5)
"""Rows of the work of compute tasks."""
_FORWARD, _CHECKPOINT_FORWARD, _RECOMPUTE, _BACKWARD, _CHECKPOINT_BACKWARD, _PER_PROFILE = range(6)
"""Rows of each profile, after those."""
_EXCHANGES = (("forward",), ("checkpoint_forward",), ("backward",), ("recompute", "checkpoint_backward"))
"""Phases of a profile's steps, which exchange what they do together: forward kept and checkpointed, and backward."""


class Sections(ABC):
    """What computes, in which order: the compute tasks of all sections, micro-batch by micro-batch, but device Adam.

    Shapes: n blocks, M micro-batches, S steps.  Sections go by their numbers ([Note: Numbers of sections] in
    ``shared/layout/uses.py``).
    """

    has_modes: ClassVar[bool]
    """Whether blocks may be checkpointed or swap what they save."""
    forwards: IntArray
    """(M, ...) the forwards of all sections that have one, from the prologue on."""
    backwards: IntArray
    """(M, ...) the backwards of all sections that have one, in the order of the program."""

    def __init__(self, family: Family, draft: Draft) -> None:
        self.family = family
        self.draft = draft
        num_blocks, micro_batches = family.workload.num_blocks, family.step.micro_batches
        self.num_blocks = num_blocks
        self.micro_batch: IntArray = np.arange(micro_batches)[:, None]
        """(M, 1)"""
        self._blocks = 1 + np.arange(num_blocks)
        """(n,) the blocks among the sections."""
        positions = self.positions = self.positions_of(family.workload, micro_batches)
        self.step_number = positions.step_number
        """(S,) the number of each step within its micro-batch."""
        steps = np.arange(positions.num_steps)
        self.begin_position = positions.step_begin(steps)
        """(S,) where the first task of each step stands."""
        self.end_position = positions.step_end(steps)
        """(S,) where the last one stands."""
        begin, end = self._add_tasks()
        self.step_begin: IntArray = begin.ravel()
        """(S,) the first task of each step, whether the plan has it or not."""
        self.step_end: IntArray = end.ravel()
        """(S,) the last task of each step."""

    @staticmethod
    @abstractmethod
    def positions_of(workload: Workload, micro_batches: int = 1) -> Positions:
        """Where the tasks of so many micro-batches stand."""

    @staticmethod
    def levels_of(
        workload: Workload, is_checkpoint: BoolArray, is_swap: BoolArray, input_bytes: IntArray, micro_batches: int
    ) -> ActivationLevels | None:
        """What ``wire`` has on the device for many choices of modes at once, (K, n) blocks in each.

        ``input_bytes``: (K, n) what each block moves of its input.
        None for programs without modes: it is read from the buffers that ``wire`` adds.
        """
        del workload, is_checkpoint, is_swap, input_bytes, micro_batches
        return None

    def stay_ends(self, chunks: IntArray, last_steps: IntArray) -> IntArray:
        """The tasks that end the stays of ``chunks`` whose last steps are these; (n,) each."""
        found: IntArray = self.step_end[last_steps]
        return found

    @abstractmethod
    def _add_tasks(self) -> tuple[IntArray, IntArray]:
        """Add all compute tasks but device Adam; gives (M, steps) the first task of every step, and the last one."""

    @abstractmethod
    def backward_of(self, section: IntArray) -> IntArray:
        """(M, ...) the backward of each section."""

    @abstractmethod
    def wire(self, device_adam: IntArray) -> None:
        """Add what sections leave for others in the family's one plan, who uses it, and the phases.

        What backwards leave beside gradients, and nobody else takes away, stays for ``device_adam``, (1,).
        """

    def forward_step(self, section: IntArray) -> IntArray:
        """(M, ...) the forward step of each section."""
        return self.positions.forward_step(section, self.micro_batch)

    def backward_step(self, section: IntArray) -> IntArray:
        """(M, ...) the backward step of each section."""
        return self.positions.backward_step(section, self.micro_batch)

    def _in_every_micro_batch(
        self,
        kind: TaskKind,
        work: PhaseWork,
        places: IntArray,
        section: IntArray,
        rows: IntArray,
        checkpointed: IntArray | None = None,
    ) -> IntArray:
        """(M, tasks) these tasks of one micro-batch, in every one."""
        shape = (len(self.micro_batch), len(places))
        group = TaskGroup(
            kind,
            (self.positions.micro_length * self.micro_batch + places).ravel(),
            Part.RUNS,
            work,
            spread(rows, shape),
            None if checkpointed is None else spread(checkpointed, shape),
            section=spread(section, shape),
            micro_batch=spread(self.micro_batch, shape),
        )
        return self.draft.tasks(group).reshape(shape)

    def _buffers(
        self,
        content: Content,
        size_bytes: IntArray,
        section: IntArray,
        made: tuple[IntArray, Operand],
        freed: tuple[IntArray, Operand],
    ) -> IntArray:
        """(M, n') buffers of sections in every micro-batch, with the tasks that make and free them."""
        shape = made[0].shape
        group = BufferGroup(
            content,
            Memory.DEVICE,
            spread(size_bytes, shape),
            section=spread(section, shape),
            micro_batch=spread(self.micro_batch, shape),
            made_by=made[0].ravel(),
            made_at=made[1].at(),
            freed_by=freed[0].ravel(),
            freed_at=freed[1].at(spread(self.micro_batch, shape)),
        )
        return self.draft.buffers(group).reshape(shape)


class FullTraining(Sections):
    """Forward of all sections, then backward of all, micro-batch by micro-batch.

    Beside the tasks of ``Sections`` (M, n) ``recomputations`` of blocks; forwards and backwards are (M, n + 2).
    """

    has_modes = True

    @staticmethod
    def positions_of(workload: Workload, micro_batches: int = 1) -> Positions:
        """Where the tasks of so many micro-batches stand."""
        return Positions(workload.num_blocks, micro_batches)

    @staticmethod
    def levels_of(
        workload: Workload, is_checkpoint: BoolArray, is_swap: BoolArray, input_bytes: IntArray, micro_batches: int
    ) -> ActivationLevels:
        """Of all choices of modes at once."""
        return activation_levels(workload, is_checkpoint, is_swap, input_bytes, micro_batches)

    def backward_of(self, section: IntArray) -> IntArray:
        """(M, ...) the backward of each section."""
        return self.backwards[:, self.num_blocks + 1 - section]

    # -- tasks -------------------------------------------------------------------------------------------------------

    def _add_tasks(self) -> tuple[IntArray, IntArray]:
        """A recomputation for every block, with no row where it has none."""
        num_blocks, blocks, work = self.num_blocks, self._blocks, self.family.once(_phase_work)
        prologue, epilogue = 0, num_blocks + 1
        of_profile = _PROFILES + _PER_PROFILE * np.array([block.profile for block in self.family.workload.blocks])
        at_backward = self.positions.backward(blocks)

        def around(first: int, of_blocks: IntArray, last: int) -> IntArray:
            """(n + 2,) values of blocks, and of the sections around them."""
            return np.concatenate([[first], of_blocks, [last]])

        self.forwards = self._in_every_micro_batch(
            TaskKind.FORWARD,
            work,
            np.arange(num_blocks + 2),
            around(prologue, blocks, epilogue),
            around(_PROLOGUE_FORWARD, of_profile + _FORWARD, _EPILOGUE_FORWARD),
            around(_PROLOGUE_FORWARD, of_profile + _CHECKPOINT_FORWARD, _EPILOGUE_FORWARD),
        )
        self.recomputations = self._in_every_micro_batch(
            TaskKind.RECOMPUTE, work, at_backward - 1, blocks, np.full(num_blocks, NOT_THERE), of_profile + _RECOMPUTE
        )
        self.backwards = self._in_every_micro_batch(
            TaskKind.BACKWARD,
            work,
            around(num_blocks + 2, at_backward[::-1], 3 * num_blocks + 3),
            around(epilogue, blocks[::-1], prologue),
            around(_EPILOGUE_BACKWARD, of_profile[::-1] + _BACKWARD, _PROLOGUE_BACKWARD),
            around(_EPILOGUE_BACKWARD, of_profile[::-1] + _CHECKPOINT_BACKWARD, _PROLOGUE_BACKWARD),
        )
        self._add_exchanges()
        again, last = self.recomputations[:, ::-1], self.backwards[:, -1:]
        begin = np.concatenate([self.forwards, again, last], axis=1)
        return begin, np.concatenate([self.forwards[:, :-1], self.backwards], axis=1)

    def _add_exchanges(self) -> None:
        """Those of blocks, where they share sequences; see [Note: Exchanges]."""
        work = self.family.once(_exchange_work)
        if work is None:
            return
        row = len(_EXCHANGES) * np.array([block.profile for block in self.family.workload.blocks])
        has_any = np.asarray(work.num_tensors) > 0
        back = self.backwards[:, ::-1]  # of the prologue, of blocks, and of the epilogue
        places = self.positions.backward(self._blocks) - 2
        for kept, before, behind, position in (
            (row, self.forwards[:, :-2], self.forwards[:, 1:-1], self._blocks - 1),
            (row + 2, back[:, 2:], self.recomputations, places),
        ):
            # A block exchanges in both modes, or in none.
            here = np.flatnonzero(has_any[kept])
            shape = (len(self.micro_batch), len(here))
            group = TaskGroup(
                TaskKind.SEQUENCE_EXCHANGE,
                (self.positions.micro_length * self.micro_batch + position[here]).ravel(),
                Part.LEADS,
                work,
                spread(kept[here], shape),
                spread(kept[here] + 1, shape),
                section=spread(self._blocks[here], shape),
                micro_batch=spread(self.micro_batch, shape),
            )
            exchanges = self.draft.tasks(group)
            self.draft.wait(exchanges, before[:, here].ravel())
            self.draft.wait(behind[:, here].ravel(), exchanges)

    # -- one plan ----------------------------------------------------------------------------------------------------

    def wire(self, device_adam: IntArray) -> None:
        """What the prologue's backward leaves beside gradients stays for ``device_adam``."""
        family, num_blocks = self.family, self.num_blocks
        account = ActivationAccount(
            family.workload, family.is_checkpoint, family.is_swap[None], family.input_bytes[None]
        )
        is_checkpoint = family.is_checkpoint[0]
        found, kinds = account.micro_batches(len(self.micro_batch), always_add=self.draft.keeping.keeps_gradients)
        back = self.backwards[:, ::-1]  # of the prologue, of blocks, and of the epilogue
        handed_bytes = np.stack([one.handed[0] for one in found])[kinds]
        outputs = self._buffers(
            Content.OUTPUT,
            np.append(account.prologue_output, account.outputs[0]),
            np.append(0, self._blocks),
            (self.forwards[:, :-1], Operand.INPUT),
            # The first block's input is the prologue's output, which the prologue's backward needs.
            (np.concatenate([back[:, :1], back[:, 2:]], axis=1), Operand.INPUT),
        )
        recomputed_bytes = np.maximum(0, account.recomputed[0])
        saving = np.where(is_checkpoint, self.recomputations, self.forwards[:, 1:-1])
        saved = self._buffers(
            Content.ACTIVATIONS,
            np.append(np.where(is_checkpoint, recomputed_bytes, account.saved[0]), account.epilogue_saved),
            np.append(self._blocks, num_blocks + 1),
            (np.concatenate([saving, self.forwards[:, -1:]], axis=1), Operand.SAVED),
            (back[:, 1:], Operand.CONSUMED),
        )
        self._keep_results(account.kept[0], back)
        if account.passing.any():
            self._buffers(
                Content.ACTIVATIONS,
                account.passing,
                np.zeros(1, dtype=np.int64),
                (self.forwards[:, :1], Operand.SAVED),
                (self.forwards[:, -1:], Operand.CONSUMED),
            )
        if len(passing := np.flatnonzero(account.passing_of_blocks[0])):
            self._buffers(
                Content.ACTIVATIONS,
                account.passing_of_blocks[0, passing],
                self._blocks[passing],
                (self.forwards[:, 1:-1][:, passing], Operand.SAVED),
                (np.repeat(self.forwards[:, -1:], len(passing), axis=1), Operand.CONSUMED),
            )
        taking = np.concatenate([self.backwards[:, 1:], spread(device_adam, self.micro_batch.shape)[:, None]], axis=1)
        handed = self._buffers(
            Content.INCOMING_GRADIENT,
            handed_bytes,
            np.arange(num_blocks + 2)[::-1],
            (self.backwards, Operand.HANDED),
            (taking, Operand.HANDED),
        )
        self._read(outputs, saved, handed)
        self.draft.read(device_adam, handed[:, -1], Operand.HANDED.at())
        self._state_phases(account)

    def _keep_results(self, kept_bytes: IntArray, back: IntArray) -> None:
        """Buffers of blocks in mode SELECTIVE, from their forward to their backward; ``back``: (M, n + 2)."""
        keeping = np.flatnonzero(kept_bytes)
        if not len(keeping):
            return
        backwards = back[:, 1:-1][:, keeping]
        kept = self._buffers(
            Content.KEPT_RESULTS,
            kept_bytes[keeping],
            self._blocks[keeping],
            (self.forwards[:, 1:-1][:, keeping], Operand.KEPT),
            (backwards, Operand.KEPT),
        )
        self.draft.read(self.recomputations[:, keeping], kept, Operand.KEPT.at())
        self.draft.read(backwards, kept, Operand.KEPT.at())

    def _read(self, outputs: IntArray, saved: IntArray, handed: IntArray) -> None:
        """(M, n + 1) outputs of the prologue and blocks; (M, n + 1) what blocks and the epilogue saved; (M, n + 2)."""
        read, back = self.draft.read, self.backwards[:, ::-1]
        read(self.forwards[:, 1:], outputs, Operand.INPUT.at())
        read(back[:, 1:], outputs, Operand.INPUT.at())
        read(back[:, :1], outputs[:, :1], Operand.INPUT.at())
        recomputed = np.flatnonzero(self.family.is_checkpoint[0])
        read(self.recomputations[:, recomputed], outputs[:, recomputed], Operand.INPUT.at())
        read(back[:, 1:-1], saved[:, :-1], Operand.SAVED.at())
        read(back[:, -1:], saved[:, -1:], Operand.CONSUMED.at())
        read(self.backwards[:, 1:], handed[:, :-1], Operand.HANDED.at())

    def _state_phases(self, account: ActivationAccount) -> None:
        """The phase of every task, with what shared inputs change in it."""
        workload, profiles = self.family.workload, account.profiles
        is_checkpoint = self.family.is_checkpoint[0].tolist()
        shared = account.shared
        held, later, now = (of[0].tolist() for of in (shared.let_go_later, shared.freed_later, shared.freed_now))
        forwards = [workload.prologue_forward]
        backwards = []
        for block, (profile, again) in enumerate(zip(profiles, is_checkpoint, strict=True)):
            forward, backward = profile.checkpoint_forward if again else profile.forward, profile.backward
            forwards.append(forward.with_shared(held_bytes=held[block]))
            backward = profile.checkpoint_backward if again else backward
            backwards.append(backward.with_shared(held_bytes=later[block], freed_bytes=now[block]))
        gone_bytes = int(shared.made[0].sum())
        forwards.append(workload.epilogue_forward.with_shared(held_bytes=held[-1], freed_bytes=gone_bytes))
        backwards = [workload.epilogue_backward, *backwards[::-1], workload.prologue_backward]
        is_new = self.family.has_new_gradients[::-1].tolist()
        adding = [phase if new else phase.adding for phase, new in zip(backwards, is_new, strict=True)]
        phases = self.draft.phases
        for micro_batch, (of_forward, of_backward) in enumerate(
            zip(self.forwards.tolist(), self.backwards.tolist(), strict=True)
        ):
            phases.update(zip(of_forward, forwards, strict=True))
            adds = micro_batch > 0 or self.draft.keeping.keeps_gradients
            phases.update(zip(of_backward, adding if adds else backwards, strict=True))
        for row in self.recomputations.tolist():
            phases.update(zip(row, (profile.recompute for profile in profiles), strict=True))


def _phase_work(workload: Workload) -> PhaseWork:
    """The phases of the sections outside the blocks, then of every profile, in the order of their rows."""
    return PhaseWork(
        (
            workload.prologue_forward,
            workload.epilogue_forward,
            workload.epilogue_backward,
            workload.prologue_backward,
            *(phase for profile in workload.profiles for phase in _phases_of(profile)),
        )
    )


def _exchange_work(workload: Workload) -> Work | None:
    """What every profile exchanges in the steps of ``_EXCHANGES``, row by row; None where none exchanges anything."""
    exchanged = [
        [size_bytes for name in of_step for size_bytes in getattr(profile, name).exchanges]
        for profile in workload.profiles
        for of_step in _EXCHANGES
    ]
    if not any(exchanged):
        return None
    (sharing,) = workload.sequence_sharings
    return Work(
        moved_bytes=np.array([sum(sizes) for sizes in exchanged], dtype=np.int64),
        num_tensors=np.array([len(sizes) for sizes in exchanged], dtype=np.int64),
        num_ranks=sharing.sequence_ranks,
        axis=RankAxis.SEQUENCE,
    )


def _phases_of(profile: BlockProfile) -> tuple[Phase, ...]:
    """In the order of their rows."""
    return (
        profile.forward,
        profile.checkpoint_forward,
        profile.recompute,
        profile.backward,
        profile.checkpoint_backward,
    )
