"""What passes between iterations is the loop's own work, not a wait for the next iteration's weights."""

from __future__ import annotations

from protwin.calibration.fitting.fit import gap_of
from protwin.calibration.fitting.measurement_plans import bootstrap_plans
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.schedule import Lane
from protwin.sim import simulate

from .test_fit import MACHINE, a_workload, true_calibration


def test_a_wait_for_weights_is_no_gap() -> None:
    """The simulator's loop has no work of its own; the wrong variant counts all from one iteration to the next."""
    workload, waits = a_workload(), 0
    for plan in bootstrap_plans(workload):
        schedule, record = compile_schedule(plan, workload), simulate(plan, workload, MACHINE, true_calibration())
        gap = gap_of(record, schedule)
        assert gap.seconds < 1e-6 * record.iteration_s
        last = schedule.lanes[Lane.COMPUTE][-1]
        raw_s = record.iteration_s - next(timing.end_s for timing in record.tasks if timing.task == last)
        waits += gap.is_hidden and raw_s > 0.005 * record.iteration_s
    assert waits > 0
