"""Plans chosen by the upper end of their time, and plans that intervals cannot tell apart."""

from __future__ import annotations

from typing import Any

import pytest

from protwin.shared.answers.search_result import Risk, SearchResult
from protwin.shared.schema.calibration import Calibration, Factor
from protwin.shared.schema.schedule import TaskKind
from protwin.sim.costs.contention import ContentionModel
from protwin.sim.costs.task_costs import CostModel
from protwin.sim.engine.drawn_timings import DrawnTimings
from protwin.sim.engine.error_sources import ErrorModel
from protwin.sim.engine.intervals import DrawnMachine, interval_of, time_logs
from protwin.sim.engine.simulator import simulate_plan
from protwin.sim.searching.confidence import CALIBRATED, DATA_SHEETS, NO_UNCERTAINTY, uncertainty_of
from protwin.sim.searching.request import Effort, SearchRequest
from protwin.sim.searching.search import search
from protwin.sim.space.space import SearchSpace
from tests.sim.hand_made import CHUNK_BYTES, MACHINE, machine, workload

MODEL = workload(4)
BOX = machine(gather_s=0.4, offload_s=0.4, cpu_adam_s=0.4)
_HOST = (TaskKind.GATHER, TaskKind.GRADIENT_OFFLOAD, TaskKind.CPU_ADAM)


def calibration(host_std: float, **fields: Any) -> Calibration:
    """Compute is known, and what copies and the host take is not."""
    stds = dict.fromkeys(TaskKind, 0.0) | dict.fromkeys(_HOST, host_std)
    factors = {kind: Factor(relative_std=std) for kind, std in stds.items()}
    known: dict[str, Any] = {"iteration_error_frac": 0.001, "fitted_to": ("hand-made",), "num_runs": 9} | fields
    return Calibration(hardware_name=MACHINE, machine="here", factors=factors, **known)


def found(risk: Risk, known: Calibration) -> SearchResult:
    return search(
        SearchRequest(
            workload=MODEL,
            hardware=BOX,
            calibration=known,
            margin_frac=None,
            device_budget_bytes=7_900,
            host_budget_bytes=10**6,
            space=SearchSpace(chunk_bytes=(CHUNK_BYTES,)),
            effort=Effort(tolerance_frac=0.0, uncertainty=NO_UNCERTAINTY),
            risk=risk,
        )
    )


def high_s(result: SearchResult) -> float:
    assert result.prediction.iteration_interval_s is not None
    return result.prediction.iteration_interval_s.high


def test_the_upper_end_is_the_least_of_all_plans_that_were_looked_at() -> None:
    known = calibration(1.0)
    by_mean, by_high = found(Risk.MEAN, known), found(Risk.HIGH, known)
    assert by_high.prediction.iteration_s > by_mean.prediction.iteration_s
    assert high_s(by_high) < high_s(by_mean)
    assert by_high.num_weighed > 1
    assert by_high.passed_over_for_risk is not None
    assert by_high.passed_over_for_risk.plan == by_mean.plan
    for one in (*by_mean.alternatives, *by_mean.pareto):
        assert one.iteration_interval_s is not None
        assert high_s(by_high) <= one.iteration_interval_s.high * (1 + 1e-9)


def test_where_all_are_equally_certain_the_fastest_has_the_least_upper_end() -> None:
    known = calibration(0.0)
    by_mean, by_high = found(Risk.MEAN, known), found(Risk.HIGH, known)
    assert by_high.plan == by_mean.plan
    assert by_high.passed_over_for_risk is None


def test_a_search_and_a_simulation_have_one_interval() -> None:
    """The search draws by its arrays of families, the simulation by its schedule."""
    known = calibration(0.3, arrival_s_per_byte={TaskKind.FORWARD: 1e-4}, arrival_std_s_per_byte={})
    result = found(Risk.MEAN, known)
    errors, costs = ErrorModel.of(MODEL, BOX, known), CostModel.of(MODEL, BOX, known)
    for one in result.pareto:
        contention = ContentionModel.for_plan(one.plan, BOX, known)
        schedule, timing = simulate_plan(one.plan, MODEL, costs, contention)
        drawn = DrawnTimings(schedule, costs.durations_s(schedule), contention, timing)
        expected = interval_of(timing.iteration_s, time_logs(drawn, DrawnMachine(errors)), errors)
        assert one.iteration_interval_s is not None
        assert expected is not None
        assert one.iteration_interval_s.low == pytest.approx(expected.low, rel=1e-4)
        assert one.iteration_interval_s.high == pytest.approx(expected.high, rel=1e-4)


def test_plans_are_told_apart_where_their_difference_is_certain() -> None:
    sure, unsure = found(Risk.MEAN, calibration(0.0)), found(Risk.MEAN, calibration(0.0, iteration_error_frac=0.5))
    slower = [one for one in sure.alternatives if one.iteration_s > 1.05 * sure.prediction.iteration_s]
    assert slower
    assert not any(one.is_near_tie for one in slower)
    assert all(one.is_near_tie for one in unsure.alternatives)
    own = next(one for one in sure.pareto if one.plan == sure.plan)
    assert own.ratio_interval is not None
    assert (own.ratio_interval.low, own.ratio_interval.high) == (1, 1)


def test_a_comparison_is_worth_what_the_calibration_says_of_itself() -> None:
    assert uncertainty_of(None) is DATA_SHEETS
    assert uncertainty_of(calibration(0.1, iteration_error_frac=None)) is CALIBRATED
    near, far = (uncertainty_of(calibration(0.1, iteration_error_frac=frac)) for frac in (0.02, 0.1))
    assert near.device_frac < far.device_frac < 0.2
    assert near.device_frac < near.host_frac
    certain = uncertainty_of(calibration(0.0, iteration_error_frac=0.02))
    assert certain.device_frac == certain.host_frac
