"""A better plan from the first measured steps of a training: what ``carry_out(replan_after=..., replan=...)`` asks.

The runtime measures and changes plans, and knows neither calibration nor search; it calls whoever it is given.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from ...shared.answers.plan_kind import Uncertainty
from ...shared.basics.errors import PlanError
from ...shared.basics.units import format_seconds
from ...shared.schema.calibration import Calibration
from ...shared.schema.plan import Plan
from ...shared.schema.record import Record
from ...shared.schema.workload import Workload
from ...sim.questions.by_name import simulate
from ...sim.searching.request import SearchRequest, Step
from ...sim.searching.search import search
from ...sim.space.space import SearchSpace
from .fit import Pair
from .updating import updated

_LEAST_GAIN_FRAC: Final = 0.02
"""Plans that lie closer are a tie: a prediction of one from runs of the other is worth no more."""


@dataclass
class Replanner:
    """Searches again once a training has been measured, within the budgets of ``request``.

    ``request``: its workload is the training's, its calibration what is known of the machine before, None for nothing;
    the optimizer's step becomes that of the plan that is carried out, and nothing lies on a disk.
    """

    request: SearchRequest
    tell: Callable[[str], None] | None = None
    """Hears what was decided; None: standard error."""
    calibration: Calibration | None = None
    """What was learnt, once it was asked."""

    def __call__(self, record: Record) -> Plan | None:
        """The plan to change to; None if none is faster by more than a tie.

        A tie is 2 %, or twice the standard error of the measured iterations if that is more.  Raises CalibrationError
        where ``updated`` does, and what ``search`` raises.
        """
        request, workload = self.request, self.request.workload
        if not isinstance(workload, Workload):
            raise PlanError("a training is replanned for its own micro-batch. Give its workload, not a global batch.")
        known = self.calibration = updated(request.calibration, [Pair(workload, record)], request.hardware)
        plan = record.plan
        tie_frac = max(_LEAST_GAIN_FRAC, 2 * record.iteration_noise_frac / math.sqrt(record.num_iterations))
        step = Step(
            micro_batches=plan.micro_batches,
            max_gradient_norm=plan.max_gradient_norm,
            optimizer=plan.optimizer,
            host_gradients=plan.host_gradients,
        )
        certain = Uncertainty(device_frac=tie_frac, host_frac=tie_frac, source="measured steps")
        # What is set by name is not left to the search (``may_use_disk``).
        space = SearchSpace.model_validate(request.space.model_dump(exclude_unset=True) | {"n_disk_state": 0})
        found = search(
            replace(
                request,
                calibration=known,
                step=step,
                space=space,
                effort=replace(request.effort, uncertainty=certain),
            )
        )
        stays_s = simulate(plan, workload, request.hardware, known).iteration_s
        changes_s = found.prediction.iteration_s
        is_better = found.plan != plan and changes_s < (1 - tie_frac) * stays_s
        self._say(
            f"measured {format_seconds(record.iteration_s)} per step; "
            + (
                f"changes to a plan of {format_seconds(changes_s)} predicted, {1 - changes_s / stays_s:.0%} less"
                if is_better
                else f"no plan is faster by more than {tie_frac:.0%}, so it stays"
            )
        )
        return found.plan if is_better else None

    def _say(self, line: str) -> None:
        if self.tell is not None:
            self.tell(line)
            return
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
