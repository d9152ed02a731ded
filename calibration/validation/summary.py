"""What is found of all plans of a validation together."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..fitting.subject import Subject
from .fidelity import Fidelity, PlanFidelity
from .judging import Judgement
from .ordering import rank_correlation, rank_correlation_beyond_noise, regret_frac
from .picks import PICK, ROOMY, is_alike


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a validation has measured and predicted."""

    judgement: Judgement
    machine: str
    budget_bytes: int
    halves: Sequence[Mapping[str, float]]
    """Seconds of an iteration of every plan, from one half of its bursts and from the other."""
    plain_s: tuple[float, ...]
    """Of the plain loop's steps; none where there is no such loop."""
    run: Mapping[str, Any]
    """Fields of ``Fidelity`` that say how it went."""


def summary_of(subject: Subject, found: Found) -> Fidelity:
    """Errors, coverage, order, regret and blame."""
    plans = tuple(found.judgement.plans)
    retimed = [
        abs(plan.retimed_peak_bytes / plan.measured_peak_bytes - 1)
        for plan in plans
        if plan.retimed_peak_bytes is not None
    ]
    return Fidelity(
        model=subject.workload.model_name,
        machine=found.machine,
        plans=plans,
        budget_bytes=found.budget_bytes,
        mean_retimed_peak_error_frac=statistics.fmean(retimed) if retimed else None,
        num_over_guarantee=sum(plan.measured_peak_bytes > plan.guaranteed_peak_bytes for plan in plans),
        kinds=found.judgement.found_kinds(),
        num_ranks=subject.num_ranks,
        **_errors(plans),
        **_intervals(plans),
        **_order(found, plans),
        **_beside_plain(found, plans),
        **found.run,
    )


def _errors(plans: Sequence[PlanFidelity]) -> dict[str, Any]:
    peaks = [abs(plan.peak_error_frac) for plan in plans]
    times = [plan.iteration_error_frac for plan in plans]
    collectives = [abs(error) for plan in plans if (error := plan.collectives_error_frac) is not None]
    return {
        "mean_peak_error_frac": statistics.fmean(peaks),
        "worst_peak_error_frac": max(peaks),
        "mean_iteration_error_frac": statistics.fmean(map(abs, times)),
        "signed_mean_iteration_error_frac": statistics.fmean(times),
        "worst_iteration_error_frac": max(map(abs, times)),
        "median_noise_frac": statistics.median(plan.iteration_noise_frac for plan in plans),
        "mean_collectives_error_frac": statistics.fmean(collectives) if collectives else None,
        "worst_collectives_error_frac": max(collectives) if collectives else None,
    }


def _intervals(plans: Sequence[PlanFidelity]) -> dict[str, Any]:
    widths = [
        interval.half_width_frac(plan.predicted_iteration_s)
        for plan in plans
        if (interval := plan.iteration_interval_s) is not None
    ]
    return {
        "time_coverage_frac": coverage_frac(plan.time_is_covered for plan in plans),
        "peak_coverage_frac": coverage_frac(plan.peak_is_covered for plan in plans),
        "median_half_width_frac": statistics.median(widths) if widths else None,
    }


def coverage_frac(covered: Iterable[bool | None]) -> float | None:
    """Share of those with an interval whose measurement lies in it; None if none has one."""
    known = [one for one in covered if one is not None]
    return sum(known) / len(known) if known else None


def _order(found: Found, plans: Sequence[PlanFidelity]) -> dict[str, Any]:
    """Of plans as they were predicted and measured, the regret of the search, and of its mode."""
    predicted = [plan.predicted_iteration_s for plan in plans]
    measured = [plan.measured_iteration_s for plan in plans]
    noises = [plan.iteration_noise_frac for plan in plans]
    allowed = [plan.name for plan in plans if plan.guaranteed_peak_bytes <= found.budget_bytes and is_alike(plan.plan)]
    of_modes = {plan.name: plan.predicted_iteration_s for plan in plans if plan.name.endswith(f": {PICK}")}
    fastest = min(of_modes, key=of_modes.__getitem__, default=None)
    return {
        "rank_correlation": rank_correlation(predicted, measured),
        "rank_correlation_beyond_noise": rank_correlation_beyond_noise(predicted, measured, noises),
        "search_regret_frac": regret_frac(PICK, allowed, found.halves),
        "mode_regret_frac": None if fastest is None else regret_frac(fastest, tuple(of_modes), found.halves),
    }


def _beside_plain(found: Found, plans: Sequence[PlanFidelity]) -> dict[str, Any]:
    """What a plain step takes, and what the search's picks take beside it."""
    if not found.plain_s:
        return {}
    measured = {plan.name: plan.measured_iteration_s for plan in plans}
    plain_s = statistics.median(found.plain_s)
    return {
        "plain_iteration_s": plain_s,
        "plain_ratio": measured[ROOMY] / plain_s,
        "plain_ratio_in_budget": measured[PICK] / plain_s,
    }
