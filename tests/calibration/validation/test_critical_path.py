"""The critical path: its seconds are the iteration's, and what is on it is what makes an iteration longer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from protwin.calibration.validation.critical_path import critical_seconds
from protwin.calibration.validation.drawing import Draw, draw_plans
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.calibration import Calibration, Factor
from protwin.shared.schema.record import Record
from protwin.shared.schema.schedule import Schedule, TaskKind
from protwin.sim.costs.contention import ContentionModel
from protwin.sim.costs.task_costs import CostModel
from protwin.sim.engine.simulator import simulate, simulate_timing
from tests.calibration.fitting.test_budgeted import swappable
from tests.calibration.fitting.test_fit import MACHINE, a_workload
from tests.proof_size import examples

EPSILON = 1e-4


def alone_s(schedule: Schedule, durations_s: np.ndarray) -> float:
    """Seconds of an iteration where lanes do not slow each other."""
    return simulate_timing(schedule, durations_s.tolist(), ContentionModel.none(has_disk=True)).iteration_s


@given(st.integers(2, 6), st.integers(0, 2**20), st.floats(0.3, 20))
@settings(max_examples=examples(150, 6), deadline=None, phases=[Phase.generate])
def test_longer_tasks_on_it_make_the_iteration_longer_by_as_much(num_blocks: int, seed: int, gather: float) -> None:
    """The derivative by a kind's durations, from simulations: an oracle that follows no chain."""
    workload = swappable(a_workload(num_blocks))
    (plan,) = draw_plans(workload, Draw(seed=seed), number=1)
    schedule = compile_schedule(plan, workload)
    factors = {TaskKind.GATHER: Factor(value=gather), TaskKind.CPU_ADAM: Factor(value=3 / gather)}
    calibration = Calibration(hardware_name=MACHINE.name, machine="", factors=factors)
    durations_s = np.array(CostModel.of(workload, MACHINE, calibration).durations_s(schedule))
    timing = simulate_timing(schedule, durations_s.tolist(), ContentionModel.none(), num_more_iterations=1)
    record = _as_record(simulate(plan, workload, MACHINE, calibration), schedule, timing)
    found = critical_seconds(record, schedule)
    assert sum(found.values()) == pytest.approx(record.iteration_s)
    for kind in {task.kind for task in schedule.tasks}:
        of_kind = np.array([task.kind is kind for task in schedule.tasks])
        longer, shorter = (
            alone_s(schedule, durations_s * np.where(of_kind, 1 + sign * EPSILON, 1)) for sign in (1, -1)
        )
        least, most = sorted((longer - record.iteration_s, record.iteration_s - shorter))
        # Where several chains are as long, tasks of either make it longer, and neither alone makes it shorter.
        slack_s = 1e-6 * record.iteration_s * EPSILON + 1e-12
        assert least - slack_s <= EPSILON * found.get(kind, 0.0) <= most + slack_s, kind


def _as_record(record: Record, schedule: Schedule, timing: object) -> Record:
    """``record`` with the times of ``timing``."""
    begin_s = timing.starts_s[timing.window, 0]  # type: ignore[attr-defined]
    starts_s, ends_s = (
        getattr(timing, name)[timing.window] - begin_s  # type: ignore[attr-defined]
        for name in ("starts_s", "ends_s")
    )
    tasks = tuple(
        one.model_copy(
            update={
                "start_s": float(starts_s[one.task]),
                "end_s": float(ends_s[one.task]),
                "duration_s": float(ends_s[one.task] - starts_s[one.task]),
            }
        )
        for one in record.tasks
    )
    assert len(tasks) == len(schedule.tasks)
    return record.model_copy(update={"tasks": tasks, "iteration_s": timing.iteration_s})  # type: ignore[attr-defined]
