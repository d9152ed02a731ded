"""A distillation of a configuration in any element type is of the models that a run makes in it."""

from __future__ import annotations

import pytest
import torch

from protwin.runtime.distillation.block_losses import block_loss
from protwin.runtime.distillation.configurations import distillation_of_configuration
from protwin.runtime.distillation.pairs import Pairs
from protwin.runtime.model.configurations import build_model
from protwin.runtime.model.ownership import check_model
from protwin.runtime.students.student_model import make_student
from protwin.shared.basics.errors import PlanError
from protwin.shared.schema.workload import Workload
from protwin.shared.students.student import Student
from tests.runtime.distillation.cases import quiet
from tests.runtime.students.teachers import CONFIGURATIONS, student_of

SHAPED = "[all]\nintermediate_size = 16\n[block.1]\nffn = 'linear'\n[initialization]\nlinear = 'random'\n"


def student_for(name: str) -> Student:
    return student_of("" if name == "bamba" else SHAPED)


def traced(name: str, published: torch.dtype, dtype: str) -> Workload:
    configuration = CONFIGURATIONS[name] | {"dtype": str(published).removeprefix("torch.")}
    with quiet():
        return distillation_of_configuration(
            configuration, student=student_for(name), name=name, batch_size=1, sequence_length=4, dtype=dtype
        )


def pairs_of(name: str, dtype: str) -> Pairs:
    """The models with values, as a run makes them."""
    with quiet():
        teacher = build_model(CONFIGURATIONS[name], name, getattr(torch, dtype), device="cpu").eval()
        student = make_student(teacher, student_for(name)).train()
        return Pairs(teacher, student, block_loss(student_for(name).loss))


@pytest.mark.parametrize(
    ("name", "published", "dtype"),
    [
        ("llama", torch.float32, "bfloat16"),
        ("bamba", torch.float32, "float16"),
        ("qwen3", torch.bfloat16, "bfloat16"),
        ("mistral", torch.bfloat16, "float32"),
    ],
)
def test_a_workload_in_any_element_type_is_of_the_models_that_run(
    name: str, published: torch.dtype, dtype: str
) -> None:
    """Rotary frequencies stay in float32."""
    pairs = pairs_of(name, dtype)
    workload = traced(name, published, dtype)
    with pairs.learning():
        check_model(pairs, workload)
    assert {str(parameter.dtype) for parameter in workload.parameters} == {dtype}


def test_a_workload_of_other_models_names_what_differs_and_nothing_that_it_never_lists() -> None:
    """The teacher's norm and head, and the student's ends, run in no distillation."""
    workload = traced("llama", torch.float32, "bfloat16")

    def refused(pairs: Pairs, message: str) -> None:
        with pairs.learning(), pytest.raises(PlanError, match=message):
            check_model(pairs, workload)

    refused(pairs_of("llama", "float32"), r"element type of teacher\.model\.\S+ was bfloat16, and is float32 here")
    changed = pairs_of("llama", "bfloat16")
    changed.teacher.lm_head.weight.data = changed.teacher.lm_head.weight.data.float()
    refused(changed, "parameters outside of the blocks, differ")
    extended = pairs_of("llama", "bfloat16")
    extended.student.model.layers[1].register_parameter("added", torch.nn.Parameter(torch.zeros(1)))
    refused(extended, r"lacks the parameter student\.model\.layers\.1\.added of this one")
