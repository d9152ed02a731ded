"""What tasks of one kind cost, from tasks of many sizes."""

from __future__ import annotations

import numpy as np
import pytest

from protwin.calibration.estimation import tasks
from protwin.calibration.estimation.evidence import estimate_evidence, evidence_of
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
