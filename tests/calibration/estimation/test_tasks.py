"""What tasks of one kind cost, from tasks of many sizes."""

from __future__ import annotations

import numpy as np
import pytest

from protwin.calibration.estimation import evidence, tasks
from protwin.calibration.estimation.evidence import estimate_evidence, evidence_of
from protwin.calibration.estimation.linear import Prior
from protwin.calibration.estimation.tasks import Coefficient, estimate_tasks
from protwin.shared.schema.schedule import TaskKind
from tests.calibration.fitting.test_fit import MACHINE

SMALL_S = np.full(4, 1e-6)
LARGE_S = np.repeat([1e-3, 2e-3, 3e-3, 4e-3], 6)
MODELLED_S = np.concatenate([SMALL_S, LARGE_S])
MEASURED_S = np.concatenate([np.full(4, 3e-3), 1.5 * LARGE_S])
"""Four chunks that hold hardly anything were measured while their lane was being woken up."""


def slopes() -> tuple[float, float]:
    """By tasks one by one, and by sums."""
    none = np.zeros_like(MODELLED_S)
    one_by_one = estimate_tasks(TaskKind.GATHER, MODELLED_S, none, MEASURED_S, MACHINE)
    by_sums = estimate_evidence(evidence_of(MODELLED_S, none, MEASURED_S), MACHINE)
    return one_by_one[Coefficient.SLOPE], by_sums[Coefficient.SLOPE]


def test_tasks_without_work_do_not_say_alone_what_all_others_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant weighs rows by modelled seconds alone: overhead is what the smallest took."""
    one_by_one, by_sums = slopes()
    # The usual task is a median there and a mean here.
    assert one_by_one == pytest.approx(by_sums, rel=0.03)
    monkeypatch.setattr(tasks, "scatter", np.sqrt)
    wrong, _ = slopes()
    assert wrong < 0.7 * one_by_one


HARDLY_ANY_S = np.geomspace(9e-7, 1.1e-6, 12)
STARTING_S = 2e-4
WORK_S = 5e-3
"""Of a task of a larger model."""


def hardly_any_work(rng: np.random.Generator) -> tuple[np.ndarray, float]:
    """(12,) what such tasks took, and what a larger one takes, of a machine that the test draws."""
    slope = float(np.exp(rng.normal(0, 0.3)))
    taken_s = (slope * HARDLY_ANY_S + STARTING_S) * np.exp(rng.normal(0, 0.05, len(HARDLY_ANY_S)))
    return taken_s, slope * WORK_S + STARTING_S


@pytest.mark.parametrize("is_by_sums", [False, True])
def test_what_starting_takes_is_not_carried_to_larger_tasks_as_work(
    is_by_sums: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Predictions for larger tasks lie within a factor of 5, and the truth within three standard deviations.

    The wrong variant knows nothing of a slope, so that it takes microseconds of work for all that tasks cost.
    """
    rng, none = np.random.default_rng(4), np.zeros_like(HARDLY_ANY_S)

    def worst() -> float:
        errors = []
        for _ in range(20):
            taken_s, larger_s = hardly_any_work(rng)
            if is_by_sums:
                found = estimate_evidence(evidence_of(HARDLY_ANY_S, none, taken_s), MACHINE)
            else:
                found = estimate_tasks(TaskKind.GATHER, HARDLY_ANY_S, none, taken_s, MACHINE)
            columns = np.array([[WORK_S, 1.0], [HARDLY_ANY_S.mean(), 1.0]])
            (said_s, usual_s) = columns @ found.values
            (std_s, usual_std_s) = np.sqrt(np.einsum("ij,jk,ik->i", columns, found.covariance, columns))
            assert usual_s == pytest.approx(taken_s.mean(), rel=0.1)
            errors.append(abs(np.log(said_s / larger_s)))
            if not is_wrong:
                assert abs(said_s - larger_s) < 3 * std_s
                assert usual_std_s < 0.1 * usual_s
        return float(max(errors))

    is_wrong = False
    assert worst() < np.log(5)
    is_wrong = True
    for module in (tasks, evidence):
        monkeypatch.setattr(module, "work_prior", lambda _: Prior(1.0, 1e9))
    assert worst() > np.log(10)
