"""The simulator replays memory in the order in which the runtime asks for it; each reads that order off by itself."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings

from protwin.runtime.training.stream_memory import stream_memory
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.schedule import AllocationId, Lane, Memory, Schedule, TaskId
from protwin.sim.memory.requests_of_schedule import Act, allocation_program
from tests.strategies import PlannedWorkload, planned_workloads

Placed = Counter[tuple[TaskId, Act, AllocationId, int]]
"""Buffers of copies: by the compute task at whose end they are made, or at whose beginning they go."""


def replayed(schedule: Schedule) -> Placed:
    """What the simulator's program says."""
    found: Placed = Counter()
    compute = iter(schedule.lanes[Lane.COMPUTE])
    previous, coming = TaskId(-1), next(compute)
    for step in allocation_program(schedule).steps:
        if step.act is Act.END:
            previous, coming = coming, next(compute, TaskId(-1))
        elif step.act in (Act.MAKE, Act.FREE):
            task = previous if step.act is Act.MAKE else coming
            found.update((task, step.act, buffer, step.iterations_later) for buffer in step.buffers)
    return found


def carried_out(schedule: Schedule) -> Placed:
    """What the runtime does."""
    found: Placed = Counter()
    memory = stream_memory(schedule)
    for act, places in ((Act.MAKE, memory.room_at_end), (Act.FREE, memory.gone_at_begin)):
        for task, copies in places.items():
            for copy in copies:
                moved = schedule.tasks[copy.task]
                buffers = moved.allocates if act is Act.MAKE else moved.frees
                found.update(
                    (task, act, buffer, copy.iterations_later)
                    for buffer in buffers
                    if schedule.buffers[buffer].memory is Memory.DEVICE and schedule.buffers[buffer].size_bytes
                )
    return found


@settings(max_examples=60)
@given(planned_workloads())
def test_both_read_the_same_order_off_a_schedule(drawn: PlannedWorkload) -> None:
    schedule = compile_schedule(drawn.plan, drawn.workload, drawn.layout)
    assert replayed(schedule) == carried_out(schedule)
