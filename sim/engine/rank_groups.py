"""Ranks that are not alike: stragglers, and machines of several kinds, that train one model together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import isfinite
from typing import Final

import numpy as np

from ...shared.basics.errors import PlanError
from ...shared.catalogue.rank_share import price_of_ranks
from ...shared.compile.compile import compile_schedule
from ...shared.layout.layout import Layout
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import Hardware
from ...shared.schema.plan import Plan
from ...shared.schema.record import OF_RANKS, RankRecord, RankWait, Record
from ...shared.schema.schedule import Lane, Schedule, TaskId
from ...shared.schema.workload import Workload
from ..costs.contention import ContentionModel
from ..costs.task_costs import CostModel
from ..memory.libraries import collective_bytes
from .error_sources import ErrorModel
from .intervals import DrawnMachine, PlanDraws
from .joint_intervals import draws_of, interval_of_groups
from .lanes import LaneProcesses
from .prediction import RankMachine, predicted_record
from .simulator import MAX_ITERATIONS, MIN_ITERATIONS, by_task
from .timing import Seconds, Timing, slowest_period_s, steady_period_s

_ROUNDING_FRAC: Final = 1e-9
"""Of a time since the simulation began: differences below are rounding."""


@dataclass(frozen=True)
class RankGroup:
    """Ranks that are alike."""

    num_ranks: int
    hardware: Hardware
    """The machine of all ranks of the plan, as if all were like these; these are some of them."""
    slowdowns: Mapping[Lane, float] = field(default_factory=dict)
    """How many times as long tasks of a lane take as on that machine: a device that is throttled, a slow link."""
    name: str = ""


@dataclass(frozen=True)
class GroupRecord:
    """What one rank of a group does."""

    group: RankGroup
    record: Record
    """Its samples and tokens are those of all ranks together, and so is its period."""

    @property
    def waiting_s(self) -> float:
        """Seconds per iteration in which its compute lane stands still: what it waits for others, or for copies."""
        return self.record.iteration_s - self.record.lane(Lane.COMPUTE).busy_s


@dataclass(frozen=True)
class GroupedPrediction:
    """Unlike ranks that train together."""

    groups: tuple[GroupRecord, ...]
    iteration_s: float
    """Period of the steady state, which all ranks share."""
    record: Record
    """One rank of each group in one record, in the order of the groups: the first of its ranks, in the form in which
    several ranks that train are recorded."""

    @property
    def tokens_per_s(self) -> float:
        """Throughput of all ranks together."""
        return self.groups[0].record.tokens_per_s

    @property
    def price_usd_per_hour(self) -> float | None:
        """Rent of all ranks; None if any price is unknown."""
        prices = [price_of_ranks(group.group.hardware, group.group.num_ranks) for group in self.groups]
        known = [price for price in prices if price is not None]
        return sum(known) if len(known) == len(prices) else None


def simulate_groups(
    plan: Plan,
    workload: Workload,
    groups: Sequence[RankGroup],
    calibration: Calibration | None = None,
    *,
    layout: Layout | None = None,
) -> GroupedPrediction:
    """What one steady-state iteration of ``workload`` under ``plan`` does on ranks of several kinds.

    Every group is simulated once, whatever its number of ranks, in one world, where all meet in their collectives
    ([Note: Where groups meet] in ``sim/engine/lanes.py``).  A collective takes as long as on the machine where
    it takes longest.  Equal groups give exactly what ``simulate`` gives, but no intervals of peaks.  The cost grows
    with groups times tasks.

    Raises PlanError if the groups do not have the plan's ranks between them, and what ``simulate`` raises.
    """
    _check_groups(plan, groups)
    if workload.num_stages > 1:
        raise PlanError("ranks of one stage of a pipeline are simulated as equal ones. Pass the plan to simulate.")
    schedule = compile_schedule(plan, workload, layout)
    costs = [CostModel.of(workload, group.hardware, calibration, num_ranks=plan.num_ranks) for group in groups]
    durations_s = [_slowed(schedule, model, group) for model, group in zip(costs, groups, strict=True)]
    contentions = [
        ContentionModel.of(group.hardware, calibration, num_ranks=plan.num_ranks, optimizer=plan.optimizer)
        for group in groups
    ]
    timings = simulate_group_timings(schedule, durations_s, contentions)
    records = [
        predicted_record(
            plan,
            workload,
            RankMachine(
                hardware=model.hardware,
                collective_bytes=collective_bytes(group.hardware, plan.num_ranks, plan.shard_ranks),
            ),
            calibration,
            schedule,
            timing,
            layout=layout,
        )
        for group, model, timing in zip(groups, costs, timings, strict=True)
    ]
    draws = _drawn(workload, groups, schedule, durations_s, contentions, calibration)
    interval = interval_of_groups(timings[0].iteration_s, draws)
    records = [record.model_copy(update={"iteration_interval_s": interval}) for record in records]
    found = tuple(GroupRecord(group, record) for group, record in zip(groups, records, strict=True))
    record = _of_all(groups, records, timings, schedule.lanes[Lane.COMPUTE][0])
    return GroupedPrediction(found, timings[0].iteration_s, record)


def simulate_group_timings(
    schedule: Schedule,
    durations_s: Sequence[Sequence[float]],
    contentions: Sequence[ContentionModel],
) -> tuple[Timing, ...]:
    """Run the schedule in all groups until the tasks of all are periodic; see ``simulate_timing``.

    Every group's timing has the common period.  Raises ScheduleError if the lanes wait for each other.
    """
    lanes = LaneProcesses(schedule, durations_s, contentions)
    ends_s: list[Seconds] = []

    def run() -> None:
        lanes.run_iteration()
        ends_s.append(np.concatenate([by_task(schedule, group.ends_s, len(ends_s)) for group in lanes.groups]))

    period_s: float | None = None
    while len(ends_s) < MAX_ITERATIONS and period_s is None:
        run()
        if len(ends_s) >= MIN_ITERATIONS:
            period_s = steady_period_s(ends_s)
    iteration_s = period_s if period_s is not None else slowest_period_s(ends_s)
    run()

    def stacked(times_s: Sequence[Sequence[float]]) -> Seconds:
        return np.stack([by_task(schedule, times_s, iteration) for iteration in range(len(ends_s))])

    timings = (
        Timing(stacked(group.starts_s), stacked(group.ends_s), iteration_s=iteration_s, is_steady=period_s is not None)
        for group in lanes.groups
    )
    return tuple(replace(timing, rank_waits_s=_rank_waits_s(schedule, timing)) for timing in timings)


def _rank_waits_s(schedule: Schedule, timing: Timing) -> dict[TaskId, float]:
    """What a group waits for the others before each collective of the window: from when nothing of its own is left."""
    window = timing.window
    waits_s = {}
    program = schedule.lanes[Lane.COLLECTIVE]
    for place, task_id in enumerate(program):
        task = schedule.tasks[task_id]
        ends_s = [timing.ends_s[window, other] for other in task.after]
        if place:
            ends_s.append(timing.ends_s[window, program[place - 1]])
        if window:
            ends_s += [timing.ends_s[window - 1, other] for other in (*task.after_previous, program[place - 1])]
        start_s = float(timing.starts_s[window, task_id])
        waited_s = start_s - float(max(ends_s, default=0.0))
        if waited_s > _ROUNDING_FRAC * start_s:
            waits_s[task_id] = waited_s
    return waits_s


def _of_all(groups: Sequence[RankGroup], records: Sequence[Record], timings: Sequence[Timing], first: TaskId) -> Record:
    """The record of the group that waits least, with all groups as its ranks; ``first``: the first compute task."""
    firsts = list(accumulate((group.num_ranks for group in groups[:-1]), initial=0))
    begins_s = [float(timing.starts_s[timing.window, first]) for timing in timings]
    waited_s = [sum(timing.rank_waits_s.values()) for timing in timings]
    slowest = min(range(len(groups)), key=lambda place: (waited_s[place], place))
    ranks = [
        RankRecord(
            rank=rank,
            num_alike=group.num_ranks,
            name=group.name,
            begins_s=begin_s - begins_s[slowest],
            rank_waits=tuple(RankWait(task=task, seconds=seconds) for task, seconds in timing.rank_waits_s.items()),
            **{name: getattr(record, name) for name in OF_RANKS},
        )
        for group, rank, record, timing, begin_s in zip(groups, firsts, records, timings, begins_s, strict=True)
    ]
    return records[slowest].model_copy(update={"rank": firsts[slowest], "ranks": tuple(ranks)})


def _slowed(schedule: Schedule, costs: CostModel, group: RankGroup) -> tuple[float, ...]:
    durations_s = costs.durations_s(schedule)
    pairs = zip(schedule.tasks, durations_s, strict=True)
    return tuple(seconds * group.slowdowns.get(task.lane, 1.0) for task, seconds in pairs)


def _drawn(
    workload: Workload,
    groups: Sequence[RankGroup],
    schedule: Schedule,
    durations_s: Sequence[Sequence[float]],
    contentions: Sequence[ContentionModel],
    calibration: Calibration | None,
) -> list[PlanDraws]:
    """Every group by itself, with collectives that take as long as in the group where they take longest."""
    longest_s = np.max(durations_s, axis=0)
    is_joint = np.array([task.lane is Lane.COLLECTIVE for task in schedule.tasks])
    # Machines of one kind are off by the same factors; the first kind has the draws of a machine by itself.
    names = ["" if group.hardware.name == groups[0].hardware.name else group.hardware.name for group in groups]
    return [
        draws_of(
            schedule,
            np.where(is_joint, longest_s, of_group).tolist(),
            contention,
            DrawnMachine(ErrorModel.of(workload, group.hardware, calibration), name),
        )
        for group, of_group, contention, name in zip(groups, durations_s, contentions, names, strict=True)
    ]


def _check_groups(plan: Plan, groups: Sequence[RankGroup]) -> None:
    for group in groups:
        if group.num_ranks < 1:
            raise PlanError(f"a group of {group.num_ranks} ranks is none. Leave it out.")
        for lane, slowdown in group.slowdowns.items():
            if not (isfinite(slowdown) and slowdown > 0):
                raise PlanError(f"the slowdown of {lane} is {slowdown}; it must be positive and finite.")
    total = sum(group.num_ranks for group in groups)
    if total != plan.num_ranks:
        raise PlanError(
            f"the groups have {total} ranks between them but the plan has num_ranks = {plan.num_ranks}. "
            f"Set num_ranks to {max(1, total)}, or change the groups."
        )
