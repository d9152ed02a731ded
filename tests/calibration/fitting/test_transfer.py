"""What a calibration of several models knows of how far it is off for another one.

A machine is off by a factor that differs from model to model, with a spread that the test knows; a model that was not
among the fitted ones is drawn from the same spread.
"""

from __future__ import annotations

import math
import random
import statistics
from functools import lru_cache
from typing import Final

import pytest

from protwin.calibration.fitting.fit import Pair
from protwin.calibration.fitting.measurement_plans import bootstrap_plans
from protwin.calibration.fitting.updating import updated
from protwin.shared.schema.calibration import Calibration
from protwin.shared.schema.record import Origin
from protwin.shared.schema.workload import Workload
from protwin.sim import simulate
from protwin.sim.engine.error_sources import TRANSFER_STD, ErrorModel, transfer_of
from tests.calibration.fitting.test_fit import MACHINE, a_workload, true_calibration
from tests.calibration.fitting.test_updating import told
from tests.calibration.validation.test_changes import scaled
from tests.proof_size import examples, some_quick

NUM_MACHINES: Final = examples(60, 5)


def model(number: int) -> Workload:
    return a_workload(2).model_copy(update={"model_name": f"model {number}", "model_hash": f"{number}"})


@lru_cache(maxsize=16)
def run(number: int) -> Pair:
    """Of a plan that has all kinds of tasks but recomputation, on the machine that all models are near."""
    workload = model(number)
    plan = next(plan for plan in bootstrap_plans(workload) if not plan.n_persist and not plan.n_checkpoint)
    record = simulate(plan, workload, MACHINE, true_calibration().model_copy(update={"contention": ()}))
    return told(Pair(workload, record.model_copy(update={"origin": Origin.MEASURED})))


def off_by(number: int, log: float) -> Pair:
    """The run where the machine is slower by exp(``log``) for this model."""
    pair = run(number)
    return told(Pair(pair.workload, scaled(pair.measured, math.exp(log))))


def known(logs: list[float]) -> Calibration:
    found = updated(None, [off_by(number, log) for number, log in enumerate(logs)], MACHINE)
    # Nothing else is unsure.
    factors = {kind: factor.model_copy(update={"relative_std": 0.0}) for kind, factor in found.factors.items()}
    return found.model_copy(
        update={
            "factors": factors,
            "iteration_error_frac": 0.0,
            "iteration_noise_frac": 0.0,
            "arrival_std_s_per_byte": {},
        }
    )


@some_quick("spread", [0.03, 0.2], quick=1)
def test_another_model_is_expected_where_it_is_measured(spread: float) -> None:
    chance = random.Random(1)
    inside, stated = [], []
    another = off_by(99, 0.0)
    for _ in range(NUM_MACHINES):
        found = known([chance.gauss(0, spread) for _ in range(4)])
        predicted = simulate(another.measured.plan, another.workload, MACHINE, found).iteration_interval_s
        unmeasured = found.model_copy(update={"transfer_error_frac": None})
        usual = simulate(another.measured.plan, another.workload, MACHINE, unmeasured).iteration_interval_s
        assert predicted is not None
        assert usual is not None
        measured_s = [another.measured.iteration_s * math.exp(chance.gauss(0, spread)) for _ in range(200)]
        inside += [predicted.contains(seconds) for seconds in measured_s]
        stated += [usual.contains(seconds) for seconds in measured_s]
    assert 0.85 <= statistics.fmean(inside) <= 0.97
    # The wrong variant: what is stated, where nothing was measured.
    assert not 0.85 <= statistics.fmean(stated) <= 0.97


def test_two_models_say_nothing_yet_and_a_model_that_was_fitted_to_has_no_transfer() -> None:
    logs = [0.1, -0.1, 0.05]
    assert transfer_of("model 99", known(logs[:2])) == (TRANSFER_STD, None)
    three = known(logs)
    assert transfer_of("model 1", three) == (0.0, None)
    std, freedom = transfer_of("model 99", three)
    assert (std, freedom) == (three.transfer_error_frac, 3)
    assert ErrorModel.of(model(99), MACHINE, three).transfer_freedom == 3
    assert transfer_of("model 99", Calibration(hardware_name=MACHINE.name, machine="here")) == (TRANSFER_STD, None)


def test_a_new_model_tells_before_anything_is_learnt_from_it() -> None:
    """One after another: the second is predicted from the first, the third from both; and it says so once."""
    found = updated(None, [off_by(0, 0.0)], MACHINE)
    assert found.transfer_error_frac is None
    second = updated(found, [off_by(1, 0.1)], MACHINE)
    assert second.transfer_error_frac == pytest.approx(1 - math.exp(-0.1), rel=0.05)
    assert updated(second, [off_by(1, 0.3)], MACHINE).num_transfers == second.num_transfers == 1
    third = updated(second, [off_by(2, 0.5)], MACHINE)
    assert third.num_transfers == 2
    assert third.transfer_error_frac is not None
    assert third.transfer_error_frac > second.transfer_error_frac
    std, freedom = transfer_of("model 99", third)
    assert (std, freedom) == (third.transfer_error_frac, 2)
