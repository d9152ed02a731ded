"""The verifier accepts what the compiler makes and rejects every single fault.

Three judges: data faults must all be rejected; a dropped dependency must be rejected whenever it changes what the
program guarantees; for every other change of order the abstract machine is the oracle.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.shared.basics.errors import PlanError, ScheduleError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout
from protwin.shared.order.happens_before import HappensBefore, Occurrence
from protwin.shared.schema.schedule import LANE_OF, Lane, Memory, Schedule, TaskId, TaskKind
from protwin.shared.verify import data_flow, verify
from protwin.shared.verify.claim import Claim
from protwin.shared.verify.disk import check_disk_reads, check_disk_writes, check_shared_places, check_turns
from protwin.shared.verify.full_training import FULL_TRAINING
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.shared.verify.residency import check_gathers, check_one_gather
from protwin.shared.verify.rules import Stage
from protwin.shared.verify.verify import verify_schedule
from tests.proof_size import examples, share
from tests.shared import faults
from tests.shared.abstract_machine import AbstractMachine
from tests.shared.adversaries import at_random, holding
from tests.shared.faults import Fault
from tests.shared.small_models import chain, parameter, plan, workload
from tests.shared.verdicts import (
    check_dropped_dependencies,
    check_sound_and_faulty,
    compiled,
    is_accepted,
    only_rejections,
    violation,
)
from tests.strategies.plans import PlannedWorkload, parallel_workloads, planned_workloads

SEEDS = st.integers(0, 2**32 - 1)


def example() -> PlannedWorkload:
    """Four blocks with two chunks each, one persistent, one frozen, blocks in all modes, an unowned parameter."""
    parameters = [parameter("embedding", 700, None)]
    for block in range(4):
        parameters += [
            parameter(f"layers.{block}.first", 1_000, block, trainable=block != 2),
            parameter(f"layers.{block}.second", 500 + block, block),
        ]
    model = workload(parameters, 4)
    knobs = plan(model, n_persist=2, n_buffer=4, n_checkpoint=2, n_swap=1, micro_batches=2, max_gradient_norm=1.0)
    layout = build_layout(model.parameters, num_blocks=4, chunk_bytes=knobs.chunk_bytes)
    return PlannedWorkload(model, knobs, layout)


# -- random schedules ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=examples(2_000, 80))
@given(planned_workloads(has_disk=True) | parallel_workloads(), SEEDS)
def test_compiled_schedules_pass_and_faulty_ones_do_not(case: PlannedWorkload, seed: int) -> None:
    check_sound_and_faulty(case, seed)


@settings(max_examples=examples(60, 12))
@given(planned_workloads(max_blocks=3, has_disk=True), SEEDS)
def test_garbage_is_rejected_without_a_crash(case: PlannedWorkload, seed: int) -> None:
    """Several faults on top of each other; the verifier may raise nothing but ScheduleError."""
    schedule = compiled(case)
    generator = random.Random(seed)
    families = (faults.changed_task_fields, faults.changed_buffer_fields, faults.dropped_dependencies)
    for _ in range(4):
        try:
            found = list(generator.choice(families)(schedule))
        except IndexError:
            return  # so damaged that the faults of what is left cannot even be named
        if found:
            schedule = generator.choice(found).make()
            is_accepted(schedule, case)


@pytest.mark.slow
@settings(max_examples=examples(100, 10))
@given(planned_workloads(has_disk=True))
def test_every_dropped_dependency_that_matters_is_rejected(case: PlannedWorkload) -> None:
    check_dropped_dependencies(case)


@pytest.mark.slow
@settings(max_examples=examples(30, 10))
@given(planned_workloads(max_blocks=4, has_disk=True), SEEDS)
def test_order_faults_are_rejected_exactly_when_some_timing_harms(case: PlannedWorkload, seed: int) -> None:
    schedule = compiled(case)
    generator = random.Random(seed)
    for family in (faults.dropped_dependencies, faults.retargeted_dependencies, faults.merged_slots):
        found = list(family(schedule))
        for fault in generator.sample(found, min(2, len(found))):
            changed = fault.make()
            harm = violation(changed, case)
            assert is_accepted(changed, case) == (harm is None), (fault, harm)


@pytest.mark.slow
@settings(max_examples=examples(30, 10))
@given(planned_workloads(max_blocks=4, has_disk=True), SEEDS)
def test_swapped_neighbours_are_rejected_when_some_timing_harms(case: PlannedWorkload, seed: int) -> None:
    """Compute tasks must also keep the order that the model runs them in, which harms nobody on the machine."""
    schedule = compiled(case)
    found = list(faults.swapped_neighbours(schedule))
    for fault in random.Random(seed).sample(found, min(4, len(found))):
        changed = fault.make()
        harm = violation(changed, case)
        if is_accepted(changed, case):
            assert harm is None, (fault, harm)
        else:
            assert harm is not None or computes(changed) != computes(schedule), fault


def computes(schedule: Schedule) -> list[tuple[TaskKind, object]]:
    return [(t.kind, t.section) for t in schedule.tasks if t.section is not None or t.kind is TaskKind.DEVICE_ADAM]


@settings(max_examples=examples(60, 12))
@given(planned_workloads(has_disk=True), SEEDS)
def test_no_timing_harms_a_compiled_schedule(case: PlannedWorkload, seed: int) -> None:
    schedule = compiled(case)
    generator = random.Random(seed)
    for task in generator.sample(schedule.tasks, 4):
        AbstractMachine(schedule, case.plan, case.workload, case.layout).run(holding(task.id, iteration=1))
    AbstractMachine(schedule, case.plan, case.workload, case.layout, num_iterations=5).run(at_random(seed))


# -- one schedule, every fault ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", faults.DATA_FAULTS, ids=lambda family: family.__name__)
def test_every_data_fault_of_the_example_is_rejected(family: Callable[[Schedule], list[Fault]]) -> None:
    case = example()
    schedule = compiled(case)
    verify_schedule(schedule, case.plan, case.workload, case.layout)
    found = share(family(schedule), one_in=5)
    assert found
    escaped = [fault for fault in found if is_accepted(fault.make(), case)]
    assert escaped == []


def test_the_example_has_every_hazard() -> None:
    case = example()
    schedule = compiled(case)
    kinds = {task.kind for task in schedule.tasks}
    of_other_methods = {kind for kind in TaskKind if kind.endswith("_projection")}
    of_other_methods |= {TaskKind.TEACHER_FORWARD, TaskKind.LOSS}
    assert kinds == {kind for kind in TaskKind if LANE_OF[kind] not in (Lane.COLLECTIVE, Lane.DISK)} - of_other_methods
    gathered = [task.chunk for task in schedule.tasks if task.kind is TaskKind.GATHER]
    assert len(gathered) > len(set(gathered)), "some chunk is gathered twice"
    assert any(not case.layout.chunks[chunk].is_trainable for chunk in gathered if chunk is not None)


def test_every_rule_states_itself_and_every_kind_has_a_rule() -> None:
    answered = []
    for method in verify.RULES.values():
        rules = method.in_order(*verify.COMMON)
        assert all(rule.check.__doc__ for rule in rules)
        kinds = [kind for rule in rules for kind in rule.kinds]
        assert len(kinds) == len(set(kinds))
        answered += kinds
    assert set(answered) == set(TaskKind)


def test_a_method_replaces_a_rule() -> None:
    """One that gathers chunks at half the bytes, say."""

    def check_half_gathers(claim: Claim) -> None:
        for task in claim.tasks_of(TaskKind.GATHER):
            assert task.chunk is not None
            check_one_gather(claim, task, moved_bytes=claim.held[task.chunk].parameter_bytes // 2)

    residency = [
        replace(rule, check=check_half_gathers) if rule.check is check_gathers else rule
        for rule in FULL_TRAINING.residency
    ]
    rules = replace(FULL_TRAINING, residency=tuple(residency))
    case = example()
    schedule = compiled(case)
    halved = tuple(
        replace(task, moved_bytes=task.moved_bytes // 2) if task.kind is TaskKind.GATHER else task
        for task in schedule.tasks
    )
    verify_schedule(replace(schedule, tasks=halved), case.plan, case.workload, case.layout, rules=rules)
    with pytest.raises(ScheduleError, match="gather chunk 2 moves"):
        verify_schedule(schedule, case.plan, case.workload, case.layout, rules=rules)


@pytest.mark.slow
def test_every_rule_earns_its_place() -> None:
    """Some fault of this plan is rejected by this rule and no other; ``test_parallel``, ``test_disk`` have more."""
    case = example()
    case = replace(case, plan=case.plan.model_copy(update={"n_host_stepped": 1}))
    schedule = compiled(case)
    data_faults = [fault for family in faults.DATA_FAULTS for fault in family(schedule)]
    random.Random(0).shuffle(data_faults)
    # The few that break rules of order come first.
    found = [*faults.dropped_dependencies(schedule), *faults.merged_slots(schedule), *data_faults]
    about_ranks = (Stage.RANKS, Stage.RANK_ORDER)
    elsewhere = (check_disk_reads, check_disk_writes, check_shared_places, check_turns)
    rules = [rule.check for rule in FULL_TRAINING.in_order() if rule.stage not in about_ranks]
    waiting = {check.__name__ for check in rules if check not in elsewhere}
    only_rejections(found, case, waiting)
    assert waiting == set(), "these reject nothing that other rules let pass"


@pytest.mark.parametrize("check", ["_check_lifetime", "_check_versions"])
def test_both_halves_of_data_flow_earn_their_place(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = example()
    schedule = compiled(case)
    caught = [fault for fault in faults.dropped_dependencies(schedule) if not is_accepted(fault.make(), case)]
    monkeypatch.setattr(data_flow, check, lambda *_: None)
    assert any(is_accepted(fault.make(), case) for fault in caught)


def test_the_form_earns_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    case = example()
    schedule = compiled(case)
    changed = replace(schedule, plan_id="0" * 16)
    assert not is_accepted(changed, case)
    monkeypatch.setattr(verify, "COMMON", verify.COMMON[1:])
    assert is_accepted(changed, case)


# -- named hazards ---------------------------------------------------------------------------------------------------


def chained(n_buffer: int = 1, prefetch_depth: int = 1, num_blocks: int = 4) -> PlannedWorkload:
    model = chain(num_blocks)
    knobs = plan(model, n_buffer=n_buffer, prefetch_depth=prefetch_depth)
    return PlannedWorkload(
        model, knobs, build_layout(model.parameters, num_blocks=num_blocks, chunk_bytes=knobs.chunk_bytes)
    )


def only(schedule: Schedule, kind: TaskKind, chunk: int, occurrence: int = 0) -> TaskId:
    return [task.id for task in schedule.tasks if task.kind is kind and task.chunk == chunk][occurrence]


def test_a_gather_that_does_not_wait_for_its_cpu_adam_reads_stale_weights() -> None:
    case = chained(n_buffer=4, prefetch_depth=4)
    schedule = compiled(case)
    gather, adam = only(schedule, TaskKind.GATHER, 0), only(schedule, TaskKind.CPU_ADAM, 0)
    waits = schedule.tasks[gather].after_previous
    assert adam in waits
    changed = faults.with_task(schedule, gather, after_previous=faults.without(waits, adam))
    assert violation(changed, case) is not None
    with pytest.raises(ScheduleError, match="cpu_adam chunk 0"):
        verify_schedule(changed, case.plan, case.workload, case.layout)


def test_a_gather_that_waits_for_the_wrong_adam_is_rejected() -> None:
    case = chained(n_buffer=4, prefetch_depth=4)
    schedule = compiled(case)
    gather = only(schedule, TaskKind.GATHER, 0)
    adams = [only(schedule, TaskKind.CPU_ADAM, chunk) for chunk in (0, 1)]
    waits = (*faults.without(schedule.tasks[gather].after_previous, adams[0]), adams[1])
    changed = faults.with_task(schedule, gather, after_previous=waits)
    assert violation(changed, case) is not None
    with pytest.raises(ScheduleError, match="race"):
        verify_schedule(changed, case.plan, case.workload, case.layout)


def test_a_slot_that_is_taken_too_early_is_rejected() -> None:
    case = chained()
    schedule = compiled(case)
    gather = only(schedule, TaskKind.GATHER, 1)
    changed = faults.with_task(schedule, gather, after=())
    assert "slot" in (violation(changed, case) or "")
    with pytest.raises(ScheduleError, match="slot 0 may hold chunks 0 and 1 at once"):
        verify_schedule(changed, case.plan, case.workload, case.layout)


def test_a_frozen_chunk_that_comes_before_it_has_gone_is_rejected() -> None:
    """No CPU Adam stands between a frozen chunk's last stay and the next iteration's first, and slots change."""
    blocks = (0, 1, 2, 2)
    weights = [
        parameter(f"layers.{block}.{place}", 1_000, block, trainable=False) for place, block in enumerate(blocks)
    ]
    model = workload([*weights, parameter("trained", 10, 2)], 3)
    knobs = plan(model, n_buffer=3, prefetch_depth=2)
    case = PlannedWorkload(model, knobs, build_layout(model.parameters, num_blocks=3, chunk_bytes=knobs.chunk_bytes))
    schedule = compiled(case)
    first, last_use = only(schedule, TaskKind.GATHER, 0), schedule.lanes[Lane.COMPUTE][-3]
    assert schedule.tasks[last_use].name == "backward 0"
    waits = schedule.tasks[first].after_previous
    changed = faults.with_task(schedule, first, after_previous=faults.without(waits, last_use))
    assert "is in slots" in (violation(changed, case) or "")
    with pytest.raises(
        ScheduleError, match=r"chunk 0 may be in slots \d and \d at once when the next iteration begins"
    ):
        verify_schedule(changed, case.plan, case.workload, case.layout)


def test_a_deadlock_is_rejected() -> None:
    case = chained()
    schedule = compiled(case)
    first, last = schedule.tasks[0].id, schedule.tasks[-1].id
    changed = faults.with_task(schedule, first, after=(last,))
    assert violation(changed, case) == "deadlock"
    with pytest.raises(ScheduleError, match="does not stand before it"):
        verify_schedule(changed, case.plan, case.workload, case.layout)


def test_a_chunk_that_ends_with_a_frozen_block_is_accepted() -> None:
    """The gradients are final a step before the chunk's last backward; they leave with the latter."""
    model = chain(6, elements=10, frozen=(0, 2, 4))
    for prefetch_depth in (1, 2, 3, 4):
        knobs = plan(model, chunk_bytes=512, prefetch_depth=prefetch_depth)
        layout = build_layout(model.parameters, num_blocks=6, chunk_bytes=512)
        assert layout.chunks[1].backward == (3, 4)
        verify_schedule(compile_schedule(knobs, model, layout), knobs, model, layout)


def test_a_schedule_of_another_plan_is_rejected() -> None:
    case = chained()
    schedule = compiled(case)
    for change in ({"prefetch_depth": 2}, {"n_buffer": 2}, {"n_persist": 1}, {"n_checkpoint": 1}):
        other = case.plan.model_copy(update=change)
        with pytest.raises(ScheduleError, match="plan_id"):
            verify_schedule(schedule, other, case.workload, case.layout)


def test_a_layout_of_another_chunk_size_is_refused() -> None:
    case = chained()
    other = build_layout(case.workload.parameters, num_blocks=4, chunk_bytes=8192)
    with pytest.raises(PlanError, match="chunk_bytes"):
        verify_schedule(compiled(case), case.plan, case.workload, other)


# -- limits ----------------------------------------------------------------------------------------------------------


def test_limits_are_kept_to_the_byte() -> None:
    case = example()
    schedule = compiled(case)
    peak_bytes = guaranteed_device_peak(schedule).size_bytes
    pinned_bytes = schedule.static_bytes(Memory.PINNED_HOST)
    host_bytes = pinned_bytes + schedule.static_bytes(Memory.HOST)
    for limit, size_bytes in (
        ("device_limit_bytes", peak_bytes),
        ("pinned_limit_bytes", pinned_bytes),
        ("host_limit_bytes", host_bytes),
    ):
        verify_schedule(schedule, case.plan, case.workload, case.layout, **{limit: size_bytes})
        with pytest.raises(ScheduleError, match="limit"):
            verify_schedule(
                schedule,
                case.plan,
                case.workload,
                case.layout,
                **{limit: size_bytes - 1},
            )


def test_the_order_of_many_micro_batches_is_verified_in_proportion_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pair of a writer and a user of a buffer would be the square of the micro-batches."""
    num_questions = 0
    original = HappensBefore.before

    def counted(self: HappensBefore, first: Occurrence, second: Occurrence) -> bool:
        nonlocal num_questions
        num_questions += 1
        return original(self, first, second)

    monkeypatch.setattr(HappensBefore, "before", counted)
    case = chained()
    asked = []
    for micro_batches in (8, 32):
        plan = case.plan.model_copy(update={"micro_batches": micro_batches})
        num_questions = 0
        verify_schedule(compile_schedule(plan, case.workload, case.layout), plan, case.workload, case.layout)
        asked.append(num_questions)
    assert asked[1] < 4.5 * asked[0]
