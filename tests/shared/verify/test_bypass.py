"""Schedules of bypass distillation: compiled ones pass, every single fault is rejected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.shared.basics.errors import ScheduleError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout, layout_of
from protwin.shared.schema.plan import TrainingMethod
from protwin.shared.schema.schedule import Content, Lane, Schedule, Task, TaskKind
from protwin.shared.verify.bypass import (
    BYPASS,
    check_independence,
    check_norm_order_of_blocks,
    check_norms_of_blocks,
)
from protwin.shared.verify.claim import Claim
from protwin.shared.verify.verify import verify_schedule
from tests.proof_size import examples, share
from tests.shared import faults
from tests.shared.bypass_models import bypass_plan, pairs
from tests.shared.faults import Fault
from tests.shared.verdicts import check_dropped_dependencies, check_sound_and_faulty, compiled, is_accepted
from tests.strategies.pairs import bypass_cases
from tests.strategies.plans import PlannedWorkload

SEEDS = st.integers(0, 2**32 - 1)


@settings(max_examples=examples(1_000, 24))
@given(bypass_cases(), SEEDS)
def test_compiled_schedules_pass_and_faulty_ones_do_not(case: PlannedWorkload, seed: int) -> None:
    check_sound_and_faulty(case, seed)


@settings(max_examples=examples(100, 7))
@given(bypass_cases(max_pairs=3))
def test_every_dropped_dependency_that_matters_is_rejected(case: PlannedWorkload) -> None:
    check_dropped_dependencies(case)


# -- one schedule ----------------------------------------------------------------------------------------------------


def example() -> PlannedWorkload:
    """Two pairs, two micro-batches; one chunk of each model persistent, one student's stepped on the host."""
    workload = pairs(2)
    plan = bypass_plan(workload, n_persist=2, n_host_stepped=1, n_buffer=1, micro_batches=2)
    return PlannedWorkload(workload, plan, layout_of(workload, plan.chunk_bytes))


@pytest.mark.parametrize("family", faults.DATA_FAULTS, ids=lambda family: family.__name__)
def test_every_data_fault_of_the_example_is_rejected(family: Callable[[Schedule], list[Fault]]) -> None:
    case = example()
    schedule = compiled(case)
    verify_schedule(schedule, case.plan, case.workload, case.layout)
    found = share(family(schedule), one_in=7)
    assert [fault for fault in found if is_accepted(fault.make(), case)] == []


def test_swapped_neighbours_of_compute_are_rejected() -> None:
    case = example()
    schedule = compiled(case)
    found = [fault for fault in faults.swapped_neighbours(schedule) if of_compute(fault.make()) != of_compute(schedule)]
    assert found
    assert [fault for fault in found if is_accepted(fault.make(), case)] == []


def of_compute(schedule: Schedule) -> list[tuple[TaskKind, object]]:
    return [(t.kind, t.section) for t in schedule.tasks if t.lane is Lane.COMPUTE]


def changed(schedule: Schedule, task: Task, **fields: Any) -> Schedule:
    tasks = list(schedule.tasks)
    tasks[task.id] = replace(task, **fields)
    return replace(schedule, tasks=tuple(tasks))


def test_a_schedule_without_a_loss_is_rejected() -> None:
    """Its place is taken by a forward once more, so that all numbers stay."""
    case = example()
    schedule = compiled(case)
    loss = next(task for task in schedule.tasks if task.kind is TaskKind.LOSS)
    with pytest.raises(ScheduleError, match="compute task 3 is forward 1, the plan asks for loss 1"):
        verify_schedule(changed(schedule, loss, kind=TaskKind.FORWARD), case.plan, case.workload, case.layout)


@pytest.mark.parametrize("kind", [TaskKind.FORWARD, TaskKind.LOSS, TaskKind.BACKWARD])
def test_a_student_block_sees_nothing_of_another_one(kind: TaskKind) -> None:
    """It reads the output of the student's block before in place of its own input, or of its own output."""
    case = example()
    schedule = compiled(case)
    task = next(task for task in schedule.tasks if task.kind is kind and task.section == 3)
    other = next(b for b in schedule.buffers if b.content is Content.OUTPUT and b.section == 1 and b.micro_batch == 0)
    outputs = [b for b in task.reads if schedule.buffers[b].content is Content.OUTPUT]
    for place in outputs:
        reads = tuple(other.id if buffer == place else buffer for buffer in task.reads)
        faulty = changed(schedule, task, reads=reads)
        assert not is_accepted(faulty, case)
        with pytest.raises(ScheduleError, match=rf"{kind} 3 sees buffer {other.id}, which is of 1"):
            check_independence(Claim(faulty, case.plan, case.workload, case.layout))


def test_a_teachers_block_sees_nothing_of_the_student() -> None:
    case = example()
    schedule = compiled(case)
    task = next(task for task in schedule.tasks if task.kind is TaskKind.TEACHER_FORWARD and task.section == 2)
    other = next(b for b in schedule.buffers if b.content is Content.OUTPUT and b.section == 1)
    faulty = changed(schedule, task, reads=(*task.reads, other.id))
    with pytest.raises(ScheduleError, match=rf"teacher_forward 2 sees buffer {other.id}, which is of 1"):
        check_independence(Claim(faulty, case.plan, case.workload, case.layout))


def test_a_layout_in_which_blocks_share_a_chunk_is_rejected() -> None:
    """No other rule sees it: every task has the chunks that hold its parameters."""
    workload = pairs(2)
    mixed = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=2**20)
    layout = replace(mixed, method=TrainingMethod.BYPASS)
    assert len(layout.chunks) < len(layout_of(workload, 2**20).chunks)
    plan = bypass_plan(workload, chunk_bytes=2**20, n_persist=len(layout.chunks), n_buffer=0)
    schedule = compile_schedule(plan, workload, layout)
    with pytest.raises(ScheduleError, match="sees buffer"):
        verify_schedule(schedule, plan, workload, layout)
    others = replace(BYPASS, sections=tuple(rule for rule in BYPASS.sections if rule.check is not check_independence))
    verify_schedule(schedule, plan, workload, layout, rules=others)


# -- norms of blocks -------------------------------------------------------------------------------------------------


def limited() -> PlannedWorkload:
    """The example with a limit; the third pair has a chunk on the host alone."""
    workload = pairs(3)
    plan = bypass_plan(
        workload, n_persist=3, n_host_stepped=2, n_buffer=1, micro_batches=2, max_gradient_norm=1.0, prefetch_depth=2
    )
    return PlannedWorkload(workload, plan, layout_of(workload, plan.chunk_bytes))


def norms_in(schedule: Schedule) -> list[Task]:
    return [task for task in schedule.tasks if task.kind is TaskKind.GRADIENT_NORM]


def refused(case: PlannedWorkload, schedule: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        verify_schedule(schedule, case.plan, case.workload, case.layout)


def test_a_norm_of_another_block_is_rejected() -> None:
    case = limited()
    schedule = compiled(case)
    _, second, third = norms_in(schedule)
    refused(case, changed(schedule, second, section=third.section), r"norms .* of blocks \['1', '5', '5'\], not of")
    # It reads the gradients of the block behind it, which have as many bytes.
    refused(case, changed(schedule, second, reads=third.reads), "gradient_norm 3 reads")


def test_a_missing_norm_is_rejected() -> None:
    """What waits for it waits for another block's."""
    case = limited()
    schedule = compiled(case)
    first, second, _ = norms_in(schedule)
    tasks = [
        replace(task, after=tuple(first.id if other == second.id else other for other in task.after))
        for task in schedule.tasks
    ]
    tasks[second.id] = replace(second, kind=TaskKind.GRADIENT_ACCUMULATE, chunk=4, section=None)
    faulty = replace(schedule, tasks=tuple(tasks))
    assert not is_accepted(faulty, case)
    with pytest.raises(ScheduleError, match=r"norms .* of blocks \['1', '5'\], not of"):
        check_norms_of_blocks(Claim(faulty, case.plan, case.workload, case.layout))


def test_one_norm_for_all_is_rejected() -> None:
    """That of full training: it names no block, and reads all gradients."""
    case = limited()
    schedule = compiled(case)
    *others, last = norms_in(schedule)
    reads = tuple(dict.fromkeys(buffer for norm in (*others, last) for buffer in norm.reads))
    refused(
        case, changed(schedule, last, section=None, reads=reads), r"norms .* of blocks \['1', '3', 'None'\], not of"
    )


def test_a_norm_without_a_limit_is_rejected() -> None:
    case = limited()
    plan = case.plan.model_copy(update={"max_gradient_norm": None})
    with pytest.raises(ScheduleError):
        verify_schedule(replace(compiled(case), plan_id=plan.identity), plan, case.workload, case.layout)
    with pytest.raises(ScheduleError, match=r"norms .* of blocks \['1', '3', '5'\], not of \[\]"):
        check_norms_of_blocks(Claim(compiled(case), plan, case.workload, case.layout))


@pytest.mark.parametrize("chunk", [4, 6])
def test_a_chunk_that_is_stepped_before_its_blocks_norm_is_rejected(chunk: int) -> None:
    """CPU Adam stands where the norm does, and waits for what that waits for."""
    case = limited()
    schedule = compiled(case)
    adam = next(task for task in schedule.tasks if task.kind is TaskKind.CPU_ADAM and task.chunk == chunk)
    norm = next(task for task in norms_in(schedule) if task.id in adam.after)
    earlier, later = replace(adam, id=norm.id, after=norm.after), replace(norm, id=adam.id)
    moved = {norm.id: adam.id, adam.id: norm.id}
    tasks = []
    for task in schedule.tasks:
        task = {norm.id: earlier, adam.id: later}.get(task.id, task)
        renamed = [tuple(moved.get(other, other) for other in waits) for waits in (task.after, task.after_previous)]
        tasks.append(task if task in (earlier, later) else replace(task, after=renamed[0], after_previous=renamed[1]))
    faulty = replace(schedule, tasks=tuple(tasks))
    refused(case, faulty, f"cpu_adam chunk {chunk}")
    with pytest.raises(ScheduleError, match=f"cpu_adam chunk {chunk}"):
        check_norm_order_of_blocks(Claim(faulty, case.plan, case.workload, case.layout))


def test_a_chunk_with_trained_parameters_of_two_blocks_has_no_norm() -> None:
    workload = pairs(2)
    mixed = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=2**20)
    layout = replace(mixed, method=TrainingMethod.BYPASS)
    plan = bypass_plan(workload, chunk_bytes=2**20, n_persist=len(layout.chunks), n_buffer=0, max_gradient_norm=1.0)
    schedule = compile_schedule(plan, workload, layout)
    with pytest.raises(ScheduleError, match="has trained parameters of blocks 1, 3"):
        check_norms_of_blocks(Claim(schedule, plan, workload, layout))
