"""Ranks that share sequences: what they exchange stands ahead of each step, and nothing else of a schedule changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.shared.basics.errors import PlanError, ScheduleError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout
from protwin.shared.phases.sequence_sharing import SequenceSharing
from protwin.shared.schema.plan import ParallelMode
from protwin.shared.schema.schedule import Lane, RankAxis, Schedule, Task, TaskId, TaskKind
from protwin.shared.schema.workload import BlockProfile, Phase, Workload
from protwin.shared.verify.verify import verify_schedule
from tests.proof_size import examples
from tests.shared import faults
from tests.shared.small_models import chain, plan
from tests.shared.verdicts import compiled, is_accepted, only_rejections
from tests.strategies.plans import PlannedWorkload, parallel_workloads
from tests.strategies.sharings import changed, shared_workloads, sharings

EXCHANGE = TaskKind.SEQUENCE_EXCHANGE


@st.composite
def shared_plans(draw: st.DrawFn, max_blocks: int = 5) -> PlannedWorkload:
    """Plans of ranks that share sequences, and that form shard groups of any other size or none."""
    case = draw(parallel_workloads(max_blocks))
    if case.plan.num_ranks == 1000:
        case = replace(case, plan=case.plan.model_copy(update={"num_ranks": 12, "shard_ranks": None}))
    divisors = [number for number in range(2, case.plan.num_ranks + 1) if case.plan.num_ranks % number == 0]
    chosen = case.plan.model_copy(update={"sequence_ranks": draw(st.sampled_from(divisors))})
    known = draw(shared_workloads(case.workload, (chosen.sequence_ranks,)))
    return PlannedWorkload(known, chosen, case.layout)


def steps_of(schedule: Schedule) -> list[list[Task]]:
    """Compute tasks of blocks: forwards, and backwards with the recomputations ahead of them."""
    steps: list[list[Task]] = []
    for task in schedule.tasks:
        if isinstance(task.section, int) and task.lane is Lane.COMPUTE:
            if steps and steps[-1][-1].kind is TaskKind.RECOMPUTE:
                steps[-1].append(task)
            else:
                steps.append([task])
    return steps


@settings(max_examples=examples(200, 20), deadline=None)
@given(shared_plans())
def test_exchanges_are_all_that_ranks_do_more(case: PlannedWorkload) -> None:
    schedule = compiled(case)
    verify_schedule(schedule, case.plan, case.workload, case.layout)
    # The oracle: what each phase of the workload says, step by step.
    expected = [[size for task in step if task.phase for size in task.phase.exchanges] for step in steps_of(schedule)]
    found = [task for task in schedule.tasks if task.kind is EXCHANGE]
    assert [(task.moved_bytes, task.num_tensors) for task in found] == [(sum(e), len(e)) for e in expected if e]
    assert {(t.axis, t.num_ranks, t.lane) for t in found} <= {
        (RankAxis.SEQUENCE, case.plan.sequence_ranks, Lane.COLLECTIVE)
    }
    # Without them it is the schedule of a workload whose blocks exchange nothing.
    quiet = changed(
        case.workload,
        **{
            "sequence_sharings": tuple(
                SequenceSharing(
                    **{name: getattr(of, name) for name in SequenceSharing.model_fields}
                    | {"profiles": tuple(_quiet(profile) for profile in of.profiles)}
                )
                for of in case.workload.sequence_sharings
            )
        },
    )
    alone = compile_schedule(case.plan, quiet, case.layout)
    left = faults.renumbered(schedule, [task for task in schedule.tasks if task.kind is not EXCHANGE])
    plain = [replace(t, phase=t.phase and _without_exchanges(t.phase)) for t in left.tasks]
    assert tuple(plain) == alone.tasks
    assert schedule.buffers == alone.buffers


def _without_exchanges(phase: Phase) -> Phase:
    return Phase(**{name: getattr(phase, name) for name in Phase.model_fields} | {"exchanges": ()})


def _quiet(profile: BlockProfile) -> BlockProfile:
    names = ("forward", "backward", "checkpoint_forward", "recompute", "checkpoint_backward")
    return profile.model_copy(update={name: _without_exchanges(getattr(profile, name)) for name in names})


# -- what is not sound -----------------------------------------------------------------------------------------------


def _shared_chain(num_blocks: int = 3, **knobs: object) -> PlannedWorkload:
    """Four ranks, two of which share each sequence; forwards exchange 300 and 100 bytes, backwards 100 and 300."""
    model = chain(num_blocks)
    names = {"forward": (300, 100), "checkpoint_forward": (300, 100), "recompute": (300,)}
    names |= {"backward": (100, 300), "checkpoint_backward": (100, 300)}
    profiles = tuple(
        profile.model_copy(
            update={
                name: Phase(
                    **{of: getattr(getattr(profile, name), of) for of in Phase.model_fields} | {"exchanges": sizes}
                )
                for name, sizes in names.items()
            }
        )
        for profile in model.profiles
    )
    outer = ("prologue_forward", "epilogue_forward", "epilogue_backward", "prologue_backward")
    sharing = SequenceSharing(
        sequence_ranks=2,
        profiles=profiles,
        profile_of=tuple(range(num_blocks)),
        resident_bytes=model.resident_bytes,
        **{name: getattr(model, name) for name in outer},
    )
    known = changed(model, sequence_sharings=(sharing,))
    update = {"parallel": ParallelMode.SHARDED, "num_ranks": 4, "sequence_ranks": 2, "n_buffer": 2, "n_checkpoint": 1}
    chosen = plan(known).model_copy(update=update | knobs)
    return PlannedWorkload(known, chosen, build_layout(known.parameters, num_blocks=num_blocks, chunk_bytes=4_096))


CASE = _shared_chain(micro_batches=2)


def test_steps_exchange_what_their_phases_say() -> None:
    found = [task for task in compiled(CASE).tasks if task.kind is EXCHANGE]
    assert [(t.section, t.moved_bytes, t.num_tensors) for t in found if t.micro_batch == 1] == [
        (0, 400, 2),
        (1, 400, 2),
        (2, 400, 2),
        (2, 400, 2),
        (1, 700, 3),  # recomputed: its forward's first exchange once more
        (0, 400, 2),
    ]


def _rejected(schedule: Schedule, reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        verify_schedule(schedule, CASE.plan, CASE.workload, CASE.layout)


@pytest.mark.parametrize("task", [t for t in compiled(CASE).tasks if t.kind is EXCHANGE], ids=lambda t: f"{t.id}")
def test_a_step_without_its_exchange_or_with_another_one_is_rejected(task: Task) -> None:
    schedule = compiled(CASE)
    missing = faults.renumbered(schedule, [other for other in schedule.tasks if other.id != task.id])
    _rejected(missing, "lacks its exchanges|moves .* not")
    for change in (
        {"moved_bytes": task.moved_bytes + 1},
        {"num_tensors": task.num_tensors + 1},
        {"axis": RankAxis.WORLD},
        {"num_ranks": 4},
        {"axis": RankAxis.SHARD, "num_ranks": 4},
        {"micro_batch": 1 - task.micro_batch},
        {"section": 0 if task.section else 1},
        {"reads": (0,)},
        {"phase": Phase()},
        {"chunk": 0},
        {"num_stepped": 1},
    ):
        assert not is_accepted(faults.with_task(schedule, task.id, **change), CASE), change


def test_an_exchange_that_may_begin_too_early_or_end_too_late_is_rejected() -> None:
    """Neither wait may go where nothing else implies it, as whole chunks on every device do not."""
    case = _shared_chain(parallel=ParallelMode.DDP, n_persist=3, n_buffer=0)
    schedule = compiled(case)
    lane = schedule.lanes[Lane.COMPUTE]
    for task in [task for task in schedule.tasks if task.kind is EXCHANGE]:
        step = next(t for t in schedule.tasks if task.id in t.after and t.lane is Lane.COMPUTE)
        before = schedule.tasks[lane[lane.index(step.id) - 1]]
        for late, first in ((step, task), (task, before)):
            changed_one = _not_after(schedule, late.id, first.id)
            with pytest.raises(ScheduleError, match=f"{late.name} may start before {first.name} has ended"):
                verify_schedule(changed_one, case.plan, case.workload, case.layout)


def _not_after(schedule: Schedule, task: TaskId, other: TaskId) -> Schedule:
    waits = tuple(one for one in schedule.tasks[task].after if one != other)
    return faults.with_task(schedule, task, after=waits)


def test_both_rules_earn_their_place() -> None:
    """Some fault is rejected by each of them, and by no other rule."""
    case = _shared_chain(parallel=ParallelMode.DDP, n_persist=3, n_buffer=0)
    case = replace(case, workload=case.workload.shared_among(2))
    schedule = compiled(case)
    found = [*faults.dropped_dependencies(schedule), *faults.changed_task_fields(schedule)]
    waiting = {"check_exchanges", "check_exchange_order"}
    only_rejections(found, case, waiting)
    assert waiting == set()


def test_one_exchange_too_many_is_rejected() -> None:
    schedule = compiled(CASE)
    task = next(t for t in schedule.tasks if t.kind is EXCHANGE)
    twice = [*schedule.tasks[: task.id + 1], replace(task, id=TaskId(10_000)), *schedule.tasks[task.id + 1 :]]
    _rejected(faults.renumbered(schedule, twice), "is of no step that exchanges anything|moves")


def test_a_plan_for_other_ranks_is_rejected() -> None:
    other = CASE.plan.model_copy(update={"sequence_ranks": 4})
    with pytest.raises(PlanError, match="sequence_ranks: 4, but the workload of small knows 1, 2"):
        compile_schedule(other, CASE.workload)
    _rejected(replace(compiled(CASE), sequence_ranks=1), "its sequence_ranks is 1, that of the plan is 2")


def test_one_rank_of_a_shared_workload_is_still_the_whole() -> None:
    whole: Workload = CASE.workload
    alone = CASE.plan.model_copy(update={"sequence_ranks": 1})
    assert not any(task.kind is EXCHANGE for task in compile_schedule(alone, whole).tasks)


@given(st.data())
@settings(max_examples=examples(30, 3), deadline=None)
def test_what_one_mode_alone_exchanges_is_refused(data: st.DataObject) -> None:
    sharing = data.draw(sharings(chain(2), 2, exchanges=(8,)))
    (profile, *_) = sharing.profiles
    name = data.draw(st.sampled_from(("forward", "checkpoint_forward", "backward")))
    odd = profile.model_copy(update={name: _without_exchanges(getattr(profile, name))})
    fields = {of: getattr(sharing, of) for of in SequenceSharing.model_fields}
    with pytest.raises(ValueError, match="in either activation mode, or in neither"):
        SequenceSharing(**fields | {"profiles": (odd,) * len(sharing.profiles)})
