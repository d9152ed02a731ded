"""How far a fit is off where it has not looked: every plan in turn is left out of it, and predicted.

Errors of the runs that a fit has seen say how well it bends.  What a prediction is worth says the error of a plan that
had no part in it (leave-one-out cross-validation: Stone, doi 10.1111/j.2517-6161.1974.tb00994.x).  With it comes the
run-to-run noise, since every plan is measured once.

A plan that alone has some kind of tasks is not asked about: without it nobody knows that kind, and the error would be
one of predictions that nobody makes with the whole fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from ...shared.compile.compile import compile_schedule
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import Hardware
from ...shared.schema.schedule import TaskKind
from ...sim.costs.contention import ContentionModel
from ...sim.costs.task_costs import CostModel
from ...sim.engine.simulator import simulate_timing

if TYPE_CHECKING:
    from .fit import Pair

_FEWEST: Final = 2
"""Plans that must be left to fit to."""


def left_out_error_frac(
    pairs: Sequence[Pair], hardware: Hardware, fit: Callable[[Sequence[Pair]], Calibration]
) -> float | None:
    """Root mean square of the relative errors of iterations, each plan predicted by a fit to the others.

    ``fit``: to some of ``pairs``, without this figure.  None where no plan can be left out.
    """
    plans = list(dict.fromkeys((pair.workload.identity, pair.measured.plan_id) for pair in pairs))
    if len(plans) <= _FEWEST:
        return None
    squares = []
    for plan in plans:
        left = [pair for pair in pairs if (pair.workload.identity, pair.measured.plan_id) == plan]
        others = [pair for pair in pairs if (pair.workload.identity, pair.measured.plan_id) != plan]
        if _kinds_of(left) - _kinds_of(others):
            continue
        calibration = fit(others)
        squares += [(_predicted_s(pair, hardware, calibration) / pair.measured.iteration_s - 1) ** 2 for pair in left]
    return math.sqrt(sum(squares) / len(squares)) if squares else None


def _kinds_of(pairs: Sequence[Pair]) -> set[TaskKind]:
    return {task.kind for pair in pairs for task in pair.measured.tasks}


def _predicted_s(pair: Pair, hardware: Hardware, calibration: Calibration) -> float:
    plan = pair.measured.plan
    schedule = compile_schedule(plan, pair.workload)
    durations_s = CostModel.of(pair.workload, hardware, calibration, num_ranks=plan.num_ranks).durations_s(schedule)
    return simulate_timing(schedule, durations_s, ContentionModel.for_plan(plan, hardware, calibration)).iteration_s
