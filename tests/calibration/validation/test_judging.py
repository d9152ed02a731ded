"""What is said of predictions: who is to blame, peaks for measured times, and files of before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

from protwin.calibration.fitting.subject import Subject
from protwin.calibration.validation.drawing import Draw, draw_plans
from protwin.calibration.validation.fidelity import Fidelity
from protwin.calibration.validation.judging import Judgement, retimed_peak_bytes
from protwin.calibration.validation.tables import fidelity_tables
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.calibration import Calibration, Factor
from protwin.shared.schema.record import Origin
from protwin.shared.schema.schedule import TaskKind
from protwin.sim import simulate
from tests.calibration.fitting.test_budgeted import swappable
from tests.calibration.fitting.test_fit import MACHINE, a_workload

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
SLOWER = {TaskKind.FORWARD: 2.0, TaskKind.BACKWARD: 2.0, TaskKind.GATHER: 30.0, TaskKind.CPU_ADAM: 60.0}


def calibration(**slow: float) -> Calibration:
    """All kinds as they are, but ``slow`` ones."""
    known = dict.fromkeys(TaskKind, 1.0) | {TaskKind(kind): value for kind, value in slow.items()}
    factors = {kind: Factor(value=value) for kind, value in known.items()}
    return Calibration(hardware_name=MACHINE.name, machine=MACHINE.name, factors=factors)


@pytest.mark.parametrize("culprit", SLOWER)
def test_the_kind_that_is_slower_than_predicted_is_to_blame(culprit: TaskKind) -> None:
    """A machine on which it takes far longer, and a prediction that does not know it."""
    workload = swappable(a_workload(4))
    subject = Subject(nn.Identity(), {}, workload, MACHINE)
    found, truth = Judgement(), calibration(**{culprit: SLOWER[culprit]})
    for number, plan in enumerate(draw_plans(workload, Draw(seed=1), number=4)):
        measured = simulate(plan, workload, MACHINE, truth).model_copy(update={"origin": Origin.MEASURED})
        found.add(subject, calibration(), str(number), [measured] * 3)
        schedule = compile_schedule(plan, workload)
        # The account of memory is the prediction's own: for the times of its tasks it gives its peak.
        assert retimed_peak_bytes(schedule, measured) == measured.peak_device_bytes
    kinds = found.found_kinds()
    measured_s = sum(plan.measured_iteration_s for plan in found.plans)
    error_frac = sum(plan.predicted_iteration_s for plan in found.plans) / measured_s - 1
    assert sum(kind.blame_frac for kind in kinds) == pytest.approx(error_frac)
    assert error_frac < -0.03
    assert kinds[0].kind is culprit
    assert kinds[0].measured_s > 1.5 * kinds[0].predicted_s


@pytest.mark.parametrize("path", sorted(RESULTS.glob("fidelity*.json")), ids=lambda path: path.name)
def test_results_that_were_kept_before_can_still_be_read(path: Path) -> None:
    for one in json.loads(path.read_text(encoding="utf-8")):
        found = Fidelity.model_validate(one)
        assert len(found.plans) == len(one["plans"])
        assert fidelity_tables(found)
