"""Shard groups: neighbours share chunks, groups have replicas of them, and gradients are added up in two levels."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from protwin.shared.basics.errors import PlanError, ScheduleError
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.plan import ParallelMode
from protwin.shared.schema.schedule import Content, Lane, RankAxis, Schedule, Task, TaskKind
from protwin.shared.tables.explain import explain
from protwin.shared.verify.verify import verify_schedule
from tests.proof_size import examples, some_quick
from tests.shared import faults
from tests.shared.abstract_machine import AbstractMachine
from tests.shared.adversaries import holding
from tests.shared.faults import Fault
from tests.shared.small_models import chain, plan
from tests.shared.verdicts import compiled, is_accepted, violation
from tests.strategies.plans import PlannedWorkload, parallel_workloads

GATHER, SCATTER, REDUCE = TaskKind.ALL_GATHER, TaskKind.REDUCE_SCATTER, TaskKind.ALL_REDUCE


def grouped(num_blocks: int = 4, **knobs: object) -> PlannedWorkload:
    """Chunks of 4 096 bytes; six ranks in two groups of three; chunk 0 persistent, 1 and 2 sharded, 3 offloaded."""
    model = chain(num_blocks)
    layout = build_layout(model.parameters, num_blocks=num_blocks, chunk_bytes=plan(model).chunk_bytes)
    update = {"parallel": ParallelMode.SHARDED, "num_ranks": 6, "shard_ranks": 3, "n_buffer": 2}
    update |= {"n_persist": 1, "n_shard": 2, **knobs}
    return PlannedWorkload(model, plan(model).model_copy(update=update), layout)


def meetings(schedule: Schedule, *kinds: TaskKind) -> list[tuple[TaskKind, int | None, int, RankAxis, int, int]]:
    """Kind, chunk, micro-batch, axis, ranks and bytes of collectives, in their order."""
    found = (
        task for task in schedule.tasks if task.lane is Lane.COLLECTIVE and task.kind in (kinds or tuple(TaskKind))
    )
    return [(t.kind, t.chunk, t.micro_batch, t.axis, t.num_ranks, t.moved_bytes) for t in found]


def replicated(schedule: Schedule) -> list[Task]:
    return [task for task in schedule.tasks if task.axis is RankAxis.REPLICA]


# -- what groups do --------------------------------------------------------------------------------------------------


def test_parts_are_of_a_group_and_pass_between_groups_once_for_what_stays() -> None:
    """A third of 64 cache lines is 22 of them, 1 408 bytes; what stays is added up in the last micro-batch alone."""
    schedule = compiled(grouped(micro_batches=2))
    every, shard, replica = RankAxis.WORLD, RankAxis.SHARD, RankAxis.REPLICA
    assert meetings(schedule, SCATTER) == [
        (SCATTER, chunk, micro, shard, 3, 3 * 1_408) for micro in (0, 1) for chunk in (3, 2, 1)
    ]
    assert meetings(schedule, REDUCE) == [
        (REDUCE, 3, 0, replica, 2, 1_408),
        (REDUCE, 3, 1, replica, 2, 1_408),
        (REDUCE, 2, 1, replica, 2, 1_408),
        (REDUCE, 1, 1, replica, 2, 1_408),
        (REDUCE, 0, 1, every, 6, 4_000),
    ]
    assert {found[3:] for found in meetings(schedule, GATHER)} == {(shard, 3, 3 * 1_408)}
    homes = [b.size_bytes for b in schedule.buffers if b.is_static and b.content is Content.REDUCED_GRADIENTS]
    assert homes == [1_408, 1_408]


def test_groups_know_the_norm_when_their_own_ranks_have_added_it_up() -> None:
    schedule = compiled(grouped(max_gradient_norm=1.0))
    assert meetings(schedule, REDUCE)[-1] == (REDUCE, None, 0, RankAxis.SHARD, 3, 8)
    (norm,) = (task for task in schedule.tasks if task.kind is TaskKind.GRADIENT_NORM)
    agreeing = {task.id for task in replicated(schedule) if task.chunk in (1, 2)}
    assert len(agreeing) == 2
    assert agreeing <= set(norm.after)


def test_one_group_of_all_ranks_is_as_if_there_were_none() -> None:
    whole, same = (compiled(grouped(shard_ranks=ranks)) for ranks in (None, 6))
    assert (same.tasks, same.buffers) == (whole.tasks, whole.buffers)
    assert {task.axis for task in whole.tasks} == {RankAxis.WORLD}


def test_a_group_holds_as_much_as_all_ranks_where_there_are_no_more() -> None:
    """Two groups of three have on every rank what three ranks have that form one group."""
    two, alone = compiled(grouped()), compiled(grouped(num_ranks=3, shard_ranks=None))
    assert [(b.content, b.memory, b.size_bytes) for b in two.buffers] == [
        (b.content, b.memory, b.size_bytes) for b in alone.buffers
    ]


# -- what the verifier must see --------------------------------------------------------------------------------------


@settings(max_examples=examples(60, 10))
@given(parallel_workloads(max_blocks=3))
def test_no_timing_harms_groups(case: PlannedWorkload) -> None:
    schedule = compiled(case)
    verify_schedule(schedule, case.plan, case.workload, case.layout)
    for task in replicated(schedule)[:3]:
        AbstractMachine(schedule, case.plan, case.workload, case.layout).run(holding(task.id, iteration=1))


CASE = grouped(micro_batches=2, max_gradient_norm=1.0)


@pytest.mark.parametrize("task", replicated(compiled(CASE)), ids=lambda task: task.name)
def test_a_reduction_over_groups_that_is_missing_is_rejected(task: Task) -> None:
    schedule = compiled(CASE)
    missing = faults.renumbered(schedule, [other for other in schedule.tasks if other.id != task.id])
    assert violation(missing, CASE) is not None
    with pytest.raises(ScheduleError, match=f"{task.kind} chunk {task.chunk} of micro-batch {task.micro_batch}"):
        verify_schedule(missing, CASE.plan, CASE.workload, CASE.layout)


@pytest.mark.parametrize(
    "change",
    [{"axis": RankAxis.WORLD}, {"axis": RankAxis.SHARD}, {"num_ranks": 3}, {"num_ranks": 6}, {"moved_bytes": 4_104}],
    ids=str,
)
def test_a_reduction_over_other_ranks_or_of_other_bytes_is_rejected(change: dict[str, object]) -> None:
    schedule = compiled(CASE)
    for task in replicated(schedule):
        assert not is_accepted(faults.with_task(schedule, task.id, **change), CASE)


def test_gathering_or_scattering_over_all_ranks_is_rejected() -> None:
    schedule = compiled(CASE)
    for task in schedule.tasks:
        if task.axis is RankAxis.SHARD:
            changed = faults.with_task(schedule, task.id, axis=RankAxis.WORLD, num_ranks=6)
            with pytest.raises(ScheduleError, match="done by 6 of 6 ranks together, along axis world, not by 3"):
                verify_schedule(changed, CASE.plan, CASE.workload, CASE.layout)


@some_quick(
    ("case", "waiting"),
    [(CASE, ["gradient_offload chunk 3", "gradient_offload chunk 3"]), (grouped(n_persist=0, n_shard=4), ["device"])],
    quick=1,
    ids=["mixed", "on devices"],
)
def test_what_reads_a_part_waits_until_all_groups_are_in_it(case: PlannedWorkload, waiting: list[str]) -> None:
    """Other waits follow from the one order of the collective lane."""
    schedule = compiled(case)
    ids = {task.id for task in replicated(schedule)}
    around: list[Fault] = [
        fault
        for fault in faults.dropped_dependencies(schedule)
        if any(fault.name.startswith(f"{task} ") or f"for {task} " in fault.name for task in ids)
    ]
    harmful = [fault for fault in around if violation(fault.make(), case) is not None]
    assert len(harmful) == len(waiting)
    assert all(words in fault.name for fault, words in zip(harmful, waiting, strict=True))
    for fault in around:
        assert is_accepted(fault.make(), case) == (fault not in harmful), fault


def test_a_reduction_over_groups_before_the_last_micro_batch_is_rejected() -> None:
    schedule = compiled(CASE)
    (task,) = (task for task in replicated(schedule) if task.chunk == 2)
    scatters = [t.id for t in schedule.tasks if t.kind is SCATTER and t.chunk == 2]
    early = faults.with_task(schedule, task.id, after=(scatters[0],))
    early = faults.with_task(early, scatters[1], after=(*early.tasks[scatters[1]].after, task.id))
    order = [t for t in early.tasks if t.id not in (task.id,)]
    order.insert(next(place for place, t in enumerate(order) if t.id == scatters[0]) + 1, early.tasks[task.id])
    changed = faults.renumbered(early, order)
    assert violation(changed, CASE) is not None
    assert not is_accepted(changed, CASE)


# -- what is refused, and words --------------------------------------------------------------------------------------


def test_groups_that_do_not_divide_the_ranks_are_refused_by_whoever_compiles_a_copied_plan() -> None:
    with pytest.raises(PlanError, match="shard_ranks: 4 does not divide num_ranks 6 into equal groups"):
        compiled(grouped(shard_ranks=4))


def test_a_plan_explains_its_groups() -> None:
    case = grouped(n_buffer=3)
    told = " ".join(explain(compiled(case), case.plan, case.workload, case.layout).split())
    assert "shard_ranks = 3" in told
    assert "2 chunks sharded over the devices (8 KiB, 1/3 of it on each, with gradients" in told
    assert "6 train together, in 2 groups of 3; every device has 1/3 of the sharded chunks and every host" in told
