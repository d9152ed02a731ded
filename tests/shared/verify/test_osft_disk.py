"""Projections of chunks on a disk: against what has been read, in the places that steps use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from protwin.shared.schema.schedule import Content, Memory, Schedule, Task, TaskKind
from protwin.shared.verify.verify import verify_schedule
from tests.proof_size import share
from tests.shared import faults
from tests.shared.faults import Fault
from tests.shared.verdicts import compiled, guarantees, is_accepted
from tests.shared.verify.test_osft import HOST, example, rejected
from tests.strategies.plans import PlannedWorkload


def on_disk(limit: float | None, n_staging: int = 1) -> PlannedWorkload:
    """All chunks but the first, whose state alone is on the disk."""
    num_chunks = len(example(n_persist=0).layout.chunks)
    places = {"n_disk_state": num_chunks, "n_disk": num_chunks - 1, "n_staging": n_staging}
    return example(HOST, n_persist=0, max_gradient_norm=limit, **places)


def read_to_host(schedule: Schedule, chunk: int) -> list[Task]:
    """What reads parameters of ``chunk`` to where they are stepped."""
    passing = {b.id for b in schedule.buffers if (b.content, b.memory) == (Content.PARAMETERS, Memory.HOST)}
    reads = (t for t in schedule.tasks if t.kind is TaskKind.DISK_READ and t.chunk == chunk)
    return [task for task in reads if passing & set(task.writes)]


@pytest.mark.parametrize("limit", [None, 1.0])
def test_parameters_are_read_twice_where_steps_wait_for_a_norm(limit: float | None) -> None:
    case = on_disk(limit)
    schedule = compiled(case)
    projected = [t for t in schedule.tasks if t.kind is TaskKind.HOST_GRADIENT_PROJECTION]
    assert len(projected) == len([chunk for chunk in case.layout.chunks if chunk.subspaces]) > 2
    for task in projected:
        reads = read_to_host(schedule, task.chunk or 0)
        is_on_disk = task.chunk != 0
        assert len(reads) == (2 if limit else 1) * is_on_disk
        assert bool(task.frees) == bool(limit and is_on_disk)
        assert not is_on_disk or reads[0].writes[0] in task.reads


@pytest.mark.parametrize("limit", [None, 1.0])
@pytest.mark.parametrize("family", faults.DATA_FAULTS, ids=lambda family: family.__name__)
def test_every_data_fault_is_rejected(family: Callable[[Schedule], list[Fault]], limit: float | None) -> None:
    case = on_disk(limit, n_staging=2)
    schedule = compiled(case)
    verify_schedule(schedule, case.plan, case.workload, case.layout)
    found = share(family(schedule), one_in=40)
    assert [fault for fault in found if is_accepted(fault.make(), case)] == []


@pytest.mark.parametrize("limit", [None, 1.0])
def test_a_projection_waits_for_what_it_is_against(limit: float | None) -> None:
    """Whatever a projection, an Adam or a read of parameters waits for is needed, or guaranteed otherwise."""
    case = on_disk(limit)
    schedule = compiled(case)
    intact = guarantees(schedule)
    kinds = (TaskKind.HOST_GRADIENT_PROJECTION, TaskKind.CPU_ADAM, TaskKind.DISK_READ, TaskKind.DISK_WRITE)
    num_rejected = 0
    for task in schedule.tasks:
        for wait in task.after if task.kind in kinds else ():
            changed = faults.with_task(schedule, task.id, after=faults.without(task.after, wait))
            assert is_accepted(changed, case) == (guarantees(changed) == intact), (task.name, wait)
            num_rejected += guarantees(changed) != intact
    assert num_rejected > 5


def test_what_is_projected_against_is_there_and_of_the_chunk() -> None:
    """The wrong variants read the place that the step reads into later, or leave the read for the projection out."""
    case = on_disk(1.0)
    schedule = compiled(case)
    task = next(t for t in schedule.tasks if t.kind is TaskKind.HOST_GRADIENT_PROJECTION and t.chunk != 0)
    first, later = read_to_host(schedule, task.chunk or 0)
    reads = tuple(later.writes[0] if b == first.writes[0] else b for b in task.reads)
    rejected(case, faults.with_task(schedule, task.id, reads=reads), f"{task.name} reads")
    left_out = [replace(t, frees=(), reads=reads) if t is task else t for t in schedule.tasks if t is not first]
    rejected(case, faults.renumbered(schedule, left_out), "brought 0 times to be projected against|allocated|freed")
