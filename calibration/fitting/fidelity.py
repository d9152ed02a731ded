"""How true predictions are: many plans, none of them fitted to, predicted and measured on one machine.

A shared machine is now faster and now slower, and a calibration of one minute does not hold for the next.  What is
asked for here is the error of the model, not the drift of the machine: so the plans that the calibration is fitted to
and the plans that it is judged by all train side by side, each on a copy of the model, a few iterations of one plan
after a few of another, in random order.
"""

from __future__ import annotations

import copy
import random
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import Final

from scipy.stats import spearmanr

from ...runtime.model.batches import loss_of
from ...runtime.model.identity import software_versions
from ...runtime.training.carry_out import carry_out
from ...runtime.training.training import Training
from ...shared.basics.documents import FrozenModel
from ...shared.compile.compile import compile_schedule
from ...shared.schema.calibration import Calibration, Contention
from ...shared.schema.plan import Plan
from ...shared.schema.record import Record
from ...shared.schema.workload import Workload
from ...shared.verify.guaranteed_peak import guaranteed_device_peak
from ...sim.engine.simulator import simulate
from ...sim.searching.request import SearchRequest
from ...sim.searching.search import search
from .fit import Pair, fit_calibration
from .measurement_plans import bootstrap_plans, spanning_plans
from .slowdowns import measure_slowdowns
from .subject import Subject

_WARM_UP: Final = 3
_PICK: Final = "search's pick"


class PlanFidelity(FrozenModel):
    """One plan, predicted and measured."""

    name: str
    plan: Plan
    predicted_iteration_s: float
    measured_iteration_s: float
    iteration_noise_frac: float
    """Of the record: how iterations of this plan scatter."""
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
    """Measured time of the search's pick over that of the best plan within the budget, minus one.

    The best plan is chosen by one half of the measurements and timed by the other, both ways: the smallest of many
    noisy figures is smaller than any plan is fast.
    """


def measure_fidelity(
    subject: Subject,
    *,
    rounds: int = 10,
    steps: int = 3,
    seed: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[Fidelity, tuple[Record, ...]]:
    """Predict and measure the spanning plans and the search's pick; none of them is fitted to.

    Where ``subject`` has a folder on a disk, plans with chunks there are among them.  In each of ``rounds`` every plan
    runs ``steps`` iterations that count.  The first ones, of the fitted plans alone, find the pick.  Gives all Records
    beside the judgement.
    """
    has_disk = subject.measures_disk
    contention = measure_slowdowns(subject.make_device(), disk_folder=subject.disk_folder)
    bootstrap = bootstrap_plans(subject.workload, has_disk=has_disk)
    fitted = {f"fitted {place}": plan for place, plan in enumerate(bootstrap)}
    judged = spanning_plans(subject.workload, has_disk=has_disk)
    total = rounds * (len(fitted) + len(judged) + 1)
    needs = {name: _guaranteed_bytes(plan, subject.workload) for name, plan in judged.items()}
    budget_bytes = (min(needs.values()) + max(needs.values())) // 2
    with ExitStack() as undo:
        trainings = {name: _begin(subject, plan, undo) for name, plan in fitted.items()}
        for training in trainings.values():
            _burst(subject, training, 2 * steps)
        first = _fit(subject, [training.record() for training in trainings.values()], contention)
        judged[_PICK] = search(
            SearchRequest(
                workload=subject.workload,
                hardware=subject.hardware,
                calibration=first,
                device_budget_bytes=budget_bytes,
            )
        ).plan
        needs[_PICK] = _guaranteed_bytes(judged[_PICK], subject.workload)
        trainings |= {name: _begin(subject, plan, undo) for name, plan in judged.items()}
        order = list(trainings.values())
        middle: dict[str, int] = {}
        for turn in range(rounds):
            if turn == rounds // 2:
                middle = {name: training.num_iterations for name, training in trainings.items()}
            random.Random(seed + turn).shuffle(order)
            for place, training in enumerate(order):
                _burst(subject, training, steps)
                if on_progress is not None:
                    on_progress(turn * len(order) + place + 1, total)
        records = {name: training.record() for name, training in trainings.items()}
        halves = [
            {name: trainings[name].record(until=middle[name]).iteration_s for name in judged},
            {name: trainings[name].record(since=middle[name]).iteration_s for name in judged},
        ]
    calibration = _fit(subject, [records[name] for name in fitted], contention)
    found = tuple(_judged(subject, calibration, name, records[name], needs[name]) for name in judged)
    allowed = [name for name in judged if needs[name] <= budget_bytes]
    regret_frac = statistics.fmean(
        timed[_PICK] / timed[min(allowed, key=chosen.__getitem__)] - 1 for chosen, timed in (halves, halves[::-1])
    )
    return _summary(subject, calibration, found, budget_bytes, regret_frac), tuple(records.values())


def _begin(subject: Subject, plan: Plan, undo: ExitStack) -> Training:
    """A training past its warm-up, which ``undo`` ends."""
    folder = None
    if plan.n_disk_state:
        folder = undo.enter_context(TemporaryDirectory(dir=subject.disk_folder))
    training = undo.enter_context(
        carry_out(
            copy.deepcopy(subject.model),
            plan,
            subject.workload,
            optimizer=subject.make_optimizer,
            device=subject.make_device(),
            disk_folder=folder,
        )
    )
    _burst(subject, training, _WARM_UP)
    return training


def _burst(subject: Subject, training: Training, steps: int) -> None:
    """Iterations of which ``steps`` count: the first finds idle lanes, and the last but closes the one before."""
    for _ in range(steps + 2):
        loss_of(training.model, subject.batch, subject.loss).backward()  # type: ignore[no-untyped-call]
        training.step()
    training.synchronize()


def _fit(subject: Subject, records: Sequence[Record], contention: Sequence[Contention]) -> Calibration:
    return fit_calibration(
        [Pair(subject.workload, record) for record in records],
        subject.hardware,
        contention=contention,
        machine=subject.make_device().description,
        software=software_versions(),
    )


def _judged(
    subject: Subject, calibration: Calibration, name: str, measured: Record, guaranteed_peak_bytes: int
) -> PlanFidelity:
    """The plan of ``measured``, predicted and measured."""
    predicted = simulate(measured.plan, subject.workload, subject.hardware, calibration)
    return PlanFidelity(
        name=name,
        plan=measured.plan,
        predicted_iteration_s=predicted.iteration_s,
        measured_iteration_s=measured.iteration_s,
        iteration_noise_frac=measured.iteration_noise_frac,
        predicted_peak_bytes=predicted.peak_device_bytes,
        measured_peak_bytes=measured.peak_device_bytes,
        guaranteed_peak_bytes=guaranteed_peak_bytes,
    )


def _guaranteed_bytes(plan: Plan, workload: Workload) -> int:
    return guaranteed_device_peak(compile_schedule(plan, workload)).size_bytes


def _summary(
    subject: Subject,
    calibration: Calibration,
    plans: tuple[PlanFidelity, ...],
    budget_bytes: int,
    regret_frac: float,
) -> Fidelity:
    peak_errors = [abs(plan.peak_error_frac) for plan in plans]
    time_errors = [abs(plan.iteration_error_frac) for plan in plans]
    predicted = [plan.predicted_iteration_s for plan in plans]
    correlation = spearmanr(predicted, [plan.measured_iteration_s for plan in plans]).statistic
    return Fidelity(
        model=subject.workload.model_name,
        machine=calibration.machine,
        plans=plans,
        budget_bytes=budget_bytes,
        mean_peak_error_frac=statistics.fmean(peak_errors),
        worst_peak_error_frac=max(peak_errors),
        mean_iteration_error_frac=statistics.fmean(time_errors),
        worst_iteration_error_frac=max(time_errors),
        rank_correlation=float(correlation),
        search_regret_frac=regret_frac,
    )
