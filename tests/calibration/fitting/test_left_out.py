"""The error of plans that a fit has not seen, on a machine whose truth the test chose."""

from __future__ import annotations

import math

import pytest

from protwin.calibration.fitting.fit import Pair
from protwin.calibration.fitting.left_out import left_out_error_frac
from protwin.calibration.fitting.measurement_plans import spanning_plans
from protwin.shared.schema.calibration import Calibration
from protwin.shared.schema.record import Origin
from protwin.sim import simulate
from tests.calibration.fitting.test_fit import MACHINE, SLOW, a_workload, fitted, true_calibration
from tests.sim.hand_made import MACHINE as SLOW_MACHINE
from tests.sim.hand_made import machine, plan, workload

MODEL = workload(3)
BOX = machine()


def runs(slower: dict[int, float]) -> list[Pair]:
    """Four plans of the hand-made model, some of them so many times as slow from iteration to iteration."""
    chosen = [
        plan(MODEL, n_persist=0, n_buffer=n_buffer, n_checkpoint=n_checkpoint)
        for n_buffer in (2, 3)
        for n_checkpoint in (1, 2)
    ]
    truth = Calibration(hardware_name=SLOW_MACHINE, machine="here")
    records = [simulate(one, MODEL, BOX, truth) for one in chosen]
    return [
        Pair(
            MODEL,
            one.model_copy(update={"origin": Origin.MEASURED, "iteration_s": one.iteration_s * slower.get(place, 1.0)}),
        )
        for place, one in enumerate(records)
    ]


def error_frac(pairs: list[Pair]) -> float | None:
    truth = Calibration(hardware_name=SLOW_MACHINE, machine="here")
    return left_out_error_frac([(pair.workload, pair.measured) for pair in pairs], BOX, lambda places: truth)


def test_it_is_the_root_mean_square_of_the_errors_of_plans_left_out() -> None:
    assert error_frac(runs({})) == pytest.approx(0, abs=1e-6)
    errors = [1 / 1.25 - 1, 1 / 0.8 - 1, 0.0, 0.0]
    assert error_frac(runs({0: 1.25, 1: 0.8})) == pytest.approx(math.hypot(*errors) / 2, rel=1e-6)


def test_a_plan_is_predicted_by_the_others_alone() -> None:
    """The wrong variant, a fit to all runs, would ask for all of them."""
    asked: list[tuple[int, ...]] = []

    def fit(places: object) -> Calibration:
        asked.append(tuple(places))  # type: ignore[call-overload]
        return Calibration(hardware_name=SLOW_MACHINE, machine="here")

    pairs = runs({})
    left_out_error_frac([(pair.workload, pair.measured) for pair in pairs], BOX, fit)
    assert asked == [(1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)]


def test_runs_of_one_plan_are_left_out_together_and_two_plans_tell_nothing() -> None:
    one, other, *_ = runs({})
    assert error_frac([one, one, other, other]) is None


def test_a_plan_that_alone_has_a_kind_of_tasks_is_not_asked_about() -> None:
    pairs = runs({})
    resident = simulate(plan(MODEL, n_persist=3, n_buffer=0, n_checkpoint=0), MODEL, BOX)
    alone = Pair(MODEL, resident.model_copy(update={"origin": Origin.MEASURED, "iteration_s": 1e3}))
    # It has no kind of its own: its error counts.
    counted = error_frac([*pairs, alone])
    assert counted is not None
    assert counted > 0.1
    # Beside such plans alone, the only offloaded one has.
    others = [
        Pair(MODEL, simulate(plan(MODEL, n_persist=3, n_buffer=0, n_checkpoint=n), MODEL, BOX)) for n in (0, 1, 2)
    ]
    slow = Pair(MODEL, pairs[0].measured.model_copy(update={"iteration_s": 1e3}))
    assert error_frac([*others, slow]) == pytest.approx(0, abs=1e-6)


def test_a_fit_says_it() -> None:
    """A machine that is as the fit supposes is met within a percent; one whose runs scatter is not."""
    model = a_workload(4)
    chosen = list(spanning_plans(model).values())[:5]
    records = [simulate(one, model, MACHINE, true_calibration()) for one in chosen]
    quiet = [Pair(model, one.model_copy(update={"origin": Origin.MEASURED})) for one in records]
    first = quiet[0].measured
    phases = ("iteration_s", "forward_s", "backward_s", "optimizer_s")
    slowed = first.model_copy(update={name: 1.5 * getattr(first, name) for name in phases})
    scattering = [Pair(model, slowed), *quiet[1:]]
    errors = [fitted(pairs, SLOW).iteration_error_frac for pairs in (quiet, scattering)]
    assert errors[0] is not None
    assert errors[1] is not None
    assert errors[0] < 0.02 < 0.1 < errors[1]
