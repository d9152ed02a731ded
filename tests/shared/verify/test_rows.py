"""Schedules that look rows up: what they hold by hand, and single faults, which the verifier rejects."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from protwin.shared.basics.errors import ScheduleError
from protwin.shared.schema.schedule import Content, Memory, TaskKind
from protwin.shared.verify.verify import verify_schedule
from tests.shared import faults
from tests.shared.looking_up import (
    EPILOGUE,
    NUM_PLACES,
    NUM_WORDS,
    PLACE_ROWS,
    PROLOGUE,
    ROW_BYTES,
    WORD_ROWS,
    lookups,
    planned,
)
from tests.shared.verdicts import compiled, guarantees, is_accepted

WORDS, PLACES = 0, 1
WORD_BYTES, PLACE_BYTES = ROW_BYTES * NUM_WORDS, ROW_BYTES * NUM_PLACES


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("words_trained", [True, False])
def test_what_travels_of_tables(micro_batches: int, max_norm: float | None, words_trained: bool) -> None:
    """Words are gathered for the epilogue alone and places never; each leaves as rows, and words as a table too."""
    case = planned(lookups(words_trained), micro_batches=micro_batches, max_gradient_norm=max_norm)
    schedule = compiled(case)
    verify_schedule(schedule, case.plan, case.workload, case.layout)

    def amounts(kind: TaskKind) -> list[tuple[int, object, int, int]]:
        tasks = [t for t in schedule.tasks if t.kind is kind and t.chunk in (WORDS, PLACES)]
        return sorted((t.chunk or 0, str(t.section), t.micro_batch, t.moved_bytes or t.stepped_bytes) for t in tasks)

    each = range(micro_batches)
    gathers = [t for t in schedule.tasks if t.kind is TaskKind.GATHER and t.chunk in (WORDS, PLACES)]
    assert {t.chunk for t in gathers} == {WORDS}
    assert len(gathers) == micro_batches
    words = [(WORDS, "None", m, WORD_BYTES) for m in each]
    words += [(WORDS, "prologue", m, WORD_ROWS * ROW_BYTES) for m in each]
    places = [(PLACES, "prologue", m, PLACE_ROWS * ROW_BYTES) for m in each]
    assert amounts(TaskKind.GRADIENT_OFFLOAD) == (words if words_trained else []) + places
    later = 3 * WORD_BYTES
    sums = [(WORDS, "prologue", m, 5 * WORD_ROWS * ROW_BYTES + (later if m else 0)) for m in each]
    zeros = [(PLACES, "prologue", m, 5 * PLACE_ROWS * ROW_BYTES + (0 if m else PLACE_BYTES)) for m in each]
    assert amounts(TaskKind.GRADIENT_ACCUMULATE) == (sums if words_trained else []) + zeros
    # On the host: words' own arrivals beside those of rows; places have none.
    arriving = {b.chunk for b in schedule.buffers if b.content is Content.ARRIVING_GRADIENTS}
    assert arriving & {WORDS, PLACES} == ({WORDS} if words_trained and micro_batches > 1 else set())
    rows = {b.chunk: b.size_bytes for b in schedule.buffers if b.content is Content.LOOKED_UP_ROWS}
    assert rows == {WORDS: WORD_ROWS * ROW_BYTES, PLACES: PLACE_ROWS * ROW_BYTES}


def test_lookups_wait_for_the_steps_of_their_tables() -> None:
    schedule = compiled(planned(lookups()))
    forward = next(t for t in schedule.tasks if t.kind is TaskKind.FORWARD and t.section is PROLOGUE)
    waited = {schedule.tasks[t].chunk for t in forward.after_previous if schedule.tasks[t].kind is TaskKind.CPU_ADAM}
    assert {WORDS, PLACES} <= waited
    read = {schedule.buffers[b].chunk for b in forward.reads if schedule.buffers[b].memory is Memory.PINNED_HOST}
    assert read == {WORDS, PLACES}
    backward = next(t for t in schedule.tasks if t.kind is TaskKind.BACKWARD and t.section is EPILOGUE)
    made = [schedule.buffers[b] for b in backward.allocates if schedule.buffers[b].content is Content.GRADIENTS]
    assert [(b.chunk, b.size_bytes) for b in made] == [(WORDS, WORD_BYTES)]


@pytest.mark.parametrize("family", faults.DATA_FAULTS, ids=lambda family: family.__name__)
def test_every_single_fault_is_rejected(family: object) -> None:
    case = planned(lookups(), micro_batches=2, max_gradient_norm=1.0)
    found = list(family(compiled(case)))  # type: ignore[operator]
    for fault in random.Random(0).sample(found, min(len(found), 60)):
        assert not is_accepted(fault.make(), case), fault


def test_every_dropped_dependency_that_matters_is_rejected() -> None:
    case = planned(lookups(), micro_batches=3)
    schedule = compiled(case)
    intact = guarantees(schedule)
    for fault in faults.dropped_dependencies(schedule):
        changed = fault.make()
        assert is_accepted(changed, case) == (guarantees(changed) == intact), fault


def test_rows_of_another_place_are_rejected() -> None:
    """The forward reads the gathered table, or the home of another one."""
    case = planned(lookups())
    schedule = compiled(case)
    forward = schedule.tasks[0]
    assert forward.section is PROLOGUE
    homes = [b for b in forward.reads if schedule.buffers[b].content is Content.PARAMETERS]
    other = next(b.id for b in schedule.buffers if b.is_static and b.chunk == 2 and b.content is Content.PARAMETERS)
    reads = tuple(other if b == homes[0] else b for b in forward.reads)
    tasks = (replace(forward, reads=reads), *schedule.tasks[1:])
    with pytest.raises(ScheduleError, match="forward prologue touches buffer"):
        verify_schedule(replace(schedule, tasks=tasks), case.plan, case.workload, case.layout)
