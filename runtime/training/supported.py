"""What the runtime carries out of all that a plan can say."""

from __future__ import annotations

from ...shared.basics.errors import PlanError
from ...shared.schema.plan import Plan


def check_carried_out(plan: Plan) -> None:
    """Raise PlanError if the runtime cannot carry ``plan`` out yet."""
    if plan.num_ranks > 1:
        raise PlanError(
            f"the plan is for num_ranks = {plan.num_ranks} (parallel = {plan.parallel}), but nothing here joins ranks "
            f"yet: collectives between devices are simulated alone. Carry out a plan with num_ranks = 1."
        )
