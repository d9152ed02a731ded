"""What verifier and abstract machine say of a schedule."""

from __future__ import annotations

from protwin.shared.basics.errors import ScheduleError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.schedule import Schedule
from protwin.shared.verify.happens_before import HappensBefore, Occurrence
from protwin.shared.verify.verify import verify_schedule
from tests.shared.abstract_machine import AbstractMachine, Violation
from tests.shared.adversaries import holding
from tests.strategies import PlannedWorkload


def compiled(case: PlannedWorkload) -> Schedule:
    return compile_schedule(case.plan, case.workload, case.layout)


def is_accepted(schedule: Schedule, case: PlannedWorkload) -> bool:
    try:
        verify_schedule(schedule, case.plan, case.workload, case.layout)
    except ScheduleError:
        return False
    return True


def violation(schedule: Schedule, case: PlannedWorkload) -> str | None:
    """What goes wrong if any one task of the second iteration takes as long as it may."""
    for task in schedule.tasks:
        try:
            AbstractMachine(schedule, case.plan, case.workload, case.layout).run(holding(task.id, iteration=1))
        except Violation as found:
            return str(found)
    return None


def guarantees(schedule: Schedule) -> list[tuple[int, ...]]:
    order = HappensBefore(schedule, 3)
    return [order.reached(Occurrence(iteration, task.id)) for iteration in range(3) for task in schedule.tasks]
