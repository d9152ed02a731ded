"""Laying predictions beside measurements: plan by plan, kind by kind, altogether."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ...shared.compile.compile import compile_schedule
from ...shared.schema.calibration import Calibration
from ...shared.schema.record import Record
from ...shared.schema.schedule import Lane, Schedule, TaskKind, in_kind_order
from ...sim.engine.device_memory import DeviceMemory
from ...sim.engine.simulator import simulate
from ...sim.engine.timing import Timing
from ..fitting.fit import pairs_of
from ..fitting.since_ready import seconds_since_ready
from ..fitting.subject import Subject
from .critical_path import critical_seconds
from .drawing import guaranteed_bytes
from .fidelity import KindFidelity, PlanFidelity
from .quiet import quiet_record, seconds_of, uncertainty_frac

_PERIODS: Final = 4
"""Iterations of a repeated measurement: what one holds may come from the one before, and stay into the next."""


@dataclass
class KindSums:
    """Seconds of the tasks of one kind, predicted and measured."""

    num_tasks: int = 0
    predicted_s: float = 0.0
    measured_s: float = 0.0
    critical_predicted_s: float = 0.0
    critical_measured_s: float = 0.0


@dataclass
class Judgement:
    """What is found plan by plan."""

    plans: list[PlanFidelity] = field(default_factory=list)
    kinds: dict[TaskKind, KindSums] = field(default_factory=dict)

    def add(self, subject: Subject, calibration: Calibration, name: str, bursts: Sequence[Record]) -> None:
        """Judge the plan of ``bursts``, of which the quiet share counts."""
        workload = subject.workload
        record = quiet_record(bursts)
        measured = [pair.measured for pair in pairs_of(workload, record)]
        plan, has_ranks = record.plan, len(measured) > 1
        schedule = compile_schedule(plan, workload)
        predicted = simulate(plan, workload, subject.hardware, calibration)
        self.plans.append(
            PlanFidelity(
                name=name,
                plan=plan,
                predicted_iteration_s=predicted.iteration_s,
                iteration_interval_s=predicted.iteration_interval_s,
                measured_iteration_s=statistics.fmean(one.iteration_s for one in measured),
                iteration_noise_frac=record.iteration_noise_frac,
                uncertainty_frac=uncertainty_frac([seconds_of(burst) for burst in bursts]),
                predicted_peak_bytes=predicted.peak_device_bytes,
                peak_interval_bytes=predicted.peak_interval_bytes,
                measured_peak_bytes=max(one.peak_device_bytes for one in measured),
                guaranteed_peak_bytes=guaranteed_bytes(plan, workload),
                retimed_peak_bytes=None if has_ranks else retimed_peak_bytes(schedule, record),
                predicted_collectives_s=_collectives_s(predicted) if has_ranks else None,
                measured_collectives_s=statistics.fmean(map(_collectives_s, measured)) if has_ranks else None,
            )
        )
        self._add_kinds(schedule, predicted, measured)

    def _add_kinds(self, schedule: Schedule, predicted: Record, measured: Sequence[Record]) -> None:
        for task, seconds in seconds_since_ready(predicted, schedule).items():
            sums = self.kinds.setdefault(schedule.tasks[task].kind, KindSums())
            sums.num_tasks += 1
            sums.predicted_s += seconds
        for kind, seconds in critical_seconds(predicted, schedule).items():
            self.kinds[kind].critical_predicted_s += seconds
        for one in measured:
            for task, seconds in seconds_since_ready(one, schedule).items():
                self.kinds[schedule.tasks[task].kind].measured_s += seconds / len(measured)
            last = schedule.tasks[schedule.lanes[Lane.COMPUTE][-1]]
            # What passes between iterations is a calibration's price of the task that ends one.
            end_s = max(timing.end_s for timing in one.tasks if timing.task == last.id)
            self.kinds[last.kind].measured_s += max(0.0, one.iteration_s - end_s) / len(measured)
            for kind, seconds in critical_seconds(one, schedule).items():
                self.kinds[kind].critical_measured_s += seconds / len(measured)

    def found_kinds(self) -> tuple[KindFidelity, ...]:
        """Every kind that any plan has, the one to blame most first."""
        return kind_fidelities(self.kinds, sum(plan.measured_iteration_s for plan in self.plans))


def kind_fidelities(sums: Mapping[TaskKind, KindSums], measured_s: float) -> tuple[KindFidelity, ...]:
    """``measured_s``: of all iterations together."""
    found = [
        KindFidelity(
            kind=kind,
            num_tasks=sums[kind].num_tasks,
            predicted_s=sums[kind].predicted_s,
            measured_s=sums[kind].measured_s,
            critical_predicted_s=sums[kind].critical_predicted_s,
            critical_measured_s=sums[kind].critical_measured_s,
            blame_frac=(sums[kind].critical_predicted_s - sums[kind].critical_measured_s) / measured_s,
        )
        for kind in in_kind_order(sums)
    ]
    return tuple(sorted(found, key=lambda one: -abs(one.blame_frac)))


def retimed_peak_bytes(schedule: Schedule, measured: Record) -> int:
    """The peak of device memory that the account gives where tasks take the times that were measured."""
    starts_s, ends_s = np.zeros((2, len(schedule.tasks)))
    for one in measured.tasks:
        starts_s[one.task], ends_s[one.task] = one.start_s, one.end_s
    shifts_s = measured.iteration_s * np.arange(_PERIODS)[:, None]
    timing = Timing(starts_s + shifts_s, ends_s + shifts_s, measured.iteration_s, is_steady=True)
    return DeviceMemory(schedule, timing).peak_bytes


def _collectives_s(record: Record) -> float:
    return sum(timing.duration_s for timing in record.tasks if timing.lane is Lane.COLLECTIVE)
