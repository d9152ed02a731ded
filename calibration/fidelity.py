"""How true predictions are: many plans, none of them fitted to, predicted and then measured on this machine.

Every plan is measured in several rounds, all plans in turn in each round, so that a slow minute of a shared machine
does not fall on one of them.  Right before and after each of its runs a reference is measured, a plan that the
calibration was fitted to: how much slower it runs than predicted is the machine's drift since the calibration, and
the plan's own error is what remains.  Both errors are reported.
"""

from __future__ import annotations

import copy
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from typing import Final

from scipy.stats import spearmanr
from torch import nn

from ..runtime.batches import Batch
from ..runtime.devices import TrainingDevice
from ..runtime.optimizer import MakeOptimizer
from ..shared.calibration import Calibration
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
from .plans import bootstrap_plans, spanning_plans

_WARM_UP: Final = 3


class PlanFidelity(FrozenModel):
    """One plan, predicted and measured."""

    name: str
    plan: Plan
    predicted_iteration_s: float
    measured_iteration_s: float
    iteration_noise_frac: float
    """Spread of the rounds' medians: largest over smallest minus one."""
    drift: float
    """Measured over predicted seconds of the reference plan around this plan's runs; median over rounds."""
    predicted_peak_bytes: int
    measured_peak_bytes: int
    guaranteed_peak_bytes: int

    @property
    def raw_iteration_error_frac(self) -> float:
        """Signed, predicted over measured minus one, the machine's drift included."""
        return self.predicted_iteration_s / self.measured_iteration_s - 1

    @property
    def iteration_error_frac(self) -> float:
        """Signed, predicted over measured minus one, for a machine as fast as it was when it was calibrated."""
        return self.predicted_iteration_s * self.drift / self.measured_iteration_s - 1

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
    mean_raw_iteration_error_frac: float
    mean_iteration_error_frac: float
    worst_iteration_error_frac: float
    rank_correlation: float
    """Spearman's, of predicted iteration times and measured ones without drift."""
    search_regret_frac: float
    """Time of the search's pick over that of the best measured plan within the budget, without drift, minus one."""


@dataclass(frozen=True)
class Subject:
    """A model on a machine, ready to be measured."""

    name: str
    model: nn.Module
    batch: Batch
    workload: Workload
    hardware: Hardware
    calibration: Calibration
    make_device: Callable[[], TrainingDevice]
    make_optimizer: MakeOptimizer


def measure_fidelity(
    subject: Subject,
    *,
    rounds: int = 2,
    steps: int = 5,
    seed: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> Fidelity:
    """Predict and measure the spanning plans and the search's pick; none of them was fitted to."""
    plans = spanning_plans(subject.workload)
    needs = {name: _guaranteed_bytes(plan, subject.workload) for name, plan in plans.items()}
    budget_bytes = (min(needs.values()) + max(needs.values())) // 2
    pick = search(subject.workload, subject.hardware, subject.calibration, device_budget_bytes=budget_bytes).plan
    plans["search's pick"] = pick
    needs["search's pick"] = _guaranteed_bytes(pick, subject.workload)
    reference = bootstrap_plans(subject.workload)[0]
    expected_s = simulate(reference, subject.workload, subject.hardware, subject.calibration).iteration_s
    times: dict[str, list[float]] = {name: [] for name in plans}
    drifts: dict[str, list[float]] = {name: [] for name in plans}
    peaks: dict[str, int] = dict.fromkeys(plans, 0)
    order = list(plans)
    done = 0
    for turn in range(rounds):
        random.Random(seed + turn).shuffle(order)
        before = _run(subject, reference, steps).iteration_s
        for name in order:
            record = _run(subject, plans[name], steps)
            after = _run(subject, reference, steps).iteration_s
            times[name].append(record.iteration_s)
            drifts[name].append((before + after) / 2 / expected_s)
            peaks[name] = max(peaks[name], record.peak_device_bytes)
            before = after
            done += 1
            if on_progress is not None:
                on_progress(done, rounds * len(plans))
    found = []
    for name, plan in plans.items():
        predicted = simulate(plan, subject.workload, subject.hardware, subject.calibration)
        found.append(
            PlanFidelity(
                name=name,
                plan=plan,
                predicted_iteration_s=predicted.iteration_s,
                measured_iteration_s=statistics.median(times[name]),
                iteration_noise_frac=max(times[name]) / min(times[name]) - 1,
                drift=statistics.median(drifts[name]),
                predicted_peak_bytes=predicted.peak_device_bytes,
                measured_peak_bytes=peaks[name],
                guaranteed_peak_bytes=needs[name],
            )
        )
    return _summary(subject, tuple(found), budget_bytes)


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


def _summary(subject: Subject, plans: tuple[PlanFidelity, ...], budget_bytes: int) -> Fidelity:
    peak_errors = [abs(plan.peak_error_frac) for plan in plans]
    time_errors = [abs(plan.iteration_error_frac) for plan in plans]
    still_s = {plan.name: plan.measured_iteration_s / plan.drift for plan in plans}
    correlation = spearmanr([plan.predicted_iteration_s for plan in plans], list(still_s.values())).statistic
    fitting = [plan for plan in plans if plan.guaranteed_peak_bytes <= budget_bytes]
    pick = next(plan for plan in plans if plan.name == "search's pick")
    best_s = min(still_s[plan.name] for plan in fitting)
    return Fidelity(
        model=subject.name,
        machine=subject.calibration.machine,
        plans=plans,
        budget_bytes=budget_bytes,
        mean_peak_error_frac=statistics.fmean(peak_errors),
        worst_peak_error_frac=max(peak_errors),
        mean_raw_iteration_error_frac=statistics.fmean(abs(plan.raw_iteration_error_frac) for plan in plans),
        mean_iteration_error_frac=statistics.fmean(time_errors),
        worst_iteration_error_frac=max(time_errors),
        rank_correlation=float(correlation),
        search_regret_frac=still_s[pick.name] / best_s - 1,
    )
