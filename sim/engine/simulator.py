"""The simulator: a schedule, the seconds of its tasks, and what becomes of them when lanes run side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from ...shared.basics.progress import OnProgress, no_progress
from ...shared.catalogue.rank_share import rent_of_stage
from ...shared.compile.compile import compile_schedule
from ...shared.layout.layout import Layout
from ...shared.methods.known import method_named
from ...shared.methods.method import Method
from ...shared.methods.runtime_profile import OUR_RUNTIME, RuntimeProfile
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import Hardware
from ...shared.schema.plan import Plan
from ...shared.schema.record import Record
from ...shared.schema.schedule import Lane, Schedule
from ...shared.schema.workload import Workload
from ..costs.contention import ContentionModel
from ..costs.runtimes import RuntimeCosts
from ..costs.task_costs import CostModel
from ..memory.libraries import collective_bytes, rank_device_bytes
from ..memory.segments import segments_of
from .error_sources import ErrorModel
from .folding import MORE_KEPT, Folds, find_folds, kept_micro_batches
from .intervals import PlanDraws, drawn_record
from .kept_schedule import KeptSchedule, kept_schedule
from .lanes import LaneProcesses
from .prediction import RankMachine, predicted_record
from .timing import Fold, Seconds, Timing, slowest_period_s, steady_period_s
from .unfolding import names_each_once

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
    method: Method | None = None,
    runtime: RuntimeProfile = OUR_RUNTIME,
    device_budget_bytes: int | None = None,
    on_progress: OnProgress = no_progress,
) -> Record:
    """What one steady-state iteration of ``workload`` under ``plan`` does on ``hardware``.

    Ranks of a plan that has several are equal: each has its share of the machine, all run the same schedule at the same
    moments, and one of them is simulated, whatever their number (``sim/engine/rank_groups.py`` has unequal ones).  A
    stage of a pipeline is simulated by itself, as if its neighbours were always ready: ``simulate_pipeline`` has all.
    Seconds that the workload carries count where they were measured on this machine, otherwise its operations do.

    Args:
        plan: What every rank does.
        workload: One rank's micro-batch.
        hardware: The machine of all ranks.
        calibration: Factors measured on that machine; None for its data sheet.
        schedule: Spares compiling ``plan`` again; it is verified to carry the plan out.
        layout: Spares building the layout of ``plan`` again.
        method: The training method, where it is another than the plan names: by it the plan is compiled and its
            schedule verified.
        runtime: Who carries the plan out; others copy around their collectives what is not copied here.
        device_budget_bytes: Device memory of one rank that the chance to run out is of; None for all that it has.
        on_progress: Told of every simulated iteration; the memory that follows takes about as long.

    Raises PlanError if the plan fits neither the workload nor ``runtime``, ScheduleError if ``schedule`` is unsafe,
    CalibrationError if the calibration belongs to another machine, HardwareError if the machine lacks a figure that the
    workload needs or a device for a rank, and WorkloadError if the workload says nothing of how long it takes here.
    """
    record, _ = simulate_drawn(
        plan,
        workload,
        hardware,
        calibration,
        schedule=schedule,
        layout=layout,
        method=method,
        runtime=runtime,
        device_budget_bytes=device_budget_bytes,
        on_progress=on_progress,
    )
    return record


def simulate_drawn(
    plan: Plan,
    workload: Workload,
    hardware: Hardware,
    calibration: Calibration | None = None,
    *,
    schedule: Schedule | None = None,
    layout: Layout | None = None,
    method: Method | None = None,
    runtime: RuntimeProfile = OUR_RUNTIME,
    device_budget_bytes: int | None = None,
    on_progress: OnProgress = no_progress,
) -> tuple[Record, PlanDraws]:
    """``simulate``, with the time under every draw, which intervals of several plans together are made of."""
    runtime.check(plan)
    runtime.check_gathers(plan, workload)
    own = method_named(plan.method, method)
    method = runtime.method(own)
    if method is not own:
        schedule = None  # it was compiled by other policies
    costs = CostModel.of(workload, hardware, calibration, num_ranks=plan.num_ranks)
    if not runtime.is_ours:
        costs = RuntimeCosts.like(costs, runtime, workload)
    num_stages = workload.num_stages
    contention = ContentionModel.for_plan(plan, hardware, calibration, num_stages=num_stages)
    if schedule is None:
        schedule, timing = simulate_plan(
            plan, workload, costs, contention, layout=layout, method=method, on_progress=on_progress
        )
    else:
        timing = simulate_timing(
            schedule, costs.durations_s(schedule), contention, num_more_iterations=1, on_progress=on_progress
        )
    rank = RankMachine(
        hardware=costs.hardware,
        collective_bytes=collective_bytes(hardware, plan.num_ranks * num_stages, plan.shard_ranks),
        segments=segments_of(runtime, plan, workload),
        price_usd_per_hour=rent_of_stage(hardware, plan.num_ranks, num_stages),
    )
    record = predicted_record(plan, workload, rank, calibration, schedule, timing, layout=layout, method=method)
    record = record.asking(
        runtime=str(runtime.runtime), runtime_words=runtime.words, device_budget_bytes=device_budget_bytes
    )
    if runtime.other is not None:
        record = record.model_copy(update={"emulated": (runtime.other, *record.emulated)})
    durations_s, errors = costs.durations_s(schedule), ErrorModel.of(workload, hardware, calibration)
    limit_bytes = device_budget_bytes
    if limit_bytes is None:
        limit_bytes = rank_device_bytes(hardware, plan.num_ranks * num_stages, plan.shard_ranks)
    return drawn_record(record, durations_s, contention, schedule, timing, errors, limit_bytes=limit_bytes)


def simulate_plan(
    plan: Plan,
    workload: Workload,
    costs: CostModel,
    contention: ContentionModel,
    *,
    layout: Layout | None = None,
    schedule: Schedule | None = None,
    method: Method | None = None,
    on_progress: OnProgress = no_progress,
) -> tuple[Schedule, Timing]:
    """The timing of a plan, with the schedule that was simulated: that of few micro-batches where these tell of all.

    ``schedule``: of the plan, which spares compiling it where it has to be simulated whole.  See [Note: Folded
    iterations] in ``sim/engine/folding.py``.  Errors as of ``simulate``.
    """
    policies = method_named(plan.method, method).policies
    positions = policies.sections.positions_of(workload)
    least = kept_micro_batches(plan.micro_batches, positions.micro_steps, plan.prefetch_depth)
    # Where the least do not settle, a few more often do, and cost far less than all.
    for num_kept in (number for number in (least, MORE_KEPT * least) if number < plan.micro_batches):
        few = compile_schedule(plan.model_copy(update={"micro_batches": num_kept}), workload, layout, policies=policies)
        kept = kept_schedule(few, plan.micro_batches - num_kept)
        if kept is not None:
            timing = _simulate_kept(kept, costs.durations_s(few), contention, on_progress)
            if timing is not None:
                return few, timing
    if schedule is None:
        schedule = compile_schedule(plan, workload, layout, policies=policies)
    durations_s = costs.durations_s(schedule)
    return schedule, simulate_timing(schedule, durations_s, contention, num_more_iterations=1, on_progress=on_progress)


def _simulate_kept(
    kept: KeptSchedule, durations_s: Sequence[float], contention: ContentionModel, on_progress: OnProgress
) -> Timing | None:
    """What ``simulate_timing`` says with all micro-batches; None if those kept do not tell."""
    schedule = kept.schedule
    on_progress(0, 2 * MIN_ITERATIONS)
    lanes = LaneProcesses(schedule, [durations_s], [contention])
    (group,) = lanes.groups
    num_tasks = [len(schedule.lanes[lane]) for lane in Lane]
    folds: Folds | None = None
    period_s: float | None = None
    for number in range(1, MAX_ITERATIONS + 1):
        lanes.run_iteration()
        on_progress(number, 2 * max(MIN_ITERATIONS, number))
        if number < MIN_ITERATIONS:
            continue
        noted_s = [
            [
                np.array(ends_s[iteration * length : (iteration + 1) * length])
                for ends_s, length in zip(group.ends_s, num_tasks, strict=True)
            ]
            for iteration in range(number)
        ]
        folds = find_folds(noted_s, kept.repeating)
        if folds is None:
            return None
        ends_s = [
            by_task(schedule, group.ends_s, iteration)
            + by_task(schedule, _split(folds.shifts_s(kept.num_left_out, iteration, num_tasks), num_tasks), 0)
            for iteration in range(number)
        ]
        period_s = steady_period_s(ends_s)
        if period_s is not None:
            break
    if folds is None or period_s is None:
        return None
    window = number - 1
    fold = Fold(kept, folds.cuts, folds.begins_s[window], folds.periods_s[window])
    if not names_each_once(fold):
        return None
    lanes.run_iteration()
    return Timing(
        np.stack([by_task(schedule, group.starts_s, iteration) for iteration in range(number + 1)]),
        np.stack([by_task(schedule, group.ends_s, iteration) for iteration in range(number + 1)]),
        iteration_s=period_s,
        is_steady=True,
        fold=fold,
    )


def _split(values: Seconds, lengths: Sequence[int]) -> list[Seconds]:
    return np.split(values, np.cumsum(lengths)[:-1])


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


def by_task(schedule: Schedule, times_s: Sequence[Sequence[float] | Seconds], iteration: int) -> Seconds:
    """One iteration of what the lanes noted, in the order of the schedule's tasks."""
    by_task = np.empty(len(schedule.tasks))
    for lane, noted_s in zip(Lane, times_s, strict=True):
        program = schedule.lanes[lane]
        if program:
            by_task[list(program)] = noted_s[iteration * len(program) : (iteration + 1) * len(program)]
    return by_task
