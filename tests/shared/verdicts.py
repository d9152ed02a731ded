"""What verifier and abstract machine say of a schedule."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import islice

from protwin.shared.basics.errors import ScheduleError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.order.happens_before import HappensBefore, Occurrence
from protwin.shared.schema.schedule import Schedule
from protwin.shared.verify.claim import Claim
from protwin.shared.verify.full_training import FULL_TRAINING
from protwin.shared.verify.rules import Rule
from protwin.shared.verify.verify import COMMON, verify_schedule
from tests.shared import faults
from tests.shared.abstract_machine import AbstractMachine
from tests.shared.adversaries import holding
from tests.shared.faults import Fault
from tests.shared.symbolic_values import Violation
from tests.strategies.plans import PlannedWorkload


def compiled(case: PlannedWorkload) -> Schedule:
    return compile_schedule(case.plan, case.workload, case.layout)


def is_accepted(schedule: Schedule, case: PlannedWorkload) -> bool:
    try:
        verify_schedule(schedule, case.plan, case.workload, case.layout)
    except ScheduleError:
        return False
    return True


def check_sound_and_faulty(case: PlannedWorkload, seed: int) -> None:
    """The schedule that is compiled passes; with some fault of three families it does not."""
    schedule = compiled(case)
    verify_schedule(schedule, case.plan, case.workload, case.layout)
    generator = random.Random(seed)
    for family in generator.sample(faults.DATA_FAULTS, 3):
        *_, fault = islice(family(schedule), generator.randrange(1, 300))
        assert not is_accepted(fault.make(), case), fault


def check_dropped_dependencies(case: PlannedWorkload) -> None:
    """Schedules without one dependency are rejected exactly if that makes them guarantee less."""
    schedule = compiled(case)
    intact = guarantees(schedule)
    for fault in faults.dropped_dependencies(schedule):
        changed = fault.make()
        assert is_accepted(changed, case) == (guarantees(changed) == intact), fault


def only_rejections(faults: Iterable[Fault], case: PlannedWorkload, waiting: set[str]) -> None:
    """Strike from ``waiting`` every rule of full training, by its name, that alone rejects one of the faults.

    The form of each fault is sound.  Ends when nothing waits.
    """
    for fault in faults:
        if not waiting:
            return
        claim = Claim(fault.make(), case.plan, case.workload, case.layout)
        if not _holds(COMMON[0], claim):
            continue
        broken: list[str] = []
        for rule in FULL_TRAINING.in_order():
            if not _holds(rule, claim):
                broken.append(rule.check.__name__)
                if len(broken) > 1 or broken[0] not in waiting:
                    break
        if len(broken) == 1:
            waiting.discard(broken[0])


def _holds(rule: Rule, claim: Claim) -> bool:
    try:
        rule.check(claim)
    except Exception:  # rules may rely on those of earlier stages
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
