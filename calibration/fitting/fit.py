"""Fitting a calibration: the factor of every task kind from pairs of predicted and measured tasks.

For each kind the measured seconds of its tasks are regressed on the modelled ones, by least squares with both
coefficients kept from being negative.  What a task costs is counted from when it could begin (``since_ready.py``), so
that hand-over, hooks and launches are in it.  Slowdown by other lanes is part of a measured duration, so the modelled
seconds are what the simulator predicts under contention, and the fit is repeated with the factors found until they
settle.

[Note: Slope or intercept]
Tasks that are alike cannot tell what grows with a task's work from what every task costs alike.  Taken for the one, it
is carried to models with other tasks as the other.  So an intercept is held to be small until tasks of different sizes
tell more: the estimate that is most probable if errors grow with the root of a task's work, and intercepts scatter by
what starting a task takes (``_STARTING_S``) and a share of the task: what it finds cold, or waits for another thread.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from scipy.optimize import nnls

from ...shared.basics.errors import CalibrationError
from ...shared.compile.compile import compile_schedule
from ...shared.schema.calibration import Calibration, Contention, Factor
from ...shared.schema.hardware import Hardware
from ...shared.schema.record import OF_RANKS, Origin, RankRecord, Record
from ...shared.schema.schedule import Schedule, TaskKind
from ...shared.schema.workload import Workload
from ...sim.costs.contention import ContentionModel
from ...sim.costs.task_costs import CostModel
from ...sim.engine.simulator import simulate_timing
from .since_ready import seconds_since_ready

_ROUNDS: Final = 4
_STARTING_S: Final = 3e-4
"""Hooks, launches and a thread's wake-up, as far as one knows before measuring ([Note: Slope or intercept])."""
_STARTING_FRAC: Final = 0.3
"""Of a usual task of the kind, on top."""
_LEAST_ERROR_FRAC: Final = 1e-3
"""Of a task: no measurement is truer."""
_TIMES: Final = 4
"""The errors are as large as the last estimate leaves them: so often."""
_LOWEST: Final = 0.02


@dataclass(frozen=True)
class Pair:
    """A measured Record and the workload that it ran."""

    workload: Workload
    measured: Record


def pairs_of(workload: Workload, measured: Record) -> tuple[Pair, ...]:
    """A pair for every rank that ``measured`` has; one pair for a record of one rank.

    A collective lasts from when its rank comes to it: equal ranks are simulated as one that waits for nobody, so that
    what ranks really wait for each other is part of what their collectives cost.
    """
    if not measured.ranks:
        return (Pair(workload, measured),)
    return tuple(Pair(workload, _of_rank(measured, rank)) for rank in measured.ranks)


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


def fit_calibration(
    pairs: Sequence[Pair],
    hardware: Hardware,
    *,
    contention: Sequence[Contention] = (),
    machine: str,
    software: Mapping[str, str],
    optimizers: Mapping[str, Any] = MappingProxyType({}),
) -> Calibration:
    """The calibration that makes the simulator agree best with ``pairs``, task by task.

    ``optimizers``: what steps of each take, measured by themselves, as fields of the calibration; factors are fitted on
    top of them.

    Raises CalibrationError without pairs, for records that were not measured, or if tasks of a kind are far faster
    than the hardware's description allows, which means that it describes another machine.
    """
    if not pairs:
        raise CalibrationError("there are no measured records to fit to. Run at least one plan.")
    if any(pair.measured.origin is not Origin.MEASURED for pair in pairs):
        raise CalibrationError("a predicted record was given as a measurement. Fit to records of real runs.")
    schedules = [compile_schedule(pair.measured.plan, pair.workload) for pair in pairs]
    for pair, schedule in zip(pairs, schedules, strict=True):
        if pair.measured.plan_id != schedule.plan_id:
            raise CalibrationError(f"a record of plan {pair.measured.plan_id} does not belong to its workload.")
    calibration = Calibration(
        hardware_name=hardware.name,
        machine=machine,
        software=dict(software),
        contention=tuple(contention),
        iteration_noise_frac=statistics.median(pair.measured.iteration_noise_frac for pair in pairs),
        fitted_to=tuple(dict.fromkeys(pair.workload.model_name for pair in pairs)),
        num_runs=len(pairs),
        **optimizers,
    )
    bare = calibration.model_copy(update={"contention": ()})
    for _ in range(_ROUNDS):
        calibration = _refit(calibration, bare, pairs, schedules, hardware)
    return _with_gap(calibration, pairs)


def _refit(
    calibration: Calibration,
    without_factors: Calibration,
    pairs: Sequence[Pair],
    schedules: Sequence[Schedule],
    hardware: Hardware,
) -> Calibration:
    """One round: slowdowns under the present factors, then factors under these slowdowns."""
    modelled: dict[TaskKind, list[float]] = {}
    measured: dict[TaskKind, list[float]] = {}
    for pair, schedule in zip(pairs, schedules, strict=True):
        plan = pair.measured.plan
        bare, current = (
            CostModel.of(pair.workload, hardware, known, num_ranks=plan.num_ranks).durations_s(schedule)
            for known in (without_factors, calibration)
        )
        timing = simulate_timing(schedule, current, ContentionModel.for_plan(plan, hardware, calibration))
        taken = timing.ends_s[timing.window] - timing.starts_s[timing.window]
        seconds = seconds_since_ready(pair.measured, schedule)
        for task in schedule.tasks:
            slowdown = float(taken[task.id]) / current[task.id] if current[task.id] > 0 else 1.0
            modelled.setdefault(task.kind, []).append(bare[task.id])
            measured.setdefault(task.kind, []).append(seconds[task.id] / max(1.0, slowdown))
    factors, overheads = dict(calibration.factors), {}
    for kind in modelled:
        factors[kind], overheads[kind] = _regress(kind, np.array(modelled[kind]), np.array(measured[kind]))
    return calibration.model_copy(update={"factors": factors, "overhead_s": overheads})


def _regress(kind: TaskKind, modelled: np.ndarray, measured: np.ndarray) -> tuple[Factor, float]:
    """Slope and intercept (seconds) of measured over modelled, by [Note: Slope or intercept].

    With the slope's relative standard deviation.  Raises CalibrationError if the slope is far below what the hardware's
    description allows.
    """
    present = modelled > 0
    if not present.any():
        return Factor(), float(np.median(measured))
    x, y = modelled[present], measured[present]
    # A task's scatter grows with its duration: so weighted, all that is measured tells alike.
    root = np.sqrt(x)
    rows, target = np.stack([root, 1 / root], axis=1), y / root
    alone = float(root @ target / (root @ root))
    if alone < _LOWEST:
        raise CalibrationError(
            f"{kind} took {alone:.3g} times what the hardware's description says. It describes another machine: probe "
            f"this one (protwin hardware probe)."
        )
    known = np.array([[0.0, 1 / (_STARTING_S + _STARTING_FRAC * float(np.median(y)))]])
    found = np.array([alone, 0.0])
    for _ in range(_TIMES):
        error = max(float(np.sqrt(np.mean((target - rows @ found) ** 2))), _LEAST_ERROR_FRAC * float(target.mean()))
        found, _ = nnls(np.concatenate([rows / error, known]), np.append(target / error, 0.0))
    covariance = np.linalg.inv(rows.T @ rows / error**2 + known.T @ known)
    slope, overhead_s = float(found[0]), float(found[1])
    if slope < _LOWEST:
        # What the tasks cost does not grow with their work: a slope must be something all the same.
        slope, overhead_s = alone, 0.0
    return Factor(value=slope, relative_std=float(np.sqrt(covariance[0, 0])) / slope, num_pairs=len(x)), overhead_s


def _with_gap(calibration: Calibration, pairs: Sequence[Pair]) -> Calibration:
    """Add what passes between iterations (the training loop's own work) to the task that ends one."""
    gaps = [pair.measured.iteration_s - _end_of_iteration_s(pair.measured) for pair in pairs]
    overheads = dict(calibration.overhead_s)
    gap_s = max(0.0, statistics.median(gaps))
    overheads[TaskKind.DEVICE_ADAM] = overheads.get(TaskKind.DEVICE_ADAM, 0.0) + gap_s
    return calibration.model_copy(update={"overhead_s": overheads})


def _end_of_iteration_s(record: Record) -> float:
    return next(timing.end_s for timing in record.tasks if timing.kind is TaskKind.DEVICE_ADAM)
