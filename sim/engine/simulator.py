"""The simulator: a schedule, the seconds of its tasks, and what becomes of them when lanes run side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from ...shared.basics.progress import OnProgress, no_progress
from ...shared.catalogue.rank_share import rent_of_ranks
from ...shared.compile.compile import compile_schedule
from ...shared.layout.layout import Layout
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import Hardware
from ...shared.schema.plan import Plan
from ...shared.schema.record import Record
from ...shared.schema.schedule import Lane, Schedule
from ...shared.schema.workload import Workload
from ..costs.contention import ContentionModel
from ..costs.task_costs import CostModel
from ..memory.libraries import collective_bytes
from .lanes import LaneProcesses
from .prediction import RankMachine, predicted_record
from .timing import Seconds, Timing, slowest_period_s, steady_period_s

MIN_ITERATIONS: Final = 3
MAX_ITERATIONS: Final = 12


def simulate(
    plan: Plan,
    workload: Workload,
    hardware: Hardware,
    calibration: Calibration | None = None,
    *,
    schedule: Schedule | None = None,
    layout: Layout | None = None,
    on_progress: OnProgress = no_progress,
) -> Record:
    """What one steady-state iteration of ``workload`` under ``plan`` does on ``hardware``.

    Ranks of a plan that has several are equal: each has its share of the machine, all run the same schedule at the same
    moments, and one of them is simulated, whatever their number (``sim/engine/rank_groups.py`` has unequal ones).
    Seconds that the workload carries count where they were measured on this machine, otherwise its operations do.

    Args:
        plan: What every rank does.
        workload: One rank's micro-batch.
        hardware: The machine of all ranks.
        calibration: Factors measured on that machine; None for its data sheet.
        schedule: Spares compiling ``plan`` again; it is verified to carry the plan out.
        layout: Spares building the layout of ``plan`` again.
        on_progress: Told of every simulated iteration; the memory that follows takes about as long.

    Raises PlanError if the plan does not fit the workload, ScheduleError if ``schedule`` is unsafe, CalibrationError if
    the calibration belongs to another machine, HardwareError if the machine lacks a figure that the workload needs or a
    device for a rank, and WorkloadError if the workload says nothing of how long it takes on this machine.
    """
    if schedule is None:
        schedule = compile_schedule(plan, workload, layout)
    costs = CostModel.of(workload, hardware, calibration, num_ranks=plan.num_ranks)
    contention = ContentionModel.of(hardware, calibration, num_ranks=plan.num_ranks)
    timing = simulate_timing(
        schedule, costs.durations_s(schedule), contention, num_more_iterations=1, on_progress=on_progress
    )
    return predicted_record(
        plan,
        workload,
        RankMachine(
            hardware=costs.hardware,
            collective_bytes=collective_bytes(hardware, plan.num_ranks),
            price_usd_per_hour=rent_of_ranks(hardware, plan.num_ranks),
        ),
        calibration,
        schedule,
        timing,
        layout=layout,
    )


def simulate_timing(
    schedule: Schedule,
    durations_s: Sequence[float],
    contention: ContentionModel,
    *,
    max_iterations: int = MAX_ITERATIONS,
    num_more_iterations: int = 0,
    on_progress: OnProgress = no_progress,
) -> Timing:
    """Run the schedule until its tasks are periodic; see [Note: Steady state] in ``sim/engine/timing.py``.

    ``durations_s``: seconds of every task alone on its lane.  At least MIN_ITERATIONS are run, at most
    ``max_iterations``, and then ``num_more_iterations``, so that the last steady one has a successor.
    Raises ScheduleError if the lanes wait for each other.
    """
    on_progress(0, 2 * MIN_ITERATIONS)
    lanes = LaneProcesses(schedule, [durations_s], [contention])
    (group,) = lanes.groups
    ends_s: list[Seconds] = []
    period_s: float | None = None
    while len(ends_s) < max(MIN_ITERATIONS, max_iterations) and period_s is None:
        lanes.run_iteration()
        ends_s.append(by_task(schedule, group.ends_s, len(ends_s)))
        on_progress(len(ends_s), 2 * max(MIN_ITERATIONS, len(ends_s)))
        if len(ends_s) >= MIN_ITERATIONS:
            period_s = steady_period_s(ends_s)
    iteration_s = period_s if period_s is not None else slowest_period_s(ends_s)
    for _ in range(num_more_iterations):
        lanes.run_iteration()
        ends_s.append(by_task(schedule, group.ends_s, len(ends_s)))
    starts_s = [by_task(schedule, group.starts_s, iteration) for iteration in range(len(ends_s))]
    return Timing(np.stack(starts_s), np.stack(ends_s), iteration_s=iteration_s, is_steady=period_s is not None)


def by_task(schedule: Schedule, times_s: Sequence[Sequence[float]], iteration: int) -> Seconds:
    """One iteration of what the lanes noted, in the order of the schedule's tasks."""
    by_task = np.empty(len(schedule.tasks))
    for lane, noted_s in zip(Lane, times_s, strict=True):
        program = schedule.lanes[lane]
        if program:
            by_task[list(program)] = noted_s[iteration * len(program) : (iteration + 1) * len(program)]
    return by_task
