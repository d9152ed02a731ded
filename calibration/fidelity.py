"""How true predictions are: many plans, none of them fitted to, predicted and measured on one machine.

A shared machine is now faster and now slower, and a calibration of one minute does not hold for the next.  What is
asked for here is the error of the model, not the drift of the machine: so the plans that the calibration is fitted to
and the plans that it is judged by are run in turn, in several rounds in random order, and what counts of every plan
are its typical rounds (see [Note: Typical iterations]).
"""

from __future__ import annotations

import copy
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Final

from scipy.stats import spearmanr
from torch import nn

from ..runtime.batches import Batch
from ..runtime.devices import TrainingDevice
from ..runtime.identity import software_versions
from ..runtime.optimizer import MakeOptimizer
from ..runtime.recording import middle_half
from ..shared.calibration import Calibration, Contention
from ..shared.compile import compile_schedule
from ..shared.files import FrozenModel
from ..shared.hardware import Hardware
from ..shared.memory_bound import guaranteed_device_peak
from ..shared.plan import Plan
from ..shared.record import Record
from ..shared.workload import Workload
from ..sim.search import search
from ..sim.simulator import simulate
from .calibrating import run_plan
from .fitting import Pair, fit_calibration
from .plans import bootstrap_plans, spanning_plans
from .slowdowns import measure_slowdowns

_WARM_UP: Final = 3
_PICK: Final = "search's pick"


class PlanFidelity(FrozenModel):
    """One plan, predicted and measured."""

    name: str
    plan: Plan
    predicted_iteration_s: float
    measured_iteration_s: float
    iteration_noise_frac: float
    """Standard deviation of its rounds over their mean."""
    predicted_peak_bytes: int
    measured_peak_bytes: int
    guaranteed_peak_bytes: int

    @property
    def iteration_error_frac(self) -> float:
        """Signed, predicted over measured minus one."""
        return self.predicted_iteration_s / self.measured_iteration_s - 1

    @property
    def peak_error_frac(self) -> float:
        """Signed, predicted over measured minus one."""
        return self.predicted_peak_bytes / self.measured_peak_bytes - 1


class Fidelity(FrozenModel):
    """All plans of one model on one machine."""

    model: str
    machine: str
    plans: tuple[PlanFidelity, ...]
    budget_bytes: int
    """The search was given this much device memory; plans that may need more do not count for its regret."""
    mean_peak_error_frac: float
    worst_peak_error_frac: float
    mean_iteration_error_frac: float
    worst_iteration_error_frac: float
    rank_correlation: float
    """Spearman's, of predicted iteration times and measured ones."""
    search_regret_frac: float
    """Measured time of the search's pick over that of the best measured plan within the budget, minus one."""


@dataclass(frozen=True)
class Subject:
    """A model on a machine, ready to be measured."""

    name: str
    model: nn.Module
    batch: Batch
    workload: Workload
    hardware: Hardware
    make_device: Callable[[], TrainingDevice]
    make_optimizer: MakeOptimizer


def measure_fidelity(
    subject: Subject,
    *,
    rounds: int = 5,
    steps: int = 8,
    seed: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[Fidelity, tuple[Record, ...]]:
    """Predict and measure the spanning plans and the search's pick; none of them is fitted to.

    Gives the typical records beside the judgement.  The first round, of the fitted plans alone, finds the pick.
    """
    contention = measure_slowdowns(subject.make_device())
    fitted = {f"fitted {place}": plan for place, plan in enumerate(bootstrap_plans(subject.workload))}
    judged = spanning_plans(subject.workload)
    total = rounds * (len(fitted) + len(judged) + 1) + len(fitted)
    needs = {name: _guaranteed_bytes(plan, subject.workload) for name, plan in judged.items()}
    budget_bytes = (min(needs.values()) + max(needs.values())) // 2
    records: dict[str, list[Record]] = {name: [] for name in (*fitted, *judged, _PICK)}

    def run(name: str, plan: Plan) -> None:
        records[name].append(_run(subject, plan, steps))
        if on_progress is not None:
            on_progress(sum(map(len, records.values())), total)

    for name, plan in fitted.items():
        run(name, plan)
    first = _fit(subject, [records[name][0] for name in fitted], contention)
    judged[_PICK] = search(subject.workload, subject.hardware, first, device_budget_bytes=budget_bytes).plan
    needs[_PICK] = _guaranteed_bytes(judged[_PICK], subject.workload)
    order = [*fitted.items(), *judged.items()]
    for turn in range(rounds):
        random.Random(seed + turn).shuffle(order)
        for name, plan in order:
            run(name, plan)
    typical = {name: _typical(of_plan) for name, of_plan in records.items()}
    calibration = _fit(subject, [record for name in fitted for record in typical[name]], contention)
    found = []
    for name, plan in judged.items():
        predicted = simulate(plan, subject.workload, subject.hardware, calibration)
        times = [record.iteration_s for record in records[name]]
        found.append(
            PlanFidelity(
                name=name,
                plan=plan,
                predicted_iteration_s=predicted.iteration_s,
                measured_iteration_s=statistics.fmean(record.iteration_s for record in typical[name]),
                iteration_noise_frac=statistics.pstdev(times) / statistics.fmean(times),
                predicted_peak_bytes=predicted.peak_device_bytes,
                measured_peak_bytes=max(record.peak_device_bytes for record in records[name]),
                guaranteed_peak_bytes=needs[name],
            )
        )
    kept = tuple(record for of_plan in typical.values() for record in of_plan)
    return _summary(subject, calibration, tuple(found), budget_bytes), kept


def _typical(records: Sequence[Record]) -> list[Record]:
    return [records[place] for place in middle_half([record.iteration_s for record in records])]


def _fit(subject: Subject, records: Sequence[Record], contention: Sequence[Contention]) -> Calibration:
    return fit_calibration(
        [Pair(subject.workload, record) for record in records],
        subject.hardware,
        contention=contention,
        machine=subject.make_device().description,
        software=software_versions(),
    )


def _run(subject: Subject, plan: Plan, steps: int) -> Record:
    return run_plan(
        copy.deepcopy(subject.model),
        plan,
        subject.workload,
        repeat(subject.batch, _WARM_UP + steps + 1),
        optimizer=subject.make_optimizer,
        device=subject.make_device(),
        hardware_name=subject.hardware.name,
    )


def _guaranteed_bytes(plan: Plan, workload: Workload) -> int:
    return guaranteed_device_peak(compile_schedule(plan, workload)).size_bytes


def _summary(
    subject: Subject, calibration: Calibration, plans: tuple[PlanFidelity, ...], budget_bytes: int
) -> Fidelity:
    peak_errors = [abs(plan.peak_error_frac) for plan in plans]
    time_errors = [abs(plan.iteration_error_frac) for plan in plans]
    predicted = [plan.predicted_iteration_s for plan in plans]
    correlation = spearmanr(predicted, [plan.measured_iteration_s for plan in plans]).statistic
    fitting = [plan for plan in plans if plan.guaranteed_peak_bytes <= budget_bytes]
    pick = next(plan for plan in plans if plan.name == _PICK)
    return Fidelity(
        model=subject.name,
        machine=calibration.machine,
        plans=plans,
        budget_bytes=budget_bytes,
        mean_peak_error_frac=statistics.fmean(peak_errors),
        worst_peak_error_frac=max(peak_errors),
        mean_iteration_error_frac=statistics.fmean(time_errors),
        worst_iteration_error_frac=max(time_errors),
        rank_correlation=float(correlation),
        search_regret_frac=pick.measured_iteration_s / min(plan.measured_iteration_s for plan in fitting) - 1,
    )
