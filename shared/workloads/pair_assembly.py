"""Observations of bypass distillation put together to a workload: a teacher's and a student's blocks in turn.

[Note: What passes by]
The account of a pair's memory knows outputs, what a student's block saves, and what passes by all blocks.  What the
prologue leaves is the first pair's input or passes by.  The first pair's backward tells the two apart: beside gradients
it takes away what its own forward and loss have left, and its input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ..observed.assembly import TracedModel, TracedShape, median, phase_of
from ..observed.observation import Observation
from ..observed.observed_inputs import PhaseKey
from ..phases.distillation import Distillation, KeyToLearn
from ..schema.plan import ActivationMode
from ..schema.schedule import OuterSection, TaskKind
from ..schema.workload import Block, BlockId, BlockProfile, Phase, Workload

Profiled = tuple[BlockProfile, Phase]
"""A block's profile and its loss."""
_PHASES: Final = ("forward", "backward", "checkpoint_forward")
"""Those that may be measured."""


def assemble_pairs(
    model: TracedModel,
    shape: TracedShape,
    *,
    loss: str,
    keys_to_learn: Sequence[KeyToLearn] = (KeyToLearn.ENTIRE_BLOCK,),
    seconds: Mapping[PhaseKey, float] | None = None,
    measured_on: str | None = None,
) -> Workload:
    """The workload of a teacher with its student at a shape; sections were observed in mode KEEP alone.

    ``seconds`` are medians measured on ``measured_on``.  Raises pydantic's ValidationError if a figure exceeds what a
    workload holds.
    """
    observed, times = shape.observed[ActivationMode.KEEP], seconds or {}

    seen = [_seen_block(observed, times, block) for block in range(1 + max(model.stands_for))]
    members: dict[tuple[bool, Profiled], list[Profiled]] = {}
    keys = []
    for number, found in enumerate(seen):
        # A teacher's block and a student's may do the same, and are two things all the same.
        key = number % 2 == 1, _with_times(found, lambda _: None)
        members.setdefault(key, []).append(found)
        keys.append(key)
    order = list(members)
    merged = [_with_times(members[key][0], _median_of, *members[key][1:]) for key in order]
    profile_of = [order.index(keys[traced]) for traced in model.stands_for]
    place = TaskKind.TEACHER_FORWARD, OuterSection.PROLOGUE
    prologue = phase_of(observed[place], times.get(place))
    return Workload(
        model_name=model.model_name,
        model_hash=model.model_hash,
        batch_shapes=shape.batch_shapes,
        num_samples=shape.num_samples,
        num_tokens=shape.num_tokens,
        compute_dtype=model.compute_dtype,
        parameters=model.parameters,
        blocks=tuple(Block(name=n, profile=p) for n, p in zip(model.block_names, profile_of, strict=True)),
        profiles=tuple(profile for profile, _ in merged),
        prologue_forward=prologue,
        epilogue_forward=Phase(),
        epilogue_backward=Phase(),
        prologue_backward=Phase(),
        distillation=Distillation(
            losses=tuple(of_profile for _, of_profile in merged),
            passing_bytes=_passing_bytes(prologue, seen[1]),
            keys_to_learn=tuple(sorted(keys_to_learn)),
            loss=loss,
        ),
        resident_bytes=shape.resident_bytes,
        traced_with=model.traced_with,
        measured_on=measured_on,
        software=model.software,
    )


def _seen_block(observed: Mapping[PhaseKey, Observation], times: Mapping[PhaseKey, float], block: int) -> Profiled:
    """The profile and the loss of an observed block: of the teacher's the forward alone."""
    section = BlockId(block)

    def phase(kind: TaskKind) -> Phase:
        return phase_of(observed[kind, section], times.get((kind, section)))

    if block % 2 == 0:
        forward = phase(TaskKind.TEACHER_FORWARD)
        output_bytes = observed[TaskKind.TEACHER_FORWARD, section].output_bytes
        return _profile(output_bytes, forward, Phase(), checkpoint_forward=forward), Phase()
    output_bytes = observed[TaskKind.FORWARD, section].output_bytes
    loss, backward = _freed_by_backward(phase(TaskKind.LOSS), phase(TaskKind.BACKWARD))
    return _profile(output_bytes, phase(TaskKind.FORWARD), backward, checkpoint_forward=Phase()), loss


def _freed_by_backward(loss: Phase, backward: Phase) -> tuple[Phase, Phase]:
    """Both, with what a loss lets go of before its end going with the backward, as the account of a pair has it.

    That is so of a block in which nothing is learnt: nobody holds its output for a backward.
    """
    freed_bytes = max(0, -loss.net_bytes)
    if not freed_bytes:
        return loss, backward
    later = {"net_bytes": backward.net_bytes - freed_bytes}
    curves = {
        name: tuple((end, level - freed_bytes) for end, level in getattr(backward, name))
        for name in ("curve", "adding_curve")
    }
    tensors: dict[str, tuple[int, ...]] = {"changes": (), "staying_tensors": (), "adding_changes": ()}
    return loss.model_copy(update={"net_bytes": 0}), backward.model_copy(update=later | curves | tensors)


def _profile(output_bytes: int, forward: Phase, backward: Phase, *, checkpoint_forward: Phase) -> BlockProfile:
    return BlockProfile(
        output_bytes=output_bytes,
        forward=forward,
        backward=backward,
        checkpoint_forward=checkpoint_forward,
        recompute=Phase(),
        checkpoint_backward=Phase(),
    )


def _passing_bytes(prologue: Phase, first: Profiled) -> int:
    """Of what the prologue leaves, the bytes that outlive the first pair (Note: What passes by)."""
    profile, loss = first
    made_bytes = profile.forward.net_bytes + loss.net_bytes
    input_bytes = profile.backward.stated_gradient_bytes - profile.backward.net_bytes - made_bytes
    return prologue.net_bytes - min(max(0, input_bytes), prologue.net_bytes)


def _with_times(profiled: Profiled, times_of: Callable[[Sequence[Phase]], float | None], *others: Profiled) -> Profiled:
    """``profiled`` with other times: what ``times_of`` says of each phase of it and of ``others``."""
    everything = (profiled, *others)

    def timed(phases: Sequence[Phase]) -> Phase:
        return phases[0].model_copy(update={"measured_s": times_of(phases)})

    profile = profiled[0].model_copy(
        update={name: timed([getattr(one, name) for one, _ in everything]) for name in _PHASES}
    )
    return profile, timed([loss for _, loss in everything])


def _median_of(phases: Sequence[Phase]) -> float | None:
    times = [phase.measured_s for phase in phases if phase.measured_s is not None]
    return median(times) if times else None
