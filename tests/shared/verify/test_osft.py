"""Schedules of orthogonal subspace fine-tuning: compiled ones pass, every single fault is rejected."""

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
from protwin.shared.methods.full_training import FULL_TRAINING
from protwin.shared.schema.optimizer import HostGradients
from protwin.shared.schema.plan import ParallelMode, Plan, ProjectionPlace, TrainingMethod
from protwin.shared.schema.schedule import OF_OWNERS, AllocationId, Content, Lane, Schedule, Task, TaskKind
from protwin.shared.schema.workload import DType, Parameter, Subspace, SubspaceAxis, Workload
from protwin.shared.verify.verify import verify_schedule
from tests.proof_size import examples, share
from tests.shared import faults
from tests.shared.faults import Fault
from tests.shared.verdicts import check_dropped_dependencies, check_sound_and_faulty, compiled, is_accepted
from tests.sim import hand_made
from tests.strategies.plans import PlannedWorkload
from tests.strategies.subspaces import projected_plans

SEEDS = st.integers(0, 2**32 - 1)
DEVICE, HOST = ProjectionPlace.DEVICE, ProjectionPlace.HOST


@settings(max_examples=examples(1_000, 15))
@given(projected_plans(), SEEDS)
def test_compiled_schedules_pass_and_faulty_ones_do_not(case: PlannedWorkload, seed: int) -> None:
    check_sound_and_faulty(case, seed)


@settings(max_examples=examples(100, 4))
@given(projected_plans(max_blocks=2))
def test_every_dropped_dependency_that_matters_is_rejected(case: PlannedWorkload) -> None:
    check_dropped_dependencies(case)


# -- one schedule ----------------------------------------------------------------------------------------------------


def factorised(num_frozen: int = 3, dtype: DType = DType.FLOAT32) -> Workload:
    """The hand-made model with one weight of 8 x 6 per block, factorised."""
    shapes = {
        "u_high": (8, num_frozen),
        "s_high": (num_frozen,),
        "v_high": (num_frozen, 6),
        "u_low": (8, 6 - num_frozen),
        "s_low": (6 - num_frozen,),
        "v_low": (6 - num_frozen, 6),
    }
    model = hand_made.workload()
    parameters = tuple(
        Parameter(name=f"{block}.{name}", shape=shape, dtype=dtype, trainable=name.endswith("low"), block=block)
        for block in range(model.num_blocks)
        for name, shape in shapes.items()
    )
    subspaces = tuple(
        Subspace(frozen=6 * block + place, trained=6 * block + place + 3, axis=axis)
        for block in range(model.num_blocks)
        for place, axis in ((0, SubspaceAxis.COLUMNS), (2, SubspaceAxis.ROWS))
    )
    fields: dict[str, Any] = {name: getattr(model, name) for name in Workload.model_fields}
    return Workload(**fields | {"parameters": parameters, "subspaces": subspaces})


def example(place: ProjectionPlace = HOST, n_persist: int = 1, **knobs: Any) -> PlannedWorkload:
    """Two blocks, of which chunks of 600 B each hold one unit of two matrices, or what stands between."""
    model = factorised()
    layout = layout_of(model, 600)
    plan = Plan(
        workload_id=model.identity,
        method=TrainingMethod.OSFT,
        chunk_bytes=600,
        n_persist=n_persist,
        n_buffer=layout.min_buffers(n_persist),
        projects_gradients_on=place,
        **knobs,
    )
    return PlannedWorkload(model, plan, layout)


def rejected(case: PlannedWorkload, schedule: Schedule, why: str) -> None:
    with pytest.raises(ScheduleError, match=why):
        verify_schedule(schedule, case.plan, case.workload, case.layout)


def first(schedule: Schedule, kind: TaskKind) -> Task:
    return next(task for task in schedule.tasks if task.kind is kind)


@pytest.mark.parametrize(("place", "micro_batches"), [(HOST, 1), (DEVICE, 1), (DEVICE, 2)])
@pytest.mark.parametrize("family", faults.DATA_FAULTS, ids=lambda family: family.__name__)
def test_every_data_fault_of_the_example_is_rejected(
    family: Callable[[Schedule], list[Fault]], place: ProjectionPlace, micro_batches: int
) -> None:
    case = example(place, max_gradient_norm=1.0, micro_batches=micro_batches)
    schedule = compiled(case)
    verify_schedule(schedule, case.plan, case.workload, case.layout)
    found = share(family(schedule), one_in=7)
    assert [fault for fault in found if is_accepted(fault.make(), case)] == []


@pytest.mark.parametrize(
    "kind",
    [
        TaskKind.GRADIENT_PROJECTION,
        TaskKind.PARAMETER_PROJECTION,
        TaskKind.HOST_GRADIENT_PROJECTION,
        TaskKind.HOST_PARAMETER_PROJECTION,
    ],
)
def test_whoever_waited_for_a_projection_waits_for_what_it_waited_for(kind: TaskKind) -> None:
    """A schedule that leaves a projection out altogether: unprojected gradients are stepped, parameters gathered."""
    case = example(max_gradient_norm=1.0)
    schedule = compiled(case)
    left_out = first(schedule, kind)
    others = [replace(task, after=_instead(task.after, left_out)) for task in schedule.tasks if task is not left_out]
    rejected(case, faults.renumbered(schedule, others), f"tasks of kind {kind} serve chunks")


def _instead(after: tuple[int, ...], left_out: Task) -> tuple[Any, ...]:
    if left_out.id not in after:
        return after
    return tuple(sorted({*after, *left_out.after} - {left_out.id}))


def test_unprojected_gradients_are_not_stepped() -> None:
    case = example()
    schedule = compiled(case)
    projection = first(schedule, TaskKind.HOST_GRADIENT_PROJECTION)
    adam = next(t for t in schedule.tasks if t.kind is TaskKind.CPU_ADAM and t.chunk == projection.chunk)
    # The lane's own order would do: it is exchanged.
    tasks = list(schedule.tasks)
    tasks[projection.id], tasks[adam.id] = adam, projection
    early = faults.with_task(schedule, adam.id, after=tuple(w for w in adam.after if w != projection.id))
    tasks = list(early.tasks)
    moved = tasks.pop(projection.id)
    tasks.insert(adam.id, replace(moved, after=()))
    rejected(case, faults.renumbered(early, tasks), "may (run after|start before)|race|touched")


def test_nothing_gathers_unprojected_parameters() -> None:
    case = example()
    schedule = compiled(case)
    # The last one: gathers of later chunks wait for those before anyhow.
    *_, renewal = (t for t in schedule.tasks if t.kind is TaskKind.HOST_PARAMETER_PROJECTION)
    gather = next(t for t in schedule.tasks if t.kind is TaskKind.GATHER and t.chunk == renewal.chunk)
    waits = tuple(w for w in gather.after_previous if w != renewal.id)
    adam = next(t for t in schedule.tasks if t.kind is TaskKind.CPU_ADAM and t.chunk == renewal.chunk)
    changed = faults.with_task(schedule, gather.id, after_previous=(*waits, adam.id))
    rejected(case, changed, "of successive iterations race on buffer")


def test_gradients_are_projected_when_all_micro_batches_are_summed() -> None:
    """Each micro-batch's own in place of the sum's: the projection stands before the last sum."""
    case = example(micro_batches=2)
    schedule = compiled(case)
    projection = first(schedule, TaskKind.HOST_GRADIENT_PROJECTION)
    sums = [t for t in schedule.tasks if t.kind is TaskKind.GRADIENT_ACCUMULATE and t.chunk == projection.chunk]
    tasks = [t for t in schedule.tasks if t is not projection]
    early = replace(projection, after=sums[-1].after)
    place = tasks.index(sums[-1])
    tasks[place : place + 1] = [early, replace(sums[-1], after=(*sums[-1].after, early.id))]
    tasks = [
        replace(t, after=tuple(sums[-1].id if w == projection.id else w for w in t.after))
        if t.kind is TaskKind.CPU_ADAM and t.chunk == projection.chunk
        else t
        for t in tasks
    ]
    rejected(case, faults.renumbered(schedule, tasks), "may run after|may start before")


def test_sums_on_the_device_leave_once_and_nothing_is_added_on_the_host() -> None:
    """Three micro-batches: one copy of projected gradients, from buffers that the first one's backwards have made."""
    case = example(DEVICE, micro_batches=3)
    schedule = compiled(case)
    verify_schedule(schedule, case.plan, case.workload, case.layout)
    leaving = [chunk for chunk in case.layout.chunks[1:] if chunk.is_trainable]
    added = [chunk.id for chunk in leaving if chunk.subspaces]
    others = [chunk.id for chunk in leaving if not chunk.subspaces]
    assert added
    assert others

    def served(kind: TaskKind, found: Schedule = schedule) -> list[tuple[Any, ...]]:
        return sorted((t.chunk, t.micro_batch) for t in found.tasks if t.kind is kind)

    sent = [*((chunk, 2) for chunk in added), *((chunk, micro_batch) for chunk in others for micro_batch in range(3))]
    assert served(TaskKind.GRADIENT_OFFLOAD) == sorted(sent)
    assert served(TaskKind.GRADIENT_ACCUMULATE) == [(chunk, micro_batch) for chunk in others for micro_batch in (1, 2)]
    offloads = [t for t in schedule.tasks if t.kind is TaskKind.GRADIENT_OFFLOAD and t.chunk in added]
    assert {schedule.buffers[b].micro_batch for t in offloads for b in t.frees} == {0}
    arrivals = [b.chunk for b in schedule.buffers if b.content is Content.ARRIVING_GRADIENTS]
    assert arrivals == others
    on_host = compiled(example(HOST, micro_batches=3))
    assert len(served(TaskKind.GRADIENT_OFFLOAD, on_host)) == 3 * len(leaving)


@pytest.mark.parametrize("kind", [TaskKind.GRADIENT_PROJECTION, TaskKind.GRADIENT_OFFLOAD])
def test_sums_are_neither_projected_nor_sent_before_the_last_micro_batch(kind: TaskKind) -> None:
    """It stands behind the first micro-batch's backward, or says so and stands where it was."""
    case = example(DEVICE, micro_batches=2)
    schedule = compiled(case)
    task = next(t for t in schedule.tasks if t.kind is kind and t.chunk == 2)
    (made,) = {schedule.buffers[b].section for b in task.reads if schedule.buffers[b].content is Content.GRADIENTS}
    backward, last = (t for t in schedule.tasks if t.kind is TaskKind.BACKWARD and t.section == made)
    assert last.id in task.after or kind is TaskKind.GRADIENT_OFFLOAD
    tasks = [t for t in schedule.tasks if t is not task]
    tasks.insert(tasks.index(backward) + 1, replace(task, after=(backward.id,)))
    rejected(case, faults.renumbered(schedule, tasks), "may (run after|start before)|race|touched|freed|free|while")
    named = faults.with_task(schedule, task.id, micro_batch=0)
    rejected(case, named, "is not of micro-batch 1|serve .chunk, micro-batch.")


def test_float32_sums_are_on_the_host() -> None:
    with pytest.raises(ValueError, match=r"added up there, in the parameters' own type\. Name host, or leave"):
        example(DEVICE, micro_batches=2, host_gradients=HostGradients.FLOAT32)
    example(DEVICE, host_gradients=HostGradients.FLOAT32)
    example(HOST, micro_batches=2, host_gradients=HostGradients.FLOAT32)


def test_a_projection_needs_the_chunk_on_the_device() -> None:
    """It reads the buffer that the chunk had in forward, which is gone, or another chunk's."""
    case = example(DEVICE)
    schedule = compiled(case)
    projections = [t for t in schedule.tasks if t.kind is TaskKind.GRADIENT_PROJECTION and t.chunk is not None]
    stays = {b.id: b for b in schedule.buffers if b.slot is not None}
    for task in projections:
        (there,) = (b for b in task.reads if b in stays)
        for other in stays.values():
            if other.id == there:
                continue
            reads = tuple(other.id if b == there else b for b in task.reads)
            why = "projects against chunks" if other.chunk != task.chunk else "uses it|frees|it is used|freed"
            rejected(case, faults.with_task(schedule, task.id, reads=reads), why + "|while")
    assert projections


def test_a_forgotten_subspace_is_noticed() -> None:
    """One of two that a chunk has: fewer FLOPs, scalars and matrices."""
    model = factorised()
    layout = layout_of(model, 10_000)
    plan = Plan(workload_id=model.identity, method=TrainingMethod.OSFT, chunk_bytes=10_000, n_persist=0, n_buffer=2)
    case = PlannedWorkload(model, plan, layout)
    schedule = compiled(case)
    task = first(schedule, TaskKind.HOST_GRADIENT_PROJECTION)
    rejected(case, faults.with_task(schedule, task.id, flops=task.flops // 2), "FLOPs, not")
    chunks = tuple(replace(chunk, subspaces=chunk.subspaces[:1]) for chunk in layout.chunks)
    with pytest.raises(Exception, match="without the workload's subspaces"):
        verify_schedule(schedule, plan, model, replace(layout, chunks=chunks))


def test_full_training_answers_for_no_projection() -> None:
    case = example()
    with pytest.raises(ScheduleError, match="no rule answers"):
        verify_schedule(compiled(case), case.plan, case.workload, case.layout, rules=FULL_TRAINING.rules)


# -- parts of several ranks ------------------------------------------------------------------------------------------


def example_in_parts(num_ranks: int = 4, shard_ranks: int | None = 2) -> PlannedWorkload:
    """The example on several devices, which have its chunks in parts."""
    case = example(n_persist=0, max_gradient_norm=1.0)
    ranks = {"parallel": ParallelMode.SHARDED, "num_ranks": num_ranks, "shard_ranks": shard_ranks}
    plan = case.plan.model_copy(update={**ranks, "n_shard": len(case.layout.chunks)})
    return replace(case, plan=Plan(**plan.model_dump()))


@pytest.mark.parametrize("family", faults.DATA_FAULTS, ids=lambda family: family.__name__)
def test_every_data_fault_of_parts_is_rejected(family: Callable[[Schedule], list[Fault]]) -> None:
    case = example_in_parts()
    schedule = compiled(case)
    verify_schedule(schedule, case.plan, case.workload, case.layout)
    found = share(family(schedule), one_in=11)
    assert [fault for fault in found if is_accepted(fault.make(), case)] == []


@pytest.mark.parametrize("kind", OF_OWNERS)
def test_no_exchange_with_owners_is_left_out(kind: TaskKind) -> None:
    """Whoever waited for it waits for what it waited for; what it made is not there, what it freed goes at the end."""
    case = example_in_parts(3, None)
    schedule = compiled(case)
    left_out = first(schedule, kind)
    places = [buffer.id for buffer in schedule.buffers if buffer.id not in left_out.allocates]
    number = {old: AllocationId(new) for new, old in enumerate(places)}
    buffers = tuple(replace(schedule.buffers[old], id=new) for old, new in number.items())
    tasks = [task for task in schedule.tasks if task is not left_out]
    tasks[-1] = replace(tasks[-1], frees=(*tasks[-1].frees, *left_out.frees))
    others = []
    for task in tasks:
        used: dict[str, Any] = {
            field: tuple(number[b] for b in getattr(task, field) if b in number)
            for field in ("allocates", "frees", "reads", "writes")
        }
        waits: dict[str, Any] = {
            field: _instead(getattr(task, field), left_out) for field in ("after", "after_previous")
        }
        others.append(replace(task, **used, **waits))
    changed = faults.renumbered(replace(schedule, buffers=buffers), others)
    rejected(case, changed, "ranks do nothing too much and .*_owners|projects against|projection (reads|frees)")


def test_unprojected_parts_are_not_stepped() -> None:
    """Device Adam, and the norm before it, do not wait for what comes back from the owners."""
    case = example_in_parts()
    changed = compiled(case)
    back = first(changed, TaskKind.GRADIENTS_FROM_OWNERS)
    for kind in (TaskKind.DEVICE_ADAM, TaskKind.GRADIENT_NORM):
        task = first(changed, kind)
        changed = faults.with_task(changed, task.id, after=tuple(w for w in task.after if w != back.id))
    rejected(case, changed, "may run after|race")


def test_nothing_gathers_unprojected_parts() -> None:
    """What comes back from the owners stands behind the first gather of the next iteration."""
    case = example_in_parts()
    schedule = compiled(case)
    back, gather = first(schedule, TaskKind.PARAMETERS_FROM_OWNERS), first(schedule, TaskKind.ALL_GATHER)
    assert back.id in gather.after_previous
    tasks = [task for task in schedule.tasks if task is not back]
    tasks.insert(tasks.index(gather) + 1, replace(back, after=(), after_previous=back.after))
    rejected(case, faults.renumbered(schedule, tasks), "race|may")


def test_parts_on_hosts_are_refused_by_name() -> None:
    case = example_in_parts(2, None)
    plan = case.plan.model_copy(update={"n_shard": 1, "n_buffer": 4})
    with pytest.raises(
        PlanError, match=r"lies on the hosts in parts .* n_persist and n_shard count the first 7 chunks"
    ):
        compile_schedule(plan, case.workload)


# -- amounts and places ----------------------------------------------------------------------------------------------


def test_a_projection_takes_four_products_of_its_shapes() -> None:
    """Of U 8 x 3 against 8 x 3 and of V 3 x 6 against 3 x 6: 4 n k r FLOPs each."""
    case = example(n_persist=0)
    flops = {t.chunk: t.flops for t in compiled(case).tasks if t.kind is TaskKind.HOST_GRADIENT_PROJECTION}
    assert sorted(set(flops.values())) == [4 * 6 * 3 * 3, 4 * 8 * 3 * 3]


def test_frozen_and_trained_matrix_share_a_chunk_whatever_its_size() -> None:
    model = factorised()
    for chunk_bytes in (1, 256, 512, 600, 1_024, 5_000):
        for chunk in layout_of(model, chunk_bytes).chunks:
            members = {placed.index for placed in chunk.parameters}
            for subspace in model.subspaces:
                assert (subspace.frozen in members) == (subspace.trained in members)


@pytest.mark.parametrize("place", ProjectionPlace)
def test_projections_stand_on_the_lane_of_their_place(place: ProjectionPlace) -> None:
    schedule = compiled(example(place, n_persist=0))
    lanes = {t.lane for t in schedule.tasks if t.kind.value.endswith("gradient_projection")}
    assert lanes == {Lane.COMPUTE if place is DEVICE else Lane.CPU_OPTIM}


def test_a_projection_on_the_device_keeps_the_chunk_until_it_is_over() -> None:
    schedule = compiled(example(DEVICE, n_persist=0))
    for task in schedule.tasks:
        if task.kind is TaskKind.GRADIENT_PROJECTION:
            (gone,) = task.frees
            assert schedule.buffers[gone].chunk == task.chunk
            assert gone in task.reads
