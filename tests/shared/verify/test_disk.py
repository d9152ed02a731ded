"""Chunks on the host's disk: rules of the verifier, and each single fault that breaks one.

Random plans of ``test_verify`` have such chunks in every other case; here are the corners.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
from pydantic import ValidationError

from protwin.shared.basics.errors import PlanError, ScheduleError
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.schedule import Content, Lane, Memory, Schedule, TaskId, TaskKind
from protwin.shared.verify.verify import verify_schedule
from tests.proof_size import share
from tests.shared import faults
from tests.shared.faults import Fault
from tests.shared.small_models import chain, parameter, plan, workload
from tests.shared.verdicts import compiled, guarantees, is_accepted, only_rejections, violation
from tests.strategies.plans import PlannedWorkload


def planned(model: Any, given: Plan, **changes: object) -> PlannedWorkload:
    knobs = Plan.model_validate({**given.model_dump(), **changes})
    layout = build_layout(model.parameters, num_blocks=model.num_blocks, chunk_bytes=knobs.chunk_bytes)
    return PlannedWorkload(model, knobs, layout)


@lru_cache
def example(*, passes_gradients: bool = True) -> PlannedWorkload:
    """Every residency of one rank, a frozen chunk on the disk, and three chunks that take turns at two places."""
    parameters = [parameter("embedding", 700, None)]
    for block in range(5):
        dtype = "float32" if block % 2 else "bfloat16"
        parameters.append(parameter(f"layers.{block}", 1_000 + block, block, trainable=block != 2, dtype=dtype))
    model = workload(parameters, 5)
    given = plan(model, n_persist=1, n_buffer=2, n_checkpoint=1, n_swap=1)
    more = {} if passes_gradients else {"micro_batches": 2, "max_gradient_norm": 1.0}
    return planned(model, given, n_host_stepped=1, n_disk_state=4, n_disk=3, n_staging=2, **more)


def chained(**changes: object) -> PlannedWorkload:
    """Four chunks, all of them on the disk."""
    model = chain(4)
    return planned(model, plan(model, n_buffer=2), **{"n_disk_state": 4, "n_disk": 4, "n_staging": 2, **changes})


def of(schedule: Schedule, kind: TaskKind, chunk: int, place: int = -1) -> TaskId:
    return [task.id for task in schedule.tasks if task.kind is kind and task.chunk == chunk][place]


def rejection(changed: Schedule, case: PlannedWorkload) -> str:
    with pytest.raises(ScheduleError) as found:
        verify_schedule(changed, case.plan, case.workload, case.layout)
    return str(found.value)


# -- what lies where -------------------------------------------------------------------------------------------------


def test_the_example_by_hand() -> None:
    """Chunk 0 is the embedding, then one of every block; 3, the third block's, is frozen."""
    case = example()
    schedule = compiled(case)
    verify_schedule(schedule, case.plan, case.workload, case.layout)
    on_disk = [(b.content, b.chunk) for b in schedule.buffers if b.memory is Memory.DISK]
    parameters = [(Content.PARAMETERS, chunk) for chunk in (3, 4, 5)]
    assert sorted(on_disk) == sorted([*parameters, *((Content.OPTIMIZER_STATE, chunk) for chunk in (2, 4, 5))])
    steps = [(t.kind, t.chunk) for t in schedule.tasks if t.lane is Lane.DISK and Content.OPTIMIZER_STATE in used(t.id)]
    read, write = TaskKind.DISK_READ, TaskKind.DISK_WRITE
    assert steps == [(read, 5), (read, 4), (write, 5), (read, 2), (write, 4), (write, 2)]
    # Of each sort two places, as large as the largest: masters, moments and a count; a narrow chunk's fewer gradients.
    places = [(b.content, b.memory, b.size_bytes) for b in schedule.buffers if b.is_static and b.slot == 1]
    assert sorted(places) == sorted(
        [
            (Content.PARAMETERS, Memory.PINNED_HOST, 4_096),
            (Content.PARAMETERS, Memory.HOST, 4_096),
            (Content.OPTIMIZER_STATE, Memory.HOST, 12 * 1_004 + 4),
            (Content.GRADIENTS, Memory.PINNED_HOST, 4_096),
        ]
    )


def used(task: TaskId) -> set[Content]:
    schedule = compiled(example())
    return {schedule.buffers[buffer].content for buffer in schedule.tasks[task].reads}


def test_host_memory_is_that_of_places_alone() -> None:
    """Of n equal chunks, whatever n is: parameters twice, gradients and state, in two places each."""
    for num_blocks in (3, 7):
        model = chain(num_blocks)
        knobs = {"n_disk_state": num_blocks, "n_disk": num_blocks, "n_staging": 2}
        schedule = compiled(planned(model, plan(model, n_buffer=2), **knobs))
        assert schedule.static_bytes(Memory.PINNED_HOST) == 2 * (4_096 + 4_096)
        assert schedule.static_bytes(Memory.HOST) == 2 * (4_096 + 8_004)
        assert schedule.static_bytes(Memory.DISK) == num_blocks * (4_096 + 8_004)


@pytest.mark.parametrize("more", [{"micro_batches": 2}, {"max_gradient_norm": 1.0}], ids=str)
def test_gradients_that_wait_for_others_have_places_of_their_own(more: dict[str, object]) -> None:
    case = chained(**more)
    schedule = compiled(case)
    verify_schedule(schedule, case.plan, case.workload, case.layout)
    staged = [b for b in schedule.buffers if b.content is Content.GRADIENTS and b.memory is Memory.PINNED_HOST]
    assert [(b.chunk, b.is_static) for b in staged] == [(chunk, True) for chunk in range(4)]


# -- single faults ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", faults.DATA_FAULTS, ids=lambda family: family.__name__)
def test_data_faults_are_rejected(family: Callable[[Schedule], list[Fault]]) -> None:
    case = example()
    found = share(list(family(compiled(case))), one_in=40)
    assert found
    assert [fault for fault in found if is_accepted(fault.make(), case)] == []


@pytest.mark.slow
@pytest.mark.parametrize("passes_gradients", [True, False])
@pytest.mark.parametrize("family", faults.DATA_FAULTS, ids=lambda family: family.__name__)
def test_every_data_fault_is_rejected(family: Callable[[Schedule], list[Fault]], passes_gradients: bool) -> None:
    case = example(passes_gradients=passes_gradients)
    found = share(list(family(compiled(case))), one_in=8)
    assert found
    assert [fault for fault in found if is_accepted(fault.make(), case)] == []


@pytest.mark.parametrize("passes_gradients", [True, False])
def test_every_wait_for_the_disk_that_matters_is_demanded(passes_gradients: bool) -> None:
    case = example(passes_gradients=passes_gradients)
    schedule = compiled(case)
    intact = guarantees(schedule)
    found = [fault for fault in faults.dropped_dependencies(schedule) if "disk" in fault.name]
    assert len(found) >= 12
    for fault in found:
        changed = fault.make()
        assert is_accepted(changed, case) == (guarantees(changed) == intact), fault


def test_every_rule_of_the_disk_earns_its_place() -> None:
    case = example()
    schedule = compiled(case)
    waiting = {"check_disk_reads", "check_disk_writes", "check_shared_places", "check_turns"}
    found = [*faults.merged_slots(schedule), *faults.changed_buffer_fields(schedule)]
    found += [fault for fault in faults.changed_task_fields(schedule) if " disk_" in fault.name]
    only_rejections(found, case, waiting)
    assert waiting == set(), "these reject nothing that other rules let pass"


# -- named hazards ---------------------------------------------------------------------------------------------------


def test_a_place_that_is_taken_before_it_is_free_is_rejected() -> None:
    case = chained()
    schedule = compiled(case)
    read, gather = of(schedule, TaskKind.DISK_READ, 2, 0), of(schedule, TaskKind.GATHER, 0, 0)
    assert gather in schedule.tasks[read].after
    changed = faults.with_task(schedule, read, after=faults.without(schedule.tasks[read].after, gather))
    assert violation(changed, case) is not None
    assert "place 0 may hold parameters of chunks 0 and 2 at once" in rejection(changed, case)


def test_what_is_written_before_it_is_stepped_is_rejected() -> None:
    case = chained()
    schedule = compiled(case)
    write, adam = of(schedule, TaskKind.DISK_WRITE, 3), of(schedule, TaskKind.CPU_ADAM, 3)
    changed = faults.with_task(schedule, write, after=faults.without(schedule.tasks[write].after, adam))
    assert violation(changed, case) is not None
    assert "disk_write chunk 3" in rejection(changed, case)


def test_a_read_ahead_of_the_write_is_stale() -> None:
    """The lane's order alone keeps the two apart: with the chunk's write moved to the end, its next read comes first.

    The first chunk is read first of all, for the next forward.
    """
    case = chained(n_staging=3)
    schedule = compiled(case)
    read, write = of(schedule, TaskKind.DISK_READ, 0, 0), of(schedule, TaskKind.DISK_WRITE, 0)
    lane = schedule.lanes[Lane.DISK]
    assert (lane[0], lane[-1]) == (read, write)
    # One place in the lane is lost: the write of this iteration stands behind the next iteration's first read.
    tasks = list(schedule.tasks)
    moved = tasks.pop(write)
    tasks.insert(tasks.index(schedule.tasks[lane[1]]), moved)
    changed = faults.renumbered(schedule, tasks)
    assert rejection(changed, case)


def test_gradients_that_arrive_before_their_place_is_free_are_rejected() -> None:
    case = chained(n_staging=1)
    schedule = compiled(case)
    offload, adam = of(schedule, TaskKind.GRADIENT_OFFLOAD, 2), of(schedule, TaskKind.CPU_ADAM, 3)
    changed = faults.with_task(schedule, offload, after=faults.without(schedule.tasks[offload].after, adam))
    assert violation(changed, case) is not None
    assert "place 0 may hold gradients of chunks 3 and 2 at once" in rejection(changed, case)


# -- refusals --------------------------------------------------------------------------------------------------------


def test_who_cannot_have_them_is_told_so() -> None:
    case = chained()
    for changes, message in (
        ({"n_disk_state": 1}, "n_disk: 4 with n_disk_state 1.*Raise n_disk_state to 4"),
        ({"n_staging": 0}, "n_staging: 0 with n_disk_state 4.*needs 1 at least"),
        ({"n_disk": 0, "n_disk_state": 0}, "n_staging: 2 with n_disk_state 0; set it to 0"),
        ({"parallel": "replicated", "num_ranks": 2}, "n_disk_state: 4 with parallel replicated; one rank alone"),
    ):
        with pytest.raises(ValidationError, match=message):
            chained(**changes)
        unchecked = {**changes, "parallel": ParallelMode(changes.get("parallel", "single"))}
        with pytest.raises(PlanError, match=message):
            compiled(PlannedWorkload(case.workload, case.plan.model_copy(update=unchecked), case.layout))
    with pytest.raises(PlanError, match=r"of which 3 are offloaded. Lower n_disk_state to 3 or less"):
        compiled(chained(n_persist=1))
