"""What a validation found, as a page to look at: measured against predicted, plan by plan."""

from __future__ import annotations

from typing import Final

from ...shared.basics.units import format_bytes, format_seconds
from ...shared.report.axes import Scale, across, time_unit, x_axis, y_axis
from ...shared.report.page import Card, PageTable, Report, Section
from ...shared.report.svg import Figure, circle, joined, line, share, tag, zoomable
from ...shared.tables.labels import NO_VALUE, format_error
from .fidelity import Fidelity, PlanFidelity
from .tables import figures_table, kinds_table, plans_table

_TOP: Final = 20.0
_BOTTOM: Final = 340.0
_MARGIN: Final = 0.08


def fidelity_page(found: Fidelity) -> Report:
    """The page; equal findings give equal bytes."""
    coverage = NO_VALUE if found.time_coverage_frac is None else f"{found.time_coverage_frac:.0%}"
    cards = (
        Card(
            "mean error of iterations",
            f"{found.mean_iteration_error_frac:.1%}",
            (f"worst {found.worst_iteration_error_frac:.1%}",),
        ),
        Card("within their 90 % intervals", coverage, (f"of {len(found.plans)} plans",)),
        Card("mean error of peaks", f"{found.mean_peak_error_frac:.2%}", (f"worst {found.worst_peak_error_frac:.2%}",)),
        Card(
            "search's pick, over the best",
            f"{found.search_regret_frac:+.1%}",
            (f"within {format_bytes(found.budget_bytes)}",),
        ),
    )
    sections = [
        Section("Plans", (times_chart(found), PageTable(plans_table(found)))),
        Section("Altogether", (PageTable(figures_table(found)),)),
    ]
    if found.kinds:
        sections.append(Section("What is to blame", (PageTable(kinds_table(found)),)))
    return Report(
        title=f"{found.model}: predictions judged",
        subtitle=found.machine,
        cards=cards,
        sections=tuple(sections),
        warnings=found.notes,
    )


def times_chart(found: Fidelity) -> Figure:
    """Measured iterations against predicted ones, with the intervals of the predictions."""
    figures = [value for plan in found.plans for value in _figures(plan)]
    low, high = min(figures), max(figures)
    margin = _MARGIN * (high - low) or _MARGIN * high
    low, high = max(0.0, low - margin), high + margin
    rightwards, upwards = across(low, high), Scale(low, high, _BOTTOM, _TOP)
    unit = time_unit(high)
    drawn = [line(share(rightwards(low)), upwards(low), share(rightwards(high)), upwards(high), "axis")]
    for plan in found.plans:
        y = upwards(plan.measured_iteration_s)
        if (interval := plan.iteration_interval_s) is not None:
            drawn.append(line(share(rightwards(interval.low)), y, share(rightwards(interval.high)), y, "stroke-blue"))
        drawn.append(circle(share(rightwards(plan.predicted_iteration_s)), y, 5.0, _mark(plan), title=_words(plan)))
    axes = [
        x_axis(rightwards, unit, top=_TOP, bottom=_BOTTOM, title="predicted iteration, with its 90 % interval"),
        y_axis(upwards, unit, title="measured iteration"),
    ]
    return Figure(
        name="fidelity",
        height=_BOTTOM + 42,
        drawing=joined([*axes, zoomable(_BOTTOM, *drawn)]),
        label=f"Measured against predicted iterations of {len(found.plans)} plans",
        caption=("Measured against predicted", ": on the line where both agree. Axes may begin above 0."),
        legend=(
            (circle(12, 6, 4, "dot"), "a plan"),
            (circle(12, 6, 4, "ring stroke-blue"), "measured outside its interval"),
            (tag("path", d="M2 6H22", class_="stroke-blue"), "90 % interval"),
        ),
    )


def _figures(plan: PlanFidelity) -> tuple[float, ...]:
    interval = plan.iteration_interval_s
    ends = () if interval is None else (interval.low, interval.high)
    return (plan.predicted_iteration_s, plan.measured_iteration_s, *ends)


def _mark(plan: PlanFidelity) -> str:
    return "ring stroke-blue" if plan.time_is_covered is False else "dot"


def _words(plan: PlanFidelity) -> str:
    return (
        f"{plan.name}: predicted {format_seconds(plan.predicted_iteration_s)}, measured "
        f"{format_seconds(plan.measured_iteration_s)} ({format_error(plan.iteration_error_frac)})"
    )
