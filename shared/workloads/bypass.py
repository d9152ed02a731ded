"""A workload of bypass distillation from workloads of full training: a teacher's and a student's, without a trace.

[Note: From full training to pairs]
A teacher's block does what a checkpointed block's forward does: nothing but the output outlives it.  A student's block
does its forward, and the backward of the loss before its own.  Three things are upper bounds, since no workload of full
training tells more: a student's backward is taken to compute the gradient of its input, which nobody needs, and
gradients of weights that are not learnt; buffers of modules and the batch count for both models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Final

from ..basics.errors import WorkloadError
from ..phases.distillation import Distillation, KeyToLearn
from ..phases.seen_memory import PhaseMemory, SeenMemory
from ..schema.workload import (
    COMPOSED,
    Block,
    BlockProfile,
    OuterSection,
    Parameter,
    Phase,
    Uses,
    Workload,
    in_forward_order,
)
from .block_losses import SCALAR_BYTES, LossPhases, loss_phases

IsLearnt = Callable[[int, str], bool]
"""Whether the parameter of that name, of the block of that number, is learnt."""
_NOTHING: Final = Phase()
_LABELS: Final = "labels"
"""What full training reads behind the last block, which no distillation runs."""
_BYTES_PER_LABEL: Final = 8


def bypass_workload(
    teacher: Workload,
    students: Sequence[Workload],
    *,
    loss: str = "normalized_mse",
    keys_to_learn: Sequence[KeyToLearn] = (KeyToLearn.ENTIRE_BLOCK,),
    is_learnt: IsLearnt | None = None,
) -> Workload:
    """The bypass distillation of ``teacher``: both are workloads of full training, of one batch.

    ``students``: one workload whose blocks are the student's; or one for each block, of which that block counts, where
    blocks differ as one configuration cannot.  ``is_learnt`` says which parameters of the student's blocks
    ``keys_to_learn`` are; None: all that the student's workload trains.  See [Note: From full training to pairs].

    Raises WorkloadError if the two do not belong together: other numbers of blocks, other batches or element types, or
    blocks whose outputs differ in size; or if nothing is learnt.
    """
    of_pair = list(students) * teacher.num_blocks if len(students) == 1 else list(students)
    if len(of_pair) != teacher.num_blocks:
        raise WorkloadError(
            f"{len(of_pair)} workloads of a student for the {teacher.num_blocks} blocks of {teacher.model_name}. "
            f"Give one for all blocks, or one for each."
        )
    for student in {id(one): one for one in of_pair}.values():
        _check_pair(teacher, student)
    passing_bytes = sum(s.size_bytes for s in teacher.shared_inputs if not s.is_returned and s.made_by is None)
    passing_bytes = min(passing_bytes, max(0, teacher.prologue_forward.net_bytes))
    made = _Pairs(teacher, loss, is_learnt or (lambda block, name: True))
    given_bytes = max(0, teacher.prologue_forward.net_bytes) - passing_bytes
    for pair, student in enumerate(of_pair):
        given_bytes = made.add(pair, student, given_bytes)
    if not any(parameter.trainable for parameter in made.parameters):
        raise WorkloadError(
            f"nothing of the student is learnt: none of its blocks has a parameter of keys_to_learn = "
            f"{', '.join(keys_to_learn)}. Name keys of parts that its blocks have."
        )
    distillation = Distillation(
        losses=tuple(made.losses),
        passing_bytes=passing_bytes,
        keys_to_learn=tuple(sorted(set(keys_to_learn))),
        loss=loss,
    )
    return _workload(teacher, of_pair, made, distillation)


def _workload(teacher: Workload, students: Sequence[Workload], made: _Pairs, distillation: Distillation) -> Workload:
    """What ``made`` and the teacher's prologue do; ``students``: one for each block."""
    labels_bytes = _BYTES_PER_LABEL * prod(teacher.batch_shapes.get(_LABELS, (0,)))
    resident_bytes = teacher.resident_bytes + max(student.resident_bytes for student in students) - 2 * labels_bytes
    fields = {name: getattr(teacher, name) for name in Workload.model_fields}
    fields |= {
        "model_name": f"{students[0].model_name}, taught by {teacher.model_name}",
        "model_hash": COMPOSED,
        "batch_shapes": {name: shape for name, shape in teacher.batch_shapes.items() if name != _LABELS},
        "parameters": (*_outside(teacher), *made.parameters),
        "blocks": tuple(made.blocks),
        "profiles": tuple(made.profiles),
        "prologue_forward": _unmeasured(teacher.prologue_forward),
        "epilogue_forward": _NOTHING,
        "epilogue_backward": _NOTHING,
        "prologue_backward": _NOTHING,
        "shared_inputs": (),
        "row_lookups": None,
        "tilings": (),
        "distillation": distillation,
        "resident_bytes": max(0, resident_bytes) + SCALAR_BYTES * teacher.num_blocks,
        "measured_on": None,
    }
    return Workload(**fields)


def _check_pair(teacher: Workload, student: Workload) -> None:
    """Raise WorkloadError unless blocks of ``student`` can learn from the ``teacher``'s of the same places."""
    names = f"{teacher.model_name} and {student.model_name}"
    if teacher.distillation is not None or student.distillation is not None:
        raise WorkloadError(f"one of {names} is a distillation already. Give workloads of full training.")
    if teacher.num_blocks != student.num_blocks:
        raise WorkloadError(
            f"{names} have {teacher.num_blocks} and {student.num_blocks} blocks. A student has as many as its teacher."
        )
    if teacher.batch_shapes != student.batch_shapes or teacher.compute_dtype is not student.compute_dtype:
        raise WorkloadError(
            f"{names} were made for other batches or element types ({teacher.compute_dtype} and "
            f"{student.compute_dtype}). Both see one batch, in one type."
        )
    for block in range(teacher.num_blocks):
        sizes = (teacher.profile_of(block).output_bytes, student.profile_of(block).output_bytes)
        if sizes[0] != sizes[1]:
            raise WorkloadError(
                f"outputs of block {block} have {sizes[0]:,} B in {teacher.model_name} and {sizes[1]:,} B in "
                f"{student.model_name}. A student's blocks are as wide as the teacher's at their ends."
            )
    for parameter in student.parameters:
        users = parameter.uses and {*parameter.uses.forward, *parameter.uses.backward}
        if parameter.block is None and users and any(not isinstance(user, OuterSection) for user in users):
            raise WorkloadError(
                f"blocks of {student.model_name} share {parameter.name}. Blocks of a student learn independently."
            )


def _outside(teacher: Workload) -> list[Parameter]:
    """What the prologue uses, and perhaps blocks: frozen.  What is needed behind the last block alone is left out."""
    found = []
    for parameter in teacher.parameters:
        if parameter.block is not None:
            continue
        uses = parameter.uses or Uses(forward=(OuterSection.PROLOGUE,), backward=(), gradient=OuterSection.PROLOGUE)
        users = [user for user in uses.forward if user is not OuterSection.EPILOGUE]
        if users:
            forward = tuple(user if isinstance(user, OuterSection) else 2 * user for user in users)
            frozen = Uses(forward=forward, backward=(), gradient=min(forward, key=in_forward_order))
            found.append(_named("teacher", parameter, uses=frozen, trainable=False))
    return found


def _named(model: str, parameter: Parameter, **changes: object) -> Parameter:
    aliases = tuple(f"{model}.{alias}" for alias in parameter.aliases)
    return parameter.model_copy(update={"name": f"{model}.{parameter.name}", "aliases": aliases, **changes})


@dataclass
class _Pairs:
    """Pairs in the making."""

    teacher: Workload
    loss: str
    is_learnt: IsLearnt
    blocks: list[Block] = field(default_factory=list)
    parameters: list[Parameter] = field(default_factory=list)
    profiles: list[BlockProfile] = field(default_factory=list)
    losses: list[Phase] = field(default_factory=list)

    def add(self, pair: int, student: Workload, given_bytes: int) -> int:
        """Add the next pair, whose blocks read ``given_bytes``; gives the bytes of the teacher's output."""
        profile = self.teacher.profile_of(pair)
        of_teacher = self._of_teacher(pair, profile)
        seen = None if profile.seen is None else self._of_teacher(pair, _as_seen(profile))
        self._add_block(self.teacher, pair, "teacher", self._place(_with_seen(of_teacher, seen, profile), _NOTHING))
        self.parameters += [
            _named("teacher", p, block=2 * pair, trainable=False) for p in _of_block(self.teacher, pair)
        ]
        learnt = [
            _named("student", p, block=2 * pair + 1, trainable=p.trainable and self.is_learnt(pair, p.name))
            for p in _of_block(student, pair)
        ]
        self.parameters += learnt
        sizes = [parameter.size_bytes for parameter in learnt if parameter.trainable]
        profile, learnt_bytes = student.profile_of(pair), sum(sizes) if sizes else None
        of_student, loss = self._of_student(student, pair, profile, given_bytes, learnt_bytes)
        seen = None
        if profile.seen is not None:
            seen, _ = self._of_student(student, pair, _as_seen(profile), given_bytes, learnt_bytes)
        self._add_block(student, pair, "student", self._place(_with_seen(of_student, seen, profile), loss))
        return of_teacher.output_bytes

    def _add_block(self, workload: Workload, block: int, model: str, profile: int) -> None:
        self.blocks.append(Block(name=f"{model}.{workload.blocks[block].name}", profile=profile))

    def _place(self, profile: BlockProfile, loss: Phase) -> int:
        """Of a profile and its loss among all; equal ones have one."""
        # Blocks stand by turns: a teacher's never has a student's profile.
        same_model = {block.profile for block in self.blocks[len(self.blocks) % 2 :: 2]}
        for place in sorted(same_model):
            if (self.profiles[place], self.losses[place]) == (profile, loss):
                return place
        self.profiles.append(profile)
        self.losses.append(loss)
        return len(self.profiles) - 1

    def _of_teacher(self, block: int, profile: BlockProfile) -> BlockProfile:
        """A teacher's block, which in full training has ``profile``."""
        # What the block before returned beside its output goes, since a teacher keeps nothing for a backward.
        passing = [shared for shared in self.teacher.shared_inputs if not shared.is_returned]
        let_go_bytes = sum(shared.size_bytes for shared in passing if shared.let_go_by == block)
        forward = _unmeasured(profile.checkpoint_forward.with_shared(held_bytes=let_go_bytes))
        return BlockProfile(
            output_bytes=max(0, forward.net_bytes),
            forward=forward,
            backward=_NOTHING,
            checkpoint_forward=forward,
            recompute=_NOTHING,
            checkpoint_backward=_NOTHING,
        )

    def _of_student(
        self, student: Workload, block: int, profile: BlockProfile, given_bytes: int, learnt_bytes: int | None
    ) -> tuple[BlockProfile, Phase]:
        """A student's block, which in full training has ``profile``, and its loss.

        ``learnt_bytes``: of what is learnt, None if nothing is.
        """
        let_go_bytes = sum(s.size_bytes for s in student.shared_inputs if s.let_go_by == block)
        forward = profile.forward if learnt_bytes is not None else profile.checkpoint_forward
        forward = _unmeasured(forward.with_shared(held_bytes=let_go_bytes))
        phases = loss_phases(self.loss, profile.output_bytes, student.compute_dtype)
        of_loss, backward = phases.forward, profile.backward
        if learnt_bytes is None:
            # Nobody asks for its gradient: the loss alone is computed.
            of_loss = of_loss.model_copy(update={"net_bytes": SCALAR_BYTES})
        freed_bytes = forward.net_bytes + of_loss.net_bytes + given_bytes
        if learnt_bytes is not None:
            stated = backward.gradient_bytes
            gradient_bytes = learnt_bytes if stated is None else min(learnt_bytes, stated)
            made = _backward(phases, backward, profile.output_bytes, gradient_bytes, gradient_bytes - freed_bytes)
        else:
            made = Phase(net_bytes=-freed_bytes, gradient_bytes=0)
        of_student = BlockProfile(
            output_bytes=profile.output_bytes,
            forward=forward,
            backward=made,
            checkpoint_forward=_NOTHING,
            recompute=_NOTHING,
            checkpoint_backward=_NOTHING,
        )
        return of_student, of_loss


def _as_seen(profile: BlockProfile) -> BlockProfile:
    """The profile with the memory of the traced batch; pairs have no mode SWAP."""
    assert profile.seen is not None
    return profile.model_copy(update={"swappable_bytes": profile.seen.swappable_bytes}).as_seen


def _with_seen(pair_profile: BlockProfile, seen: BlockProfile | None, of_training: BlockProfile) -> BlockProfile:
    """``pair_profile`` with the memory of ``seen``, as what ``of_training`` was seen to take becomes it."""
    known = of_training.seen
    if known is None or seen is None:
        return pair_profile
    found = SeenMemory(
        forward=PhaseMemory.of(seen.forward, pair_profile.forward),
        backward=PhaseMemory.of(seen.backward, pair_profile.backward),
        checkpoint_forward=PhaseMemory.of(seen.checkpoint_forward, pair_profile.checkpoint_forward),
        recompute=PhaseMemory.of(seen.recompute, pair_profile.recompute),
        checkpoint_backward=PhaseMemory.of(seen.checkpoint_backward, pair_profile.checkpoint_backward),
        is_forced=known.is_forced,
        num_tried=known.num_tried,
    )
    return pair_profile.model_copy(update={"seen": found})


def _of_block(workload: Workload, block: int) -> list[Parameter]:
    return [parameter for parameter in workload.parameters if parameter.block == block]


def _backward(phases: LossPhases, backward: Phase, output_bytes: int, gradient_bytes: int, net_bytes: int) -> Phase:
    """The backward of the loss, then of the block.

    In full training the gradient of the block's output is there when its backward begins; here the loss makes it.
    """
    own_bytes, all_bytes = (
        sum(op.bytes_moved * op.count for op in (*phases.backward.operations, *more))
        for more in ((), backward.operations)
    )
    frac = min(max(own_bytes / max(all_bytes, 1), 1e-6), 0.999)
    shift_bytes = output_bytes - phases.forward.net_bytes

    def behind(curve: tuple[tuple[float, int], ...]) -> tuple[tuple[float, int], ...]:
        if not curve:
            return ((1.0, max(phases.backward.peak_bytes, shift_bytes)),)
        later = tuple((frac + (1 - frac) * end, level + shift_bytes) for end, level in curve[:-1])
        return ((frac, phases.backward.peak_bytes), *later, (1.0, curve[-1][1] + shift_bytes))

    return Phase(
        operations=(*phases.backward.operations, *backward.operations),
        net_bytes=net_bytes,
        gradient_bytes=gradient_bytes,
        curve=behind(backward.curve),
        adding_curve=behind(backward.adding_curve) if backward.adding_curve else (),
    )


def _unmeasured(phase: Phase) -> Phase:
    """The phase by its operations alone: losses carry no measured seconds."""
    return phase if phase.measured_s is None else phase.model_copy(update={"measured_s": None})
