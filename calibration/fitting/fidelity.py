"""How true predictions are: many plans, none of them fitted to, predicted and measured on one machine.

A shared machine is now faster and now slower, and a calibration of one minute does not hold for the next.  What is
asked for here is the error of the model, not the drift of the machine: so the plans that the calibration is fitted to
and the plans that it is judged by all train side by side, each on a copy of the model, a few iterations of one plan
after a few of another, in random order.

Several ranks judge predictions of several ranks: all of them run the same plans in the same order, and what counts is
the mean over ranks, of peaks the highest.  A task that ranks do together lasts from when its rank comes to it until it
is done: what a rank waits for the others is in it, in what factors are fitted to as in what they are judged by.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from scipy.stats import spearmanr

from ...runtime.model.identity import software_versions
from ...runtime.training.training import Training
from ...shared.basics.documents import FrozenModel
from ...shared.basics.errors import InfeasibleError
from ...shared.compile.compile import compile_schedule
from ...shared.schema.calibration import Calibration, Contention
from ...shared.schema.plan import Plan
from ...shared.schema.record import Record
from ...shared.schema.schedule import Lane
from ...shared.schema.workload import Workload
from ...shared.verify.guaranteed_peak import guaranteed_device_peak
from ...sim.engine.simulator import simulate
from ...sim.searching.confidence import NO_UNCERTAINTY
from ...sim.searching.request import SearchRequest, Step
from ...sim.searching.search import search
from .fit import fit_calibration, pairs_of
from .measurement_plans import bootstrap_plans, random_plans, spanning_plans
from .slowdowns import measure_slowdowns
from .subject import Subject

_WARM_UP: Final = 3
_PICK: Final = "search's pick"
_ROOMY: Final = "search's pick without a budget"
"""Beside a plain loop, which has none either."""
_NUM_RANDOM: Final = 20
"""Plans of a distillation beside which the search's pick is judged."""
_NUM_OF_SEVERAL: Final = 4
"""Of its plans that have several micro-batches."""
_PLAIN: Final = 4
"""Times as many plain steps as steps of one plan: all are compared with them."""


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
    predicted_collectives_s: float | None = None
    """Seconds of all tasks of an iteration that ranks do together; None for one rank."""
    measured_collectives_s: float | None = None

    @property
    def collectives_error_frac(self) -> float | None:
        """Signed, predicted over measured minus one; None for one rank."""
        if self.predicted_collectives_s is None or self.measured_collectives_s is None:
            return None
        return self.predicted_collectives_s / self.measured_collectives_s - 1

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
    plain_iteration_s: float | None = None
    """Median of a plain loop without a plan, everything on the device; None where none was measured."""
    plain_ratio: float | None = None
    """Measured iteration of the plan that the search picks without a budget, over that of the plain loop."""
    plain_ratio_in_budget: float | None = None
    """The same of the plan that it picks within the budget."""
    num_ranks: int = 1
    mean_collectives_error_frac: float | None = None
    worst_collectives_error_frac: float | None = None
    mode_regret_frac: float | None = None
    """Measured time of the fastest plan in the mode that the search finds fastest, over that of the fastest plan in
    whichever mode was measured to be faster, minus one; None for one rank."""


def measure_fidelity(
    subject: Subject,
    *,
    rounds: int = 10,
    steps: int = 3,
    seed: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[Fidelity, tuple[Record, ...]]:
    """Predict and measure the spanning plans and the search's pick; none of them is fitted to.

    Where ``subject`` has a folder on a disk, plans with chunks there are among them.  Where it has a world of several
    ranks, all of them call this and get the same, and the fastest plan of every mode is among the plans.  In each of
    ``rounds`` every plan runs ``steps`` iterations that count.  The first ones, of the fitted plans alone, find the
    pick.  Gives all Records of this rank beside the judgement.
    """
    has_disk, num_ranks = subject.measures_disk, subject.num_ranks
    contention = measure_slowdowns(subject.make_device(), disk_folder=subject.disk_folder, world=subject.world)
    bootstrap = bootstrap_plans(subject.workload, has_disk=has_disk, num_ranks=num_ranks)
    fitted = {f"fitted {place}": plan for place, plan in enumerate(bootstrap)}
    judged, needs, budget_bytes = _plans_to_judge(subject, has_disk=has_disk)
    plain_step, plain_s = subject.plain_step(), list[float]()
    with ExitStack() as undo:
        trainings = {name: _begin(subject, plan, undo) for name, plan in fitted.items()}
        for training in trainings.values():
            _burst(subject, training, 2 * steps)
        first = _fit(subject, [training.record() for training in trainings.values()], contention)
        picks = subject.of_first(lambda: _picks(subject, first, budget_bytes))
        judged |= picks
        needs |= {name: _guaranteed_bytes(plan, subject.workload) for name, plan in picks.items()}
        trainings |= {name: _begin(subject, plan, undo) for name, plan in judged.items()}
        middle = _train_in_turns(subject, trainings, rounds, steps, seed, on_progress, plain=(plain_step, plain_s))
        records = {name: training.record() for name, training in trainings.items()}
        halves = [
            _mean_iterations(subject, {name: trainings[name].record(until=middle[name]) for name in judged}),
            _mean_iterations(subject, {name: trainings[name].record(since=middle[name]) for name in judged}),
        ]
    calibration = _fit(subject, [records[name] for name in fitted], contention)
    found = tuple(
        _judged(
            subject,
            calibration,
            name,
            [pair.measured for pair in pairs_of(subject.workload, records[name])],
            needs[name],
        )
        for name in judged
    )
    allowed = [name for name in judged if needs[name] <= budget_bytes and judged[name].micro_batches == 1]
    summary = _summary(subject, calibration, found, budget_bytes, _regret_frac(_PICK, allowed, halves))
    if plain_s:
        summary = summary.model_copy(update=_beside_plain(summary, statistics.median(plain_s)))
    if num_ranks > 1:
        of_modes = [name for name in picks if name != _PICK]
        predicted = {plan.name: plan.predicted_iteration_s for plan in found}
        fastest = min(of_modes, key=predicted.__getitem__)
        summary = summary.model_copy(update={"mode_regret_frac": _regret_frac(fastest, of_modes, halves)})
    return summary, tuple(records.values())


def _plans_to_judge(subject: Subject, *, has_disk: bool) -> tuple[dict[str, Plan], dict[str, int], int]:
    """Plans that nothing is fitted to, the device memory that each may need, and the budget of the search.

    Of a distillation they come by chance: twenty of one micro-batch within the budget, and a few of several.
    """
    workload = subject.workload
    if workload.distillation is None:
        judged = spanning_plans(workload, has_disk=has_disk, num_ranks=subject.num_ranks)
        needs = {name: _guaranteed_bytes(plan, workload) for name, plan in judged.items()}
        return judged, needs, (min(needs.values()) + max(needs.values())) // 2
    drawn = {plan: _guaranteed_bytes(plan, workload) for plan in random_plans(workload, 3 * _NUM_RANDOM, seed=0)}
    budget_bytes = (min(drawn.values()) + max(drawn.values())) // 2
    within = [plan for plan, need_bytes in drawn.items() if need_bytes <= budget_bytes][:_NUM_RANDOM]
    several = random_plans(workload, 4 * _NUM_OF_SEVERAL, seed=1, most_micro_batches=3)
    within += [plan for plan in several if plan.micro_batches > 1][:_NUM_OF_SEVERAL]
    judged = {f"by chance {place}": plan for place, plan in enumerate(within, start=1)}
    return judged, {name: _guaranteed_bytes(plan, workload) for name, plan in judged.items()}, budget_bytes


def _beside_plain(summary: Fidelity, plain_s: float) -> dict[str, float]:
    """What a plain step takes, and what the search's picks take beside it."""
    measured = {plan.name: plan.measured_iteration_s for plan in summary.plans}
    return {
        "plain_iteration_s": plain_s,
        "plain_ratio": measured[_ROOMY] / plain_s,
        "plain_ratio_in_budget": measured[_PICK] / plain_s,
    }


def _train_in_turns(
    subject: Subject,
    trainings: Mapping[str, Training],
    rounds: int,
    steps: int,
    seed: int,
    on_progress: Callable[[int, int], None] | None,
    *,
    plain: tuple[Callable[[], None] | None, list[float]],
) -> dict[str, int]:
    """In each of ``rounds`` every training runs ``steps`` iterations that count; gives how many each had halfway.

    ``plain``: a step that has its turn among them, and the list to which the seconds of each that counts are added.
    """
    order = list(trainings.values())
    middle: dict[str, int] = {}
    for turn in range(rounds):
        if turn == rounds // 2:
            middle = {name: training.num_iterations for name, training in trainings.items()}
        random.Random(seed + turn).shuffle(order)
        plain_step, plain_s = plain
        for number in range(0 if plain_step is None else _PLAIN * steps + 2):
            assert plain_step is not None
            begin_s = time.perf_counter()
            plain_step()
            plain_s += [time.perf_counter() - begin_s] if number >= 2 else []
        for place, training in enumerate(order):
            _burst(subject, training, steps)
            if on_progress is not None:
                on_progress(turn * len(order) + place + 1, rounds * len(order))
    return middle


def _mean_iterations(subject: Subject, records: dict[str, Record]) -> dict[str, float]:
    """Seconds of an iteration of every plan, over all ranks."""
    return {
        name: statistics.fmean(pair.measured.iteration_s for pair in pairs_of(subject.workload, record))
        for name, record in records.items()
    }


def _regret_frac(chosen: str, allowed: Sequence[str], halves: Sequence[dict[str, float]]) -> float:
    """Time of ``chosen`` over that of the best of ``allowed``, which one half finds and the other times, minus one."""
    return statistics.fmean(
        timed[chosen] / timed[min(allowed, key=choosing.__getitem__)] - 1 for choosing, timed in (halves, halves[::-1])
    )


def _picks(subject: Subject, calibration: Calibration, budget_bytes: int) -> dict[str, Plan]:
    """What the search recommends, and of several ranks the fastest plan of every mode in which one fits."""
    step = Step(num_ranks=subject.num_ranks)
    request = SearchRequest(
        workload=subject.workload,
        hardware=subject.hardware,
        calibration=calibration,
        device_budget_bytes=budget_bytes,
        step=step,
    )
    found = {_PICK: search(request).plan}
    if subject.workload.distillation is not None:
        found[_ROOMY] = search(replace(request, device_budget_bytes=None)).plan
    for mode in step.allowed_modes if subject.num_ranks > 1 else ():
        of_mode = replace(
            request, step=replace(step, modes=(mode,)), effort=replace(request.effort, uncertainty=NO_UNCERTAINTY)
        )
        with suppress(InfeasibleError):
            found[f"{mode}: {_PICK}"] = search(of_mode).plan
    return found


def _begin(subject: Subject, plan: Plan, undo: ExitStack) -> Training:
    """A training past its warm-up, which ``undo`` ends."""
    folder = None
    if plan.n_disk_state:
        folder = Path(undo.enter_context(TemporaryDirectory(dir=subject.disk_folder)))
    training = undo.enter_context(subject.begin(plan, disk_folder=folder))
    _burst(subject, training, _WARM_UP)
    return training


def _burst(subject: Subject, training: Training, steps: int) -> None:
    """Iterations of which ``steps`` count: the first finds idle lanes, and the last but closes the one before."""
    for _ in range(steps + 2):
        subject.run_step(training)
    training.synchronize()


def _fit(subject: Subject, records: Sequence[Record], contention: Sequence[Contention]) -> Calibration:
    """Of all ranks' tasks; the same on all."""
    pairs = [pair for record in records for pair in pairs_of(subject.workload, record)]
    return subject.of_first(
        lambda: fit_calibration(
            pairs,
            subject.hardware,
            contention=contention,
            machine=subject.make_device().description,
            software=software_versions(),
        )
    )


def _judged(
    subject: Subject, calibration: Calibration, name: str, measured: Sequence[Record], guaranteed_peak_bytes: int
) -> PlanFidelity:
    """The plan of ``measured``, which has one record for every rank, predicted and measured."""
    plan = measured[0].plan
    predicted = simulate(plan, subject.workload, subject.hardware, calibration)
    has_ranks = len(measured) > 1
    return PlanFidelity(
        name=name,
        plan=plan,
        predicted_iteration_s=predicted.iteration_s,
        measured_iteration_s=statistics.fmean(record.iteration_s for record in measured),
        iteration_noise_frac=statistics.fmean(record.iteration_noise_frac for record in measured),
        predicted_peak_bytes=predicted.peak_device_bytes,
        measured_peak_bytes=max(record.peak_device_bytes for record in measured),
        guaranteed_peak_bytes=guaranteed_peak_bytes,
        predicted_collectives_s=_collectives_s(predicted) if has_ranks else None,
        measured_collectives_s=statistics.fmean(map(_collectives_s, measured)) if has_ranks else None,
    )


def _collectives_s(record: Record) -> float:
    return sum(timing.duration_s for timing in record.tasks if timing.lane is Lane.COLLECTIVE)


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
    collectives = [abs(error) for plan in plans if (error := plan.collectives_error_frac) is not None]
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
        num_ranks=subject.num_ranks,
        mean_collectives_error_frac=statistics.fmean(collectives) if collectives else None,
        worst_collectives_error_frac=max(collectives) if collectives else None,
    )
