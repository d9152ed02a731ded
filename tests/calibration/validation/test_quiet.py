"""The quiet share of bursts on a machine that others use too, and what is said of it."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from protwin.calibration.fitting.measurement_plans import bootstrap_plans
from protwin.calibration.validation.quiet import (
    drift_frac,
    paces_of,
    quiet_places,
    quiet_record,
    quiet_seconds,
    scatter_frac,
    uncertainty_frac,
)
from protwin.shared.schema.calibration import Calibration, Factor
from protwin.shared.schema.record import Origin, Record
from protwin.shared.schema.schedule import TaskKind
from protwin.sim import simulate
from tests.calibration.fitting.test_fit import MACHINE, a_workload

TRUE_S = {"a": 0.1, "b": 0.3, "c": 0.05}


def rounds(num_rounds: int, slow: range, factor: float, seed: int = 0) -> dict[str, list[float]]:
    """Bursts that scatter by 1 %, in the ``slow`` rounds on a machine that is slower by ``factor``."""
    chance = random.Random(seed)
    return {
        name: [true_s * chance.gauss(1, 0.01) * (factor if turn in slow else 1) for turn in range(num_rounds)]
        for name, true_s in TRUE_S.items()
    }


def test_a_core_that_is_stolen_for_half_of_the_rounds_counts_for_nothing() -> None:
    found = rounds(12, range(6, 12), 1.5)
    for name, seconds in found.items():
        assert quiet_seconds(seconds) == pytest.approx(TRUE_S[name], rel=0.03)
        assert statistics.fmean(seconds) > 1.2 * TRUE_S[name], "the wrong variant"


def test_drift_is_the_machine_s_and_not_a_plan_s_own_noise() -> None:
    assert drift_frac(rounds(12, range(0), 1)) < 0.03
    assert drift_frac(rounds(12, range(6, 12), 1.5)) > 0.15
    noisy = rounds(12, range(0), 1) | {"d": [0.1 * (1 + turn % 2) for turn in range(12)]}
    assert scatter_frac(noisy["d"]) > 0.2
    assert drift_frac(noisy) < 0.05
    assert paces_of(rounds(12, range(6, 12), 1.5))[0] < 0.9 < 1.1 < paces_of(rounds(12, range(6, 12), 1.5))[-1]


def test_uncertainty_is_how_far_quiet_shares_of_other_bursts_lie_apart() -> None:
    """Against the spread over many measurements of the same kind, which nobody has when there is one."""
    for factor in (1.0, 1.3):
        many = [bursts(random.Random(seed), factor) for seed in range(200)]
        truth = statistics.pstdev(map(quiet_seconds, many)) / 0.1
        told = statistics.fmean(map(uncertainty_frac, many))
        assert truth / 2 < told < 2 * truth
    assert uncertainty_frac([0.1, 0.1]) == math.inf


def bursts(chance: random.Random, factor: float) -> list[float]:
    """Twelve of one plan, one in three of which is slower by ``factor``."""
    return [0.1 * chance.gauss(1, 0.01) * (factor if chance.random() < 1 / 3 else 1) for _ in range(12)]


def test_one_record_of_the_quiet_bursts() -> None:
    workload = a_workload(4)
    record = simulate(bootstrap_plans(workload)[2], workload, MACHINE).model_copy(update={"origin": Origin.MEASURED})
    bursts = [_slower(record, factor) for factor in (1.4, 1.0, 1.3, 1.02, 1.5, 1.6)]
    assert quiet_places([burst.iteration_s for burst in bursts]) == [1, 3]
    found = quiet_record(bursts)
    assert found.iteration_s == pytest.approx(1.01 * record.iteration_s)
    for one, quiet in zip(record.tasks, found.tasks, strict=True):
        assert quiet.duration_s == pytest.approx(1.01 * one.duration_s)
        assert quiet.end_s == pytest.approx(1.01 * one.end_s)
    assert found.memory in [bursts[place].memory for place in (1, 3)]
    assert found.iteration_noise_frac == pytest.approx(0.19 / 1.35, rel=0.1), "of all bursts, not of the quiet ones"


def test_drift_widens_what_is_promised() -> None:
    """A link that is throttled in the middle: the calibration allows for what the rounds differ by."""
    workload = a_workload(4)
    plan = bootstrap_plans(workload)[1]

    def half_width_frac(noise_frac: float) -> float:
        known = Calibration(
            hardware_name=MACHINE.name,
            machine=MACHINE.name,
            factors={kind: Factor(relative_std=0.01) for kind in TaskKind},
            iteration_noise_frac=noise_frac,
            iteration_error_frac=0.02,
            num_runs=5,
            fitted_to=(workload.model_name,),
        )
        predicted = simulate(plan, workload, MACHINE, known)
        assert predicted.iteration_interval_s is not None
        return predicted.iteration_interval_s.half_width_frac(predicted.iteration_s)

    calm, disturbed = (drift_frac(rounds(12, slow, 1.3)) for slow in (range(0), range(6, 12)))
    assert half_width_frac(disturbed) > 1.5 * half_width_frac(calm)


def _slower(record: Record, factor: float) -> Record:
    tasks = tuple(
        one.model_copy(update={name: factor * getattr(one, name) for name in ("start_s", "end_s", "duration_s")})
        for one in record.tasks
    )
    return record.model_copy(update={"iteration_s": factor * record.iteration_s, "tasks": tasks})
