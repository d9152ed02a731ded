"""Whether a plan fits the budget of a run: asked before any work is done.  Needs no torch."""

from __future__ import annotations

from ...shared.basics.errors import PlanError
from ...shared.basics.units import format_bytes, format_enough_bytes
from ...shared.compile.compile import compile_schedule
from ...shared.layout.layout import layout_of
from ...shared.schema.plan import Plan
from ...shared.schema.schedule import Memory
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


def check_host(plan: Plan, workload: Workload, memory_bytes: int, *, num_processes: int, is_cpu: bool) -> None:
    """Raise PlanError if this machine cannot hold what the plan keeps on the host, in each process.

    A model that is read into its chunks takes that and one chunk, loading included.  ``is_cpu``: the device's memory
    is the host's too.
    """
    layout = layout_of(workload, plan.chunk_bytes)
    schedule = compile_schedule(plan, workload, layout)
    need_bytes = schedule.static_bytes(Memory.PINNED_HOST) + schedule.static_bytes(Memory.HOST)
    need_bytes += max((chunk.size_bytes for chunk in layout.chunks), default=0)
    need_bytes += guaranteed_device_peak(schedule).size_bytes if is_cpu else 0
    need_bytes *= num_processes
    if need_bytes > memory_bytes:
        times = f" in each of {num_processes} processes" if num_processes > 1 else ""
        raise PlanError(
            f"the plan needs {format_bytes(need_bytes)} of host memory{times}, with the chunk that is being read, but "
            f"this machine has {format_bytes(memory_bytes)}. Search a plan for this machine, with --host-budget or a "
            f"disk, or use a machine with more memory."
        )
