"""Two task kinds that a method adds, as one would: rules, a schedule with them, and whatever reads a record of it.

After every backward of a block compute pauses, and a note of it goes to the host; Adam waits for all notes.
"""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protwin.shared.basics.errors import FileError, ScheduleError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.methods.full_training import FULL_TRAINING as METHOD
from protwin.shared.records.chrome_trace import chrome_trace
from protwin.shared.records.comparison import compare_records
from protwin.shared.report.bars import kind_colour
from protwin.shared.report.report import Facts, report
from protwin.shared.schema.calibration import Calibration, Factor
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.record import IterationPhase, Origin, PhaseWait, Record
from protwin.shared.schema.schedule import Lane, Schedule, Task, TaskId, TaskKind, add_task_kind, in_kind_order
from protwin.shared.schema.workload import BlockId, Workload
from protwin.shared.verify.claim import Claim, check_amounts, check_earlier, check_in_place, reject
from protwin.shared.verify.full_training import FULL_TRAINING
from protwin.shared.verify.rules import Rule, Stage
from protwin.shared.verify.verify import verify_schedule
from protwin.sim.costs.task_costs import CostModel
from protwin.sim.engine.simulator import simulate
from tests.shared import faults
from tests.sim import hand_made
from tests.sim.hand_made import assert_timeline

PAUSE, NOTE = add_task_kind("pause", Lane.COMPUTE), add_task_kind("note", Lane.D2H)
PAUSE_S, NOTE_S = 0.5, 4.0


def check_pauses(claim: Claim) -> None:
    """On the compute lane every backward of a block, and nothing else, is followed by one pause of half a second."""
    lane = [claim.schedule.tasks[task] for task in claim.schedule.lanes[Lane.COMPUTE]]
    for before, task in zip(lane, [*lane[1:], None], strict=True):
        is_due = before.kind is TaskKind.BACKWARD and isinstance(before.section, int)
        if is_due != (task is not None and task.kind is PAUSE):
            reject(f"after {before.name} compute does{'' if is_due else ' not'} pause")
        if is_due and task is not None:
            if (task.section, task.micro_batch, task.stated_s) != (before.section, before.micro_batch, PAUSE_S):
                reject(f"{task.name} is not the pause after {before.name}")
            check_touches_nothing(task)


def check_notes(claim: Claim) -> None:
    """Every pause is noted once, when it is over."""
    pauses, notes = claim.tasks_of(PAUSE), claim.tasks_of(NOTE)
    if [(p.section, p.micro_batch) for p in pauses] != [(n.section, n.micro_batch) for n in notes]:
        reject("pauses and notes do not match")
    for pause, note in zip(pauses, notes, strict=True):
        check_touches_nothing(note)
        check_earlier(claim, pause.id, note.id)
        if note.stated_s != NOTE_S:
            reject(f"{note.name} takes {note.stated_s} s")


def check_notes_arrive(claim: Claim) -> None:
    """All notes have arrived before device Adam begins."""
    for note in claim.tasks_of(NOTE):
        for adam in claim.tasks_of(TaskKind.DEVICE_ADAM):
            check_earlier(claim, note.id, adam.id)


def check_touches_nothing(task: Task) -> None:
    check_in_place(task, [])
    check_amounts(task)
    if task.chunk is not None or task.phase is not None:
        reject(f"{task.name} has a chunk or a phase")


RULES = replace(
    FULL_TRAINING,
    sections=(*FULL_TRAINING.sections, Rule(Stage.PROGRAM, check_pauses, (PAUSE,))),
    updates=(
        *FULL_TRAINING.updates,
        Rule(Stage.CHUNKS, check_notes, (NOTE,)),
        Rule(Stage.CHUNK_ORDER, check_notes_arrive),
    ),
)


def with_pauses(schedule: Schedule) -> Schedule:
    tasks: list[Task] = []
    notes: list[TaskId] = []
    fresh = len(schedule.tasks)
    for task in schedule.tasks:
        is_adam = task.kind is TaskKind.DEVICE_ADAM
        tasks.append(replace(task, after=(*task.after, *notes)) if is_adam else task)
        if task.kind is TaskKind.BACKWARD and isinstance(task.section, int):
            named: dict[str, Any] = {"section": task.section, "micro_batch": task.micro_batch}
            pause, note = TaskId(fresh), TaskId(fresh + 1)
            tasks.append(Task(pause, PAUSE, **named, stated_s=PAUSE_S))
            tasks.append(Task(note, NOTE, **named, after=(pause,), stated_s=NOTE_S))
            notes.append(note)
            fresh += 2
    return faults.renumbered(schedule, tasks)


def case(n_persist: int = 2) -> tuple[Schedule, Plan, Workload]:
    model = hand_made.workload()
    plan = hand_made.plan(model, n_persist=n_persist, n_buffer=2 - n_persist)
    return with_pauses(compile_schedule(plan, model)), plan, model


def predicted(calibration: Calibration | None = None) -> Record:
    schedule, plan, model = case()
    return simulate(
        plan, model, hand_made.machine(), calibration, schedule=schedule, method=replace(METHOD, rules=RULES)
    )


# -- verified --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_persist", [0, 2])
def test_a_schedule_with_added_kinds_passes_by_the_rules_that_answer_for_them(n_persist: int) -> None:
    schedule, plan, model = case(n_persist)
    verify_schedule(schedule, plan, model, rules=RULES)
    with pytest.raises(ScheduleError, match="pause 1 is of kind pause, for which no rule answers"):
        verify_schedule(schedule, plan, model)
    with pytest.raises(ScheduleError, match="after backward 1 compute does pause"):
        verify_schedule(compile_schedule(plan, model), plan, model, rules=RULES)


def added_faults(schedule: Schedule) -> Iterator[faults.Fault]:
    """Data faults and exchanged neighbours that concern an added task, and other seconds."""
    families = (
        faults.missing_tasks,
        faults.changed_buffer_lists,
        faults.changed_task_fields,
        faults.swapped_neighbours,
    )
    for family in families:
        yield from (fault for fault in family(schedule) if PAUSE in fault.name or NOTE in fault.name)
    for task in schedule.tasks:
        for stated_s in (None, -1.0, float("nan"), float("inf")) if task.kind.is_added else ():
            changed = faults.with_task(schedule, task.id, stated_s=stated_s)
            yield faults.Fault(f"{task.id} {task.name} states {stated_s}", lambda changed=changed: changed)  # type: ignore[misc]
    for fault in faults.dropped_dependencies(schedule):
        if "note" in fault.name:
            yield fault


def test_every_fault_of_an_added_task_is_rejected() -> None:
    schedule, plan, model = case()
    found = list(added_faults(schedule))
    assert len(found) > 100
    escaped = []
    for fault in found:
        try:
            verify_schedule(fault.make(), plan, model, rules=RULES)
        except ScheduleError:
            continue
        escaped.append(fault)
    # The lane alone has the first note end before the second, which Adam waits for.
    assert [fault.name for fault in escaped] == ["12 device_adam no longer waits (after) for 7 note 1"]


# -- simulated, recorded, shown --------------------------------------------------------------------------------------


def test_added_tasks_take_the_seconds_that_they_state() -> None:
    """Everything persistent and kept: compute waits for nothing but the notes."""
    record = predicted()
    assert_timeline(record, Lane.D2H, [("note 1", 7.5, 11.5), ("note 0", 11.5, 15.5)])
    compute = [
        ("forward prologue", 0, 1),
        ("forward 0", 1, 2),
        ("forward 1", 2, 3),
        ("forward epilogue", 3, 4),
        ("backward epilogue", 4, 5),
        ("backward 1", 5, 7),
        ("pause 1", 7, 7.5),
        ("backward 0", 7.5, 9.5),
        ("pause 0", 9.5, 10),
        ("backward prologue", 10, 11),
        ("device_adam", 15.5, 17.5),
    ]
    assert_timeline(record, Lane.COMPUTE, compute)
    assert record.iteration_s == pytest.approx(17.5)
    assert record.waits == (PhaseWait(phase=IterationPhase.OPTIMIZER, cause=NOTE, seconds=4.5),)


def test_a_factor_counts_where_one_was_fitted() -> None:
    factors = {NOTE: Factor(value=0.25)}
    record = predicted(Calibration(hardware_name=hand_made.MACHINE, machine="", factors=factors))
    assert_timeline(record, Lane.D2H, [("note 1", 7.5, 8.5), ("note 0", 10, 11)])
    assert record.iteration_s == pytest.approx(13)


def test_a_kind_without_a_price_must_state_its_seconds() -> None:
    costs = CostModel(hand_made.machine())
    with pytest.raises(ScheduleError, match=r"note 1 states no seconds, and no task of kind note has a price"):
        costs.task_s(Task(TaskId(0), NOTE, section=BlockId(1)))


def test_what_is_recorded_reads_back_and_is_shown(tmp_path: Path) -> None:
    record, schedule = predicted(), case()[0]
    record.save(tmp_path / "record.json")
    assert Record.load(tmp_path / "record.json") == record
    measured = record.model_copy(update={"origin": Origin.MEASURED})
    comparison = compare_records(record, measured)
    assert [kind.kind for kind in comparison.kinds][-2:] == [NOTE, PAUSE]
    assert re.search(r"note +2 +8 s +8 s", str(comparison))
    assert re.search(r"device to host +note +2", str(schedule))
    assert re.search(r"waiting for note +4\.5 s", str(record))
    assert '"note 1"' in chrome_trace({"predicted": record}, schedule=schedule)
    page = report("t", Facts(predicted=record, measured=measured, schedule=schedule)).html
    assert "waiting for note: 4.5 s" in page
    assert f"note={kind_colour(TaskKind.GRADIENT_OFFLOAD)};pause={kind_colour(TaskKind.FORWARD)}" in page


def test_a_file_with_a_kind_that_nobody_added_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    predicted().save(path)
    path.write_text(path.read_text().replace('"note"', '"nap"'))
    with pytest.raises(FileError, match=r"must be 'forward', .* or 'disk_write' \(found 'nap'\)"):
        Record.load(path)


# -- kinds -----------------------------------------------------------------------------------------------------------


def test_a_kind_is_added_once_and_is_one_object_everywhere() -> None:
    assert add_task_kind("note", Lane.D2H) is NOTE is TaskKind("note")
    assert pickle.loads(pickle.dumps(NOTE)) is copy.deepcopy(NOTE) is NOTE
    assert NOTE not in list(TaskKind), "protwin's own"
    assert in_kind_order([PAUSE, TaskKind.CPU_ADAM, NOTE, TaskKind.GATHER, PAUSE]) == [
        TaskKind.GATHER,
        TaskKind.CPU_ADAM,
        NOTE,
        PAUSE,
    ]


@pytest.mark.parametrize("name", ["note", "gather", "Note", "a note", "a=b", ""])
def test_a_name_that_is_taken_or_none_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="task kind"):
        add_task_kind(name, Lane.H2D)
    assert NOTE.lane is Lane.D2H
    assert TaskKind.GATHER.lane is Lane.H2D
