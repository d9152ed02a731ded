"""The lanes of a family in arrays: what the compiled schedules of its plans say task by task."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.shared.compile.compile import compile_schedule, drafted
from protwin.shared.compile.family import Family, family_of
from protwin.shared.compile.views import tasks_and_buffers
from protwin.shared.drafts.lanes import NOTHING, DeviceBuffers, FamilyLanes, is_there, task_order
from protwin.shared.drafts.program import Draft
from protwin.shared.schema.schedule import Content, Lane, Memory, lanes_of
from tests.proof_size import examples
from tests.strategies.plans import PlannedWorkload, parallel_workloads, planned_workloads

DEPTHS = np.array([1, 2, 5])
HANDED_ON = (Content.OUTPUT, Content.ACTIVATIONS, Content.KEPT_RESULTS, Content.INCOMING_GRADIENT)
"""What sections hand to each other, whose sizes depend on the modes."""


def family(case: PlannedWorkload) -> tuple[Family, Draft, FamilyLanes]:
    """The plan's family at several depths."""
    found = replace(family_of(case.plan, case.workload, case.layout), depths=DEPTHS)
    draft = drafted(found)
    return found, draft, FamilyLanes.of(draft, len(lanes_of(case.plan.num_ranks)), len(DEPTHS))


def waits_by_hand(found: Family, draft: Draft, lanes: FamilyLanes, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """(lanes, N) what every task or one before it in its lane waits for, and (N,) whether the plan has the task."""
    tasks, _ = tasks_and_buffers(draft, found, depth=depth)
    there = is_there(draft, found.is_checkpoint[0])
    orders = task_order(draft)
    order = orders[depth if len(orders) > 1 else 0]
    ids = order[there[order]]
    waits = np.full((len(lanes.tasks), draft.num_tasks), NOTHING)
    for number, task in zip(ids.tolist(), tasks, strict=True):
        for others, iterations in ((task.after, 0), (task.after_previous, 1)):
            for other in ids[list(others)].tolist():
                lane = lanes.lane[other]
                ended = lanes.place[depth, other] + 1 - iterations * lanes.lengths[lane]
                waits[lane, number] = max(waits[lane, number], ended)
    for of_lane in lanes.tasks:
        waits[:, of_lane[depth]] = np.maximum.accumulate(waits[:, of_lane[depth]], axis=1)
    return waits, there


@given(planned_workloads() | parallel_workloads(), st.integers(0, len(DEPTHS) - 1))
@settings(max_examples=examples(300, 32))
def test_lanes_wait_as_tasks_do(case: PlannedWorkload, depth: int) -> None:
    found, draft, lanes = family(case)
    expected, there = waits_by_hand(found, draft, lanes, depth)
    for lane, tasks in enumerate(lanes.tasks):
        for other in range(len(lanes.tasks)):
            if other == lane:
                continue
            waits = lanes.waits.get((lane, other), np.full(tasks.shape, NOTHING))[depth]
            is_here = there[tasks[depth]]
            assert np.array_equal(np.maximum.accumulate(waits)[is_here], expected[other, tasks[depth]][is_here]), (
                f"{tuple(Lane)[lane]} for {tuple(Lane)[other]}"
            )


@given(planned_workloads() | parallel_workloads())
@settings(max_examples=examples(200, 20))
def test_buffers_of_the_device_are_those_of_the_schedule(case: PlannedWorkload) -> None:
    """All but what sections hand to each other, with the kinds and chunks of the tasks that make and free them."""
    found = family_of(case.plan, case.workload, case.layout)
    draft = drafted(found)
    schedule = compile_schedule(case.plan, case.workload, case.layout)
    tasks = {buffer: task for task in schedule.tasks for buffer in task.allocates}
    freeing = {buffer: task for task in schedule.tasks for buffer in task.frees}
    expected = sorted(
        (buffer.size_bytes, tasks[buffer.id].name, freeing[buffer.id].name)
        for buffer in schedule.buffers
        if not buffer.is_static and buffer.memory is Memory.DEVICE and buffer.content not in HANDED_ON
    )
    there = is_there(draft, found.is_checkpoint[0])
    order = task_order(draft)[0]
    views = tasks_and_buffers(draft, found)[0]
    names = {number: task.name for number, task in zip(order[there[order]].tolist(), views, strict=True)}
    buffers = DeviceBuffers.of(draft)
    assert expected == sorted(
        (size_bytes, names[made], names[freed])
        for size_bytes, made, freed in zip(
            buffers.size_bytes.tolist(), buffers.made_by.tolist(), buffers.freed_by.tolist(), strict=True
        )
    )
