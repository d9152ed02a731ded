"""Chunks that the device keeps and the host steps: rules of the verifier, and each single fault that breaks one."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import pytest
from hypothesis import given, settings
from pydantic import ValidationError

from protwin.shared.answers.plan_kind import PlanKind
from protwin.shared.basics.errors import PlanError, ScheduleError
from protwin.shared.layout.kinds import kind_of
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.schedule import Content, Memory, Schedule, Task, TaskId, TaskKind
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.shared.verify.verify import verify_schedule
from tests.proof_size import examples, share
from tests.shared import faults
from tests.shared.faults import Fault
from tests.shared.small_models import chain, parameter, plan, workload
from tests.shared.verdicts import compiled, guarantees, is_accepted, violation
from tests.strategies.plans import PlannedWorkload, planned_workloads


def with_knobs(given: Plan, **changes: object) -> Plan:
    return Plan.model_validate({**given.model_dump(), **changes})


@lru_cache
def example() -> PlannedWorkload:
    """Every residency of one rank, two micro-batches, a limited norm, and a frozen chunk among the host-stepped."""
    parameters = [parameter("embedding", 700, None)]
    for block in range(4):
        trainable = block != 1
        parameters += [parameter(f"layers.{block}.{n}", 1_000 + n, block, trainable=trainable) for n in range(2)]
    model = workload(parameters, 4)
    knobs = with_knobs(
        plan(model, n_persist=1, n_buffer=3, n_checkpoint=1, n_swap=1, micro_batches=2, max_gradient_norm=1.0),
        n_host_stepped=4,
    )
    layout = build_layout(model.parameters, num_blocks=4, chunk_bytes=knobs.chunk_bytes)
    return PlannedWorkload(model, knobs, layout)


@lru_cache
def schedule_of_example() -> Schedule:
    return compiled(example())


def test_the_example_by_hand() -> None:
    """Chunk 0 is the embedding, then two of every block: 1 and 2 host-stepped, 3 and 4 frozen, 5 to 8 offloaded."""
    case, schedule = example(), schedule_of_example()
    verify_schedule(schedule, case.plan, case.workload, case.layout)
    assert kind_of(with_knobs(case.plan, n_swap=0, n_host_stepped=8), case.layout, case.workload) is (
        PlanKind.HOST_STEPPED
    )
    renewals = [t for t in schedule.tasks if t.kind is TaskKind.GATHER and not t.allocates]
    assert [(t.chunk, t.micro_batch) for t in renewals] == [(1, 0), (2, 0)]
    kept = {b.chunk for b in schedule.buffers if b.is_static and b.memory is Memory.DEVICE and b.chunk is not None}
    assert kept == {0, 1, 2, 3, 4}
    state = {b.chunk for b in schedule.buffers if b.content is Content.OPTIMIZER_STATE and b.memory is Memory.HOST}
    assert state == {1, 2, 5, 6, 7, 8}
    assert [t.chunk for t in schedule.tasks if t.kind is TaskKind.CPU_ADAM] == [1, 2, 5, 6, 7, 8]


@pytest.mark.slow
@pytest.mark.parametrize("family", faults.DATA_FAULTS, ids=lambda family: family.__name__)
def test_every_data_fault_is_rejected(family: Callable[[Schedule], list[Fault]]) -> None:
    found = share(family(schedule_of_example()), one_in=8)
    assert found
    assert [fault for fault in found if is_accepted(fault.make(), example())] == []


def about_renewals(schedule: Schedule) -> list[Fault]:
    """The waits of renewals and for them, left out."""
    names = {f"{task.id} {task.name}" for task in schedule.tasks if is_renewal(task)}
    return [fault for fault in faults.dropped_dependencies(schedule) if any(name in fault.name for name in names)]


def is_renewal(task: Task) -> bool:
    return task.kind is TaskKind.GATHER and not task.allocates


def test_every_wait_of_a_renewal_that_matters_is_demanded() -> None:
    schedule, case = schedule_of_example(), example()
    intact = guarantees(schedule)
    found = about_renewals(schedule)
    assert len(found) >= 6
    for fault in found:
        changed = fault.make()
        assert is_accepted(changed, case) == (guarantees(changed) == intact), fault


# -- named hazards ---------------------------------------------------------------------------------------------------


def chained() -> PlannedWorkload:
    """Three chunks, all of them host-stepped."""
    model = chain(3)
    knobs = with_knobs(plan(model, n_buffer=0), n_host_stepped=3)
    return PlannedWorkload(model, knobs, build_layout(model.parameters, num_blocks=3, chunk_bytes=knobs.chunk_bytes))


def of(schedule: Schedule, kind: TaskKind, chunk: int) -> TaskId:
    (found,) = [task.id for task in schedule.tasks if task.kind is kind and task.chunk == chunk]
    return found


def rejection(changed: Schedule, case: PlannedWorkload) -> str:
    with pytest.raises(ScheduleError) as found:
        verify_schedule(changed, case.plan, case.workload, case.layout)
    return str(found.value)


def test_new_values_that_do_not_wait_for_cpu_adam_are_stale() -> None:
    """Of the first chunk, which is stepped last and comes back first; lanes keep the others in order."""
    case = chained()
    schedule = compiled(case)
    renewal, adam = of(schedule, TaskKind.GATHER, 0), of(schedule, TaskKind.CPU_ADAM, 0)
    waits = schedule.tasks[renewal].after_previous
    changed = faults.with_task(schedule, renewal, after_previous=faults.without(waits, adam))
    assert violation(changed, case) is not None
    assert "cpu_adam chunk 0" in rejection(changed, case)


def test_compute_that_does_not_wait_for_new_values_is_rejected() -> None:
    case = chained()
    schedule = compiled(case)
    renewal = of(schedule, TaskKind.GATHER, 1)
    (forward,) = [task for task in schedule.tasks if task.name == "forward 1"]
    changed = faults.with_task(schedule, forward.id, after=faults.without(forward.after, renewal))
    assert violation(changed, case) is not None
    assert "gather chunk 1" in rejection(changed, case)


def test_new_values_that_overwrite_what_is_still_used_are_rejected() -> None:
    """A chunk of a frozen block and a trained one behind it is stepped before the frozen block's backward."""
    weights = [parameter("layers.0.weight", 10, 0, trainable=False), parameter("layers.1.weight", 10, 1)]
    model = workload(weights, 2)
    knobs = with_knobs(plan(model, n_buffer=0), n_host_stepped=1)
    case = PlannedWorkload(model, knobs, build_layout(model.parameters, num_blocks=2, chunk_bytes=knobs.chunk_bytes))
    assert len(case.layout.chunks) == 1
    schedule = compiled(case)
    verify_schedule(schedule, case.plan, case.workload, case.layout)
    renewal = of(schedule, TaskKind.GATHER, 0)
    (last,) = [task.id for task in schedule.tasks if task.name == "backward 0"]
    changed = faults.with_task(
        schedule, renewal, after_previous=faults.without(schedule.tasks[renewal].after_previous, last)
    )
    assert violation(changed, case) is not None
    assert "race" in rejection(changed, case)


def test_new_values_come_once() -> None:
    case = chained()
    schedule = compiled(case)
    renewal = of(schedule, TaskKind.GATHER, 1)
    changed = faults.renumbered(schedule, [task for task in schedule.tasks if task.id != renewal])
    assert violation(changed, case) is not None
    assert "chunk 1 comes back 0 times, not once" in rejection(changed, case)


# -- memory ----------------------------------------------------------------------------------------------------------


def test_optimizer_state_and_gradients_leave_the_device() -> None:
    """Of n equal chunks; 4 bytes of parameters, 8 of state and 4 of gradients per scalar, and 4 of a count.

    A chunk of 1 000 scalars has 4 000 bytes, in 4 096.  Persistent, everything is there at device Adam.  Stepped on the
    host, gradients of two sections at most wait for their copies: those that run and those behind.
    """
    model = chain(6)
    persistent = with_knobs(plan(model, n_buffer=0), n_persist=6)
    host_stepped = with_knobs(persistent, n_persist=0, n_host_stepped=6)
    layout = build_layout(model.parameters, num_blocks=6, chunk_bytes=persistent.chunk_bytes)
    found = [compiled(PlannedWorkload(model, knobs, layout)) for knobs in (persistent, host_stepped)]
    whole, kept = (schedule.static_bytes(Memory.DEVICE) for schedule in found)
    assert (whole, kept) == (64 + 6 * (4_096 + 8_004), 64 + 6 * 4_096)
    assert found[1].static_bytes(Memory.PINNED_HOST) == 6 * 2 * 4_096
    assert found[1].static_bytes(Memory.HOST) == 6 * 8_004
    peaks = [guaranteed_device_peak(schedule).size_bytes for schedule in found]
    assert peaks[0] - peaks[1] >= 6 * 8_004 - 4_000


# -- refusals --------------------------------------------------------------------------------------------------------


def test_who_cannot_have_them_is_told_so() -> None:
    case = chained()
    with pytest.raises(ValidationError, match=r"n_host_stepped: 3 with parallel sharded.*single and replicated"):
        with_knobs(case.plan, parallel=ParallelMode.SHARDED, num_ranks=2)
    sharded = case.plan.model_copy(update={"parallel": ParallelMode.SHARDED, "num_ranks": 2})
    with pytest.raises(PlanError, match="Set n_host_stepped to 0, or parallel to replicated"):
        compiled(PlannedWorkload(case.workload, sharded, case.layout))
    with pytest.raises(PlanError, match="parallel is ddp, which keeps every chunk"):
        compiled(PlannedWorkload(case.workload, with_knobs(case.plan, parallel="ddp", num_ranks=2), case.layout))
    with pytest.raises(PlanError, match="Lower n_host_stepped to 2 or less"):
        compiled(PlannedWorkload(case.workload, with_knobs(case.plan, n_persist=1), case.layout))


# -- beside buffers --------------------------------------------------------------------------------------------------


@settings(max_examples=examples(160, 16))
@given(planned_workloads())
def test_as_many_more_buffers_never_gather_more_often(case: PlannedWorkload) -> None:
    """Offloaded chunks with a buffer for each place: Belady's rule gathers no more than if some chunks kept theirs.

    Frozen chunks among them are gathered then, which were not before.  See decision 0015.
    """
    first, kept = case.plan.n_persist, case.plan.n_persist + case.plan.n_host_stepped
    more = {"n_host_stepped": 0, "n_buffer": case.plan.n_buffer + case.plan.n_host_stepped}
    offloaded = PlannedWorkload(case.workload, with_knobs(case.plan, **more), case.layout)
    num_frozen = sum(not chunk.is_trainable for chunk in case.layout.chunks[first:kept])
    assert num_gathers(offloaded) <= num_gathers(case) + num_frozen


def num_gathers(case: PlannedWorkload) -> int:
    return sum(task.kind is TaskKind.GATHER for task in compiled(case).tasks)
