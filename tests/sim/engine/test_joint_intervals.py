"""Intervals of pipelines and of unlike ranks, against machines whose truth is drawn.

The oracles are the simulator of ranks that meet in their collectives, and the slowest of several stages; neither knows
of draws.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import numpy as np
import pytest

from protwin.shared.basics.interval import Interval
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.calibration import Calibration, Factor
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.schedule import Lane, TaskKind
from protwin.sim.costs.contention import ContentionModel
from protwin.sim.engine.error_sources import ErrorModel
from protwin.sim.engine.intervals import DrawnMachine, PlanDraws, interval_of
from protwin.sim.engine.joint_intervals import draws_of, interval_of_groups, interval_of_slowest
from protwin.sim.engine.rank_groups import RankGroup, simulate_group_timings, simulate_groups
from protwin.sim.engine.simulator import simulate, simulate_timing
from tests.cli.saved import decoder
from tests.proof_size import examples
from tests.sim.engine.test_intervals import BOX, FACTORS, MODEL, PLANS, calibration, drawn_of
from tests.sim.engine.test_rank_groups import nodes, of
from tests.sim.hand_made import plan

NUM_TRUTHS: Final = examples(1_000, 90)
NUM_PARTS: Final = 4
NUM_KINDS: Final = 8
SECONDS: Final = {Lane.COMPUTE: 1.0, Lane.H2D: 0.9, Lane.D2H: 0.8, Lane.CPU_OPTIM: 1.5, Lane.COLLECTIVE: 0.6}


def stage(known: Calibration, chosen: Plan) -> PlanDraws:
    drawn = drawn_of(chosen, known)
    machine = DrawnMachine(ErrorModel.of(MODEL, BOX, known))
    return draws_of(drawn.schedule, drawn.durations_s.tolist(), ContentionModel.none(), machine)


# -- pipelines -------------------------------------------------------------------------------------------------------


def test_the_slowest_of_several_stages_is_expected_where_it_is_measured() -> None:
    """Stages alike, each with a model's error of its own: now one is slowest, and now another."""
    known = calibration(FACTORS, iteration_error_frac=0.1, num_runs=30)
    chosen = PLANS[1]
    stages = [stage(known, chosen) for _ in range(NUM_PARTS)]
    found = interval_of_slowest(stages)
    alone = interval_of(stages[0].iteration_s, stages[0].logs, stages[0].errors)
    assert found is not None
    assert alone is not None
    random = np.random.default_rng(3)
    measured_s = []
    bare = drawn_of(chosen, calibration({}))
    for _ in range(NUM_TRUTHS):
        factors = {k: f.value * math.exp(f.relative_std * random.standard_normal()) for k, f in FACTORS.items()}
        tasks = zip(bare.schedule.tasks, bare.durations_s.tolist(), strict=True)
        durations_s = [seconds * factors[task.kind] for task, seconds in tasks]
        true_s = simulate_timing(bare.schedule, durations_s, ContentionModel.none()).iteration_s
        errors = 0.1 * random.standard_t(known.num_runs, (20, NUM_PARTS))
        measured_s += (true_s * np.exp(errors.max(axis=1))).tolist()
    assert 0.85 <= share_within(found, measured_s) <= 0.95
    assert share_within(alone, measured_s) < 0.85, "the wrong variant: the stage that is predicted to be slowest"


def share_within(interval: Interval, measured_s: list[float]) -> float:
    return float(np.mean([interval.contains(seconds) for seconds in measured_s]))


def test_one_stage_is_a_plan_and_a_stage_that_never_is_slowest_does_not_count() -> None:
    known = calibration(FACTORS, iteration_error_frac=0.02)
    one = stage(known, PLANS[1])
    alone = interval_of(one.iteration_s, one.logs, one.errors)
    assert interval_of_slowest([one]) == alone
    fast = replace(one, iteration_s=one.iteration_s / 10)
    found = interval_of_slowest([fast, one])
    assert found is not None
    assert alone is not None
    assert (found.low, found.high) == pytest.approx((alone.low, alone.high), rel=0.02)


def test_a_stage_without_a_period_leaves_no_interval() -> None:
    one = stage(calibration(FACTORS), PLANS[1])
    assert interval_of_slowest([one, replace(one, logs=np.full(len(one.logs), np.nan))]) is None


# -- unlike ranks ----------------------------------------------------------------------------------------------------


def ranks(num_ranks: int) -> Plan:
    knobs = {"parallel": ParallelMode.REPLICATED, "num_ranks": num_ranks}
    return plan(MODEL, n_persist=1, n_buffer=2).model_copy(update=knobs)


def test_unlike_ranks_are_expected_where_they_are_measured() -> None:
    """Machines of several kinds, as fast by what is known of them, and each off by factors of its own."""
    chosen, known = ranks(NUM_KINDS), calibration(FACTORS | {TaskKind.ALL_REDUCE: Factor(relative_std=0.1)})
    schedule = compile_schedule(chosen, MODEL)
    expected = [SECONDS[task.lane] for task in schedule.tasks]
    alone = ContentionModel.none(num_ranks=NUM_KINDS)
    errors = ErrorModel.of(MODEL, BOX, known)
    parts = [draws_of(schedule, expected, alone, DrawnMachine(errors, f"{place}")) for place in range(NUM_KINDS)]
    predicted_s = simulate_group_timings(schedule, [expected] * NUM_KINDS, [alone] * NUM_KINDS)[0].iteration_s
    found = interval_of_groups(predicted_s, parts)
    one_kind = interval_of_groups(predicted_s, parts[:1])
    assert found is not None
    assert one_kind is not None
    random = np.random.default_rng(5)
    measured_s = []
    for _ in range(NUM_TRUTHS // 3):
        durations_s = []
        for _ in range(NUM_KINDS):
            logs = {kind: factor.relative_std * random.standard_normal() for kind, factor in known.factors.items()}
            pairs = zip(schedule.tasks, expected, strict=True)
            durations_s.append([one * math.exp(logs[task.kind]) for task, one in pairs])
        measured_s.append(simulate_group_timings(schedule, durations_s, [alone] * NUM_KINDS)[0].iteration_s)
    assert 0.85 <= share_within(found, measured_s) <= 0.97
    assert share_within(one_kind, measured_s) < 0.85, "the wrong variant: one kind for all"


def test_equal_groups_have_the_interval_of_one_rank_and_a_straggler_its_own() -> None:
    model, box = decoder(), nodes("a100-80gb-x8", 1)
    chosen = of(model, ParallelMode.DDP, 4)
    interval = simulate_groups(chosen, model, [RankGroup(2, box), RankGroup(2, box)]).record.iteration_interval_s
    assert interval is not None
    alone = simulate(chosen, model, box).iteration_interval_s
    assert alone is not None
    assert (interval.low, interval.high) == pytest.approx((alone.low, alone.high))
    late = simulate_groups(chosen, model, [RankGroup(3, box), RankGroup(1, box, slowdowns={Lane.COMPUTE: 3.0})])
    slower = late.record.iteration_interval_s
    assert slower is not None
    assert slower.contains(late.iteration_s)
    assert all(group.record.iteration_interval_s == slower for group in late.groups)
    assert slower.low > 1.5 * interval.low
