"""From a search that is over, or was ended, to the documents that say what it found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from ...shared.answers.search_result import BatchChoice, Certificate, ModeChoice, PlanOutcome, SearchResult
from ...shared.basics.errors import PlanError
from ...shared.catalogue.rank_share import rent_of_stage
from ...shared.layout.kinds import kind_of
from ...shared.schema.hardware import DeviceKind
from ...shared.schema.plan import ParallelMode
from ...shared.schema.record import Record
from ..engine.intervals import FloatArray, drawn_record, interval_of, ratio_interval
from ..engine.prediction import RankMachine, predicted_record
from ..memory.libraries import collective_bytes, rank_device_bytes
from .branch_and_bound import BranchAndBound, Simulated
from .choice import Choice, Chosen
from .infeasible import shortage
from .levels import Candidate
from .problem import SearchProblem
from .request import SearchRequest

_NUM_ALTERNATIVES: Final = 4
_PARETO_SAVING_FRAC: Final = 0.01
_BEYOND_SEGMENTS: Final = "its plans fit by what they allocate, but not by the segments that they are expected to take"


def search_result(
    request: SearchRequest, choice: Choice, branches: Sequence[BranchAndBound], *, is_interrupted: bool = False
) -> SearchResult:
    """The document of a search that settled on ``choice``; its certificate covers all ``branches`` together.

    Raises WorkloadError if nothing takes time.
    """
    found = choice.chosen
    chosen, problem = found.plan, found.branch.problem
    margin_frac = None if problem.hardware.device.kind is DeviceKind.CPU else request.margin_frac
    prediction = _prediction(problem, chosen, _limit_bytes(request, problem)).asking(margin_frac=margin_frac)
    peak_bytes = prediction.guaranteed_peak_device_bytes
    assert peak_bytes == chosen.candidate.peak_bytes <= problem.device_budget_bytes, "the compiled plan fits"
    known = _known([one for one in branches if one.problem is problem], found)
    told = _Told.of(found)
    return SearchResult(
        model_name=problem.workload.model_name,
        hardware_name=problem.hardware.name,
        device_budget_bytes=problem.device_budget_bytes,
        host_budget_bytes=problem.host_budget_bytes,
        plan=chosen.plan,
        plan_kind=found.where.kind,
        prediction=prediction,
        survives=None if margin_frac is None else choice.survives,
        margin_frac=margin_frac,
        uncertainty=request.uncertainty,
        risk=request.risk,
        expandable=_outcome_of(choice.expandable, told),
        passed_over_for_risk=_outcome_of(choice.passed_over_for_risk, told),
        num_weighed=choice.num_weighed,
        passed_over=_outcome_of(choice.passed_over, told),
        certificate=certify(branches, found.iteration_s, is_interrupted=is_interrupted).model_copy(
            update={"has_fewest_on_disk": not request.space.names_disk and any(b.problem.has_disk for b in branches)}
        ),
        alternatives=tuple(_outcome(one, told) for one in _alternatives(chosen.candidate, known)),
        pareto=tuple(_outcome(one, told) for one in _pareto_front(known, found)),
    )


def _limit_bytes(request: SearchRequest, problem: SearchProblem) -> int:
    """Device memory above which a plan runs out of it: the budget that was asked for, else all that the rank has.

    The margin is to stay free, and nobody runs out of memory in it.  Of one memory, each has its share.
    """
    if request.device_budget_bytes is not None or problem.is_shared:
        return problem.device_budget_bytes
    return rank_device_bytes(problem.together, problem.world_ranks, problem.step.shard_ranks)


def _prediction(problem: SearchProblem, chosen: Simulated, limit_bytes: int) -> Record:
    """The record of the recommended plan, with its intervals; the margin is not in its question yet."""
    record = predicted_record(
        chosen.plan,
        problem.workload,
        RankMachine(
            hardware=problem.hardware,
            collective_bytes=collective_bytes(problem.together, problem.world_ranks, problem.step.shard_ranks),
            price_usd_per_hour=rent_of_stage(problem.together, problem.step.num_ranks, problem.workload.num_stages),
        ),
        problem.calibration,
        chosen.schedule,
        chosen.timing,
        layout=problem.layouts[chosen.candidate.layout].grid.layout,
        method=problem.method,
    )
    found, _ = drawn_record(
        record.asking(device_budget_bytes=problem.device_budget_bytes, host_budget_bytes=problem.host_budget_bytes),
        problem.costs.durations_s(chosen.schedule),
        problem.contention,
        chosen.schedule,
        chosen.timing,
        problem.errors,
        limit_bytes=limit_bytes,
    )
    return found


def certify(branches: Sequence[BranchAndBound], chosen_s: float, *, is_interrupted: bool = False) -> Certificate:
    """What the searches prove together.

    Plans wait beyond the limits of their layouts ([Note: Plans that survive] in ``sim/searching/survival.py``).  Their
    bounds of time hold as well as any, so that nothing is proven of those alone that might be faster.

    ``chosen_s``: the time of the recommended plan, which is within none of them if no plan survives.
    """
    best_s = min(chosen_s, *(branch.own_best_s for branch in branches))
    tolerance_frac = branches[0].tolerance_frac
    left_out_frac = max(branch.left_out_frac for branch in branches)
    # As the searches had it, which know the times of plans that were replayed alone.
    limit_s = min(best_s, *(branch.promised_s for branch in branches)) * (1 - left_out_frac)
    num_bounded_by_time = num_bounded_by_segments = num_undecided = 0
    bounds_s: list[float] = []
    for branch in branches:
        num_left = branch.num_candidates - branch.num_decided
        # Those that may still win were left where the search ended early.
        closed_s = [found.bound_s for found in branch.replayed if found.bound_s >= limit_s]
        num_open = len(branch.replayed) - len(closed_s)
        waiting = branch.beyond(limit_s)
        num_bounded_by_segments += waiting.num_below + len(branch.dropped)
        bounds_s += closed_s
        next_bound_s = branch.candidates.next_bound_s
        is_complete = not is_interrupted and next_bound_s >= limit_s
        num_bounded_by_time += len(closed_s) + waiting.num_others + (num_left if is_complete else 0)
        num_undecided += num_open + (0 if is_complete else num_left)
        if is_complete and np.isfinite(next_bound_s):
            bounds_s.append(next_bound_s)
        if waiting.num_others:
            bounds_s.append(waiting.others_s)
    return Certificate(
        num_candidates=sum(branch.num_candidates for branch in branches),
        num_bounded_by_memory=sum(branch.candidates.num_bounded_by_memory for branch in branches),
        num_bounded_by_time=num_bounded_by_time,
        num_bounded_by_segments=num_bounded_by_segments,
        num_simulated=sum(len(branch.simulated) - len(branch.dropped) for branch in branches),
        num_undecided=num_undecided,
        is_interrupted=is_interrupted,
        best_iteration_s=best_s,
        best_unsimulated_bound_s=min(bounds_s, default=None),
        tolerance_frac=tolerance_frac,
        left_out_frac=left_out_frac,
    )


def mode_choice(
    mode: ParallelMode,
    branches: Sequence[BranchAndBound],
    *,
    shard_ranks: int | None,
    refusal: PlanError | None,
    is_interrupted: bool,
    chosen_s: float | None = None,
) -> ModeChoice:
    """The outcome of one mode; ``branches``: its searches, one for each size of the micro-batch, ascending.

    Args:
        mode: What ranks do together.
        branches: Its searches.
        shard_ranks: Of its shard groups, if it has some.
        refusal: Why it has no plan, where there is no search.
        is_interrupted: Whether the search was ended early.
        chosen_s: The time of the recommended plan, if that is one of this mode: it may be beyond all margins.
    """
    best_s = [branch.best.timing.iteration_s for branch in branches if branch.best is not None]
    known_s = [*best_s, *([chosen_s] if chosen_s is not None else [])]
    bounds_s = [branch.open_bound_s for branch in branches if np.isfinite(branch.open_bound_s)]
    reason = ""
    if not branches:
        reason = str(refusal)
    elif not known_s and not bounds_s:
        problems = [branch.problem for branch in branches]
        reason = shortage(min(problems, key=lambda problem: problem.least_activation_bytes)) or _BEYOND_SEGMENTS
    return ModeChoice(
        parallel=mode,
        shard_ranks=shard_ranks,
        num_candidates=sum(branch.num_candidates for branch in branches),
        num_simulated=sum(len(branch.simulated) for branch in branches),
        best_iteration_s=min(known_s, default=None),
        shortest_possible_s=None if is_interrupted else min(best_s + bounds_s, default=None),
        reason=reason,
    )


def batch_choice(size: int, branches: Sequence[BranchAndBound], *, is_interrupted: bool) -> BatchChoice:
    """The outcome of one size of the micro-batch; ``branches``: its searches, one for each parallel mode."""
    simulated = [branch.best for branch in branches if branch.best is not None]
    best = min(simulated, key=lambda one: one.order, default=None)
    bounds_s = [branch.open_bound_s for branch in branches if np.isfinite(branch.open_bound_s)]
    bounds_s += [one.timing.iteration_s for one in simulated]
    return BatchChoice(
        micro_batch_size=size,
        micro_batches=branches[0].problem.step.micro_batches,
        num_candidates=sum(branch.num_candidates for branch in branches),
        num_simulated=sum(len(branch.simulated) for branch in branches),
        best_iteration_s=None if best is None else best.timing.iteration_s,
        shortest_possible_s=None if is_interrupted else min(bounds_s, default=None),
        parallel=None if best is None else best.plan.parallel,
    )


@dataclass(frozen=True, eq=False)
class _Known:
    """A plan whose time is known."""

    branch: BranchAndBound
    candidate: Candidate
    iteration_s: float
    is_simulated: bool

    @property
    def character(self) -> tuple[int, ...]:
        """What makes plans more than variants of one another: layout, where chunks lie, modes."""
        _, _, kept, n_swap, n_offload_input, n_checkpoint, _, *residencies, _, _ = self.candidate.simplicity
        return self.candidate.layout, *residencies, n_checkpoint, n_swap, n_offload_input, kept

    @property
    def order(self) -> tuple[float, int, tuple[int, ...]]:
        """Fastest first, then by the least memory, then the simplest."""
        return self.iteration_s, self.candidate.peak_bytes, self.candidate.simplicity


def _known(branches: Iterable[BranchAndBound], chosen: Chosen) -> list[_Known]:
    """The chosen plan, and those within the limits of memory that were simulated or replayed, fastest first."""
    known = [_Known(chosen.branch, chosen.plan.candidate, chosen.iteration_s, is_simulated=True)]
    for branch in branches:
        known += [
            _Known(branch, s.candidate, s.timing.iteration_s, is_simulated=True)
            for s in branch.fitting
            if s is not chosen.plan
        ]
        known += [
            _Known(branch, r.candidate, r.period_s, is_simulated=False)
            for r in branch.replayed
            if not np.isnan(r.period_s)
        ]
    return sorted(known, key=lambda one: one.order)


@dataclass(frozen=True, eq=False)
class _Told:
    """The recommended plan as others are laid beside it."""

    time_s: float
    logs: FloatArray
    """``SearchProblem.time_logs`` of it."""

    @classmethod
    def of(cls, found: Chosen) -> Self:
        """Of the plan that was chosen."""
        candidate = found.plan.candidate
        return cls(found.iteration_s, found.branch.problem.time_logs(candidate.family, candidate.index))


def _outcome_of(chosen: Chosen | None, told: _Told) -> PlanOutcome | None:
    if chosen is None:
        return None
    return _outcome(_Known(chosen.branch, chosen.plan.candidate, chosen.iteration_s, is_simulated=True), told)


def _outcome(known: _Known, told: _Told) -> PlanOutcome:
    problem, candidate = known.branch.problem, known.candidate
    plan = problem.plan(candidate.layout, *candidate.index)
    grid = problem.layouts[candidate.layout].grid
    prefix = grid.prefix[[candidate.index[0]]]
    pinned_bytes = int(problem.pinned_host_bytes(candidate.layout, prefix, candidate.trips)[0])
    logs = problem.time_logs(candidate.family, candidate.index)
    return PlanOutcome(
        plan=plan,
        plan_kind=kind_of(plan, grid.layout, problem.workload),
        iteration_s=known.iteration_s,
        iteration_interval_s=interval_of(known.iteration_s, logs, problem.errors),
        ratio_interval=ratio_interval(logs, told.logs, problem.errors, ratio=known.iteration_s / told.time_s),
        is_simulated=known.is_simulated,
        guaranteed_peak_device_bytes=candidate.peak_bytes,
        pinned_host_bytes=pinned_bytes,
        host_bytes=int(problem.host_bytes(candidate.layout, prefix, candidate.trips)[0]) - pinned_bytes,
    )


def _alternatives(chosen: Candidate, known: list[_Known]) -> list[_Known]:
    """The next best of another character than ``chosen`` and each other; ``known`` fastest first."""
    found: dict[tuple[int, ...], _Known] = {}
    for one in known:
        found.setdefault(one.character, one)
    found.pop(next(one.character for one in known if one.candidate is chosen))
    return list(found.values())[:_NUM_ALTERNATIVES]


def _pareto_front(known: Iterable[_Known], chosen: Chosen) -> list[_Known]:
    """The front of ``known``, which comes fastest first: each of its plans saves a share of the peak before it.

    The chosen plan is on it: no plan of its kind is as fast with less memory, and those of less simple kinds count from
    its time on.
    """
    front: list[_Known] = []
    kind, time_s = chosen.where.kind, chosen.iteration_s
    for one in known:
        if one.candidate is chosen.plan.candidate:
            front.append(one)
            continue
        is_less_simple = one.branch.kind is not None and one.branch.kind.complexity > kind.complexity
        if is_less_simple and one.iteration_s < time_s:
            continue
        if one.iteration_s == time_s and one.candidate.peak_bytes < chosen.plan.candidate.peak_bytes:
            continue  # of a less simple kind: one of its own kind would have been chosen
        if not front or one.candidate.peak_bytes <= front[-1].candidate.peak_bytes * (1 - _PARETO_SAVING_FRAC):
            front.append(one)
    return front
