"""Chunks that are sharded over the devices: where they lie, how they come and go, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from pydantic import ValidationError

from protwin.shared.basics.errors import PlanError, ScheduleError
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.schedule import Allocation, Content, Lane, Memory, Schedule, Task, TaskKind
from protwin.shared.tables.explain import account, explain
from protwin.shared.verify.verify import verify_schedule
from tests.proof_size import examples
from tests.shared import faults
from tests.shared.small_models import chain, parameter, plan, workload
from tests.shared.verdicts import compiled, is_accepted, violation
from tests.strategies.plans import PlannedWorkload, parallel_workloads


def chained(*, frozen: tuple[int, ...] = (), **knobs: object) -> PlannedWorkload:
    """Four blocks of one chunk of 4 096 bytes each, 1 024 of them on each of four ranks; all sharded over devices."""
    model = chain(4, frozen=frozen)
    layout = build_layout(model.parameters, num_blocks=4, chunk_bytes=plan(model).chunk_bytes)
    update = {"parallel": ParallelMode.SHARDED, "num_ranks": 4, "n_shard": 4, "n_buffer": 2, **knobs}
    return PlannedWorkload(model, plan(model).model_copy(update=update), layout)


def of_kind(schedule: Schedule, kind: TaskKind) -> list[Task]:
    return [task for task in schedule.tasks if task.kind is kind]


def homes(schedule: Schedule, content: Content) -> list[Allocation]:
    return [b for b in schedule.buffers if b.is_static and b.content is content]


# -- where things lie ------------------------------------------------------------------------------------------------


def test_every_device_has_a_quarter_of_all_that_a_chunk_needs() -> None:
    schedule = compiled(chained())
    quarter = {
        Content.PARAMETERS: 1_024,
        Content.REDUCED_GRADIENTS: 1_024,
        Content.OPTIMIZER_STATE: 2 * 1_024 + 4,  # two float32 moments, and a count of steps
    }
    for content, size_bytes in quarter.items():
        assert [(b.memory, b.chunk, b.size_bytes) for b in homes(schedule, content)] == [
            (Memory.DEVICE, chunk, size_bytes) for chunk in range(4)
        ]
    assert schedule.static_bytes(Memory.PINNED_HOST) == schedule.static_bytes(Memory.HOST) == 0
    assert {task.lane for task in schedule.tasks} == {Lane.COMPUTE, Lane.COLLECTIVE}


def test_the_three_residencies_stand_side_by_side() -> None:
    schedule = compiled(chained(n_persist=1, n_shard=2))
    assert [(b.memory, b.size_bytes) for b in homes(schedule, Content.PARAMETERS)] == [
        (Memory.DEVICE, 4_096),
        (Memory.DEVICE, 1_024),
        (Memory.DEVICE, 1_024),
        (Memory.PINNED_HOST, 1_024),
    ]
    (adam,) = of_kind(schedule, TaskKind.DEVICE_ADAM)
    assert adam.num_stepped == 1_000 + 2 * 256
    assert [task.num_stepped for task in of_kind(schedule, TaskKind.CPU_ADAM)] == [256]


def test_a_mixed_precision_shard_has_its_part_of_the_masters() -> None:
    """Per scalar 2 bytes of parameters, 2 of gradients, 12 of masters and moments: 16 for all ranks together."""
    model = workload([parameter("layers.0.weight", 2_048, 0, dtype="bfloat16")], 1)
    layout = build_layout(model.parameters, num_blocks=1, chunk_bytes=4_096)
    update = {"parallel": ParallelMode.SHARDED, "num_ranks": 8, "n_shard": 1}
    schedule = compiled(PlannedWorkload(model, plan(model).model_copy(update=update), layout))
    parts = sum(b.size_bytes for b in schedule.buffers if b.is_static and b.chunk is not None)
    assert parts == 16 * 2_048 // 8 + 4


def test_chunks_outside_the_blocks_are_sharded_too() -> None:
    model = workload([parameter("embedding", 700, None), parameter("layers.0.weight", 1_000, 0)], 1)
    layout = build_layout(model.parameters, num_blocks=1, chunk_bytes=4_096)
    assert layout.sharded(0, 2) == {0, 1}
    update = {"parallel": ParallelMode.SHARDED, "num_ranks": 2, "n_shard": 2}
    schedule = compiled(PlannedWorkload(model, plan(model).model_copy(update=update), layout))
    assert [b.size_bytes for b in homes(schedule, Content.PARAMETERS)] == [1_408, 2_048]


# -- how they come and go --------------------------------------------------------------------------------------------


def test_an_all_gather_is_the_gather() -> None:
    schedule = compiled(chained())
    assert not of_kind(schedule, TaskKind.GATHER)
    for task in of_kind(schedule, TaskKind.ALL_GATHER):
        (made,) = task.allocates
        assert schedule.buffers[made].size_bytes == task.moved_bytes == 4_096
        assert schedule.buffers[made].slot is not None
        (read,) = task.reads
        assert (schedule.buffers[read].is_static, schedule.buffers[read].size_bytes) == (True, 1_024)
    # Two buffers: the last two chunks survive the turn.
    assert [task.chunk for task in of_kind(schedule, TaskKind.ALL_GATHER)] == [0, 1, 2, 3, 1, 0]


def test_gradients_of_later_micro_batches_are_added_to_the_part() -> None:
    schedule = compiled(chained(micro_batches=2))
    kept = {b.chunk: b.id for b in homes(schedule, Content.REDUCED_GRADIENTS)}
    scatters = of_kind(schedule, TaskKind.REDUCE_SCATTER)
    assert [(task.micro_batch, task.chunk) for task in scatters] == [(m, c) for m in (0, 1) for c in (3, 2, 1, 0)]
    for task in scatters:
        made = [schedule.buffers[b].content for b in task.allocates]
        assert set(task.allocates) <= set(task.frees), "only the part stays"
        assert kept[task.chunk] in task.writes
        assert (kept[task.chunk] in task.reads) == (task.micro_batch > 0)
        assert made == [Content.FLAT_GRADIENTS, Content.REDUCED_GRADIENTS][: task.micro_batch + 1]
    (adam,) = of_kind(schedule, TaskKind.DEVICE_ADAM)
    assert set(kept.values()) <= set(adam.reads)
    assert {task.id for task in scatters if task.micro_batch} <= set(adam.after)


def test_frozen_chunks_are_gathered_and_not_reduced() -> None:
    schedule = compiled(chained(frozen=(0, 1, 2, 3)))
    assert {task.kind for task in schedule.tasks if task.lane is Lane.COLLECTIVE} == {TaskKind.ALL_GATHER}
    assert homes(schedule, Content.OPTIMIZER_STATE) == homes(schedule, Content.REDUCED_GRADIENTS) == []


@pytest.mark.parametrize("n_shard", [2, 4])
def test_a_norm_of_parts_is_added_up_over_the_ranks(n_shard: int) -> None:
    schedule = compiled(chained(n_shard=n_shard, n_persist=4 - n_shard, max_gradient_norm=1.0))
    (norm,) = of_kind(schedule, TaskKind.GRADIENT_NORM)
    assert {b.id for b in homes(schedule, Content.REDUCED_GRADIENTS)} <= set(norm.reads)
    shared = [task for task in of_kind(schedule, TaskKind.ALL_REDUCE) if task.chunk is None and task.section is None]
    assert [(task.moved_bytes, task.after) for task in shared] == [(8, (norm.id,))]
    (adam,) = of_kind(schedule, TaskKind.DEVICE_ADAM)
    assert shared[0].id in adam.after


# -- what the verifier must see --------------------------------------------------------------------------------------


def test_compute_on_a_part_in_place_of_the_chunk_is_rejected() -> None:
    case = chained()
    schedule = compiled(case)
    forward = next(t for t in of_kind(schedule, TaskKind.FORWARD) if t.section == 0)
    gathered = next(b for b in forward.reads if schedule.buffers[b].content is Content.PARAMETERS)
    part = homes(schedule, Content.PARAMETERS)[0].id
    reads = (*faults.without(forward.reads, gathered), part)
    changed = faults.with_task(schedule, forward.id, reads=reads)
    assert violation(changed, case) is not None
    with pytest.raises(ScheduleError, match=r"'parameters part of chunk 0'\] too much"):
        verify_schedule(changed, case.plan, case.workload, case.layout)


def test_a_gather_that_does_not_wait_for_device_adam_is_rejected() -> None:
    case = chained(n_buffer=4, prefetch_depth=4)
    schedule = compiled(case)
    first = of_kind(schedule, TaskKind.ALL_GATHER)[0]
    (adam,) = of_kind(schedule, TaskKind.DEVICE_ADAM)
    assert adam.id in first.after_previous
    waits = faults.without(first.after_previous, adam.id)
    changed = faults.with_task(schedule, first.id, after_previous=waits)
    assert violation(changed, case) is not None
    assert not is_accepted(changed, case)


def test_a_part_that_forgets_the_micro_batch_before_is_rejected() -> None:
    case = chained(micro_batches=2)
    schedule = compiled(case)
    later = next(t for t in of_kind(schedule, TaskKind.REDUCE_SCATTER) if t.micro_batch)
    kept = next(b for b in later.reads if schedule.buffers[b].is_static)
    changed = faults.with_task(schedule, later.id, reads=faults.without(later.reads, kept))
    assert violation(changed, case) is not None
    assert not is_accepted(changed, case)


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "num_ranks"), [("single", 1), ("ddp", 2), ("replicated", 2)])
def test_other_modes_have_no_shards(mode: str, num_ranks: int) -> None:
    knobs = {"workload_id": "w", "chunk_bytes": 1, "n_persist": 0, "n_buffer": 1, "n_shard": 1}
    with pytest.raises(ValidationError, match=f"n_shard: 1 with parallel {mode}"):
        Plan.model_validate({**knobs, "parallel": mode, "num_ranks": num_ranks})
    case = chained(n_shard=3, parallel=ParallelMode(mode), num_ranks=num_ranks)
    with pytest.raises(PlanError, match=rf"n_shard is 3 but parallel is {mode}.*Set n_shard to 0"):
        compiled(case)


def test_more_shards_than_chunks() -> None:
    with pytest.raises(PlanError, match=r"n_persist is 2 and n_shard is 3 but .* gives 4 chunks. Lower n_shard to 2"):
        compiled(chained(n_persist=2, n_shard=3))


# -- words -----------------------------------------------------------------------------------------------------------


def test_a_plan_explains_its_shards() -> None:
    case = chained(n_persist=1, n_shard=2)
    told = " ".join(explain(compiled(case), case.plan, case.workload, case.layout).split())
    assert "n_shard = 2" in told
    assert "2 chunks sharded over the devices (8 KiB, 1/4 of it on each, with gradients" in told
    assert "every device has 1/4 of the sharded chunks and every host has 1/4 of the offloaded chunks;" in told
    assert "sharded, buffer" in told
    whole = chained(n_persist=4, n_shard=0)
    assert "4 train together; every device has all chunks;" in " ".join(
        explain(compiled(whole), whole.plan, whole.workload, whole.layout).split()
    )


@settings(max_examples=examples(120, 15))
@given(parallel_workloads(max_blocks=4))
def test_the_account_adds_up_to_the_schedule(case: PlannedWorkload) -> None:
    schedule = compiled(case)
    found = account(schedule, case.plan, case.workload, case.layout)
    used = {chunk for chunks in case.layout.needed for chunk in chunks}
    sharded = case.layout.sharded(case.plan.n_persist, case.plan.n_shard) & used
    assert {chunk.chunk.id for chunk in found.chunks if chunk.is_sharded} == sharded
    gathers = [t for t in schedule.tasks if t.kind in (TaskKind.GATHER, TaskKind.ALL_GATHER)]
    # An all-gather that allocates nothing completes what a gather has begun.
    fresh = [t for t in gathers if t.allocates or t.kind is TaskKind.GATHER]
    assert sum(chunk.gathered_bytes for chunk in found.chunks) == sum(task.moved_bytes for task in fresh)
    assert all(len(line) <= 120 for line in explain(schedule, case.plan, case.workload, case.layout).splitlines())
