"""What passes before a task's own work begins is part of what the task costs.

The machine is the simulator with seconds that every task costs besides its work.  Its records hide them, as a lane's
clock does: it reads when the work begins.
"""

from __future__ import annotations

import pytest

from protwin.calibration.fitting import fit
from protwin.calibration.fitting.fit import Pair
from protwin.calibration.fitting.measurement_plans import bootstrap_plans, spanning_plans
from protwin.calibration.fitting.since_ready import seconds_since_ready
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.calibration import Calibration
from protwin.shared.schema.record import Origin, Record
from protwin.shared.schema.schedule import Lane, TaskKind
from protwin.shared.schema.workload import Workload
from protwin.sim import simulate

from .test_fit import MACHINE, a_workload, fitted

BEFORE_S = {kind: 0.0004 * (1 + place % 4) for place, kind in enumerate(TaskKind)}
SECRET = Calibration(hardware_name=MACHINE.name, machine="here", overhead_s=BEFORE_S)


def hidden(record: Record) -> Record:
    """As a lane's clock tells it: each task's span without what passes before its work."""
    tasks = [
        timing.model_copy(
            update={
                "start_s": timing.start_s + BEFORE_S[timing.kind],
                "duration_s": timing.duration_s - BEFORE_S[timing.kind],
            }
        )
        for timing in record.tasks
    ]
    return record.model_copy(update={"origin": Origin.MEASURED, "tasks": tuple(tasks)})


def own_spans(measured: Record, schedule: object) -> dict[int, float]:
    """The wrong variant: a task costs what its own span says."""
    return {timing.task: timing.duration_s for timing in measured.tasks}


def worst_error(workload: Workload) -> float:
    """Of iterations that are predicted by what the hidden runs tell."""
    pairs = [Pair(workload, hidden(simulate(plan, workload, MACHINE, SECRET))) for plan in bootstrap_plans(workload)]
    found = fitted(pairs, ())
    errors = []
    for plan in spanning_plans(workload).values():
        truth_s = simulate(plan, workload, MACHINE, SECRET).iteration_s
        errors.append(abs(simulate(plan, workload, MACHINE, found).iteration_s / truth_s - 1))
    return max(errors)


def test_every_task_has_what_passes_before_it() -> None:
    """Seconds of every task as the machine has them, but for the first one of an iteration."""
    workload = a_workload()
    for plan in (*bootstrap_plans(workload), *spanning_plans(workload).values()):
        schedule, record = compile_schedule(plan, workload), simulate(plan, workload, MACHINE, SECRET)
        found, own = seconds_since_ready(hidden(record), schedule), own_spans(hidden(record), schedule)
        first = schedule.lanes[Lane.COMPUTE][0]
        assert found[first] == own[first]
        for timing in record.tasks:
            if timing.task != first:
                assert found[timing.task] == pytest.approx(timing.duration_s, rel=1e-9, abs=1e-9)


def test_predictions_have_it() -> None:
    """Within 1 % of the machine, for plans that nothing was fitted to."""
    assert worst_error(a_workload()) < 0.01


@pytest.mark.slow
def test_spans_alone_predict_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "seconds_since_ready", own_spans)
    assert worst_error(a_workload()) > 0.03
