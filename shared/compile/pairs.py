"""The section program of bypass distillation: what computes, in which order.

[Note: Pairs]
A micro-batch is one forward of the teacher's prologue, and then, pair by pair, the forward of the teacher's block, and
forward, loss and backward of the student's.  Nothing passes from one student block to another: each reads the output
of the teacher's section before its pair, and, as the target of its loss, that of its pair.

- Every section is one step ([Note: Steps] in ``compile.py``): a student block's chunks come once for forward and
  backward.  The epilogue is empty, and has no step.
- The output of a teacher's section stays for the backward of the student block that reads it as input, which is that of
  the next pair; the last one's for that of its own pair.
- What passes by all blocks stays until the last backward.
- What a student's backward leaves beside gradients stays until device Adam.

For n pairs a micro-batch has 2n + 1 steps and 4n + 1 positions of the compute lane:

    0         forward of the prologue
    1 + 4i    forward of the teacher's block i
    2 + 4i    forward of the student's block i
    3 + 4i    its loss
    4 + 4i    its backward

Shapes: n pairs, M micro-batches.  The teacher's block i is section 1 + 2i, the student's is section 2 + 2i.

[Note: Stages]
A stage of a pipeline has two tasks more per micro-batch, on the lane of collectives.  RECEIVE writes the teacher's
activation before the stage's first pair over the prologue's output: behind the prologue's forward, and before anybody
reads that output.  SEND reads the output of the last teacher's block, which lives until the last backward; that waits
for it.  In their lane both stand right behind the forward that they wait for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..drafts.program import BufferGroup, IntArray, Operand, Part, PhaseWork, TaskGroup, Work, spread
from ..layout.positions import Positions
from ..layout.uses import numbered_uses
from ..phases.distillation import Distillation
from ..schema.schedule import Content, Memory, TaskKind
from ..schema.workload import Phase, Workload
from .sections import Sections

_PROLOGUE, _PROFILES = range(2)
"""Rows of the work of compute tasks."""
_FORWARD, _LOSS, _BACKWARD, _PER_PROFILE = range(4)
"""Rows of each profile, after the prologue's."""
_NEIGHBOURS = 2
"""Ranks that a send and its receive join."""


@dataclass(frozen=True)
class PairPositions(Positions):
    """Where tasks of bypass distillation stand in the program of the compute lane; see [Note: Pairs]."""

    @property
    def micro_steps(self) -> int:
        """Steps of one micro-batch."""
        return self.num_blocks + 1

    @property
    def micro_length(self) -> int:
        """Positions of one micro-batch."""
        return 2 * self.num_blocks + 1

    def forward_step(self, section: IntArray, micro_batch: int | IntArray = 0) -> IntArray:
        """The step of each section."""
        return self.micro_steps * micro_batch + section

    def backward_step(self, section: IntArray, micro_batch: int | IntArray = 0) -> IntArray:
        """The step of each section."""
        return self.forward_step(section, micro_batch)

    def forward(self, section: IntArray, micro_batch: int | IntArray = 0) -> IntArray:
        """The forward of each section."""
        is_teacher = section % 2 == 1
        return self.micro_length * micro_batch + np.maximum(2 * section - np.where(is_teacher, 1, 2), 0)

    def backward(self, section: IntArray, micro_batch: int | IntArray = 0) -> IntArray:
        """The last task of each section: a student's backward, a teacher's forward; past all of those for others."""
        return self.micro_length * micro_batch + 2 * section - section % 2

    @cached_property
    def _begins(self) -> IntArray:
        begins: IntArray = self.forward(self._sections, np.arange(self.num_steps) // self.micro_steps)
        return begins

    @cached_property
    def _ends(self) -> IntArray:
        ends: IntArray = self.backward(self._sections, np.arange(self.num_steps) // self.micro_steps)
        return ends

    @property
    def _sections(self) -> IntArray:
        """(S,) the section of each step."""
        return self.step_number


class Pairs(Sections):
    """Pair by pair: the teacher's forward; the student's forward, loss and backward.  See [Note: Pairs].

    ``forwards`` are (M, 2n + 1) of all sections; ``losses`` and ``backwards`` (M, n) of the student's blocks.
    """

    has_modes = False

    @staticmethod
    def positions_of(workload: Workload, micro_batches: int = 1) -> Positions:
        """Where the tasks of so many micro-batches stand."""
        return PairPositions(workload.num_blocks, micro_batches)

    def backward_of(self, section: IntArray) -> IntArray:
        """(M, ...) the backward of each section, all of which are the student's."""
        return self.backwards[:, section // 2 - 1]

    # -- tasks -------------------------------------------------------------------------------------------------------

    def _add_tasks(self) -> tuple[IntArray, IntArray]:
        """Each teacher's section is one task; each of the student's is three."""
        work, workload = self.family.once(_phase_work), self.family.workload
        row = _PROFILES + _PER_PROFILE * np.array([block.profile for block in workload.blocks])
        teachers, students = self._blocks[::2], self._blocks[1::2]
        at = self.positions.forward(self._blocks)

        def added(kind: TaskKind, places: IntArray, section: IntArray, rows: IntArray) -> IntArray:
            return self._in_every_micro_batch(kind, work, places, section, rows)

        of_teacher = added(
            TaskKind.TEACHER_FORWARD,
            np.append(0, at[::2]),
            np.append(0, teachers),
            np.append(_PROLOGUE, row[::2] + _FORWARD),
        )
        of_student = added(TaskKind.FORWARD, at[1::2], students, row[1::2] + _FORWARD)
        self.losses: IntArray = added(TaskKind.LOSS, at[1::2] + 1, students, row[1::2] + _LOSS)
        self.backwards = added(TaskKind.BACKWARD, at[1::2] + 2, students, row[1::2] + _BACKWARD)
        self.forwards = self._by_section(of_teacher, of_student)
        self._join_stages()
        return self.forwards, self._by_section(of_teacher, self.backwards)

    def _join_stages(self) -> None:
        """Add what a stage receives and sends, see [Note: Stages]: (M, 1) each, or (M, 0) where it does not."""
        stage = distillation_of(self.family.workload).stage
        received_bytes, sent_bytes = (0, 0) if stage is None else (stage.receives_bytes, stage.sends_bytes)
        wait = self.draft.wait
        self.receives = self._exchange(TaskKind.RECEIVE, 0, received_bytes)
        wait(self.receives.ravel(), self.forwards[:, : self.receives.shape[1]].ravel())
        receiving = self.forwards[:, 1 : 1 + self.receives.shape[1]].ravel()
        wait(receiving, self.receives.ravel())
        self.draft.arrive(receiving, receiving, received_bytes)
        last_teacher = self.num_blocks - 1
        self.sends = self._exchange(TaskKind.SEND, last_teacher, sent_bytes)
        wait(self.sends.ravel(), self.forwards[:, last_teacher : last_teacher + self.sends.shape[1]].ravel())
        wait(self.backwards[:, self.backwards.shape[1] - self.sends.shape[1] :].ravel(), self.sends.ravel())

    def _exchange(self, kind: TaskKind, section: int, moved_bytes: int) -> IntArray:
        """(M, 1) tasks behind the forward of ``section``; (M, 0) where nothing is moved."""
        shape = (len(self.micro_batch), 1 if moved_bytes else 0)
        if not moved_bytes:
            return np.zeros(shape, dtype=np.int64)
        at = int(self.positions.forward(np.array([section]))[0])
        group = TaskGroup(
            kind,
            (self.positions.micro_length * self.micro_batch + at).ravel(),
            Part.LEAVES,
            Work(moved_bytes=moved_bytes, num_ranks=_NEIGHBOURS),
            np.zeros(len(self.micro_batch), dtype=np.int64),
            section=np.full(len(self.micro_batch), section),
            micro_batch=self.micro_batch.ravel(),
        )
        return self.draft.tasks(group).reshape(shape)

    def _by_section(self, of_teacher: IntArray, of_student: IntArray) -> IntArray:
        """(M, 2n + 1) of all sections: (M, n + 1) of the teacher's, (M, n) of the student's."""
        found = np.empty((len(self.micro_batch), self.num_blocks + 1), dtype=np.int64)
        found[:, 0], found[:, 1::2], found[:, 2::2] = of_teacher[:, 0], of_teacher[:, 1:], of_student
        return found

    # -- one plan ----------------------------------------------------------------------------------------------------

    def wire(self, device_adam: IntArray) -> None:
        """What the student's backwards leave beside gradients stays for ``device_adam``."""
        account = PairAccount(self.family.workload)
        read = self.draft.read
        teachers, students = np.append(0, self._blocks[::2]), self._blocks[1::2]
        of_teacher, of_student = self.forwards[:, np.append(0, teachers[1:])], self.forwards[:, 2::2]
        # The last target has no other reader than its own pair.
        last = np.concatenate([self.backwards, self.backwards[:, -1:]], axis=1)
        outputs = self._buffers(
            Content.OUTPUT, account.teacher_outputs, teachers, (of_teacher, Operand.INPUT), (last, Operand.INPUT)
        )
        if account.passing:
            self._buffers(
                Content.ACTIVATIONS,
                np.array([account.passing]),
                np.zeros(1, dtype=np.int64),
                (self.forwards[:, :1], Operand.SAVED),
                (self.backwards[:, -1:], Operand.CONSUMED),
            )
        for content, sizes, made_by, operand in (
            (Content.OUTPUT, account.student_outputs, of_student, Operand.CONSUMED),
            (Content.ACTIVATIONS, account.saved, of_student, Operand.SAVED),
            (Content.LOSS, account.losses, self.losses, Operand.SWAPPED),
        ):
            made = self._buffers(content, sizes, students, (made_by, operand), (self.backwards, operand))
            read(self.backwards, made, operand.at())
            if content is Content.OUTPUT:
                read(self.losses, made, operand.at())
        read(of_teacher[:, 1:], outputs[:, :-1], Operand.INPUT.at())
        read(of_student, outputs[:, :-1], Operand.INPUT.at())
        read(self.backwards, outputs[:, :-1], Operand.INPUT.at())
        for task in (self.losses, self.backwards):
            read(task, outputs[:, 1:], Operand.INPUT.at(1))
        self.draft.update(self.receives, outputs[:, : self.receives.shape[1]], 0)
        read(self.sends, outputs[:, outputs.shape[1] - self.sends.shape[1] :], 0)
        self._leave(account, students, device_adam)
        self._state_phases()

    def _leave(self, account: PairAccount, students: IntArray, device_adam: IntArray) -> None:
        """Add what backwards leave for device Adam beside gradients, where they leave anything."""
        left_bytes = np.stack([account.left(is_later=number > 0) for number in range(len(self.micro_batch))])
        micro_batch, pair = np.nonzero(left_bytes)
        at = Operand.HANDED.at(np.arange(len(pair)))
        group = BufferGroup(
            Content.INCOMING_GRADIENT,
            Memory.DEVICE,
            left_bytes[micro_batch, pair],
            section=students[pair],
            micro_batch=micro_batch,
            made_by=self.backwards[micro_batch, pair],
            made_at=Operand.HANDED.at(),
            freed_by=spread(device_adam, pair.shape),
            freed_at=at,
        )
        self.draft.read(device_adam, self.draft.buffers(group), at)

    def _state_phases(self) -> None:
        """The phase of every task."""
        workload, num_sections = self.family.workload, self.num_blocks + 1
        distillation = distillation_of(workload)
        profiles = [workload.profile_of(block) for block in range(workload.num_blocks)]
        forwards = [workload.prologue_forward, *(profile.forward for profile in profiles)]
        losses = [distillation.losses[block.profile] for block in workload.blocks[1::2]]
        backwards = [profile.backward for profile in profiles[1::2]]
        is_new = self.family.has_new_gradients[2:num_sections:2].tolist()
        adding = [phase if new else phase.adding for phase, new in zip(backwards, is_new, strict=True)]
        phases = self.draft.phases
        for micro_batch, (of_forward, of_loss, of_backward) in enumerate(
            zip(self.forwards.tolist(), self.losses.tolist(), self.backwards.tolist(), strict=True)
        ):
            phases.update(zip(of_forward, forwards, strict=True))
            phases.update(zip(of_loss, losses, strict=True))
            phases.update(zip(of_backward, adding if micro_batch else backwards, strict=True))


class PairAccount:
    """What tasks of one micro-batch leave on the device beside gradients.  Shapes: n pairs."""

    def __init__(self, workload: Workload) -> None:
        distillation = distillation_of(workload)
        self.workload = workload
        profiles = [workload.profile_of(block) for block in range(workload.num_blocks)]
        prologue_bytes = max(0, workload.prologue_forward.net_bytes)
        self.passing = min(distillation.passing_bytes, prologue_bytes)
        """Of what the prologue leaves, the bytes that pass by all blocks."""
        self.teacher_outputs: IntArray = np.array(
            [prologue_bytes - self.passing, *(max(0, profile.forward.net_bytes) for profile in profiles[::2])]
        )
        """(n + 1,) of the prologue and of the teacher's blocks."""
        self._students = profiles[1::2]
        forward_bytes = np.array([max(0, profile.forward.net_bytes) for profile in self._students])
        self.student_outputs: IntArray = np.minimum([profile.output_bytes for profile in self._students], forward_bytes)
        """(n,)"""
        self.saved: IntArray = forward_bytes - self.student_outputs
        """(n,) what forwards save."""
        self._losses = [distillation.losses[block.profile] for block in workload.blocks[1::2]]
        self.losses: IntArray = np.array([max(0, phase.net_bytes) for phase in self._losses])
        """(n,) losses, and what they save."""

    def left(self, *, is_later: bool) -> IntArray:
        """(n,) what backwards leave beside gradients: what the tasks of a pair leave together, less what is freed.

        A backward counts off its input, and not what the last one lets go of beside it.  ``is_later``: gradients are
        added to those of an earlier micro-batch, or are there anew.
        """
        own = self._own_gradient_bytes(is_later)
        nets = [
            sum(phase.net_bytes for phase in (profile.forward, loss, profile.backward))
            for profile, loss in zip(self._students, self._losses, strict=True)
        ]
        left: IntArray = np.maximum(np.array(nets) - own + self.teacher_outputs[:-1], 0)
        return left

    def _own_gradient_bytes(self, is_later: bool) -> IntArray:
        """(n,) gradients among what backwards leave that have buffers of their own, or were added to others."""
        num_blocks = self.workload.num_blocks
        room = np.zeros(num_blocks + 2, dtype=np.int64)
        for parameter in self.workload.parameters:
            if parameter.trainable:
                room[numbered_uses(parameter, num_blocks).gradient] += parameter.size_bytes
        found = []
        for profile, room_bytes in zip(self._students, room[2 : num_blocks + 1 : 2].tolist(), strict=True):
            stated = profile.backward.gradient_bytes
            # A phase that does not say how much it leaves of gradients leaves all.
            found.append(room_bytes if stated is None else stated if is_later else min(room_bytes, stated))
        return np.array(found)


def distillation_of(workload: Workload) -> Distillation:
    """What a workload of bypass distillation has beside; the caller has compared the methods."""
    assert workload.distillation is not None
    return workload.distillation


def _phase_work(workload: Workload) -> PhaseWork:
    """The phases of the prologue, then of every profile, in the order of their rows."""
    losses = distillation_of(workload).losses
    of_profiles: list[Phase] = []
    for profile, loss in zip(workload.profiles, losses, strict=True):
        of_profiles += [profile.forward, loss, profile.backward]
    return PhaseWork((workload.prologue_forward, *of_profiles))
