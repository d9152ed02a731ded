"""From a teacher's configuration and a student's file to the Workload of their distillation, without weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from ...shared.basics.errors import WorkloadError
from ...shared.basics.gc_pause import gc_paused
from ...shared.catalogue.own_code import OwnCode
from ...shared.families.family import BATCH_SIZE, SEQUENCE_LENGTH, TARGET_LENGTH
from ...shared.phases.distillation import KeyToLearn
from ...shared.schema.hardware import DeviceKind
from ...shared.schema.training_options import FULL_TRAINING, TrainingOptions
from ...shared.schema.workload import Workload
from ...shared.students.shapes import student_shapes
from ...shared.students.student import Student
from ..devices.time_limit import TimeChecks, time_limit
from ..model.batches import BatchRefusedError
from ..model.configurations import quiet
from ..students.building import build_student
from ..students.student_model import set_learnt, with_types_of
from ..tracing.configurations import ModelFailedError, autocast_of, check_limits, configured_model, one_message
from ..tracing.model_inputs import ModelInputs
from .block_losses import block_loss
from .tracing import trace_distillation

_STAGES: Final = 3
"""Of its progress: the teacher, the student, their trace."""


@gc_paused()
def distillation_of_configuration(
    configuration: Mapping[str, Any],
    *,
    student: Student,
    name: str,
    batch_size: int,
    sequence_length: int | None,
    dtype: str | None = None,
    options: TrainingOptions = FULL_TRAINING,
    device_kind: DeviceKind = DeviceKind.CUDA,
    code: OwnCode | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Workload:
    """The workload of every block of ``student`` learning beside the block of a model with this ``config.json``.

    Both models are built on the meta device.  ``name``: the teacher's; ``code``: files that it is made by, if these may
    run.  Of ``options``, a student knows autocast.  Everything else is as in ``workload_of_configuration``.  Raises
    WorkloadError if no such student can be made of the teacher, too.
    """
    report = on_progress or (lambda done, total: None)
    report(0, _STAGES)
    # The sizes that code of its own has by default are in no file.
    shapes = student_shapes(student, configuration, name=name) if code is None else ()
    given = {BATCH_SIZE: batch_size, SEQUENCE_LENGTH: sequence_length, TARGET_LENGTH: sequence_length}
    with time_limit(f"tracing {name} and its student with a batch of {batch_size} x {sequence_length}"):
        with TimeChecks():
            teacher: Any = configured_model(configuration, name, dtype, FULL_TRAINING, code=code)
            shapes = shapes or student_shapes(student, teacher.config.to_dict(), name=name)
            report(1, _STAGES)
            made = with_types_of(teacher, build_student(type(teacher), teacher.config, shapes))
            set_learnt(made, student, shapes)
            report(2, _STAGES)
        check_limits(teacher, name, given)
        keys = tuple(KeyToLearn(key.value) for key in student.keys_to_learn)
        refused: WorkloadError | None = None
        for with_labels in ModelInputs(teacher).batches(given):
            # No head runs, so that nothing reads labels.
            batch = {tensor: value for tensor, value in with_labels.items() if tensor != "labels"}
            try:
                with quiet(), autocast_of(options), one_message(teacher, name):
                    found = trace_distillation(
                        teacher, made, batch, block_loss(student.loss), keys_to_learn=keys, device_kind=device_kind
                    )
                    report(_STAGES, _STAGES)
                    return found.model_copy(update={"model_name": f"a student of {name}"})
            except (BatchRefusedError, ModelFailedError) as error:
                refused = refused or error
    assert refused is not None, "there is at least one batch"
    raise refused
