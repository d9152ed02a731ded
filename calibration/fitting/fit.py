"""Fitting a calibration: the factor of every task kind from pairs of predicted and measured tasks.

For each kind the measured seconds of its tasks are regressed on the modelled ones, and on the bytes that had just come
to the device (``calibration/estimation/tasks.py``).  What a task costs is counted from when it could begin
(``since_ready.py``), so that hand-over, hooks and launches are in it.  Slowdown by other lanes is part of a measured
duration, so the modelled seconds are what the simulator predicts under contention, and the fit is repeated with the
factors found until they settle.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

from ...shared.basics.errors import CalibrationError
from ...shared.compile.compile import compile_schedule
from ...shared.records.soundness import why_unsound
from ...shared.schema.calibration import Calibration, Contention, Factor, MeanSeconds
from ...shared.schema.hardware import Hardware
from ...shared.schema.record import OF_RANKS, Origin, RankRecord, Record
from ...shared.schema.schedule import Lane, Schedule, TaskKind
from ...shared.schema.workload import Workload
from ...sim.costs.contention import ContentionModel
from ...sim.costs.task_costs import CostModel, swapping_sections
from ...sim.engine.error_sources import RUN_NOISE
from ...sim.engine.simulator import simulate_timing
from ..estimation.linear import Estimate, FloatArray, expected
from ..estimation.tasks import NOTHING_KNOWN, Coefficient, Priors, estimate_tasks
from .left_out import left_out_error_frac
from .since_ready import seconds_since_ready

_ROUNDS: Final = 5
_SWAPPING: Final = (TaskKind.FORWARD, TaskKind.BACKWARD)
"""What takes longer where its block swaps."""


@dataclass(frozen=True)
class Pair:
    """A measured Record and the workload that it ran."""

    workload: Workload
    measured: Record
    name: str = "the record"
    """What messages call the Record: its file."""


def pairs_of(workload: Workload, measured: Record) -> tuple[Pair, ...]:
    """A pair for every rank that ``measured`` has; one pair for a record of one rank.

    A collective lasts from when its rank comes to it: equal ranks are simulated as one that waits for nobody, so that
    what ranks really wait for each other is part of what their collectives cost.
    """
    if not measured.ranks:
        return (Pair(workload, measured),)
    return tuple(Pair(workload, _of_rank(measured, rank), f"rank {rank.rank} of the record") for rank in measured.ranks)


def _of_rank(measured: Record, rank: RankRecord) -> Record:
    """What one rank did, with its waits for others within its collectives."""
    waits = {wait.task: wait.seconds for wait in rank.rank_waits}
    tasks = [
        timing.model_copy(
            update={
                "start_s": timing.start_s - waits.get(timing.task, 0.0),
                "duration_s": timing.duration_s + waits.get(timing.task, 0.0),
            }
        )
        for timing in rank.tasks
    ]
    return measured.model_copy(update={**{name: getattr(rank, name) for name in OF_RANKS}, "tasks": tuple(tasks)})


@dataclass(frozen=True, eq=False)
class Fit:
    """A calibration, and how sure its coefficients are."""

    calibration: Calibration
    estimates: Mapping[TaskKind, Estimate]
    """Of every kind that a pair has: its coefficients' values and covariance (``Coefficient``)."""


def fit_calibration(
    pairs: Sequence[Pair],
    hardware: Hardware,
    *,
    contention: Sequence[Contention] = (),
    machine: str,
    software: Mapping[str, str],
    optimizers: Mapping[str, Any] = MappingProxyType({}),
) -> Calibration:
    """The calibration of ``fit``, with nothing known before, and how far it is off for plans that it leaves out.

    Raises as ``fit`` does.
    """

    def fitted(places: Iterable[int]) -> Calibration:
        some = [pairs[place] for place in places]
        found = fit(some, hardware, contention=contention, machine=machine, software=software, optimizers=optimizers)
        return found.calibration

    calibration = fitted(range(len(pairs)))
    error_frac = left_out_error_frac([(pair.workload, pair.measured) for pair in pairs], hardware, fitted)
    return calibration.model_copy(update={"iteration_error_frac": error_frac})


def fit(
    pairs: Sequence[Pair],
    hardware: Hardware,
    *,
    contention: Sequence[Contention] = (),
    machine: str,
    software: Mapping[str, str],
    optimizers: Mapping[str, Any] = MappingProxyType({}),
    priors: Mapping[TaskKind, Priors] = MappingProxyType({}),
) -> Fit:
    """The calibration that makes the simulator agree best with ``pairs``, task by task.

    ``optimizers``: what steps of each take, measured by themselves, as fields of the calibration; factors are fitted on
    top of them.  ``priors``: what is known of coefficients by kind, in the place of what is assumed of any machine;
    kinds that no pair has keep the means.

    Raises CalibrationError without pairs, for records that were not measured, or if tasks of a kind are far faster
    than the hardware's description allows, which means that it describes another machine.
    """
    if not pairs:
        raise CalibrationError("there are no measured records to fit to. Run at least one plan.")
    if any(pair.measured.origin is not Origin.MEASURED for pair in pairs):
        raise CalibrationError("a predicted record was given as a measurement. Fit to records of real runs.")
    schedules = [compile_schedule(pair.measured.plan, pair.workload) for pair in pairs]
    for pair, schedule in zip(pairs, schedules, strict=True):
        check_record(pair, schedule)
    is_timed = [pair.workload.measured_on == hardware.name for pair in pairs]
    calibration = Calibration(
        hardware_name=hardware.name,
        machine=machine,
        software=dict(software),
        hardware=hardware,
        of_timed_phases=any(is_timed),
        of_modelled_phases=not all(is_timed),
        contention=tuple(contention),
        iteration_noise_frac=statistics.median(pair.measured.iteration_noise_frac for pair in pairs),
        fitted_to=tuple(dict.fromkeys(pair.workload.model_name for pair in pairs)),
        num_runs=len(pairs),
        **optimizers,
    )
    bare = calibration.model_copy(update={"contention": ()})
    run_std_frac = RUN_NOISE * calibration.iteration_noise_frac
    estimates: dict[TaskKind, Estimate] = {}
    for _ in range(_ROUNDS):
        seen = _seen(calibration, bare, pairs, schedules, hardware)
        estimates = {
            kind: estimate_tasks(
                kind, *of_kind.columns, hardware, priors.get(kind, NOTHING_KNOWN), np.array(of_kind.runs), run_std_frac
            )
            for kind, of_kind in seen.items()
        } | {kind: expected(of_kind) for kind, of_kind in priors.items() if kind not in seen}
        calibration = with_estimates(calibration, estimates).model_copy(update={"swapping": _swapping(seen, estimates)})
    return Fit(_with_gap(calibration, pairs, schedules), estimates)


def check_record(pair: Pair, schedule: Schedule) -> None:
    """Raise CalibrationError if the Record of ``pair`` is not of ``schedule``, or cannot be a measurement of it."""
    record = pair.measured
    if record.plan_id != schedule.plan_id:
        raise CalibrationError(f"{pair.name} is of plan {record.plan_id}, which does not belong to its workload.")
    wrong = why_unsound(record, schedule)
    if wrong is not None:
        raise CalibrationError(f"{pair.name} {wrong}. Nothing can be learnt from it: leave it out, or measure again.")


@dataclass
class _Seen:
    """Tasks of one kind in all pairs: seconds that they should take, bytes that came for them, seconds they took."""

    modelled_s: list[float] = field(default_factory=list)
    arrived_bytes: list[float] = field(default_factory=list)
    measured_s: list[float] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)
    """Which plan was run: ranks of one run are of one."""
    swapping: list[tuple[float, float, float]] = field(default_factory=list)
    """The same three of those whose blocks swap, with what swapping took."""

    @property
    def columns(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """(n,) each."""
        modelled_s, arrived_bytes, measured_s = map(np.array, (self.modelled_s, self.arrived_bytes, self.measured_s))
        return modelled_s, arrived_bytes, measured_s


def _seen(
    calibration: Calibration,
    without_factors: Calibration,
    pairs: Sequence[Pair],
    schedules: Sequence[Schedule],
    hardware: Hardware,
) -> dict[TaskKind, _Seen]:
    """All tasks by kind; what was measured of them, less the slowdowns under the present factors."""
    found: dict[TaskKind, _Seen] = {}
    plans: dict[tuple[str, str], int] = {}
    for pair, schedule in zip(pairs, schedules, strict=True):
        plan = pair.measured.plan
        run = plans.setdefault((pair.workload.identity, pair.measured.plan_id), len(plans))
        bare, current = (
            CostModel.of(pair.workload, hardware, known, num_ranks=plan.num_ranks).durations_s(schedule)
            for known in (without_factors, calibration)
        )
        timing = simulate_timing(schedule, current, ContentionModel.for_plan(plan, hardware, calibration))
        taken = timing.ends_s[timing.window] - timing.starts_s[timing.window]
        seconds = seconds_since_ready(pair.measured, schedule)
        swapping = swapping_sections(schedule)
        for task in schedule.tasks:
            slowdown = float(taken[task.id]) / current[task.id] if current[task.id] > 0 else 1.0
            of_kind = found.setdefault(task.kind, _Seen())
            of_kind.runs.append(run)
            of_kind.modelled_s.append(bare[task.id])
            of_kind.arrived_bytes.append(float(task.arrived_bytes))
            alone_s = seconds[task.id] / max(1.0, slowdown)
            if task.kind in _SWAPPING and task.section in swapping:
                of_kind.swapping.append((bare[task.id], float(task.arrived_bytes), alone_s))
                alone_s -= calibration.swap_s(task.kind)
            of_kind.measured_s.append(alone_s)
    return found


def _swapping(seen: Mapping[TaskKind, _Seen], estimates: Mapping[TaskKind, Estimate]) -> dict[TaskKind, MeanSeconds]:
    """What tasks of blocks that swap take beyond what ``estimates`` say, by kind."""
    found = {}
    for kind, of_kind in seen.items():
        rows, known = of_kind.swapping, estimates[kind]
        if rows:
            more_s = [
                taken_s
                - known[Coefficient.SLOPE] * modelled_s
                - known[Coefficient.OVERHEAD_S]
                - known[Coefficient.ARRIVAL_S_PER_BYTE] * arrived_bytes
                for modelled_s, arrived_bytes, taken_s in rows
            ]
            found[kind] = MeanSeconds(seconds=max(0.0, statistics.fmean(more_s)), num_tasks=len(rows))
    return found


def with_estimates(calibration: Calibration, estimates: Mapping[TaskKind, Estimate]) -> Calibration:
    """``calibration`` with these coefficients."""
    factors, overheads, overhead_stds = dict(calibration.factors), {}, {}
    arrivals, arrival_stds = {}, {}
    for kind, found in estimates.items():
        overheads[kind] = found[Coefficient.OVERHEAD_S]
        overhead_stds[kind] = found.std(Coefficient.OVERHEAD_S)
        factors[kind] = Factor()
        if Coefficient.SLOPE in found.names:
            slope, std = found[Coefficient.SLOPE], found.std(Coefficient.SLOPE)
            factors[kind] = Factor(value=slope, relative_std=std / slope, num_pairs=found.num_rows)
        if Coefficient.ARRIVAL_S_PER_BYTE in found.names:
            arrivals[kind] = found[Coefficient.ARRIVAL_S_PER_BYTE]
            arrival_stds[kind] = found.std(Coefficient.ARRIVAL_S_PER_BYTE)
    fields = {"factors": factors, "overhead_s": overheads, "overhead_std_s": overhead_stds}
    return calibration.model_copy(
        update={**fields, "arrival_s_per_byte": arrivals, "arrival_std_s_per_byte": arrival_stds}
    )


def _with_gap(calibration: Calibration, pairs: Sequence[Pair], schedules: Sequence[Schedule]) -> Calibration:
    """Add what passes between iterations (the training loop's own work) to the task that ends one.

    Where the next iteration has to wait for something else, most of that work is done meanwhile: such records count
    only if there are no others.
    """
    gaps = [gap_of(pair.measured, schedule) for pair, schedule in zip(pairs, schedules, strict=True)]
    seen = [gap.seconds for gap in gaps if not gap.is_hidden] or [gap.seconds for gap in gaps]
    overheads = dict(calibration.overhead_s)
    overheads[TaskKind.DEVICE_ADAM] = overheads.get(TaskKind.DEVICE_ADAM, 0.0) + statistics.median(seen)
    return calibration.model_copy(update={"overhead_s": overheads})


def columns_of(
    pair: Pair, hardware: Hardware, calibration: Calibration, without_factors: Calibration
) -> dict[TaskKind, tuple[FloatArray, FloatArray, FloatArray]]:
    """By kind (n,) seconds that its tasks should take, bytes that came for them, and seconds they took by themselves.

    Slowdowns by other lanes are those under ``calibration``; what should be is by ``without_factors``.
    """
    schedule = compile_schedule(pair.measured.plan, pair.workload)
    seen = _seen(calibration, without_factors, [pair], [schedule], hardware)
    return {kind: of_kind.columns for kind, of_kind in seen.items()}


class Gap(NamedTuple):
    """What passes between two iterations and no task answers for."""

    seconds: float
    """From when the next iteration could begin until it began."""
    is_hidden: bool
    """Whether it had to wait for a task longer than for the end of the iteration before."""


def gap_of(record: Record, schedule: Schedule) -> Gap:
    """The training loop's own work between two iterations of ``record``: its batch, its losses, hooks."""
    ends_s = {timing.task: timing.end_s for timing in record.tasks}
    starts_s = {timing.task: timing.start_s for timing in record.tasks}
    compute = schedule.lanes[Lane.COMPUTE]
    first, last = schedule.tasks[compute[0]], compute[-1]
    ended_s = ends_s[last] - record.iteration_s
    waited_s = [ends_s[other] for other in first.after]
    waited_s += [ends_s[other] - record.iteration_s for other in first.after_previous]
    ready_s = max([ended_s, *waited_s])
    return Gap(max(0.0, starts_s[first.id] - ready_s), ready_s > ended_s)
