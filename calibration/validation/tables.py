"""What a validation found, as tables for people."""

from __future__ import annotations

from ...shared.basics.interval import Interval
from ...shared.basics.units import format_bytes, format_duration, format_seconds
from ...shared.tables.labels import NO_VALUE, format_error, kind_name
from ...shared.tables.table import Heading, Parts, Row, Table
from .fidelity import Fidelity, PlanFidelity


def fidelity_tables(found: Fidelity) -> Parts:
    """Plan by plan, altogether, and the kinds of tasks that are to blame."""
    return (
        Heading(f"{found.model}: predictions judged on {found.machine}"),
        plans_table(found),
        figures_table(found),
        *([kinds_table(found)] if found.kinds else []),
        *found.notes,
    )


def plans_table(found: Fidelity) -> Table:
    """Every plan, predicted beside measured."""
    columns = ("plan", ">predicted", ">90 %", ">measured", ">error", ">noise", ">predicted peak", ">measured peak")
    more = (">error", ">never above")
    collectives = (">collectives, error",) if found.num_ranks > 1 else ()
    return Table(
        title="Plans that nothing was fitted to",
        columns=(*columns, *more, *collectives),
        rows=[_plan_row(plan, with_collectives=found.num_ranks > 1) for plan in found.plans],
        notes=_legend(found),
        expendable=(">never above", ">predicted peak", ">noise"),
    )


MISSED = "!"
"""Beside an interval that does not hold what was measured."""


def _legend(found: Fidelity) -> tuple[str, ...]:
    told = [
        "Chunks that are kept on the device, of all; blocks that keep (K), are checkpointed (C), swap (S); ×: "
        "micro-batches."
    ]
    if any(plan.time_is_covered is False or plan.peak_is_covered is False for plan in found.plans):
        told.append(f"{MISSED} marks a 90 % interval that does not hold the measurement.")
    return tuple(told)


def _plan_row(plan: PlanFidelity, *, with_collectives: bool) -> Row:
    row = (
        plan.name,
        format_seconds(plan.predicted_iteration_s),
        _interval(plan.iteration_interval_s, plan.predicted_iteration_s, is_covered=plan.time_is_covered),
        format_seconds(plan.measured_iteration_s),
        format_error(plan.iteration_error_frac),
        f"{plan.iteration_noise_frac:.1%}",
        format_bytes(plan.predicted_peak_bytes) + ("" if plan.peak_is_covered is not False else f" {MISSED}"),
        format_bytes(plan.measured_peak_bytes),
        f"{plan.peak_error_frac:+.2%}",
        format_bytes(plan.guaranteed_peak_bytes),
    )
    return (*row, format_error(plan.collectives_error_frac)) if with_collectives else row


def _interval(interval: Interval | None, predicted: float, *, is_covered: bool | None) -> str:
    """``−8 % +12 %``, as far as the ends are from the prediction."""
    if interval is None:
        return NO_VALUE
    low, high = (round((end / predicted - 1) * 100) for end in (interval.low, interval.high))
    return f"{low:+d} {high:+d} %" + (f" {MISSED}" if is_covered is False else "")


def figures_table(found: Fidelity) -> Table:
    """One line per figure that is promised."""
    rows: list[Row] = [
        ("mean error of iterations", _percent(found.mean_iteration_error_frac, 1)),
        ("mean of the signed errors", _signed(found.signed_mean_iteration_error_frac)),
        ("worst error", _percent(found.worst_iteration_error_frac, 1)),
        ("median noise of iterations", _percent(found.median_noise_frac, 1)),
        ("iterations within their 90 % intervals", _percent(found.time_coverage_frac, 0)),
        ("median half width of these", _percent(found.median_half_width_frac, 1)),
        ("rank correlation", f"{found.rank_correlation:.3f}"),
        ("rank correlation beyond noise", _number(found.rank_correlation_beyond_noise)),
        (f"search's pick within {format_bytes(found.budget_bytes)}, over the best", _signed(found.search_regret_frac)),
        ("mean error of peaks", _percent(found.mean_peak_error_frac, 2)),
        ("worst error of peaks", _percent(found.worst_peak_error_frac, 2)),
        ("mean error of peaks, given the measured times", _percent(found.mean_retimed_peak_error_frac, 2)),
        ("peaks within their 90 % intervals", _percent(found.peak_coverage_frac, 0)),
        (
            "peaks above the guaranteed one",
            NO_VALUE if found.num_over_guarantee is None else f"{found.num_over_guarantee}",
        ),
        ("drift of the machine between rounds", _percent(found.drift_frac, 1)),
    ]
    if found.plain_iteration_s is not None:
        rows += [
            ("both models whole on the device, a plain loop", format_seconds(found.plain_iteration_s)),
            ("search's pick without a budget, over the plain loop", _number(found.plain_ratio)),
            ("search's pick within the budget, over the plain loop", _number(found.plain_ratio_in_budget)),
        ]
    if found.num_ranks > 1:
        rows += [
            ("mean error of collectives", _percent(found.mean_collectives_error_frac, 1)),
            ("worst error of collectives", _percent(found.worst_collectives_error_frac, 1)),
            ("search's mode, over the fastest", _signed(found.mode_regret_frac)),
        ]
    title = f"{len(found.plans)} plans"
    if found.num_rounds is not None and found.seconds is not None:
        title += f", {found.num_rounds} rounds, {format_duration(found.seconds)}"
    return Table(title=title, columns=("figure", ">value"), rows=rows)


def kinds_table(found: Fidelity) -> Table:
    """Kinds of tasks, the one to blame most first."""
    return Table(
        title="What is to blame: kinds of tasks, seconds over one iteration of every plan",
        columns=("kind", ">tasks", ">predicted", ">measured", ">error", ">of all iterations"),
        rows=[
            (
                kind_name(one.kind),
                str(one.num_tasks),
                format_seconds(one.predicted_s),
                format_seconds(one.measured_s),
                format_error(one.predicted_s / one.measured_s - 1 if one.measured_s > 0 else None),
                _signed(one.blame_frac),
            )
            for one in found.kinds
        ],
        notes=("The last column is the error on the critical path; it adds up to that of all iterations together.",),
    )


def _percent(share_frac: float | None, digits: int) -> str:
    return NO_VALUE if share_frac is None else f"{share_frac * 100:.{digits}f} %"


def _signed(share_frac: float | None) -> str:
    return NO_VALUE if share_frac is None else f"{share_frac * 100:+.1f} %"


def _number(value: float | None) -> str:
    return NO_VALUE if value is None else f"{value:.3f}"


def _count(count: int | None) -> str:
    return NO_VALUE if count is None else str(count)
