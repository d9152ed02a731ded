"""Factors come back within what they are said to be unsure by, by seed, of machines whose truth the test drew.

Records are simulated under that truth, with noise of single tasks and of whole runs; what is counted is how often the
truth lies within a factor's central 90 %.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from protwin.calibration.estimation.tasks import Coefficient
from protwin.calibration.fitting.fit import Pair, fit
from protwin.calibration.fitting.measurement_plans import bootstrap_plans, spanning_plans
from protwin.calibration.fitting.updating import updated
from protwin.shared.schema.calibration import Calibration, Factor
from protwin.shared.schema.record import Origin
from protwin.shared.schema.schedule import Schedule, TaskKind
from protwin.sim import simulate
from protwin.sim.costs.task_costs import CostModel
from protwin.sim.engine.error_sources import RUN_NOISE
from tests.calibration.fitting.test_fit import MACHINE, SLOW, a_workload
from tests.calibration.fitting.test_updating import told

TAIL = 1.645
"""Standard deviations of the central 90 % of a normal distribution."""
UNSURE = 0.2
"""Of a factor: kinds that are less sure than this have hardly any work here."""


def a_truth(rng: np.random.Generator) -> Calibration:
    """A machine of which the description is off by a third, kind by kind."""
    return Calibration(
        hardware_name=MACHINE.name,
        machine=MACHINE.name,
        software={"torch": "2.9"},
        factors={kind: Factor(value=float(np.exp(rng.normal(0, 0.35)))) for kind in TaskKind},
        overhead_s={kind: float(rng.uniform(0, 3e-4)) for kind in TaskKind},
        contention=SLOW,
    )


def records_of(truth: Calibration, rng: np.random.Generator, *, task_std: float, run_std: float) -> list[Pair]:
    """What runs of the usual plans record on it."""
    workload, found = a_workload(), []
    exact = CostModel.durations_s
    for plan in bootstrap_plans(workload):
        pace = math.exp(rng.normal(0, run_std))

        def noisy(model: CostModel, schedule: Schedule, pace: float = pace) -> tuple[float, ...]:
            every = exact(model, schedule)
            return tuple(float(one) for one in np.array(every) * pace * np.exp(rng.normal(0, task_std, len(every))))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CostModel, "durations_s", noisy)
            record = simulate(plan, workload, MACHINE, truth).model_copy(update={"origin": Origin.MEASURED})
        found.append(told(Pair(workload, record), iteration_noise_frac=run_std / RUN_NOISE))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("task_std", "run_std"), [(0.03, 0.003), (0.02, 0.03), (0.1, 0.01)])
def test_factors_come_back_within_their_uncertainty(task_std: float, run_std: float) -> None:
    """Of 30 machines, 80 to 97 % of all factors that are known at all, by both ways to fit them.

    Plans that nothing was fitted to are predicted far better than by the description.
    """
    inside: dict[str, list[bool]] = {"at once": [], "by sums": []}
    errors: dict[str, list[float]] = {"fitted": [], "bare": []}
    for seed in range(30):
        rng = np.random.default_rng(seed)
        truth = a_truth(rng)
        pairs = records_of(truth, rng, task_std=task_std, run_std=run_std)
        at_once = fit(pairs, MACHINE, contention=SLOW, machine=MACHINE.name, software={"torch": "2.9"})
        lanes_alone = truth.model_copy(update={"factors": {}, "overhead_s": {}})
        for name, found in (("at once", at_once.calibration), ("by sums", updated(lanes_alone, pairs, MACHINE))):
            inside[name] += [
                abs(factor.value - truth.factor(kind)) <= TAIL * factor.relative_std * factor.value
                for kind, factor in found.factors.items()
                if factor.relative_std < UNSURE
            ]
        for plan in list(spanning_plans(a_workload()).values())[seed % 4 :: 6]:
            seconds = simulate(plan, a_workload(), MACHINE, truth).iteration_s
            for name, known in (("fitted", at_once.calibration), ("bare", None)):
                predicted = simulate(plan, a_workload(), MACHINE, known)
                errors[name].append(math.log(predicted.iteration_s / seconds))
    for found_inside in inside.values():
        assert len(found_inside) >= 120
        assert 0.8 <= np.mean(found_inside) <= 0.97
    assert np.std(errors["fitted"]) < 0.2 * np.std(errors["bare"])


def test_two_tasks_do_not_make_a_factor_sure() -> None:
    """Two plans step on the device with some work: their two tasks fit two coefficients exactly, whatever they took."""
    rng = np.random.default_rng(0)
    pairs = records_of(a_truth(rng), rng, task_std=0.03, run_std=0.003)
    found = fit(pairs, MACHINE, contention=SLOW, machine=MACHINE.name, software={})
    of_device = found.estimates[TaskKind.DEVICE_ADAM]
    assert of_device.num_rows == 2
    assert of_device.std(Coefficient.SLOPE) > 0.03 * of_device[Coefficient.SLOPE]
    of_backward = found.calibration.factors[TaskKind.BACKWARD]
    assert of_backward.relative_std < 0.02
