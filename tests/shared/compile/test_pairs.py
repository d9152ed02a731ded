"""The section program of bypass distillation, against expectations that are worked out by hand."""

from __future__ import annotations

import pytest

from protwin.shared.basics.errors import PlanError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout, layout_of
from protwin.shared.schema.schedule import Content, Lane, Memory, Schedule, TaskKind
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.shared.verify.verify import verify_schedule
from tests.shared.bypass_models import ELEMENTS, GRADIENT_BYTES, LOSS_BYTES, bypass_plan, pairs
from tests.shared.small_models import OUTPUT_BYTES, SAVED_BYTES, chain, phase, plan

CHUNK_BYTES = 4_096
"""4 000 bytes, aligned."""


def lane(schedule: Schedule, *lanes: Lane) -> list[str]:
    return [schedule.tasks[task].name for of in lanes for task in schedule.lanes[of]]


def test_compute_goes_pair_by_pair() -> None:
    workload = pairs(2)
    schedule = compile_schedule(bypass_plan(workload), workload)
    assert lane(schedule, Lane.COMPUTE) == [
        "teacher_forward prologue",
        *("teacher_forward 0", "forward 1", "loss 1", "backward 1"),
        *("teacher_forward 2", "forward 3", "loss 3", "backward 3"),
        "device_adam",
    ]


def test_every_chunk_comes_once_and_a_students_gradients_leave_behind_its_backward() -> None:
    workload = pairs(3)
    layout = layout_of(workload, CHUNK_BYTES)
    assert layout.needed == tuple((chunk,) for chunk in range(7)), "a section is a step"
    schedule = compile_schedule(bypass_plan(workload, n_buffer=2), workload)
    assert lane(schedule, Lane.H2D) == [f"gather chunk {chunk}" for chunk in range(7)]
    assert lane(schedule, Lane.D2H) == [f"gradient_offload chunk {chunk}" for chunk in (2, 4, 6)]
    assert lane(schedule, Lane.CPU_OPTIM) == [f"cpu_adam chunk {chunk}" for chunk in (2, 4, 6)]
    stepped = {task.chunk: task for task in schedule.tasks if task.kind is TaskKind.CPU_ADAM}
    later = [task.name for task in schedule.tasks[stepped[2].id :] if task.lane is Lane.COMPUTE]  # type: ignore[index]
    assert later[0] == "teacher_forward 2", "CPU Adam runs while later blocks compute"
    for chunk, gather in ((t.chunk, t) for t in schedule.tasks if t.kind is TaskKind.GATHER):
        waits = chunk in stepped and stepped[chunk].id in gather.after_previous
        assert waits == (chunk in (2, 4, 6)), "nobody steps a teacher"


def test_the_device_holds_one_pair_at_a_time() -> None:
    """At the peak, in the backward: a pair's outputs, what forward and loss saved, gradients, chunks."""
    workload = pairs(4)
    n_buffer = 2
    schedule = compile_schedule(bypass_plan(workload, n_buffer=n_buffer), workload)
    peak = guaranteed_device_peak(schedule)
    own = 3 * OUTPUT_BYTES + SAVED_BYTES + LOSS_BYTES + 2_000  # input, target and own output; 2 000 on the way
    # A depth of 1 lets the gradients of the pair before wait for two steps, which are over.
    assert peak.size_bytes == workload.resident_bytes + n_buffer * CHUNK_BYTES + own
    assert schedule.tasks[peak.task].kind is TaskKind.BACKWARD
    device = [b for b in schedule.buffers if b.memory is Memory.DEVICE]
    assert not [b for b in device if b.content is Content.INCOMING_GRADIENT]
    assert {b.size_bytes for b in device if b.content is Content.GRADIENTS} == {GRADIENT_BYTES}


def test_each_block_is_clipped_and_stepped_behind_its_own_backward() -> None:
    workload = pairs(3)
    plan = bypass_plan(workload, n_persist=3, n_buffer=2, micro_batches=2, max_gradient_norm=1.0)
    schedule = compile_schedule(plan, workload)
    tasks = {task.name: task for task in schedule.tasks}
    added = "gradient_accumulate chunk 4 of micro-batch 1", "gradient_accumulate chunk 6 of micro-batch 1"
    assert lane(schedule, Lane.CPU_OPTIM) == [
        "gradient_norm 1",  # of chunk 2, which stays on the device
        *(added[0], "gradient_norm 3", "cpu_adam chunk 4"),
        *(added[1], "gradient_norm 5", "cpu_adam chunk 6"),
    ]
    assert [tasks[f"gradient_norm {block}"].after for block in (1, 3, 5)] == [
        (tasks["backward 1 of micro-batch 1"].id,),
        (tasks[added[0]].id,),
        (tasks[added[1]].id,),
    ]
    assert tasks["gradient_norm 3"].id in tasks["cpu_adam chunk 4"].after
    assert tasks["cpu_adam chunk 4"].id < tasks["backward 5 of micro-batch 1"].id
    assert {tasks[f"gradient_norm {block}"].id for block in (1, 3, 5)} <= set(tasks["device_adam"].after)
    assert [tasks[f"gradient_norm {block}"].stepped_bytes for block in (1, 3, 5)] == [0, GRADIENT_BYTES, GRADIENT_BYTES]


def test_a_frozen_block_has_no_norm() -> None:
    workload = pairs(2)
    frozen = tuple(p.model_copy(update={"trainable": p.trainable and p.block != 1}) for p in workload.parameters)
    backward = phase(-(OUTPUT_BYTES + SAVED_BYTES + LOSS_BYTES + OUTPUT_BYTES))
    held = workload.profiles[1].model_copy(update={"backward": backward})
    blocks = tuple(b.model_copy(update={"profile": 2}) if n == 1 else b for n, b in enumerate(workload.blocks))
    assert workload.distillation is not None
    losses = (*workload.distillation.losses, workload.distillation.losses[1])
    distillation = workload.distillation.model_copy(update={"losses": losses})
    changes = {"parameters": frozen, "blocks": blocks, "profiles": (*workload.profiles, held)}
    workload = workload.model_copy(update=changes | {"distillation": distillation})
    plan = bypass_plan(workload, max_gradient_norm=1.0)
    schedule = compile_schedule(plan, workload)
    verify_schedule(schedule, plan, workload)
    assert [task.section for task in schedule.tasks if task.kind is TaskKind.GRADIENT_NORM] == [3]


def test_later_micro_batches_add_to_what_is_there() -> None:
    workload = pairs(2)
    resident = bypass_plan(workload, n_persist=5, n_buffer=0, micro_batches=2)
    schedule = compile_schedule(resident, workload)
    made = [b for b in schedule.buffers if b.content is Content.GRADIENTS]
    assert [(b.section, b.micro_batch) for b in made] == [(1, 0), (3, 0)]
    (adam,) = (task for task in schedule.tasks if task.kind is TaskKind.DEVICE_ADAM)
    assert adam.num_stepped == 2 * ELEMENTS
    offloaded = compile_schedule(bypass_plan(workload, micro_batches=2), workload)
    sums = [task.name for task in offloaded.tasks if task.kind is TaskKind.GRADIENT_ACCUMULATE]
    assert sums == [f"gradient_accumulate chunk {chunk} of micro-batch 1" for chunk in (2, 4)]


def test_teacher_and_student_share_no_chunk() -> None:
    workload = pairs(3)
    for chunk in layout_of(workload, 2**30).chunks:
        models = {workload.parameters[placed.index].name.split(".")[0] for placed in chunk.parameters}
        assert len(models) == 1
    full = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=CHUNK_BYTES)
    with pytest.raises(PlanError, match="built for method full"):
        compile_schedule(bypass_plan(workload), workload, full)


def test_a_plan_of_full_training_does_not_fit_a_distillation() -> None:
    workload, other = pairs(1), chain(1)
    with pytest.raises(PlanError, match="method full, the workload"):
        compile_schedule(plan(workload), workload)
    with pytest.raises(PlanError, match="method bypass, the workload"):
        compile_schedule(bypass_plan(other), other)
