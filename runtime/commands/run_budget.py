"""Whether a plan fits the budget of a run: asked before any work is done.  Needs no torch."""

from __future__ import annotations

from ...shared.basics.errors import PlanError
from ...shared.basics.units import format_bytes, format_enough_bytes
from ...shared.compile.compile import compile_schedule
from ...shared.schema.plan import Plan
from ...shared.schema.workload import Workload
from ...shared.verify.guaranteed_peak import guaranteed_device_peak


def check_budget(plan: Plan, workload: Workload, budget_bytes: int | None) -> None:
    """Raise PlanError if some timing of the plan exceeds the budget."""
    if budget_bytes is None:
        return
    schedule = compile_schedule(plan, workload)
    peak = guaranteed_device_peak(schedule)
    if peak.size_bytes > budget_bytes:
        raise PlanError(
            f"the plan's device memory may reach {format_bytes(peak.size_bytes)}, during "
            f"{schedule.tasks[peak.task].name}, but --device-budget is {format_bytes(budget_bytes)}. Search a plan for "
            f"this budget, or raise it to {format_enough_bytes(peak.size_bytes)}."
        )
