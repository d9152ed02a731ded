"""The happens-before relation against timings: a task comes first for certain if no duration can change it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from protwin.shared.compile.compile import compile_schedule
from protwin.shared.order.happens_before import HappensBefore, Occurrence, OrderError
from protwin.shared.schema.schedule import Lane, Schedule, Task, TaskId, TaskKind
from tests.strategies.plans import PlannedWorkload, planned_workloads

NUM_ITERATIONS = 3
KIND_IN = (TaskKind.FORWARD, TaskKind.GATHER, TaskKind.GRADIENT_OFFLOAD, TaskKind.CPU_ADAM)


def program(tasks: Sequence[Task]) -> Schedule:
    return Schedule(plan_id="", tasks=tuple(tasks), buffers=(), num_slots=0, num_blocks=1, prefetch_depth=1)


@st.composite
def programs(draw: DrawFn, *, may_deadlock: bool = False) -> Schedule:
    """Tasks in any lanes that wait for any others."""
    num_tasks = draw(st.integers(1, 8))

    def subset(bound: int) -> tuple[TaskId, ...]:
        return tuple(TaskId(i) for i in sorted(draw(st.sets(st.integers(0, bound - 1), max_size=3)))) if bound else ()

    return program(
        [
            Task(
                TaskId(place),
                draw(st.sampled_from(KIND_IN)),
                after=subset(num_tasks if may_deadlock else place),
                after_previous=subset(num_tasks),
            )
            for place in range(num_tasks)
        ]
    )


def starts_s(
    schedule: Schedule, slow: tuple[int, TaskId] | None, *, num_iterations: int
) -> dict[tuple[int, TaskId], float]:
    """When every task starts if tasks take no time but ``slow``, which takes one second; deadlocked ones are absent."""
    lanes = {lane: [t for t in schedule.tasks if t.lane is lane] for lane in Lane}
    programs = {lane: [(i, t) for i in range(num_iterations) for t in tasks] for lane, tasks in lanes.items()}
    ends: dict[tuple[int, TaskId], float] = {}
    starts: dict[tuple[int, TaskId], float] = {}
    free_s = dict.fromkeys(Lane, 0.0)
    moved = True
    while moved:
        moved = False
        for lane, queue in programs.items():
            while queue:
                iteration, task = queue[0]
                waits = [(iteration, other) for other in task.after]
                waits += [(iteration - 1, other) for other in task.after_previous] if iteration else []
                if any(wait not in ends for wait in waits):
                    break
                key = (iteration, task.id)
                starts[key] = max([free_s[lane], *(ends[wait] for wait in waits)])
                ends[key] = free_s[lane] = starts[key] + (1.0 if key == slow else 0.0)
                queue.pop(0)
                moved = True
    return starts


def assert_matches_timings(schedule: Schedule) -> None:
    order = HappensBefore(schedule, NUM_ITERATIONS)
    unrolled = [Occurrence(i, task.id) for i in range(NUM_ITERATIONS) for task in schedule.tasks]
    for first in unrolled:
        starts = starts_s(schedule, (first.iteration, first.task), num_iterations=NUM_ITERATIONS)
        for second in unrolled:
            assert order.before(first, second) == (starts[second.iteration, second.task] >= 1.0), (first, second)


@given(programs())
def test_a_task_comes_first_if_its_delay_delays_the_other(schedule: Schedule) -> None:
    assert_matches_timings(schedule)


@settings(max_examples=10)
@given(planned_workloads(max_blocks=3))
def test_the_same_holds_for_compiled_schedules(case: PlannedWorkload) -> None:
    assert_matches_timings(compile_schedule(case.plan, case.workload, case.layout))


@given(programs(may_deadlock=True))
def test_an_error_if_and_only_if_some_task_never_starts(schedule: Schedule) -> None:
    started = starts_s(schedule, None, num_iterations=NUM_ITERATIONS)
    if len(started) == NUM_ITERATIONS * len(schedule.tasks):
        assert_matches_timings(schedule)
    else:
        with pytest.raises(OrderError, match="can never start"):
            HappensBefore(schedule, NUM_ITERATIONS)


@given(programs())
def test_what_is_reached_is_counted_per_lane(schedule: Schedule) -> None:
    order = HappensBefore(schedule, NUM_ITERATIONS)
    for iteration in range(NUM_ITERATIONS):
        for task in schedule.tasks:
            at = Occurrence(iteration, task.id)
            for lane, reached in zip(Lane, order.reached(at), strict=True):
                earlier = [
                    other
                    for i in range(NUM_ITERATIONS)
                    for other in schedule.lanes[lane]
                    if order.before(Occurrence(i, other), at)
                ]
                assert len(earlier) == reached


def test_one_iteration_later_is_the_same_relation() -> None:
    """What the verifier relies on: two iterations of the unrolled program relate like the next two."""
    tasks = [
        Task(TaskId(0), TaskKind.GATHER, after_previous=(TaskId(2),)),
        Task(TaskId(1), TaskKind.FORWARD, after=(TaskId(0),)),
        Task(TaskId(2), TaskKind.CPU_ADAM, after=(TaskId(1),)),
    ]
    order = HappensBefore(program(tasks), 4)
    for iteration in (0, 1, 2):
        assert order.before(Occurrence(iteration, TaskId(2)), Occurrence(iteration + 1, TaskId(0)))
        assert not order.before(Occurrence(iteration + 1, TaskId(0)), Occurrence(iteration, TaskId(2)))
    without_link = HappensBefore(program([replace(tasks[0], after_previous=()), *tasks[1:]]), 4)
    assert not without_link.before(Occurrence(1, TaskId(2)), Occurrence(2, TaskId(0)))


@pytest.mark.parametrize("field", ["after", "after_previous"])
def test_a_wait_for_nothing_is_an_error(field: str) -> None:
    task = replace(Task(TaskId(0), TaskKind.FORWARD), **{field: (TaskId(1),)})  # type: ignore[arg-type]
    with pytest.raises(OrderError, match="task 1, which does not exist"):
        HappensBefore(program([task]), 2)
