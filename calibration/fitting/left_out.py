"""How far a fit is off where it has not looked: every plan in turn is left out of it, and predicted.

Errors of the runs that a fit has seen say how well it bends.  What a prediction is worth says the error of a plan that
had no part in it (leave-one-out cross-validation: Stone, doi 10.1111/j.2517-6161.1974.tb00994.x).  With it comes the
run-to-run noise, since every plan is measured once.

A plan that alone has some kind of tasks is not asked about: without it nobody knows that kind, and the error would be
one of predictions that nobody makes with the whole fit.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from ...shared.compile.compile import compile_schedule
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import Hardware
from ...shared.schema.record import Record
from ...shared.schema.schedule import TaskKind
from ...shared.schema.workload import Workload
from ...sim.costs.contention import ContentionModel
from ...sim.costs.task_costs import CostModel
from ...sim.engine.simulator import simulate_timing

_FEWEST: Final = 2
"""Plans that must be left to fit to."""


def left_out_error_frac(
    runs: Sequence[tuple[Workload, Record]], hardware: Hardware, fit: Callable[[Iterable[int]], Calibration]
) -> float | None:
    """Root mean square of the relative errors of iterations, each plan predicted by a fit to the others.

    ``runs``: workloads and what was measured of them.  ``fit``: to those at some places.  None where no plan can be
    left out.
    """
    plans = [(workload.identity, measured.plan_id) for workload, measured in runs]
    distinct = list(dict.fromkeys(plans))
    if len(distinct) <= _FEWEST:
        return None
    squares = []
    for plan in distinct:
        left, others = ([place for place, one in enumerate(plans) if (one == plan) is own] for own in (True, False))
        if _kinds_of(runs[place][1] for place in left) - _kinds_of(runs[place][1] for place in others):
            continue
        calibration = fit(others)
        for place in left:
            squares.append(iteration_error_frac(*runs[place], hardware, calibration) ** 2)
    return math.sqrt(sum(squares) / len(squares)) if squares else None


def _kinds_of(records: Iterable[Record]) -> set[TaskKind]:
    return {task.kind for record in records for task in record.tasks}


def iteration_error_frac(workload: Workload, measured: Record, hardware: Hardware, calibration: Calibration) -> float:
    """Signed relative error of the iteration that ``calibration`` predicts for the plan of ``measured``."""
    plan = measured.plan
    schedule = compile_schedule(plan, workload)
    durations_s = CostModel.of(workload, hardware, calibration, num_ranks=plan.num_ranks).durations_s(schedule)
    timing = simulate_timing(schedule, durations_s, ContentionModel.for_plan(plan, hardware, calibration))
    return timing.iteration_s / measured.iteration_s - 1


def model_error_frac(
    runs: Sequence[tuple[Workload, Record]], hardware: Hardware, calibration: Calibration
) -> float | None:
    """Mean signed relative error of the iterations of one model, whose runs had no part in ``calibration``.

    What its plans have in common is what does not carry over from other models.  Plans with some kind of tasks that the
    calibration has no run of, and no like, do not count; None where no plan does.
    """
    errors = [
        iteration_error_frac(workload, measured, hardware, calibration)
        for workload, measured in runs
        if all(calibration.fitted_kind(kind) in calibration.factors for kind in _kinds_of([measured]))
    ]
    return statistics.fmean(errors) if errors else None
