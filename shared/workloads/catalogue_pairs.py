"""Students of models of the catalogue, without a trace: the teacher's workload is shipped, and the student's is equal.

[Note: Which students need no trace]
A student whose blocks have the teacher's sizes, and are learnt whole, does what the teacher would in full training.  So
``bypass_workload`` composes both from one shipped workload, and no torch is needed.  All others are traced: sizes of
their own, parts that are absent or stand for others, parts that are not learnt, and models with dropout, which a
teacher does not run and a student does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..schema.workload import Workload
from ..students.block_shape import has_learnt_part, is_learnt
from ..students.families import family_of
from ..students.shapes import student_shapes, teacher_shapes
from ..students.student import Student
from .bypass import bypass_workload
from .check import has_kernels_of_gpus

_DROPOUT: Final = frozenset(("bernoulli_", "native_dropout"))
"""Operations that draw what is dropped."""


def needs_no_trace(student: Student, configuration: Mapping[str, Any], *, name: str) -> bool:
    """Whether every block of ``student`` has its teacher's sizes.

    ``configuration``: the teacher's ``config.json``; ``name``: what messages call it.  Raises WorkloadError if no such
    student can be made.
    """
    shapes = student_shapes(student, configuration, name=name)
    return shapes == teacher_shapes(configuration, name=name) and all(
        has_learnt_part(student.keys_to_learn, shape) for shape in shapes
    )


def distillation_of_shipped(
    shipped: Workload, student: Student, configuration: Mapping[str, Any], *, name: str
) -> Workload | None:
    """The distillation of ``shipped``, full training of the teacher, into ``student``; None where that takes a trace.

    See [Note: Which students need no trace].  Raises WorkloadError if no such student can be made.
    """
    if not needs_no_trace(student, configuration, name=name) or _has_dropout(shipped):
        return None
    shapes = student_shapes(student, configuration, name=name)
    family = family_of(configuration, name)

    def learnt(block: int, parameter: str) -> bool:
        path = parameter.removeprefix(f"{family.blocks}.{block}.")
        return is_learnt(student.keys_to_learn, family, shapes[block], path)

    in_blocks = [(p.block, p.name) for p in shipped.parameters if p.block is not None]
    if not all(learnt(block, parameter) for block, parameter in in_blocks):
        return None
    found = bypass_workload(
        shipped, [shipped], loss=student.loss.value, keys_to_learn=student.keys_to_learn, is_learnt=learnt
    )
    return found.model_copy(update={"model_name": f"a student of {name}"})


def _has_dropout(workload: Workload) -> bool:
    forwards = (workload.prologue_forward, *(profile.forward for profile in workload.profiles))
    names = {operation.name for phase in forwards for operation in phase.operations}
    return has_kernels_of_gpus(workload) or bool(names & _DROPOUT)
