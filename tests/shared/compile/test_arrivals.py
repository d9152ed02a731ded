"""Bytes that a compute task is the first to read since something brought them to the device."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings

from protwin.shared.basics.errors import ScheduleError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.schedule import Lane, Schedule, Section, TaskKind
from protwin.shared.verify.verify import verify_schedule
from tests.proof_size import examples
from tests.shared.faults import with_task
from tests.shared.small_models import chain, plan
from tests.shared.verdicts import compiled, is_accepted
from tests.strategies.pairs import bypass_cases, stage_workloads
from tests.strategies.plans import PlannedWorkload, parallel_workloads, planned_workloads

BLOCK_BYTES = 4_096


def schedule_of(**knobs: object) -> Schedule:
    """Four blocks with one chunk each; two buffers, so that what backward needs first is still there."""
    model = chain(4)
    fields = plan(model, n_buffer=2).model_dump() | {"activation_modes": None} | knobs
    chosen = Plan.model_validate(fields)
    schedule = compile_schedule(chosen, model)
    verify_schedule(schedule, chosen, model)
    return schedule


def arrivals(schedule: Schedule) -> dict[tuple[TaskKind, Section | None, int], int]:
    """What is not 0."""
    return {(t.kind, t.section, t.micro_batch): t.arrived_bytes for t in schedule.tasks if t.arrived_bytes}


def of_blocks(kind: TaskKind, blocks: Iterable[int], micro_batch: int = 0) -> dict[tuple[TaskKind, int, int], int]:
    """A chunk each."""
    return {(kind, block, micro_batch): BLOCK_BYTES for block in blocks}


def test_what_survives_from_forward_to_backward_arrives_once() -> None:
    """Of two buffers, backward finds both chunks that forward has left, and gathers the others anew."""
    assert arrivals(schedule_of()) == of_blocks(TaskKind.FORWARD, range(4)) | of_blocks(TaskKind.BACKWARD, (0, 1))
    # The wrong variant takes every task that needs a chunk for one that is the first to read it.
    needing = of_blocks(TaskKind.FORWARD, range(4)) | of_blocks(TaskKind.BACKWARD, range(4))
    assert arrivals(schedule_of()) != needing


def test_persistent_chunks_never_arrive() -> None:
    assert arrivals(schedule_of(n_persist=4, n_buffer=0)) == {}


def test_new_values_of_chunks_that_the_host_steps_arrive_once_per_iteration() -> None:
    """For their first use, whatever micro-batches follow."""
    found = arrivals(schedule_of(n_host_stepped=4, n_buffer=0, micro_batches=2))
    assert found == of_blocks(TaskKind.FORWARD, range(4))


def test_a_recomputation_reads_first_where_there_is_one() -> None:
    """Its backward then finds the chunk read; without it, backward is the first."""
    found = arrivals(schedule_of(n_checkpoint=4))
    assert found == of_blocks(TaskKind.FORWARD, range(4)) | of_blocks(TaskKind.RECOMPUTE, (0, 1))


def test_swapped_activations_arrive_for_their_backward() -> None:
    plain, swapping = (schedule_of(n_persist=4, n_buffer=0, n_swap=number) for number in (0, 2))
    fetched = {t.section: t.moved_bytes for t in swapping.tasks if t.kind is TaskKind.ACTIVATION_FETCH}
    assert arrivals(plain) == {}
    assert arrivals(swapping) == {(TaskKind.BACKWARD, section, 0): size for section, size in fetched.items()}
    assert sum(fetched.values()) > 0


@given(
    planned_workloads(has_disk=True) | parallel_workloads() | bypass_cases() | bypass_cases(workloads=stage_workloads())
)
@settings(max_examples=examples(120, 16))
def test_all_that_is_brought_is_read_first_once(case: PlannedWorkload) -> None:
    """The oracle counts bytes alone: what copies and ranks bring to the device is what compute is the first to read."""
    schedule = compiled(case)
    brought_bytes = 0
    for task in schedule.tasks:
        is_whole = task.chunk is None or schedule.num_shards == 1 or task.kind is TaskKind.ALL_GATHER
        if (
            task.kind in (TaskKind.GATHER, TaskKind.ALL_GATHER, TaskKind.ACTIVATION_FETCH, TaskKind.RECEIVE)
            and is_whole
        ):
            brought_bytes += task.moved_bytes
    assert sum(task.arrived_bytes for task in schedule.tasks) == brought_bytes
    assert not any(task.arrived_bytes for task in schedule.tasks if task.lane is not Lane.COMPUTE)


def test_another_figure_is_refused() -> None:
    """Of every task, whatever it is."""
    model = chain(4)
    knobs = plan(model, chunk_bytes=BLOCK_BYTES, n_persist=1, n_buffer=2, n_checkpoint=1, n_swap=1, micro_batches=2)
    case = PlannedWorkload(model, knobs, layout_of(model, BLOCK_BYTES))
    schedule = compiled(case)
    assert is_accepted(schedule, case)
    for task in schedule.tasks:
        assert not is_accepted(with_task(schedule, task.id, arrived_bytes=task.arrived_bytes + 1), case)
    # What counts a chunk at its second reader instead of its first.
    first = next(t for t in schedule.tasks if t.kind is TaskKind.FORWARD and t.arrived_bytes)
    later = next(t for t in schedule.tasks if t.kind is TaskKind.BACKWARD and t.section == first.section)
    moved = with_task(schedule, first.id, arrived_bytes=0)
    moved = with_task(moved, later.id, arrived_bytes=later.arrived_bytes + first.arrived_bytes)
    with pytest.raises(ScheduleError, match=r"forward .* is first to read 4096 bytes that came, not 0"):
        verify_schedule(moved, case.plan, case.workload, case.layout)
