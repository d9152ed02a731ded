"""Schedules of stages: compiled ones pass, and whoever reads or writes what it must not is rejected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.shared.basics.errors import PlanError, ScheduleError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.schedule import Content, Lane, Schedule, Task, TaskKind
from protwin.shared.verify.bypass import BYPASS, check_exchange_order, check_exchanges
from protwin.shared.verify.rules import Rules
from protwin.shared.verify.verify import verify_schedule
from protwin.shared.workloads.stages import stage_workload
from tests.proof_size import examples, share
from tests.shared import faults
from tests.shared.bypass_models import bypass_plan, pairs
from tests.shared.faults import Fault
from tests.shared.small_models import OUTPUT_BYTES
from tests.shared.verdicts import check_sound_and_faulty, compiled, guarantees, is_accepted
from tests.strategies.pairs import cases_of_ranks
from tests.strategies.plans import PlannedWorkload


@settings(max_examples=examples(1_000, 12), deadline=None)
@given(cases_of_ranks(), st.integers(0, 2**32 - 1))
def test_compiled_schedules_pass_and_faulty_ones_do_not(case: PlannedWorkload, seed: int) -> None:
    check_sound_and_faulty(case, seed)


def example() -> PlannedWorkload:
    """The second of three stages, which receives and sends: two pairs, two micro-batches."""
    stage = stage_workload(pairs(4), 1, 2, 3)
    plan = bypass_plan(stage, n_persist=2, n_buffer=2, micro_batches=2)
    return PlannedWorkload(stage, plan, layout_of(stage, plan.chunk_bytes))


def test_what_comes_and_goes_stands_between_the_forwards() -> None:
    schedule = compiled(example())
    lane = [schedule.tasks[task] for task in schedule.lanes[Lane.COLLECTIVE]]
    assert [task.name for task in lane] == [
        *("receive prologue", "send 2", "receive prologue of micro-batch 1", "send 2 of micro-batch 1"),
    ]
    assert {task.moved_bytes for task in lane} == {OUTPUT_BYTES}
    before = {
        task: [schedule.tasks[other].name for other in schedule.tasks[task].after]
        for task in range(len(schedule.tasks))
    }
    assert before[lane[0].id] == ["teacher_forward prologue"]
    assert before[lane[1].id] == ["teacher_forward 2"]
    named = {task.name: task for task in schedule.tasks}
    assert "receive prologue" in before[named["teacher_forward 0"].id]
    assert "send 2" in before[named["backward 3"].id]


@pytest.mark.parametrize(("first", "received", "sent"), [(0, 0, 1), (1, 1, 1), (3, 1, 0)])
def test_the_first_stage_receives_nothing_and_the_last_one_sends_nothing(first: int, received: int, sent: int) -> None:
    stage = stage_workload(pairs(4), first, 1, 3)
    kinds = [task.kind for task in compile_schedule(bypass_plan(stage, n_buffer=2), stage).tasks]
    assert (kinds.count(TaskKind.RECEIVE), kinds.count(TaskKind.SEND)) == (received, sent)


@pytest.mark.parametrize("family", faults.DATA_FAULTS, ids=lambda family: family.__name__)
def test_every_data_fault_of_the_example_is_rejected(family: Callable[[Schedule], list[Fault]]) -> None:
    case = example()
    schedule = compiled(case)
    found = share(family(schedule), one_in=7)
    assert [fault for fault in found if is_accepted(fault.make(), case)] == []


def test_every_dropped_dependency_that_matters_is_rejected() -> None:
    case = example()
    schedule = compiled(case)
    intact = guarantees(schedule)
    for fault in faults.dropped_dependencies(schedule):
        changed_schedule = fault.make()
        assert is_accepted(changed_schedule, case) == (guarantees(changed_schedule) == intact), fault


def changed(schedule: Schedule, task: Task, **fields: Any) -> Schedule:
    tasks = list(schedule.tasks)
    tasks[task.id] = replace(task, **fields)
    return replace(schedule, tasks=tuple(tasks))


def without(*checks: object) -> Rules:
    return replace(BYPASS, sections=tuple(rule for rule in BYPASS.sections if rule.check not in checks))


def task_of(schedule: Schedule, kind: TaskKind, section: object) -> Task:
    return next(task for task in schedule.tasks if task.kind is kind and task.section == section)


def test_a_stage_sends_the_teachers_activation_and_no_student_blocks() -> None:
    """What another stage would then read is of a student block of this one."""
    case = example()
    schedule = compiled(case)
    send = task_of(schedule, TaskKind.SEND, 2)
    outputs = [b for b in schedule.buffers if b.content is Content.OUTPUT and b.section == 1 and not b.micro_batch]
    faulty = changed(schedule, send, reads=(outputs[0].id,))
    with pytest.raises(ScheduleError, match=rf"send 2 reads buffers \[{outputs[0].id}\]"):
        verify_schedule(faulty, case.plan, case.workload, case.layout)


def test_what_is_received_is_there_before_anybody_reads_it() -> None:
    """The teacher's first block does not wait: it may read what the prologue has made, in a race with what comes."""
    case = example()
    schedule = compiled(case)
    receive, reader = task_of(schedule, TaskKind.RECEIVE, "prologue"), task_of(schedule, TaskKind.TEACHER_FORWARD, 0)
    faulty = changed(schedule, reader, after=tuple(other for other in reader.after if other != receive.id))
    with pytest.raises(ScheduleError, match=r"may free buffer .* while receive prologue uses it"):
        verify_schedule(faulty, case.plan, case.workload, case.layout)


def test_nobody_reads_what_the_prologue_has_made_ahead_of_what_is_received() -> None:
    """A reader that stands before the receive sees a value that data flow alone takes for the meant one."""
    case = example()
    schedule = compiled(case)
    receive = task_of(schedule, TaskKind.RECEIVE, "prologue")
    later = next(t for t in schedule.tasks if t.id > receive.id and t.kind is TaskKind.TEACHER_FORWARD)
    order = [t.id for t in schedule.tasks]
    student = task_of(schedule, TaskKind.FORWARD, 1)
    # The receive stands behind the teacher's first block, which waits for the prologue alone; the student's waits.
    order.remove(receive.id)
    order.insert(order.index(later.id) + 1, receive.id)
    place = {old: new for new, old in enumerate(order)}
    tasks = []
    # Now the student's is the first to read what was received.
    first = {later.id: -receive.moved_bytes, student.id: receive.moved_bytes}
    for old in order:
        task = schedule.tasks[old]
        task = replace(task, arrived_bytes=task.arrived_bytes + first.get(old, 0))
        after = {other for other in task.after if (old, other) != (later.id, receive.id)}
        if old == receive.id:
            after |= {later.id}
        if old == student.id:
            after |= {receive.id}
        after_previous = tuple(sorted(place[other] for other in task.after_previous))
        tasks.append(
            replace(task, id=place[old], after=tuple(sorted(place[o] for o in after)), after_previous=after_previous)
        )
    faulty = replace(schedule, tasks=tuple(tasks))
    verify_schedule(faulty, case.plan, case.workload, case.layout, rules=without(check_exchange_order))
    with pytest.raises(ScheduleError, match="teacher_forward 0 may start before receive prologue has ended"):
        verify_schedule(faulty, case.plan, case.workload, case.layout)


def test_nothing_is_received_before_the_prologue_has_ended() -> None:
    case = example()
    schedule = compiled(case)
    receive = task_of(schedule, TaskKind.RECEIVE, "prologue")
    with pytest.raises(ScheduleError, match="receive prologue may use buffer"):
        verify_schedule(changed(schedule, receive, after=()), case.plan, case.workload, case.layout)


def test_nothing_is_sent_after_it_is_gone() -> None:
    """The last backward, which frees the activation, does not wait."""
    case = example()
    schedule = compiled(case)
    send, last = task_of(schedule, TaskKind.SEND, 2), task_of(schedule, TaskKind.BACKWARD, 3)
    faulty = changed(schedule, last, after=tuple(other for other in last.after if other != send.id))
    with pytest.raises(ScheduleError, match=r"backward 3 may free buffer .* while send 2 uses it"):
        verify_schedule(faulty, case.plan, case.workload, case.layout)


def test_who_is_no_stage_exchanges_nothing() -> None:
    """A schedule of a stage, whose pairs would be a whole distillation."""
    case = example()
    schedule = compiled(case)
    assert case.workload.distillation is not None
    whole = case.workload.model_copy(
        update={"distillation": case.workload.distillation.model_copy(update={"stage": None})}
    )
    plan = bypass_plan(whole, n_persist=2, n_buffer=2, micro_batches=2)
    faulty = replace(schedule, plan_id=plan.identity)
    with pytest.raises(ScheduleError, match="receive prologue of micro-batch 0"):
        verify_schedule(faulty, plan, whole, case.layout)
    with pytest.raises(ScheduleError, match="of kind receive, for which no rule answers"):
        verify_schedule(faulty, plan, whole, case.layout, rules=without(check_exchanges))
    with pytest.raises(PlanError, match="belongs to workload"):
        verify_schedule(schedule, case.plan, whole, case.layout)
