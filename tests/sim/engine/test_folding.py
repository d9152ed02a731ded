"""Iterations of many micro-batches, known from few: against the simulation of all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from protwin.shared.catalogue.machines import load_hardware
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.hardware import Hardware
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.record import Record
from protwin.shared.schema.schedule import Lane, Schedule
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.shared.workloads.source import load_workload
from protwin.sim.bounds.exact_peaks import family_peaks
from protwin.sim.bounds.replay import REPLAY_FRAC, Replayer, ReplayPlan
from protwin.sim.engine import simulator, unfolding
from protwin.sim.engine.folding import KEPT_MICRO_BATCHES, Repeating, find_folds, settled_period_s
from protwin.sim.engine.kept_schedule import memory_schedule
from protwin.sim.engine.simulator import simulate, simulate_plan, simulate_timing
from protwin.sim.engine.timing import Fold
from protwin.sim.engine.unfolding import names_each_once, unfold_tasks
from protwin.sim.searching.problem import SearchProblem, search_problem
from protwin.sim.searching.request import SearchRequest, Step
from protwin.sim.space.space import SearchSpace, Trips
from protwin.sim.space.step_spec import StepSpec
from tests.proof_size import examples
from tests.shared import small_models
from tests.sim import brute_force
from tests.sim.hand_made import machine, plan, workload
from tests.sim.ranked_cases import RANKS, nodes
from tests.strategies.machines import hardware
from tests.strategies.plans import PlannedWorkload, planned_workloads
from tests.strategies.workloads import workloads

MANY = st.integers(KEPT_MICRO_BATCHES + 1, KEPT_MICRO_BATCHES + 4)


# -- records ---------------------------------------------------------------------------------------------------------


@given(planned_workloads(max_blocks=4), hardware(), MANY)
@settings(max_examples=examples(200, 7))
def test_a_folded_record_says_what_the_simulation_of_all_micro_batches_says(
    planned: PlannedWorkload, box: Hardware, micro_batches: int
) -> None:
    _assert_equal_records(planned.plan.model_copy(update={"micro_batches": micro_batches}), planned.workload, box)


def test_gradients_of_the_prologue_that_leave_are_not_left_over() -> None:
    """Those of an offloaded embedding go in every micro-batch; what device Adam alone frees adds up."""
    model = small_models.workload(
        [small_models.parameter("embedding", 1_000, None), small_models.parameter("layers.0.weight", 10, 0)], 1
    )
    chosen = small_models.plan(model, n_buffer=2, micro_batches=KEPT_MICRO_BATCHES + 3)
    whole, few = compile_schedule(chosen, model), memory_schedule(chosen, model)
    assert len(few.tasks) < len(whole.tasks)
    assert guaranteed_device_peak(few).size_bytes == guaranteed_device_peak(whole).size_bytes


def _takes_time(model: Workload) -> bool:
    return any(model.profile_of(block).backward.measured_s for block in range(model.num_blocks))


def _assert_equal_records(chosen: Plan, model: Workload, box: Hardware) -> None:
    box = box.model_copy(update={"name": model.measured_on})
    assume(_takes_time(model))
    whole = simulate(chosen, model, box, schedule=compile_schedule(chosen, model))
    folded = simulate(chosen, model, box)
    near = 1e-8 * whole.iteration_s
    assert folded.iteration_s == pytest.approx(whole.iteration_s, rel=1e-9)
    for name in ("forward_s", "backward_s", "optimizer_s"):
        assert getattr(folded, name) == pytest.approx(getattr(whole, name), rel=1e-8, abs=near)
    for name in ("plan_id", "num_gathers", "num_cpu_adam_steps", "guaranteed_peak_device_bytes", "hardware_flops"):
        assert getattr(folded, name) == getattr(whole, name)
    assert [(one.task, one.name) for one in folded.tasks] == [(one.task, one.name) for one in whole.tasks]
    for name in ("start_s", "end_s", "duration_s"):
        found, expected = ([getattr(one, name) for one in record.tasks] for record in (folded, whole))
        np.testing.assert_allclose(found, expected, rtol=0, atol=near)
    assert folded.host_memory == whole.host_memory
    _assert_equal_waits(folded, whole, near)
    for one, other in zip(folded.lanes, whole.lanes, strict=True):
        assert (one.lane, one.num_tasks, one.moved_bytes) == (other.lane, other.num_tasks, other.moved_bytes)
        assert one.busy_s == pytest.approx(other.busy_s, rel=1e-8, abs=near)
    for curve, expected in zip(folded.memory, whole.memory, strict=True):
        assert curve.peak_bytes == expected.peak_bytes
        assert curve.alive_at_peak == expected.alive_at_peak


def _assert_equal_waits(folded: Record, whole: Record, near: float) -> None:
    found, expected = ({(wait.phase, wait.cause): wait.seconds for wait in of.waits} for of in (folded, whole))
    for part in found.keys() | expected.keys():
        assert found.get(part, 0.0) == pytest.approx(expected.get(part, 0.0), rel=1e-6, abs=100 * near)


def test_thousands_of_micro_batches_cost_no_more_than_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[int] = []

    def compile_few(chosen: Plan, *others: Any, **options: Any) -> Schedule:
        compiled.append(chosen.micro_batches)
        return compile_schedule(chosen, *others, **options)

    monkeypatch.setattr(simulator, "compile_schedule", compile_few)
    model = workload(num_blocks=3)
    chosen = plan(model, n_buffer=2)
    record, less, least = (
        simulate(chosen.model_copy(update={"micro_batches": number}), model, machine()) for number in (4096, 1024, 512)
    )
    assert max(compiled) == KEPT_MICRO_BATCHES
    # Each micro-batch adds as much: twice as many more take twice as much longer.
    assert record.iteration_s - less.iteration_s == pytest.approx(6 * (less.iteration_s - least.iteration_s))
    assert record.num_gathers - less.num_gathers == 6 * (less.num_gathers - least.num_gathers)
    # What is not listed is counted all the same, and tasks have the names and ids of the whole schedule.
    assert len(record.tasks) < unfolding.MOST_LISTED < sum(use.num_tasks for use in record.lanes)
    assert record.tasks[-1].task == sum(use.num_tasks for use in record.lanes) - 1
    assert any(timing.name == "backward 0 of micro-batch 4095" for timing in record.tasks)


# -- searches --------------------------------------------------------------------------------------------------------


@st.composite
def problems(draw: DrawFn, many: st.SearchStrategy[int] = MANY) -> SearchProblem:
    """Spaces of plans of many micro-batches, of one rank or of several."""
    model = draw(workloads(max_blocks=4))
    micro_batches, norm = draw(many), draw(st.sampled_from((None, 1.0)))
    num_ranks = draw(st.sampled_from((1, 1, RANKS)))
    box = draw(hardware() if num_ranks == 1 else nodes()).model_copy(update={"name": model.measured_on})
    step = Step(micro_batches=micro_batches, max_gradient_norm=norm, num_ranks=num_ranks)
    space = SearchSpace(chunk_bytes=(draw(st.sampled_from((512, 4096, 100_000))),), n_swap=None)
    return search_problem(
        SearchRequest(workload=model, hardware=box, space=space, step=step, device_budget_bytes=2**60,
                      host_budget_bytes=2**60),
        step=step.spec(draw(st.sampled_from(step.allowed_modes[-2:])), micro_batches),
    )  # fmt: skip


@given(problems(), st.data())
@settings(max_examples=examples(200, 10))
def test_replays_of_few_micro_batches_have_the_period_and_the_peak_of_all(
    problem: SearchProblem, data: st.DataObject
) -> None:
    (layout,) = problem.layouts
    grid = layout.grid
    row, depth, mode = (
        data.draw(st.integers(0, len(of) - 1)) for of in (grid.prefix, grid.prefetch_depth, grid.modes.n_swap)
    )
    family = problem.family(0, row, grid.modes.trips[mode])
    chosen = problem.plan(0, row, depth, mode)
    schedule = compile_schedule(chosen, problem.workload, grid.layout)
    assert family_peaks(family, np.array([mode]))[depth, 0] == guaranteed_device_peak(schedule).size_bytes
    plans = [ReplayPlan(family, depth, mode, problem.num_left_out_of(family))]
    replayed_s = Replayer(problem.contention).periods_s(plans)
    timing = simulate_timing(schedule, problem.costs.durations_s(schedule), problem.contention)
    if not np.isnan(replayed_s[0]):
        assert replayed_s[0] == pytest.approx(timing.iteration_s, rel=(1 - REPLAY_FRAC) / 2)
    (bounds_s,) = problem.least_periods_s([(family, np.array([mode]))])
    assert bounds_s[depth, 0] <= timing.iteration_s


@given(workloads(max_blocks=3), hardware(), st.data())
@settings(max_examples=examples(40, 5))
def test_a_search_of_many_micro_batches_finds_what_brute_force_over_all_of_them_finds(
    model: Workload, box: Hardware, data: st.DataObject
) -> None:
    assume(_takes_time(model))
    box = box.model_copy(update={"name": model.measured_on})
    step = StepSpec(data.draw(MANY), data.draw(st.sampled_from((None, 1.0))))
    space = SearchSpace(
        chunk_bytes=(data.draw(st.sampled_from((512, 4096))),),
        n_persist=(0, data.draw(st.integers(1, 4))),
        n_buffer=(1000, data.draw(st.integers(1, 5))),
        prefetch_depth=(data.draw(st.integers(1, 2)),),
        n_checkpoint=(0, model.num_blocks),
        n_swap=(0,),
    )
    outcomes = brute_force.brute_force(model, box, None, space, step)
    found = brute_force.Case(model, box, None, space, step, outcomes)
    budget_bytes = data.draw(st.sampled_from([outcome.device_bytes for outcome in outcomes]))
    result = found.search(budget_bytes)
    best_s = min(outcome.iteration_s for outcome in found.feasible(budget_bytes))
    assert result.prediction.iteration_s == pytest.approx(best_s, rel=1e-9)


# -- when micro-batches repeat ---------------------------------------------------------------------------------------


def _iteration(begin_s: float, periods_s: list[float]) -> list[np.ndarray]:  # type: ignore[type-arg]
    """Compute, two tasks in each micro-batch, and a lane that follows it, by the lengths of micro-batches."""
    begins_s = begin_s + np.append(0.0, np.cumsum(periods_s))
    compute = np.stack([(begins_s[:-1] + begins_s[1:]) / 2, begins_s[1:]], axis=1).ravel()
    return [np.append(compute, compute[-1] + 0.5), begins_s[1:] + 0.25]


REPEATING = Repeating((2, 1), 7)
"""The fourth micro-batch of six ends with the eighth task of compute."""


def test_micro_batches_of_one_length_are_left_out_and_others_are_not() -> None:
    steady = [3.0, 2.5, 2.0, 2.0, 2.0, 2.0]
    folds = find_folds([_iteration(0.0, steady), _iteration(16.0, steady)], REPEATING)
    assert folds is not None
    assert folds.periods_s == (2.0, 2.0)
    assert folds.begins_s == (9.5, 25.5)
    # 3 and 2.5 and twice 2: four micro-batches of compute come before the cut; of the other lane, the fourth is late.
    assert folds.cuts == (8, 3)
    np.testing.assert_array_equal(folds.shifts_s(10, 1, (13, 6)), [20.0] * 8 + [40.0] * 5 + [20.0] * 3 + [40.0] * 3)
    assert settled_period_s([_iteration(0.0, steady), _iteration(16.0, steady)], REPEATING, 10) == 36.0
    for uneven in ([3.0, 2.5, 2.0, 2.1, 2.0, 2.0], [3.0, 2.0, 2.0, 2.0, 2.1, 2.0]):
        assert find_folds([_iteration(0.0, steady), _iteration(16.0, uneven)], REPEATING) is None
    late = _iteration(16.0, steady)
    late[1][2] += 0.1
    assert find_folds([late], REPEATING) is None
    # A second iteration that repeats, but not the first one, tells nothing of the third.
    other = _iteration(16.0, steady)
    other[1][2:] += 0.1
    assert find_folds([_iteration(0.0, steady), other], REPEATING) is not None
    assert settled_period_s([_iteration(0.0, steady), other], REPEATING, 10) is None


def test_what_is_left_out_is_like_no_task_of_the_last_micro_batch() -> None:
    """A task without seconds ends when the one before it has: what repeats begins behind it, and ends one later."""
    compute = np.append(np.repeat(np.arange(7) * 2.0, 2)[1:13], 13.0)
    assert compute[7] == compute[8]
    lanes = [[compute, np.arange(1, 7) * 2.0 + 0.25]]
    for until, is_known in (((10, 6), False), ((11, 6), True), (None, True)):
        assert (find_folds(lanes, Repeating((2, 1), 7, until)) is not None) == is_known


def test_each_task_has_one_number_where_what_is_left_out_is_like_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """By lane, what repeats begins earlier or later than it does: the whole schedule tells which of these are wrong."""
    folds: list[Fold] = []
    monkeypatch.setattr(simulator, "names_each_once", lambda fold: folds.append(fold) is None)
    model = workload(num_blocks=3)
    chosen = plan(model, n_buffer=2).model_copy(update={"micro_batches": KEPT_MICRO_BATCHES + 3})
    record = simulate(chosen, model, machine())
    (fold,) = folds
    expected = [(task.id, task.name) for task in compile_schedule(chosen, model).tasks]
    assert [(one.task, one.name) for one in record.tasks] == expected
    kept = fold.kept.schedule
    timings = tuple(record.tasks[0].model_copy(update={"task": task.id, "name": task.name}) for task in kept.tasks)
    found = set()
    for place, lane in enumerate(Lane):
        for cut in range(len(kept.lanes[lane]) - fold.kept.repeating.num_tasks[place] + 1):
            moved = replace(fold, cuts=(*fold.cuts[:place], cut, *fold.cuts[place + 1 :]))
            is_whole = [one.task for one in unfold_tasks(moved, timings)] == [number for number, _ in expected]
            assert names_each_once(moved) == is_whole
            found.add((is_whole, cut < fold.cuts[place]))
    # Too early and too late.
    assert found == {(True, True), (True, False), (False, True), (False, False)}


def test_a_lane_that_does_not_repeat_must_rest_meanwhile() -> None:
    steady = [3.0, 2.5, 2.0, 2.0, 2.0, 2.0]
    compute = _iteration(0.0, steady)[0]
    once = Repeating((2, 0), 7)
    for end_s, is_known in ((5.0, True), (8.0, False), (10.0, False), (15.0, True)):
        assert (find_folds([[compute, np.array([end_s])]], once) is not None) == is_known


@given(problems(st.integers(KEPT_MICRO_BATCHES + 1, 64)), st.data())
@settings(max_examples=examples(400, 9))
def test_bounds_hold_however_many_micro_batches_were_left_out(problem: SearchProblem, data: st.DataObject) -> None:
    (layout,) = problem.layouts
    grid = layout.grid
    row = data.draw(st.integers(0, len(grid.prefix) - 1))
    modes = np.flatnonzero(grid.modes.n_swap == data.draw(st.sampled_from(sorted(set(grid.modes.n_swap.tolist())))))
    family = problem.family(0, row, grid.modes.trips[modes[0]])
    (bounds_s,) = problem.least_periods_s([(family, modes)])
    depth, place = (data.draw(st.integers(0, length - 1)) for length in bounds_s.shape)
    _, timing = simulate_plan(
        problem.plan(0, row, depth, int(modes[place])), problem.workload, problem.costs, problem.contention,
        layout=grid.layout,
    )  # fmt: skip
    assert bounds_s[depth, place] <= timing.iteration_s


def test_the_work_of_many_micro_batches_bounds_them_as_one() -> None:
    """Of one alone, little is known to lie between two events; with chains of single ones a quarter is missing."""
    model = load_workload("qwen2.5-0.5b", batch_size=1, sequence_length=512)
    space = SearchSpace(n_persist=(0,), n_host_stepped=(0,))
    hardware = load_hardware("rtx-3090")
    problem = search_problem(
        SearchRequest(workload=model, hardware=hardware, space=space, step=Step(micro_batches=1024))
    )
    family, mode = problem.family(0, 0, Trips(0)), np.array([0])
    begin, num_tasks = np.array(family.micro_batch_places(2)).T
    seconds = [family.compute_s(mode)[0], *(family.seconds(lane, 0) for lane in (1, 2, 3))]
    work_s = [of[first : first + count].sum() for of, first, count in zip(seconds, begin, num_tasks, strict=True)]
    (bounds_s,) = problem.least_periods_s([(family, mode)])
    assert bounds_s[0, 0] >= 1024 * (problem.throughput.weights @ np.array(work_s)).max()
